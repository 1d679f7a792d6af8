r"""Evaluates a run's checkpoint, on the CPU; nothing of it changes.

    python -m experiments.evaluate --workdir=RUN
    python -m experiments.evaluate --workdir=RUN --input=FILE
    python -m experiments.evaluate --workdir=RUN --config=configs/criteo.py \
        --config.eval.split=validation
    python -m experiments.evaluate --workdir=RUN --step=120

RUN is the folder of a run, which need not be finished. It knows its config;
where one is given, its sections `data` and `eval` take the place of the run's.
The checkpoint is the newest, or that of --step. A damaged one is refused.
Without --input the examples are the held-out ones; FILE has others, with
labels, in the format of the data trained on. --output keeps the metrics.
"""

import pathlib

from absl import flags
import ml_collections

from experiments.common import cli, report
from experiments.common.record import write_json
from experiments.evaluate.evaluation import evaluation
from slipstream_jax.errors import UserError

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_INPUT = flags.DEFINE_string('input', None, 'File of examples with labels.')
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the metrics.')
_DATA = flags.DEFINE_string(
  'data', None, "Where the run's data are now; by default where they were."
)
_STEP = flags.DEFINE_integer(
  'step', None, 'Step of the checkpoint; the newest by default.', lower_bound=0
)


def main(config: ml_collections.ConfigDict | None) -> None:
  """Evaluates, and says what came of it.

  Raises:
    UserError: no such run, bad examples, or no file to write to.
  """
  if _WORKDIR.value is None:
    raise UserError(
      'what is evaluated must be named',
      got='no folder of a run',
      where='--workdir',
      hint='name one that `python -m experiments.report` lists',
    )
  screen = report.console()
  metrics = evaluation(
    _WORKDIR.value,
    config,
    _INPUT.value,
    _DATA.value,
    _STEP.value,
    report.teller(screen),
  )
  screen.print(report.facts(metrics))
  if _OUTPUT.value is not None:
    try:
      write_json(pathlib.Path(_OUTPUT.value), metrics)
    except OSError as error:
      raise UserError(
        'metrics need a file that can be written',
        got=f'{_OUTPUT.value}: {error.strerror}',
        where='--output',
        hint='name one in a folder that is there, on a disk with room',
      ) from error
    screen.print(f'written to {_OUTPUT.value}', highlight=False, soft_wrap=True)


if __name__ == '__main__':
  cli.run(main, kept='nothing was written', config='optional', on_cpu=True)
