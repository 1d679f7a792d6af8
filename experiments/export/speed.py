"""Times an export: queries a second from memory, and from an SSD with a cache.

    python -m experiments.export.speed --workdir=RUN [--export=FOLDER]

Queries are batches of the data that the run trained on, and each is new. Memory
and SSD take turns on the same queries, in another order each time. Both score
them once one by one (`logits`), and once reading the rows of the next queries
ahead (`stream`). --cache is the share of the rows that is kept in memory. The
caches are warmed by --warm queries that are not timed. Ratios are medians over
turns. The disk alone is timed as well, with as many reads at once as a query
misses, and with one at a time.
"""

from collections.abc import Callable, Iterator
import itertools
import pathlib
import statistics
import time
from typing import Any

from absl import flags
import ml_collections
import numpy as np

from experiments.common import build, cli, datasets, record, report
from experiments.common.record import write_json
from slip_serve import Query, Scorer
from slip_serve.layout import Layout
from slip_serve.reading import RecordFile
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.tables import TableSet

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_EXPORT = flags.DEFINE_string(
  'export', None, 'Folder of its export; export in its own by default.'
)
_BATCH = flags.DEFINE_integer('batch', 1024, 'Examples of a query.')
_CACHE = flags.DEFINE_float('cache', 0.1, 'Share of the rows in memory.')
_WARM = flags.DEFINE_integer('warm', 1000, 'Queries before any is timed.')
_TURN = flags.DEFINE_integer('turn', 50, 'Queries of a turn.')
_TURNS = flags.DEFINE_integer('turns', 10, 'Turns of each way.')
_JSON = flags.DEFINE_string('json', None, 'File to write the figures to.')

_Way = Callable[[list[Query]], list[np.ndarray]]


def main(config: ml_collections.ConfigDict | None) -> None:
  """Times the export of a run.

  Raises:
    UserError: no such run or export, or too few examples.
  """
  if _WORKDIR.value is None:
    raise UserError(
      'the run that was exported must be given',
      got='no folder of a run',
      where='--workdir',
      hint='give the one that was given to experiments.export',
    )
  folder = pathlib.Path(_WORKDIR.value)
  config = record.config_of(folder) if config is None else config
  data = datasets.dataset(config)
  tables = build.tables(config, data)
  export = _EXPORT.value or str(folder / 'export')
  figures = timed(export, data, tables)
  report.console().print(report.facts(figures))
  if _JSON.value is not None:
    write_json(pathlib.Path(_JSON.value), figures)


def timed(export: str, data: Dataset, tables: TableSet) -> dict[str, Any]:
  """Returns the figures of an export for queries of a data set."""
  queries = _queries(data, tables)
  with (
    Scorer(export, 'dram', check=False) as dram,
    Scorer(export, 'ssd', _CACHE.value, check=False) as alone,
    Scorer(export, 'ssd', _CACHE.value, check=False) as ahead,
  ):
    for query in itertools.islice(queries, _WARM.value):
      alone.warm([query])
      ahead.warm([query])
    first = next(queries)
    known = dram.logits(first)
    same = all(
      np.array_equal(known, one)
      for one in (alone.logits(first), *ahead.stream([first]))
    )
    ways: dict[str, _Way] = {
      'ssd': lambda turn: [alone.logits(one) for one in turn],
      'dram': lambda turn: [dram.logits(one) for one in turn],
      'ssd_ahead': lambda turn: [*ahead.stream(turn)],
      'dram_ahead': lambda turn: [*dram.stream(turn)],
    }
    before = _counts(ahead)
    rates = _rates(ways, queries)
    lookups, rows, hits, nbytes = _counts(ahead) - before
    layout = ahead.layout
  asked = _TURNS.value * _TURN.value
  misses = round((rows - hits) / asked)
  return {
    'data': data.name,
    'examples of a query': _BATCH.value,
    **{
      f'queries/s, {name}': statistics.median(rates[name])
      for name in sorted(rates)
    },
    'ratio ssd/dram': _ratio(rates['ssd'], rates['dram']),
    'ratio ssd_ahead/dram': _ratio(rates['ssd_ahead'], rates['dram']),
    'ratio ssd_ahead/dram_ahead': _ratio(
      rates['ssd_ahead'], rates['dram_ahead']
    ),
    'hit rate': float(hits / max(rows, 1)),
    'unique rows of a query': float(rows / asked),
    'of them read': misses,
    'disk bytes of a lookup': float(nbytes / max(lookups, 1)),
    **_of_disk(pathlib.Path(export), layout, max(misses, 1)),
    'same bits': same,
  }


def _counts(scorer: Scorer) -> np.ndarray:
  """Returns lookups, unique rows, those in memory, and bytes read so far."""
  stats = scorer.stats
  hits = (stats.hit_rate or 0) * stats.unique_rows
  nbytes = stats.bytes_per_lookup * stats.lookups
  return np.array([stats.lookups, stats.unique_rows, hits, nbytes])


def _rates(
  ways: dict[str, _Way], queries: Iterator[Query]
) -> dict[str, list[float]]:
  """Returns the queries a second of each way, turn by turn."""
  rates: dict[str, list[float]] = {name: [] for name in ways}
  names = [*ways]
  for number in range(_TURNS.value):
    turn = [*itertools.islice(queries, _TURN.value)]
    first = number % len(names)
    for name in names[first:] + names[:first]:
      began = time.perf_counter()
      count = len(ways[name](turn))
      rates[name].append(count / (time.perf_counter() - began))
  return rates


def _of_disk(
  export: pathlib.Path, layout: Layout, reads: int
) -> dict[str, Any]:
  """Returns random reads a second, `reads` of them at once and one by one."""
  group = max(layout.groups, key=lambda group: group.rows)
  rng, out = np.random.default_rng(0), {}
  for name, count in ('as of a query', reads), ('one at a time', 1):
    file = RecordFile(export / group.file, layout.record(group))
    records = np.empty((count, layout.record(group)), np.uint8)
    at, rates = np.arange(count), []
    for _ in range(20 if count > 1 else 500):
      rows = np.sort(rng.integers(0, group.rows, count))
      began = time.perf_counter()
      file.read(rows, at, records)
      rates.append(count / (time.perf_counter() - began))
    file.close()
    out[f'disk reads/s, {name}'] = statistics.median(rates)
  return out


def _ratio(one: list[float], other: list[float]) -> float:
  pairs = zip(one, other, strict=True)
  return statistics.median(a / b for a, b in pairs)


def _queries(data: Dataset, tables: TableSet) -> Iterator[Query]:
  source = data.train(_BATCH.value)
  first, _ = tables.column_rows
  for batch in source:
    rows = batch.lookups.reshape(len(batch.lookups), -1).astype(np.int64)
    local = np.where(rows < 0, -1, rows - first)
    weights = batch.lookup_weights
    if weights is not None:
      weights = weights.reshape(rows.shape)
    yield Query(batch.dense, local, weights)


if __name__ == '__main__':
  cli.run(main, kept='nothing was written', config='optional')
