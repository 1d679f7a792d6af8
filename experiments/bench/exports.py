"""Times the scores of an export, from memory and from an SSD."""

from collections.abc import Iterator
import itertools
import pathlib

import numpy as np

from experiments.bench.contest import seconds_of
from experiments.bench.runner import Item
from experiments.common import build, datasets, record
from experiments.common.progress import Bar
from slip_serve import Query, Scorer
from slipstream_jax.data.source import Dataset


def measure(
  run: pathlib.Path,
  bar: Bar,
  export: str | None,
  batch: int,
  cache: float,
  warm: int,
  turn: int,
  turns: int,
) -> Iterator[Item]:
  """Yields the figures of an export of a run.

  The arguments are those of the program `experiments.bench.serving`.

  Raises:
    UserError: there is no such export, or the run's data are gone.
  """
  bar.begin('queries')
  config, folder = record.config_of(run), export or str(run / 'export')
  data = datasets.dataset(config)
  first_rows, _ = build.tables(config, data).column_rows
  queries = _queries(data, batch, first_rows)
  with (
    Scorer(folder, 'dram', check=False) as dram,
    Scorer(folder, 'ssd', cache, check=False) as alone,
    Scorer(folder, 'ssd', cache, check=False) as ahead,
  ):
    for query in itertools.islice(queries, warm):
      alone.warm([query])
      ahead.warm([query])
    query = next(queries)
    scored = [alone.logits(query), *ahead.stream([query])]
    same = all(np.array_equal(dram.logits(query), one) for one in scored)
    ways = {
      'ssd': lambda some: [alone.logits(one) for one in some],
      'dram': lambda some: [dram.logits(one) for one in some],
      'ssd_ahead': lambda some: [*ahead.stream(some)],
      'dram_ahead': lambda some: [*dram.stream(some)],
    }
    before = _counts(ahead)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(turns):
      some = [*itertools.islice(queries, turn)]
      at = number % len(ways)
      for name in [*ways][at:] + [*ways][:at]:
        rates[name].append(turn / seconds_of(ways[name], some))
    lookups, rows, hits, nbytes = _counts(ahead) - before

  def ratio(one: str, other: str) -> float:
    return float(np.median(np.divide(rates[one], rates[other])))

  figures = {
    'data': data.name,
    'examples of a query': batch,
    **{f'queries/s, {way}': float(np.median(rates[way])) for way in ways},
    'ratio ssd/dram': ratio('ssd', 'dram'),
    'ratio ssd_ahead/dram': ratio('ssd_ahead', 'dram'),
    'ratio ssd_ahead/dram_ahead': ratio('ssd_ahead', 'dram_ahead'),
    'hit rate': float(hits / max(rows, 1)),
    'unique rows of a query': float(rows / (turns * turn)),
    'of them read': round((rows - hits) / (turns * turn)),
    'disk bytes of a lookup': float(nbytes / max(lookups, 1)),
    'same bits': same,
  }
  yield 'serving', figures


def _queries(
  data: Dataset, batch_size: int, first_rows: np.ndarray
) -> Iterator[Query]:
  for batch in data.train(batch_size):
    rows = batch.lookups.reshape(len(batch.lookups), -1).astype(np.int64)
    weights = batch.lookup_weights
    if weights is not None:
      weights = weights.reshape(rows.shape)
    yield Query(batch.dense, np.where(rows < 0, -1, rows - first_rows), weights)


def _counts(scorer: Scorer) -> np.ndarray:
  """Returns lookups, unique rows, those in memory, and bytes read so far."""
  stats = scorer.stats
  hits = (stats.hit_rate or 0) * stats.unique_rows
  nbytes = stats.bytes_per_lookup * stats.lookups
  return np.array([stats.lookups, stats.unique_rows, hits, nbytes])
