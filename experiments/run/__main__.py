r"""Trains, evaluates and reports one experiment.

    python -m experiments.run --config=configs/criteo.py \
        [--config.key=value] [--workdir=FOLDER]

FOLDER gets the metrics, a picture and, at the end, summary.json. A run that
was stopped continues with --config.resume=True and the same --workdir.
"""

from absl import flags

from experiments.common import cli

flags.DEFINE_string(
  'workdir', None, 'Folder of the run; a new one under runs/ by default.'
)

if __name__ == '__main__':
  cli.run('experiments.run.job:run')
