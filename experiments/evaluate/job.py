"""Computes the metrics of a run on examples that it was not trained on."""

import pathlib
import time
from typing import Any

import ml_collections

from experiments.common import build, datasets, interrupts, loading, report
from experiments.common.loading import LoadedRun
from experiments.common.workdir import json_output
from experiments.evaluate import ensemble as ensembles
from slipstream_jax.errors import UserError
from slipstream_jax.training import metrics


def write_metrics(
  config: ml_collections.ConfigDict | None,
  folder: pathlib.Path,
  *others: pathlib.Path,
  input: str | None = None,
  output: str | None = None,
  data: str | None = None,
  step: int | None = None,
  ensemble: str | None = None,
  members: int = 3,
  gamma: float = 0.1,
) -> None:
  """Evaluates a run, prints its metrics, and writes them to `output`, if any.

  The arguments are those of the program.

  Raises:
    UserError: as in `loading.load`, `evaluation` and `ensembles.evaluate`, or
      the output cannot be written.
  """
  screen = report.console()
  tell = report.teller(screen)
  if others and ensemble is None:
    raise UserError(
      'several runs are evaluated as an ensemble',
      got=f'{1 + len(others)} runs',
      where='command line',
      hint='add --ensemble=logits, or give one run',
    )
  if ensemble is not None and (input is not None or step is not None):
    raise UserError(
      'an ensemble is of all members, on the held-out examples',
      got='one step' if input is None else f'--input={input}',
      where='command line, --ensemble',
      hint='leave out --step and --input',
    )
  with json_output(output) as write:  # before minutes are spent
    if ensemble is not None:
      how = ensemble, members, gamma
      folders = folder, *others
      write(ensembles.evaluate(folders, data, config, *how, screen))
      return
    run = loading.load(folder, data, config, step, tell)
    values = evaluation(run, input)
    screen.print(report.facts(values))
    write(values)
  if output is not None:
    tell(f'written to {output}')


def evaluation(run: LoadedRun, path: str | None = None) -> dict[str, Any]:
  """Returns the metrics of a run on examples with labels.

  Args:
    run: the run.
    path: file of the examples. None: the held-out ones.

  Raises:
    UserError: examples cannot be scored or have no label.
  """
  began = time.monotonic()
  if path is None:
    numbers = build.evaluated(run.config, run.trainer, run.data)
  else:
    scored = []
    raw = datasets.new_examples(run.config.data, path)
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
