"""Times the scores of an export, from memory and from an SSD."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import itertools
import pathlib
from typing import Any

import numpy as np

from experiments.bench.contest import seconds_of
from experiments.bench.runner import Item
from experiments.common import build, datasets, record
from experiments.common.progress import Bar
from slip_serve import Query, Scorer
from slip_serve.rows import Memory
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
  pinned: Sequence[str],
  bags: float,
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
  with contextlib.ExitStack() as opened:

    def scorer(memory: Memory, **options: Any) -> Scorer:
      return opened.enter_context(
        Scorer(folder, memory, cache, check=False, **options)
      )

    scorers = {name: scorer('ssd') for name in ('ssd', 'ssd_ahead')}
    if pinned or bags:
      options = {'pinned': pinned, 'bags': bags}
      scorers |= {f'{x}, changed': scorer('ssd', **options) for x in scorers}
    dram = scorer('dram')
    for query in itertools.islice(queries, warm):
      for one in scorers.values():
        one.warm([query])
    query = next(queries)
    wanted = dram.logits(query)
    same = all(
      np.array_equal(wanted, next(one.stream([query])))
      for one in scorers.values()
    )
    before = {name: _counts(one) for name, one in scorers.items()}
    scorers |= {'dram': dram, 'dram_ahead': dram}
    rates: dict[str, list[float]] = {name: [] for name in scorers}
    for number in range(turns):
      some = [*itertools.islice(queries, turn)]
      at = number % len(scorers)
      for name in [*scorers][at:] + [*scorers][:at]:
        seconds = seconds_of(_scored(scorers[name], 'ahead' in name), some)
        rates[name].append(turn / seconds)
    counts = {name: _counts(scorers[name]) - before[name] for name in before}

  def ratio(one: str, other: str) -> float:
    return float(np.median(np.divide(rates[one], rates[other])))

  figures = {
    'data': data.name,
    'examples of a query': batch,
    **{f'queries/s, {way}': float(np.median(rates[way])) for way in rates},
    'ratio ssd/dram': ratio('ssd', 'dram'),
    'ratio ssd_ahead/dram': ratio('ssd_ahead', 'dram'),
    'ratio ssd_ahead/dram_ahead': ratio('ssd_ahead', 'dram_ahead'),
    'same bits': same,
  }
  for name in ('ssd_ahead', 'ssd_ahead, changed'):
    if name in counts:
      figures |= _read(counts[name], turns * turn, name[len('ssd_ahead') :])
  for way in ('ssd', 'ssd_ahead') if len(counts) > 2 else ():
    figures[f'ratio {way}, changed/not'] = ratio(f'{way}, changed', way)
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


def _scored(
  scorer: Scorer, ahead: bool
) -> Callable[[Sequence[Query]], list[np.ndarray]]:
  if ahead:
    return lambda some: [*scorer.stream(some)]
  return lambda some: [scorer.logits(one) for one in some]


def _read(counts: np.ndarray, queries: int, name: str) -> dict[str, float]:
  """Returns what queries found in memory, and what they read."""
  lookups, rows, hits, nbytes, bags = counts
  return {
    f'hit rate{name}': float(hits / max(rows, 1)),
    f'unique rows of a query{name}': float(rows / queries),
    f'of them read{name}': round((rows - hits) / queries),
    f'bags found of a query{name}': round(bags / queries),
    f'disk bytes of a lookup{name}': float(nbytes / max(lookups, 1)),
  }


def _counts(scorer: Scorer) -> np.ndarray:
  """Returns lookups, rows, those in memory, bytes read and bags found."""
  stats = scorer.stats
  hits = (stats.hit_rate or 0) * stats.unique_rows
  nbytes = stats.bytes_per_lookup * stats.lookups
  return np.array(
    [stats.lookups, stats.unique_rows, hits, nbytes, stats.bags_found]
  )
