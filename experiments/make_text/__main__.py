"""Writes synthetic clicks as Criteo's raw text, to measure and test with.

    python -m experiments.make_text FILE LINES [SEED]

NOT real data: the stream of `synthetic/clicks` in the shape of Criteo's Kaggle
set. Fields are missing about as often as there.
"""

from experiments.common import cli

if __name__ == '__main__':
  cli.run(
    'experiments.make_text.job:make',
    'none',
    'FILE LINES [SEED]',
    kept='no file was written',
  )
