r"""Runs the paper's comparison of systems, and writes its report.

    python -m experiments.reproduce [--models=rm1,rm2,rm3,rm4] \
        [--scale=laptop|full] [--data=DIR] [--seeds=N] [--workdir=DIR]

Trains every model with every system and with skipping, in turns, seed after
seed. Then measures what else the paper shows: skewed access, rows that stop
learning, naive skipping, thresholds. Writes report.html and results.csv, a
table with a row for each run and point, which is saved after each run.

A stopped reproduction continues with the same --workdir. Finished runs are not
run again, and models and seeds may be added. A run that fails says so in its
row, and the others continue. Remove that row to try it again.

`--scale=laptop` trains parts of the models on synthetic proxies, or with --data
on real data as experiments.prepare packs them, in those of DIR/taobao,
DIR/criteo, DIR/terabyte and DIR/avazu that exist.
"""

from absl import flags

from experiments.common import cli

_MODELS = flags.DEFINE_list(
  'models', ['rm1', 'rm2', 'rm3', 'rm4'], 'Models to train.'
)
_SCALE = flags.DEFINE_string(
  'scale', 'laptop', 'laptop: parts of the models; full: as published.'
)
_DATA = flags.DEFINE_string(
  'data', None, 'Folder of prepared real data; synthetic proxies by default.'
)
_SEEDS = flags.DEFINE_integer('seeds', 2, 'Seeds, from 0 on.', lower_bound=1)
_DROP = flags.DEFINE_float(
  'drop', 0.3, 'Examples to skip, as a share of the hot ones.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of the results; a new one under runs/ by default.'
)


def main() -> None:
  """Runs the jobs that are not finished, and writes the report.

  Raises:
    UserError: an invalid flag, or a folder with something else.
    KeyboardInterrupt: a signal came. Finished runs are kept.
  """
  from experiments.common.workdir import folder
  from experiments.reproduce.cases import Asked
  from experiments.reproduce.job import reproduce  # imports JAX

  models = tuple(dict.fromkeys(_MODELS.value))
  asked = Asked(models, _SCALE.value, _DATA.value, _SEEDS.value, _DROP.value)
  workdir = folder(_WORKDIR.value, 'reproduce-')
  more = () if _WORKDIR.value else (f'--workdir={workdir}',)
  reproduce(asked, workdir, cli.again(*more))


if __name__ == '__main__':
  cli.run(
    main,
    config='none',
    kept='finished runs are kept, and the same --workdir continues',
  )
