"""How many rows a second a disk gives, and how many a store on it.

    python -m experiments.bench.disk [--rows=N] [--dim=N] [--path=DIR]

Rows at random of a file that has all of them, as large as --rows and --dim make
it: what the system keeps of it in memory is dropped before every figure. Beside
the stores stands a plain loop of `pread` over blocks of 4 KiB at random places
of the same file, by so many threads: what the disk itself can do.
"""

import pathlib
import tempfile

from absl import flags

from experiments.bench.cold import figures
from experiments.common import cli, record, report

_ROWS = flags.DEFINE_integer(
  'rows', 4_000_000, 'Rows of the file.', lower_bound=1 << 16
)
_DIM = flags.DEFINE_integer(
  'dim', 64, 'Floats of a row, beside one of row state.', lower_bound=1
)
_PATH = flags.DEFINE_string('path', tempfile.gettempdir(), 'Folder to use.')
_JSON = flags.DEFINE_string('json', None, 'File to write the figures to.')


def main() -> None:
  """Measures and prints; writes the figures with --json."""
  frame = list(figures(_ROWS.value, _DIM.value, _PATH.value))
  title = f'{_ROWS.value:,} rows of {4 * _DIM.value + 4} bytes, cold'
  report.console().print(report.table(title, frame))
  if _JSON.value:
    record.write_json(pathlib.Path(_JSON.value), frame)


if __name__ == '__main__':
  cli.run(main, config='none')
