r"""Trains plainly and with every policy, and lays the results side by side.

    python -m experiments.compare --config=configs/criteo.py \
        [--policies=random,stale] [--targets=0.2,0.4,0.6] [--seeds=5] \
        [--epochs=2] [--workdir=DIR]
    python -m experiments.compare --own=my_module:function

For each seed: the plain run, then every policy at every target, a share of all
examples; the random control is always among them. Without --policies, those
that everyone should be measured by, and ours. `random_small` is `random` with
batches that are not filled up again, and so for any policy.

--own names a function of your own: of the config it makes a data set, or a
data set and a model (docs/how-to/own-compare.md); without --config, settings
are then those of configs/own.py.

Writes compare.csv, a line per run as soon as it ends, curve.csv, compare.html,
one page that needs nothing beside it, compare.md and compare.png. Runs of one
seed share data, model, hot rows and compiled programs. What was stopped
continues with the same --workdir: finished runs are not run again, and more
seeds, policies or targets may be added.
"""

import pathlib
import re
import sys
from typing import NamedTuple

from absl import flags
import ml_collections
from rich.console import Console

import configs
from experiments.common import build, cli, errors, report, usage
from experiments.common.compiling import compiled
from experiments.common.meter import now
from experiments.common.progress import Bar, clock
from experiments.common.workdir import folder, writable
from experiments.compare import grid, page
from experiments.compare.case import Case, case_of, measure, Tell
from experiments.compare.grid import Cell
from experiments.compare.lines import PLAIN, Run
from experiments.compare.results import Results
from experiments.pages import machine
from slipstream_jax.data.source import Dataset

_OWN = flags.DEFINE_string(
  'own', None, 'Function of your own that makes data, and maybe a model.'
)
_POLICIES = flags.DEFINE_list(
  'policies', [], 'Policies to run; by default ' + ', '.join(grid.ANCHORS) + '.'
)
_TARGETS = flags.DEFINE_list(
  'targets', ['0.2', '0.4', '0.6'], 'Shares of all examples to drop.'
)
_SEEDS = flags.DEFINE_integer('seeds', 5, 'Seeds, from config.seed on.', 1)
_EPOCHS = flags.DEFINE_integer(
  'epochs', None, 'Passes over the data; by default as the config says.', 1
)
_LONGER = flags.DEFINE_float(
  'longer',
  1.0,
  'Batches that runs which drop read, over those of a plain run: to see when '
  'they have learned as much.',
  0.01,
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of the results; a new one under runs/ by default.'
)
_PROBED = (PLAIN, 'stale', 'random_small', grid.OURS, 'random')
"""What the programs of all others are compiled with."""


class Todo(NamedTuple):
  """A run that is not finished yet."""

  seed: int
  cell: Cell


def main(config: ml_collections.ConfigDict) -> None:
  """Runs the grid.

  Raises:
    UserError: a flag that cannot be, or bad data.
    KeyboardInterrupt: a signal came; the runs finished are kept.
  """
  compiled()  # starts counting
  if _OWN.value:
    config.data.source = _OWN.value
  grid.with_epochs(config, _EPOCHS.value)
  errors.check(config)
  if not build.skips(config):
    config.skip.mode = 'examples'  # what else is there to compare?
    errors.check(config)  # what skips was not looked at before
  cells = grid.cells(_POLICIES.value, _TARGETS.value)
  screen = report.console()
  workdir = writable(str(folder(_WORKDIR.value, 'compare-')), '--workdir')
  results = Results(workdir, config, longer=_LONGER.value, own=_OWN.value)
  todo = [
    Todo(seed, cell)
    for seed in range(config.seed, config.seed + _SEEDS.value)
    for cell in cells
    if not results.has(seed, cell)
  ]
  total = _SEEDS.value * len(cells)
  more = [] if _WORKDIR.value else [f'--workdir={workdir}']
  try:
    data = _run_all(config, screen, workdir, results, todo, total)
  except KeyboardInterrupt:
    finished = total - sum(not results.has(*run) for run in todo)
    raise KeyboardInterrupt(
      f'{finished} of {total} runs are finished, and this '
      f'continues: {cli.again(*more)}'
    ) from None
  _write(screen, workdir, results, data, config)


