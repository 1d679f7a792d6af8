"""Measures how many rows per second a disk reads, alone and through a store.

    python -m experiments.bench.disk [--rows=N] [--dim=N] [--path=DIR]

Reads rows at random from a file that holds them all. What the system keeps of
the file in memory is dropped before every figure. A plain loop of `pread` over
blocks of 4 KiB at random places of the same file shows what the disk can do.
"""

from collections.abc import Iterator
import tempfile
from typing import Any

from absl import flags

from experiments.bench import runner

_ROWS = flags.DEFINE_integer(
  'rows', 4_000_000, 'Rows of the file.', lower_bound=1 << 16
)
_DIM = flags.DEFINE_integer(
  'dim', 64, 'Floats of a row, beside one of row state.', lower_bound=1
)
_PATH = flags.DEFINE_string('path', tempfile.gettempdir(), 'Folder to use.')


def bench(bar: Any) -> Iterator[runner.Item]:
  """Yields the rows/s of every way to read or write."""
  from experiments.bench import cold

  bar.begin('reading and writing rows')
  title = f'{_ROWS.value:,} rows of {4 * _DIM.value + 4} bytes, cold'
  yield title, list(cold.speeds(_ROWS.value, _DIM.value, _PATH.value))


if __name__ == '__main__':
  runner.run(bench, 'none')
