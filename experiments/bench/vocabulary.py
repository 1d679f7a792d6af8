"""How fast a growing vocabulary gives rows, by itself, on one thread.

    python -m experiments.bench.vocabulary [--rows=N] [--json=FILE]

Ids are 64-bit hashes, by a power law (exponent 1.05) or evenly, which no cache
helps; or all new, in a table that is full. Seconds are those that the thread
was given by the processor, so that others on the machine count no further than
by the caches they share.
"""

from collections.abc import Callable, Iterator
import functools
import pathlib
import time
from typing import Any

from absl import flags
import numpy as np
from rich.table import Table

from experiments.bench.rows import zipf
from experiments.common import cli, record, report
from slipstream_jax.vocabulary.growing import GrowingVocabulary

_ROWS = flags.DEFINE_multi_integer(
  'rows',
  [1_000_000, 10_000_000],
  'Rows of the tables; may be given again.',
  lower_bound=1,
)
_JSON = flags.DEFINE_string('json', None, 'File to write the figures to.')
_BATCH = 1 << 16
_TURNS = 40


def main() -> None:
  """Measures and prints; writes the figures with --json."""
  frame = [speeds(rows) for rows in _ROWS.value]
  report.console().print(table_of(frame))
  if _JSON.value:
    record.write_json(pathlib.Path(_JSON.value), frame)


def table_of(frame: report.Frame) -> Table:
  """What was measured, for the screen."""
  title = (
    'a growing vocabulary: lookups/s of ids by a power law and even ones, '
    'median and best; of new ones; seconds of a state'
  )
  headings = {
    **{'power law: lookups/s': 'power law', 'power law: best': 'best'},
    **{'even: lookups/s': 'even', 'even: best': 'best'},
    **{'all new: lookups/s': 'all new', 'state: seconds': 'state'},
  }
  return report.table(title, frame, headings=headings)


def speeds(rows: int) -> dict[str, Any]:
  """Lookups per second of a table of so many rows, and seconds of a state."""
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 1 << 64, rows, np.uint64)
  new = rng.integers(0, 1 << 64, (_TURNS, _BATCH), np.uint64)
  words = GrowingVocabulary(rows + 1)
  for start in range(0, rows, _BATCH):
    words.assign(ids[start : start + _BATCH])
  batches = {
    'power law': (ids[zipf(rng, rows, _BATCH)] for _ in range(_TURNS)),
    'even': (ids[rng.integers(0, rows, _BATCH)] for _ in range(_TURNS)),
  }
  figures: dict[str, Any] = {'rows': rows}
  for name, of in batches.items():
    speed = _lookups_per_s(words, of)
    figures[f'{name}: lookups/s'] = float(np.median(speed))
    figures[f'{name}: best'] = float(np.max(speed))
  state = _seconds(lambda: words.get_state(words.batches - 10))
  # In the mean: some batches look for the rows that leave next.
  growing = float(1 / np.mean(1 / _lookups_per_s(words, iter(new))))
  return figures | {'all new: lookups/s': growing, 'state: seconds': state}


def _lookups_per_s(
  words: GrowingVocabulary, batches: Iterator[np.ndarray]
) -> np.ndarray:
  """Of each batch."""
  seconds = [_seconds(functools.partial(words.assign, ids)) for ids in batches]
  return _BATCH / np.array(seconds[2:])


def _seconds(call: Callable[[], Any]) -> float:
  started = time.thread_time()
  call()
  return time.thread_time() - started


if __name__ == '__main__':
  cli.run(main, config='none')
