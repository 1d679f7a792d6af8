"""Times an export: queries/s from memory, and from an SSD with a cache.

    python -m experiments.bench.serving RUN [--export=FOLDER]

Queries are batches of the data that the run trained on, and each is new. Memory
and SSD take turns on the same queries, in another order each time. Both score
them one by one (`logits`), and while they read the rows of the next queries
(`stream`). --cache is the share of the rows that is kept in memory. The caches
are warmed by --warm queries that are not timed. Ratios are medians over turns.
The disk alone is timed as well, with as many reads at once as a query misses,
and with one at a time.
"""

from collections.abc import Callable, Iterator
import itertools
import pathlib
import statistics
import time
from typing import Any, TYPE_CHECKING

from absl import flags

from experiments.bench import runner

if TYPE_CHECKING:
  import numpy as np

  from experiments.screen.bar import Bar
  from slip_serve import Query, Scorer
  from slip_serve.layout import Layout

_Way = Callable[[list['Query']], list['np.ndarray']]


def bench(run: pathlib.Path, bar: 'Bar') -> Iterator[runner.Item]:
  """Yields the figures of the export of a run.

  Raises:
    UserError: there is no such run or export.
  """
  import numpy as np

  from slip_serve import Scorer

  asked = flags.FLAGS
  bar.begin('queries')
  name, queries = _queries(run, asked.batch)
  export = pathlib.Path(asked.export or run / 'export')
  with (
    Scorer(export, 'dram', check=False) as dram,
    Scorer(export, 'ssd', asked.cache, check=False) as alone,
    Scorer(export, 'ssd', asked.cache, check=False) as ahead,
  ):
    for query in itertools.islice(queries, asked.warm):
      alone.warm([query])
      ahead.warm([query])
    first = next(queries)
    scored = [alone.logits(first), *ahead.stream([first])]
    same = all(np.array_equal(dram.logits(first), one) for one in scored)
    ways: dict[str, _Way] = {
      'ssd': lambda turn: [alone.logits(one) for one in turn],
      'dram': lambda turn: [dram.logits(one) for one in turn],
      'ssd_ahead': lambda turn: [*ahead.stream(turn)],
      'dram_ahead': lambda turn: [*dram.stream(turn)],
    }
    before = _counts(ahead)
    rates = _rates(ways, queries, asked.turns, asked.turn)
    lookups, rows, hits, nbytes = _counts(ahead) - before
    misses = round((rows - hits) / (asked.turns * asked.turn))
    disk = _disk(export, ahead.layout, max(misses, 1))
  yield 'serving', {
    'data': name,
    'examples of a query': asked.batch,
    **{f'queries/s, {way}': statistics.median(rates[way]) for way in ways},
    'ratio ssd/dram': _ratio(rates, 'ssd', 'dram'),
    'ratio ssd_ahead/dram': _ratio(rates, 'ssd_ahead', 'dram'),
    'ratio ssd_ahead/dram_ahead': _ratio(rates, 'ssd_ahead', 'dram_ahead'),
    'hit rate': float(hits / max(rows, 1)),
    'unique rows of a query': float(rows / (asked.turns * asked.turn)),
    'of them read': misses,
    'disk bytes of a lookup': float(nbytes / max(lookups, 1)),
    **disk,
    'same bits': same,
  }


def _queries(
  run: pathlib.Path, batch_size: int
) -> tuple[str, Iterator['Query']]:
  """Returns the name of a run's data, and new queries from them."""
  import numpy as np

  from experiments.common import build, datasets, record
  from slip_serve import Query

  config = record.config_of(run)
  data = datasets.dataset(config)
  first, _ = build.tables(config, data).column_rows

  def queries() -> Iterator[Query]:
    for batch in data.train(batch_size):
      rows = batch.lookups.reshape(len(batch.lookups), -1).astype(np.int64)
      weights = batch.lookup_weights
      if weights is not None:
        weights = weights.reshape(rows.shape)
      yield Query(batch.dense, np.where(rows < 0, -1, rows - first), weights)

  return data.name, queries()


def _counts(scorer: 'Scorer') -> 'np.ndarray':
  """Returns lookups, unique rows, those in memory, and bytes read so far."""
  import numpy as np

  stats = scorer.stats
  hits = (stats.hit_rate or 0) * stats.unique_rows
  nbytes = stats.bytes_per_lookup * stats.lookups
  return np.array([stats.lookups, stats.unique_rows, hits, nbytes])


def _rates(
  ways: dict[str, _Way], queries: Iterator['Query'], turns: int, size: int
) -> dict[str, list[float]]:
  """Returns the queries/s of each way, turn by turn."""
  rates: dict[str, list[float]] = {name: [] for name in ways}
  names = [*ways]
  for number in range(turns):
    turn = [*itertools.islice(queries, size)]
    first = number % len(names)
    for name in names[first:] + names[:first]:
      began = time.perf_counter()
      count = len(ways[name](turn))
      rates[name].append(count / (time.perf_counter() - began))
  return rates


def _ratio(rates: dict[str, list[float]], one: str, other: str) -> float:
  pairs = zip(rates[one], rates[other], strict=True)
  return statistics.median(a / b for a, b in pairs)


def _disk(
  export: pathlib.Path, layout: 'Layout', reads: int
) -> dict[str, float]:
  """Returns random reads/s, `reads` of them at once and one by one."""
  import numpy as np

  from slip_serve.reading import RecordFile

  group = max(layout.groups, key=lambda group: group.rows)
  size, rng, out = layout.record(group), np.random.default_rng(0), {}
  for name, count in ('as of a query', reads), ('one at a time', 1):
    file = RecordFile(export / group.file, size)
    at, records = np.arange(count), np.empty((count, size), np.uint8)
    rates = []
    for _ in range(20 if count > 1 else 500):
      rows = np.sort(rng.integers(0, group.rows, count))
      began = time.perf_counter()
      file.read(rows, at, records)
      rates.append(count / (time.perf_counter() - began))
    file.close()
    out[f'disk reads/s, {name}'] = statistics.median(rates)
  return out


if __name__ == '__main__':
  flags.DEFINE_string(
    'export', None, 'Folder of its export; export in its own by default.'
  )
  flags.DEFINE_integer('batch', 1024, 'Examples of a query.')
  flags.DEFINE_float('cache', 0.1, 'Share of the rows in memory.')
  flags.DEFINE_integer('warm', 1000, 'Queries before any is timed.')
  flags.DEFINE_integer('turn', 50, 'Queries of a turn.')
  flags.DEFINE_integer('turns', 10, 'Turns of each way.')
  runner.run(bench, config='none', words='RUN')
