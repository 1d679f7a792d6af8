r"""Evaluates a run's checkpoint on the CPU and changes nothing in the run.

    python -m experiments.evaluate RUN
    python -m experiments.evaluate RUN --input=FILE
    python -m experiments.evaluate RUN --config=configs/criteo.py \
        --config.eval.split=validation
    python -m experiments.evaluate RUN --step=120

RUN is the folder of a run, finished or not. The run's config is used; if one is
given, its sections `data` and `eval` replace those of the run. The checkpoint
is the newest, or that of --step. A damaged one is refused. Without --input the
examples are the held-out ones. FILE has others, with labels, in the format of
the data trained on. --output keeps the metrics.
"""

import pathlib
import time
from typing import Any, TYPE_CHECKING

from absl import flags
import ml_collections

from experiments.common import cli
from slipstream_jax.errors import UserError

if TYPE_CHECKING:
  from experiments.common.loading import LoadedRun


def main(
  config: ml_collections.ConfigDict | None, folder: pathlib.Path
) -> None:
  """Evaluates and prints the metrics.

  Raises:
    UserError: the run has no checkpoint, examples are bad, or the output cannot
      be written.
  """
  from experiments.common import loading, record, report

  asked, screen = flags.FLAGS, report.console()
  tell = report.teller(screen)
  run = loading.load(
    folder, asked.data, other=config, step=asked.step, tell=tell
  )
  values = evaluation(run, asked.input)
  screen.print(report.facts(values))
  if asked.output is not None:
    try:
      record.write_json(pathlib.Path(asked.output), values)
    except OSError as error:
      raise UserError(
        'metrics need a file that can be written',
        got=f'{asked.output}: {error.strerror}',
        where='--output',
        hint='give one in a folder that exists, on a disk with room',
      ) from error
    tell(f'written to {asked.output}')


def evaluation(run: 'LoadedRun', path: str | None = None) -> dict[str, Any]:
  """Returns the metrics of a run on examples with labels.

  Args:
    run: the run.
    path: file of the examples. None: the held-out ones.

  Raises:
    UserError: examples cannot be scored or have no label.
  """
  from experiments.common import formats, interrupts, loading
  from slipstream_jax.training import evaluate, metrics

  began = time.monotonic()
  if path is None:
    source = interrupts.Checked(run.data.test(run.config.eval.batch_size))
    numbers = evaluate.evaluate(run.trainer, source)
  else:
    scored = []
    raw = formats.new_examples(run.config.data, path)
    for part in loading.scored(run, raw):
      interrupts.check()
      if part.labels is None:
        raise UserError(
          'evaluation needs labels',
          got='examples without any',
          where=path,
          hint='score them with python -m experiments.predict',
        )
      scored.append(part)
    if not any(len(part.logits) for part in scored):
      raise UserError(
        'there must be an example to evaluate',
        got='none',
        where=path,
        hint='give a file with more than a header',
      )
    numbers = metrics.compute(metrics.merge(scored))
  seconds = time.monotonic() - began
  values = numbers._asdict()
  del values['heads']  # the shipped models have one
  return {
    'data': run.data.name if path is None else path,
    'steps_trained': run.step,
    **values,
    'examples_per_s': numbers.examples / max(seconds, 1e-9),
  }


if __name__ == '__main__':
  flags.DEFINE_string('input', None, 'File of examples with labels.')
  flags.DEFINE_string('output', None, 'JSON file for the metrics.')
  flags.DEFINE_string(
    'data', None, "Where the run's data are now; by default where they were."
  )
  flags.DEFINE_integer(
    'step',
    None,
    'Step of the checkpoint; the newest by default.',
    lower_bound=0,
  )
  cli.run(main, 'optional', 'RUN', kept='nothing was written', on_cpu=True)
