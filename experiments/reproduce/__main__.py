r"""Runs the paper's comparison of systems, and writes its report.

    python -m experiments.reproduce [--models=rm1,rm2,rm3,rm4] \
        [--scale=laptop|medium|full] [--data=DIR] [--seeds=N] [--workdir=DIR]

Trains every model with every system and with skipping, in turns, seed after
seed. Then measures what else the paper shows: skewed access, rows that stop
learning, naive skipping, thresholds. Writes report.html and results.csv, a
table with a row for each run and point, which is saved after each run.

A stopped reproduction continues with the same --workdir. Finished runs are not
run again, and models and seeds may be added. A run that fails says so in its
row, and the others continue. Remove that row to try it again.

`--scale=laptop` trains parts of the models, and `medium` ten times as many
batches of them, on synthetic proxies, or with --data on real data as
experiments.prepare packs them, in those of DIR/taobao, DIR/criteo, DIR/terabyte
and DIR/avazu that exist.
"""

from absl import flags

from experiments.common import cli

flags.DEFINE_list('models', ['rm1', 'rm2', 'rm3', 'rm4'], 'Models to train.')
flags.DEFINE_string(
  'scale',
  'laptop',
  'laptop: parts of the models; medium: longer runs; full: as published.',
)
flags.DEFINE_string(
  'data', None, 'Folder of prepared real data; synthetic proxies by default.'
)
flags.DEFINE_integer('seeds', 2, 'Seeds, from 0 on.', lower_bound=1)
flags.DEFINE_float('drop', 0.3, 'Examples to skip, as a share of the hot ones.')
flags.DEFINE_string(
  'workdir', None, 'Folder of the results; a new one under runs/ by default.'
)

if __name__ == '__main__':
  cli.run(
    'experiments.reproduce.job:reproduce',
    'none',
    kept='finished runs are kept, and the same --workdir continues',
  )
