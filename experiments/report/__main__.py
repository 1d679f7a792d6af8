"""Lists runs, or lays some side by side on a page.

    python -m experiments.report [FOLDER]
    python -m experiments.report RUN RUN [--output=report.html]

The first lists the runs in a folder, runs/ by default: name, date, steps, AUC,
log loss, speed, the share of examples dropped, and the bytes that needed no
moving. The second also writes one page of curves, settings and figures, which
needs nothing beside itself.
"""

import pathlib

from absl import flags

from experiments.common import cli

_OUTPUT = flags.DEFINE_string('output', 'report.html', 'File of the page.')


def main(*names: str) -> None:
  """Lists runs, or writes the page.

  Raises:
    UserError: a folder without runs, or a damaged run.
  """
  from experiments.report import job

  folders = [pathlib.Path(name) for name in dict.fromkeys(names or ['runs'])]
  if len(folders) == 1 and not job.is_run(folders[0]):
    job.show(job.runs_in(folders[0]), f'no runs in {folders[0]}')
  else:
    runs = job.read_all(folders)
    job.show(runs)
    job.write(pathlib.Path(_OUTPUT.value), runs)


if __name__ == '__main__':
  cli.run(main, 'none', '[FOLDER_OR_RUN ...]', 'nothing was changed')
