r"""Finds towers of features that belong together, from what a run learned.

    python -m experiments.run --config=configs/criteo.py --workdir=runs/pilot
    python -m experiments.towers runs/pilot --towers=4 [--style=coherent]

The vector of a feature is the mean row that examples of the training data look
up. Two features belong together if their vectors point in similar directions.
Towers have equally many features, but for one, and at most 1.1 times the mean
load if that can be had. Loads are unique rows in a batch.

The tables have the affinity within towers, beside that of 100 random towers,
and each tower. The last line has the flag for `configs/criteo.py:towers`.
"""

from absl import flags

from experiments.common import cli

flags.DEFINE_integer('towers', 4, 'Number of towers.', lower_bound=1)
flags.DEFINE_enum(
  'style',
  'coherent',
  ['coherent', 'diverse'],
  'Whether features of a tower are much alike, or little.',
)
flags.DEFINE_integer('examples', 8192, 'Examples to look at.', lower_bound=1)

if __name__ == '__main__':
  cli.run(
    'experiments.towers.job:find',
    'none',
    'RUN',
    'nothing was written',
    on_cpu=True,
  )
