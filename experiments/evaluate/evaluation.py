"""The metrics of a checkpoint, on examples that it was not trained on."""

from collections.abc import Callable
import pathlib
import time
from typing import Any

import ml_collections

from experiments.common import interrupts
from experiments.predict import loading
from experiments.predict.loading import LoadedRun
from slipstream_jax.errors import UserError
from slipstream_jax.training import evaluate, metrics
from slipstream_jax.training.metrics import Metrics


def evaluation(
  folder: str | pathlib.Path,
  config: ml_collections.ConfigDict | None = None,
  path: str | None = None,
  data_path: str | None = None,
  step: int | None = None,
  tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
  """Metrics of a checkpoint of a run; JSON, for people and programs.

  Args:
    folder: of the run.
    config: whose data and evaluation take the place of the run's.
    path: a file of labelled examples; None: the held-out ones.
    data_path: where the run's data are now; None: where they were.
    step: of the checkpoint; None: the newest.
    tell: as of `loading.load`.

  Raises:
    UserError: no such run, or examples that cannot be scored or have no label.
  """
  run = loading.load(
    folder, data_path, other=config, finished=False, step=step, tell=tell
  )
  began = time.monotonic()
  numbers = _on_file(run, path) if path is not None else _held_out(run)
  seconds = time.monotonic() - began
  values = numbers._asdict()
  del values['heads']  # the shipped models have one
  return {
    'data': run.data.name if path is None else path,
    'steps_trained': run.step,
    **values,
    'examples_per_s': numbers.examples / max(seconds, 1e-9),
  }


def _held_out(run: LoadedRun) -> Metrics:
  source = interrupts.Checked(run.data.test(run.config.eval.batch_size))
  return evaluate.evaluate(run.trainer, source)


def _on_file(run: LoadedRun, path: str) -> Metrics:
  scored = []
  for part in loading.scored(run, loading.new_examples(run, path)):
    interrupts.check()
    if part.labels is None:
      raise UserError(
        'to evaluate needs labels',
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
  return metrics.compute(metrics.merge(scored))
