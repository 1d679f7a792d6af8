"""Writes synthetic clicks as Criteo's raw text, to measure and test with.

    python -m experiments.make_text FILE LINES [SEED]

NOT real data: the stream of `synthetic/clicks` in the shape of Criteo's Kaggle
set. Fields are missing about as often as there.
"""

from experiments.common import cli


def main(file: str, *numbers: str) -> None:
  """Writes FILE.

  Raises:
    UserError: invalid words, or no room for the file.
  """
  from experiments.make_text import job  # imports numba

  job.make(file, numbers)


if __name__ == '__main__':
  cli.run(
    main,
    config='none',
    words='FILE LINES [SEED]',
    kept='no file was written',
  )
