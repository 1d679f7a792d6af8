r"""Runs the paper's comparison of systems, and writes its report.

    python -m experiments.reproduce [--models=rm1,rm2,rm3,rm4] \
        [--scale=laptop|full] [--data=DIR] [--seeds=N] [--workdir=DIR]

Every model is trained by every system and with skipping, in turns, seed after
seed; then come what the paper shows beside: skewed access, rows that stop
learning, naive skipping, thresholds. Writes CSV files, a line per run as soon
as it ends, and report.html and report.md, which are made of them alone. What
was stopped continues with the same --workdir: finished runs are not run again,
and models and seeds may be added. A run that fails says so in its line, and the
others go on; remove that line to try it again.

`--scale=laptop` trains parts of the models on synthetic proxies; with --data,
on real data as experiments.prepare packs them: DIR/taobao, DIR/criteo,
DIR/terabyte and DIR/avazu, those that there are.
"""

from absl import flags

from experiments.common import cli, report
from experiments.common.workdir import folder
from experiments.reproduce import models
from experiments.reproduce.reproduction import Asked, Reproduction

_MODELS = flags.DEFINE_list(
  'models', ['rm1', 'rm2', 'rm3', 'rm4'], 'Models to train.'
)
_SCALE = flags.DEFINE_string(
  'scale', models.LAPTOP, 'laptop: parts of the models; full: as published.'
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
  """Runs what is left of the grid, and writes the report.

  Raises:
    UserError: a flag that cannot be, or a folder of something else.
    KeyboardInterrupt: a signal came; what is finished is kept.
  """
  asked = Asked(
    tuple(dict.fromkeys(_MODELS.value)),
    _SCALE.value,
    _DATA.value,
    _SEEDS.value,
    _DROP.value,
  )
  workdir = folder(_WORKDIR.value, 'reproduce-')
  more = () if _WORKDIR.value else (f'--workdir={workdir}',)
  Reproduction(report.console(), asked, workdir, cli.again(*more)).run()


if __name__ == '__main__':
  cli.run(
    main,
    config='none',
    kept='finished runs are kept, and the same --workdir continues',
  )
