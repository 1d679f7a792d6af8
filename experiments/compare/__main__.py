r"""Trains plainly and with every policy, and lays the results side by side.

    python -m experiments.compare --config=configs/criteo.py \
        [--policies=random,stale] [--targets=0.3,0.5,0.9] [--seeds=3] \
        [--workdir=DIR]

For each seed: the plain run, with its learning curve, then every policy at
every drop target, the random control always among them. Writes compare.csv,
a line per run as soon as it ends, compare.md and compare.png. Runs of one seed
share data, model, hot rows and compiled programs. What was stopped continues
with the same --workdir: finished runs are not run again, and more seeds,
policies or targets may be added.
"""

import pathlib
import re
from typing import NamedTuple

from absl import flags
import ml_collections
from rich.console import Console

from experiments.common import build, cli, datasets, errors, report
from experiments.common.meter import Meter, now
from experiments.common.workdir import folder, writable
from experiments.compare import ladder
from experiments.compare.ladder import PLAIN
from experiments.compare.results import Results
from experiments.screen.bar import Bar, clock
from experiments.systems.order import most_steps
from slipstream_jax.data.base import Dataset
from slipstream_jax.errors import choose, UserError
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import train
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.training.recipe import Recipe
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


class Todo(NamedTuple):
  """A run that is not finished yet."""

  seed: int
  policy: str
  target: float


def main(config: ml_collections.ConfigDict) -> None:
  """Runs the ladder.

  Raises:
    UserError: a flag that cannot be, or bad data.
    KeyboardInterrupt: a signal came; the runs finished are kept.
  """
  errors.check(config)
  if not build.skips(config):
    config.skip.mode = 'examples'  # what else is there to compare?
  ladder_of = _ladder()
  seeds = range(config.seed, config.seed + _SEEDS.value)
  screen = report.console()
  workdir = folder(_WORKDIR.value, 'compare-')
  results = Results(writable(str(workdir), '--workdir'), config)
  todo = [
    Todo(seed, policy, target)
    for seed in seeds
    for policy, target in ladder_of
    if not results.has(seed, policy, target)
  ]
  total = len(seeds) * len(ladder_of)
  try:
    data = _run_all(config, screen, workdir, results, todo, total)
  except KeyboardInterrupt:
    more = [] if _WORKDIR.value else [f'--workdir={workdir}']
    raise KeyboardInterrupt(
      f'{len(results.runs)} of {total} runs are finished, and this '
      f'continues: {cli.again(*more)}'
    ) from None
  title = re.sub(r', seed \d+$', '', data.name)
  (workdir / 'compare.md').write_text(ladder.page(title, results.runs))
  ladder.plot(workdir / 'compare.png', title, results.runs, results.curves)
  title = f'{title}; examples trained, and AUC'
  screen.print(report.table(title, ladder.overview(results.runs)))
  screen.print(f'written to {workdir}', highlight=False)


def _run_all(
  config: ml_collections.ConfigDict,
  screen: Console,
  workdir: pathlib.Path,
  results: Results,
  todo: list[Todo],
  total: int,
) -> Dataset:
  """Runs what is left to run, and keeps it; returns the data set."""
  case = _case(config, None)
  report.introduce(screen, case.data, workdir)
  screen.print(
    f'{len(todo)} runs of {case.steps:,} batches'
    + (f'; {total - len(todo)} are finished' if len(todo) < total else ''),
    highlight=False,
  )
  if not todo:
    return case.data
  with Bar(screen, None, 'batch', 'warming up:') as bar:
    left_s = _warm_up(case, todo, bar)
    screen.print(f'about {clock(left_s)} in all', highlight=False)
    bar.begin('', len(todo) * case.steps)
    for number, run in enumerate(todo):
      if run.seed != case.config.seed:
        bar.show(number * case.steps, phase=f'data of seed {run.seed}')
        changed = config.copy_and_resolve_references()
        changed.seed = run.seed
        case = _case(changed, case.recipe)
      words = f'run {number + 1}/{len(todo)} {run.policy} {run.target:g}'
      bar.show(number * case.steps, phase=words)
      points = _measure(case, run.policy, run.target, bar, number * case.steps)
      results.add(points)
      line = ladder.LINE.format(**points[-1]._asdict())
      screen.print(line, highlight=False)
  return case.data


def _ladder() -> list[tuple[str, float]]:
  """Pairs of policy and target; the plain run and random come first."""
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
  pairs = [(policy, target) for target in targets for policy in policies]
  return [(PLAIN, 0.0), *pairs]


def _warm_up(case: Case, todo: list[Todo], bar: Bar) -> float:
  """Compiles what the ladder runs; returns the seconds that it will take."""
  skip = case.config.skip
  steps = skip.warm_up_batches + skip.window_batches
  steps += skip.settle_batches + 20
  short = case._replace(steps=min(steps, case.steps))
  for number, policy in enumerate((PLAIN, 'random', 'stale')):
    started = now()  # of the last one, by which all is compiled
    points = _measure(short, policy, 0.5, bar, number * short.steps)
  training_s = points[-1].seconds
  other_s = now() - started - training_s  # to evaluate, and to make a trainer
  evaluations = sum(_points_of(run.policy) for run in todo)
  batches = len(todo) * case.steps / short.steps
  return batches * training_s + evaluations * other_s


def _points_of(policy: str) -> int:
  """Times that a run is evaluated: the plain one along its way."""
  return 8 if policy == PLAIN else 1


def _case(config: ml_collections.ConfigDict, recipe: Recipe | None) -> Case:
  data = datasets.dataset(config)
  steps = build.total_steps(config, data)
  # One recipe for all seeds, so that its programs are compiled once.
  recipe = recipe or build.recipe(config, data, steps)
  return Case(config, data, recipe, build.hot(config, data, recipe), steps)


def _measure(
  case: Case, policy: str, target: float, bar: Bar, before: int
) -> list[ladder.Run]:
  """One run; of a plain one the points of its learning curve, the end last.

  Args:
    case: what is run.
    policy: which examples are left out.
    target: how many.
    bar: is told of the batches.
    before: those that it knows of.
  """
  config = case.config.copy_and_resolve_references()
  if policy == PLAIN:
    config.skip.mode = 'off'
  else:
    config.skip.policy, config.skip.drop = policy, target
  trainer = build.trainer(config, case.data, case.recipe, case.hot)
  batches = build.batches(config, trainer, case.data, case.steps)
  points: list[ladder.Run] = []
  hot_share = None
  meter = Meter(trainer.engine.counters)
  with batches:
    most = most_steps(config, case.data, case.steps)
    while meter.step < most:
      started, room = meter.step, most - meter.step
      meter.start()
      steps = min(-(-case.steps // _points_of(policy)), room)
      for at in train(trainer, batches, steps):
        meter.add(at)
        hot_share = (at.event or {}).get('examples_hot', hot_share)
        if at.step % config.log_steps == 0:
          line = meter.line()
          read = at.counters.examples_seen // config.data.batch_size
          bar.show(before + read, *report.rates(line)[:2])
      meter.stop()
      if meter.step == started:
        break
      points.append(_run(case, trainer, meter, policy, target, hot_share))
  return points


def _run(
  case: Case,
  trainer: TrainerParts,
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


if __name__ == '__main__':
  cli.run(main)
