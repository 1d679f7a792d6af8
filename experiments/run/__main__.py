r"""Trains, evaluates and reports one experiment.

    python -m experiments.run --config=configs/criteo.py \
        [--config.key=value] [--workdir=FOLDER]

FOLDER gets the metrics, two pictures and, at the end, summary.json. A run that
was stopped continues with --config.resume=True and the same --workdir.
"""

from absl import flags
import ml_collections

from experiments.common import cli

_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of the run; a new one under runs/ by default.'
)


def main(config: ml_collections.ConfigDict) -> None:
  """Runs the experiment of `config`.

  Raises:
    UserError: bad settings or bad data. The folder then has no summary.
    KeyboardInterrupt: a signal came. What was trained is saved.
  """
  from experiments.run import job  # imports JAX

  job.run(config, _WORKDIR.value)


if __name__ == '__main__':
  cli.run(main)
