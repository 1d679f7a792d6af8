r"""Trains plainly and with every policy, and lays the results side by side.

    python -m experiments.compare --config=configs/criteo.py \
        [--policies=random,stale] [--targets=0.3,0.5,0.9] [--seeds=3] \
        [--workdir=DIR]

For each seed: the plain run, with its learning curve, then every policy at
every drop target, the random control always among them. Writes compare.csv,
a line per run as soon as it ends, compare.md and compare.png. Runs of one seed
share data, model, hot rows and compiled programs.
"""

import csv
import pathlib
import re
from typing import NamedTuple

from absl import flags
import ml_collections

from experiments.common import build, cli, datasets, errors, report
from experiments.common.meter import Meter
from experiments.common.workdir import folder
from experiments.compare import ladder
from experiments.compare.ladder import PLAIN
from slipstream_jax.data.base import Dataset
from slipstream_jax.errors import choose, UserError
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import train
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer import Trainer
from slipstream_jax.types import HotRows

_POLICIES = flags.DEFINE_list('policies', list(POLICIES), 'Policies to run.')
_TARGETS = flags.DEFINE_list('targets', ['0.3', '0.5', '0.9'], 'Drop targets.')
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Seeds, from config.seed on.')
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of the results; a new one under runs/ by default.'
)


class Case(NamedTuple):
  """What is the same for all runs of a seed."""

  config: ml_collections.ConfigDict
  data: Dataset
  recipe: Recipe
  hot: HotRows | None
  steps: int


def main(config: ml_collections.ConfigDict) -> None:
  """Runs the ladder.

  Raises:
    UserError: a flag that cannot be, or bad data.
  """
  errors.check(config)
  if not build.skips(config):
    config.skip.mode = 'examples'  # what else is there to compare?
  ladder_of = _ladder()
  screen, workdir = report.console(), _new_folder()
  runs: list[ladder.Run] = []
  curves: list[list[ladder.Run]] = []
  first, recipe = config.seed, None
  for seed in range(first, first + _SEEDS.value):
    config.seed = seed
    case = _case(config, recipe)
    recipe = case.recipe
    if seed == first:
      report.introduce(screen, case.data, workdir)
      _warm_up(case)
    curve = _measure(case, PLAIN, 0.0, with_curve=True)
    curves.append(curve)
    for policy, target in [(PLAIN, 0.0), *ladder_of]:
      run = curve[-1] if policy == PLAIN else _measure(case, policy, target)[-1]
      runs.append(run)
      _append(workdir, run)
      screen.print(ladder.LINE.format(**run._asdict()), highlight=False)
  data = re.sub(r', seed \d+$', '', case.data.name)
  text = ladder.page(data, runs)
  (workdir / 'compare.md').write_text(text)
  ladder.plot(workdir / 'compare.png', data, runs, curves)
  screen.print(text, highlight=False)
  screen.print(f'written to {workdir}', highlight=False)


def _ladder() -> list[tuple[str, float]]:
  """Pairs of policy and target; the random control comes first."""
  for policy in _POLICIES.value:
    choose(POLICIES, policy, '--policies')
  try:
    targets = [float(target) for target in _TARGETS.value]
  except ValueError as error:
    raise UserError(
      'drop targets must be numbers in [0, 1]',
      got=','.join(_TARGETS.value),
      where='--targets',
      hint='write them like 0.3,0.5',
    ) from error
  policies = dict.fromkeys(['random', *_POLICIES.value])
  return [(policy, target) for target in targets for policy in policies]


def _warm_up(case: Case) -> None:
  """Compiles what the ladder runs, with windows and without."""
  skip = case.config.skip
  steps = skip.warm_up_batches + skip.window_batches
  steps += skip.settle_batches + 20
  case = case._replace(steps=min(steps, case.steps))
  for policy in (PLAIN, 'random', 'stale'):
    _measure(case, policy, 0.5)


def _case(config: ml_collections.ConfigDict, recipe: Recipe | None) -> Case:
  data = datasets.dataset(config)
  steps = build.total_steps(config, data)
  # One recipe for all seeds, so that its programs are compiled once.
  recipe = recipe or build.recipe(config, data, steps)
  return Case(config, data, recipe, build.hot(config, data, recipe), steps)


def _measure(
  case: Case, policy: str, target: float, with_curve: bool = False
) -> list[ladder.Run]:
  """One run; with its learning curve, a run for each point of it."""
  config = case.config.copy_and_resolve_references()
  if policy == PLAIN:
    config.skip.mode = 'off'
  else:
    config.skip.policy, config.skip.drop_target = policy, target
  trainer = build.trainer(config, case.data, case.recipe, case.hot)
  batches = build.batches(config, trainer, case.data, case.steps)
  stretches = 8 if with_curve else 1
  points: list[ladder.Run] = []
  hot_share = None
  meter = Meter(trainer.engine.counters)
  with batches:
    while meter.step < case.steps:
      started, room = meter.step, case.steps - meter.step
      meter.start()
      for at in train(trainer, batches, min(-(-case.steps // stretches), room)):
        meter.add(at)
        hot_share = (at.event or {}).get('examples_hot', hot_share)
      meter.stop()
      if meter.step == started:
        break
      points.append(_run(case, trainer, meter, policy, target, hot_share))
  return points


def _run(
  case: Case,
  trainer: Trainer,
  meter: Meter,
  policy: str,
  target: float,
  hot_share: float | None,
) -> ladder.Run:
  metrics = evaluate(trainer, case.data.test(case.config.eval.batch_size))
  moved = trainer.engine.counters
  return ladder.Run(
    policy,
    target,
    case.config.seed,
    moved.examples_trained,
    meter.seconds,
    float('nan') if metrics.auc is None else metrics.auc,
    metrics.log_loss,
    metrics.calibration,
    moved.bytes_loaded,
    moved.bytes_stored,
    moved.examples_dropped,
    hot_share,
  )


def _new_folder() -> pathlib.Path:
  where = folder(_WORKDIR.value, 'compare-')
  if (where / 'compare.csv').exists():
    raise UserError(
      'a comparison needs a new or empty folder',
      got=where,
      where='--workdir',
      hint='name another one',
    )
  where.mkdir(parents=True, exist_ok=True)
  return where


def _append(workdir: pathlib.Path, run: ladder.Run) -> None:
  path = workdir / 'compare.csv'
  new = not path.exists()
  with path.open('a', newline='') as file:
    writer = csv.writer(file)
    if new:
      writer.writerow(ladder.Run._fields)
    writer.writerow(run)


if __name__ == '__main__':
  cli.run(main)
