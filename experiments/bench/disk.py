"""Measures how many rows per second a disk reads, alone and through a store.

    python -m experiments.bench.disk [--rows=N] [--dim=N] [--path=DIR]

Reads rows at random from a file that holds them all. What the system keeps of
the file in memory is dropped before every figure. A plain loop of `pread` over
blocks of 4 KiB at random places of the same file shows what the disk can do.
"""

import tempfile

from absl import flags

from experiments.bench import runner

flags.DEFINE_integer(
  'rows', 4_000_000, 'Rows of the file.', lower_bound=1 << 16
)
flags.DEFINE_integer(
  'dim', 64, 'Floats of a row, beside one of row state.', lower_bound=1
)
flags.DEFINE_string('path', tempfile.gettempdir(), 'Folder to use.')

if __name__ == '__main__':
  runner.run('experiments.bench.cold:measure', 'none')
