"""Lists runs, or lays some side by side on a page.

    python -m experiments.report [FOLDER]
    python -m experiments.report RUN RUN [--out=report.html]

The first lists the runs in a folder, runs/ by default: name, date, steps, AUC,
log loss, speed, and the bytes that needed no moving. The second writes one page
of curves, settings and figures, which needs nothing beside itself.
"""

import pathlib

from absl import flags
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.common import cli, report
from experiments.common.workdir import writable
from experiments.report import runs
from experiments.report.page import page

_OUT = flags.DEFINE_string('out', 'report.html', 'File of the page.')


def main(*words: str) -> None:
  """Lists or writes.

  Raises:
    UserError: a folder that is none of runs.
  """
  screen = report.console()
  folders = [pathlib.Path(word) for word in words]
  if not folders:
    _list(screen, pathlib.Path('runs'))
  elif len(folders) == 1 and not runs.is_run(folders[0]):
    _list(screen, folders[0])
  else:
    read = [runs.read(folder) for folder in dict.fromkeys(folders)]
    if len({run.name for run in read}) < len(read):  # of several folders
      pairs = zip(read, dict.fromkeys(folders), strict=True)
      read = [run._replace(name=str(folder)) for run, folder in pairs]
    _show(screen, read)
    path = pathlib.Path(_OUT.value)
    writable(str(path.parent), '--out')
    path.write_text(page(read))
    screen.print(f'written to {path}', highlight=False)


def _list(screen: Console, folder: pathlib.Path) -> None:
  read = runs.runs_in(folder)
  if not read:
    screen.print(f'no runs in {folder}', highlight=False)
    return
  _show(screen, read)


def _show(screen: Console, read: list[runs.Recorded]) -> None:
  """A table narrow enough for 80 columns."""
  frame = runs.overview(read)
  grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
  for name in frame[0]:
    is_name = name == 'run'
    grid.add_column(
      name,
      justify='left' if is_name else 'right',
      overflow='fold' if is_name else 'ellipsis',
      no_wrap=not is_name,
    )
  for row in frame:
    grid.add_row(*row.values())
  screen.print(grid)


if __name__ == '__main__':
  cli.run(
    main,
    config='none',
    words='[FOLDER_OR_RUN ...]',
    kept='nothing was changed',
  )