def _run_all(
  config: ml_collections.ConfigDict,
  screen: Console,
  workdir: pathlib.Path,
  results: Results,
  todo: list[Todo],
  total: int,
) -> Dataset:
  """Runs what is left to run, and keeps it; returns the data set."""
  case = case_of(config, _OWN.value, _LONGER.value)
  report.introduce(screen, case.data, workdir)
  screen.print(
    f'{len(todo)} runs of {case.batches[0]:,} batches'
    + (f'; {total - len(todo)} are finished' if len(todo) < total else ''),
    highlight=False,
  )
  if not todo:
    return case.data
  with Bar(screen, None, 'batch', 'warming up:') as bar:
    left_s = _warm_up(case, todo, bar)
    screen.print(f'about {clock(left_s)} in all', highlight=False)
    bar.begin('', sum(case.batches_of(run.cell) for run in todo))
    before = 0
    for number, (seed, cell) in enumerate(todo):
      if seed != case.config.seed:
        bar.show(before, phase=f'data of seed {seed}')
        changed = config.copy_and_resolve_references()
        changed.seed = seed
        case = case_of(changed, _OWN.value, _LONGER.value, case)
      words = f'run {number + 1}/{len(todo)} {cell.policy} {cell.target:g}'
      bar.show(before, phase=words)
      run, points = measure(case, cell, _told(bar, before))
      results.add(run, points)
      screen.print(_line(run), highlight=False)
      before += case.batches_of(cell)
  return case.data


def _told(bar: Bar, before: int) -> Tell:
  def tell(done: int, *facts: str) -> None:
    bar.show(before + done, *facts)

  return tell


def _warm_up(case: Case, todo: list[Todo], bar: Bar) -> float:
  """Compiles what all runs share; returns the seconds that they will take."""
  skip = case.config.skip
  steps = skip.warm_up_batches + skip.window_batches
  steps += skip.settle_batches + 20
  short = case._replace(batches=tuple(min(steps, x) for x in case.batches))
  asked = {run.cell.policy: run.cell for run in todo}
  probed = [asked[name] for name in _PROBED if name in asked]
  for number, cell in enumerate(probed or [todo[0].cell]):
    started, before = now(), compiled().seconds
    run, _ = measure(short, cell, _told(bar, number * steps))
    training_s = run.seconds / run.batches
    other_s = now() - started - run.seconds  # a trainer is made, and scored
    compiling_s = compiled().seconds - before
  # By the last one. Another share of examples is another size of a batch's
  # rows, for which the step is compiled anew.
  batches = sum(case.batches_of(run.cell) for run in todo)
  cells = len({run.cell for run in todo})
  return batches * training_s + len(todo) * other_s + cells * compiling_s


def _line(run: Run) -> str:
  """A run in one line."""
  return (
    f'seed {run.seed}  {run.policy} {run.target:g}:'
    f' {run.examples_trained:,} examples in {run.seconds:.1f} s,'
    f' AUC {report.auc(run.auc)}'
  )


def _write(
  screen: Console,
  workdir: pathlib.Path,
  results: Results,
  data: Dataset,
  config: ml_collections.ConfigDict,
) -> None:
  """Writes the page, and shows what fits the screen."""
  title = re.sub(r', seed \d+$', '', data.name)
  given = [] if _WORKDIR.value else [f'--workdir={workdir}']
  page.write(
    workdir,
    page.Comparison(
      title,
      data.bayes_auc is not None,
      results.runs,
      results.curve,
      machine.here(cli.again(*given)),
      config,
    ),
  )
  frame = page.overview(results.runs, results.curve)
  screen.print(report.table(f'{title}; ± 95 % intervals', frame))
  screen.print(f'written to {workdir}', highlight=False)


def _defaults(arguments: list[str]) -> list[str]:
  """The config of data of one's own, where the command line names none."""
  own = any(re.match(r'--?own\b', word) for word in arguments)
  if not own or usage.config_flag(arguments) is not None:
    return []
  file = pathlib.Path(configs.__file__).with_name('own.py')
  return [f'--config={file}']


if __name__ == '__main__':
  sys.argv[1:1] = _defaults(sys.argv[1:])
  cli.run(main)
