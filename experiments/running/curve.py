"""The points of the learning curve, and the evaluation at the end."""

import math

from experiments.common import interrupts
from experiments.common.summary import Run
from slipstream_jax.errors import UserError
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.metrics import Metrics


def draw_curve(run: Run, step: int) -> bool:
  """Evaluates where the config asks for it, unless it was done before.

  Returns:
    Whether a point of the curve is there.
  """
  curve = run.config.eval.curve_steps
  if not (step and curve and step % curve == 0):
    return False
  if not run.recorder.has(step, 'eval'):
    evaluated(run, step, run.config.eval.curve_examples)
  return True


def evaluated(run: Run, step: int, examples: int | None = None) -> Metrics:
  """Evaluates on about so many examples, or on all, and records it.

  Raises:
    UserError: a metric is not finite.
    KeyboardInterrupt: a signal came.
  """
  size = run.config.eval.batch_size
  batches = None if examples is None else -(-examples // size)
  source = interrupts.Checked(run.data.test(size))
  metrics = evaluate(run.trainer, source, batches)
  numbers = metrics._asdict()
  del numbers['heads']  # the shipped models have one
  for name, value in numbers.items():
    if value is not None and not math.isfinite(value):
      raise UserError(
        'the metrics must stay finite',
        got=f'{name} {value}',
        where=f'evaluation after step {step}',
        hint='lower the learning rates or look for bad values in the data',
      )
  trained = run.trainer.engine.counters.examples_trained
  line = {'step': step, 'kind': 'eval', 'examples_trained': trained}
  run.recorder.write(line | numbers)
  return metrics
