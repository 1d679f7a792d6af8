"""Times an export: queries a second from memory, and from an SSD with a cache.

    python -m experiments.export.speed --workdir=RUN [--export=FOLDER]

Queries are batches of the data that the run trained on. Memory and SSD take
turns on the same ones, and reading ahead on the next of them; none of them
warmed a cache. --cache is the share of the rows that is kept in memory. Ratios
are medians over turns.
"""

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
from slipstream_jax.data.base import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.table_set import TableSet

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


def main(config: ml_collections.ConfigDict | None) -> None:
  """Times it.

  Raises:
    UserError: no such run or export, or too few examples.
  """
  if _WORKDIR.value is None:
    raise UserError(
      'what was exported must be named',
      got='no folder of a run',
      where='--workdir',
      hint='name the one that was given to experiments.export',
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
  """Figures of an export.

  Args:
    export: its folder.
    data: what is asked for.
    tables: of the data.
  """
  queries = _queries(data, tables)
  with (
    Scorer(export, 'dram', check=False) as dram,
    Scorer(export, 'ssd', _CACHE.value, check=False) as ssd,
  ):
    ssd.warm(itertools.islice(queries, _WARM.value))
    first = next(queries)
    same = np.array_equal(dram.logits(first), ssd.logits(first))
    rates: dict[str, list[float]] = {'dram': [], 'ssd': [], 'ssd_ahead': []}
    before = ssd.stats
    for _ in range(_TURNS.value):
      turn = [next(queries) for _ in range(_TURN.value)]
      ways = {
        'ssd': lambda turn=turn: [ssd.logits(one) for one in turn],
        'dram': lambda turn=turn: [dram.logits(one) for one in turn],
      }
      for name, way in ways.items():
        rates[name].append(_rate(way))
      turn = [next(queries) for _ in range(_TURN.value)]
      rates['ssd_ahead'].append(_rate(lambda turn=turn: [*ssd.stream(turn)]))
    after = ssd.stats
  lookups = after.lookups - before.lookups
  rows = after.unique_rows - before.unique_rows
  hits = (after.hit_rate or 0) * after.unique_rows
  hits -= (before.hit_rate or 0) * before.unique_rows
  nbytes = after.bytes_per_lookup * after.lookups
  nbytes -= before.bytes_per_lookup * before.lookups
  return {
    'data': data.name,
    'examples of a query': _BATCH.value,
    **{
      f'queries/s, {name}': statistics.median(values)
      for name, values in rates.items()
    },
    'ratio ssd/dram': _ratio(rates['ssd'], rates['dram']),
    'ratio ssd_ahead/dram': _ratio(rates['ssd_ahead'], rates['dram']),
    'hit rate': hits / max(rows, 1),
    'unique rows of a query': rows / (2 * _TURNS.value * _TURN.value),
    'disk bytes of a lookup': nbytes / max(lookups, 1),
    'same bits': same,
  }


def _ratio(one: list[float], other: list[float]) -> float:
  pairs = zip(one, other, strict=True)
  return statistics.median(a / b for a, b in pairs)


def _rate(way: Any) -> float:
  began = time.perf_counter()
  return len(way()) / (time.perf_counter() - began)


def _queries(data: Dataset, tables: TableSet) -> Any:
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
  cli.run(main, kept='nothing was written', needs_config=False)
