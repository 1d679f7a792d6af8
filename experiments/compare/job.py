"""Runs a comparison: its cells, one seed after the other, and the page."""

from collections.abc import Callable, Generator, Sequence
import contextlib
import functools
import math
import re
from typing import Any, NamedTuple

import ml_collections
from rich.console import Console

from experiments.common import (
  build,
  cli,
  datasets,
  errors,
  machine,
  report,
)
from experiments.common.meter import compiled, Meter
from experiments.common.own import called
from experiments.common.progress import Bar
from experiments.common.workdir import folder, writable
from experiments.compare import page
from experiments.compare.figures import are_known
from experiments.compare.results import (
  AUTO,
  Cell,
  CONTROL,
  OURS,
  PLAIN,
  Point,
  Results,
  Run,
)
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import choose, UserError
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.training.compiled import compiled_of, CompiledFunctions
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import train
from slipstream_jax.training.metrics import Metrics
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.types import HotRows

SMALL = '_small'
"""Suffix of a policy whose batches are not filled up again."""
KNOWN = dict.fromkeys(
  [*POLICIES, *(f'{name}{SMALL}' for name in POLICIES), AUTO]
)
"""Names that may be asked for."""
ANCHORS = (
  *(CONTROL, 'negatives', 'local_case_control', 'infobatch_once'),
  *('surprise', 'stale', OURS, AUTO),
)
"""Policies of the default comparison: control, published ones, and ours."""
SEEDS, HALF = (2, 6), 0.001
"""Fewest and most seeds where no number was asked for. Between them, there are
enough once AUC less that of random dropping is known within the latter."""
POINTS = 10
"""Points of a learning curve, including its end."""
Tell = Callable[..., object]
"""Called with the batches of the source read so far, and facts to show."""


class Case(NamedTuple):
  """The data and programs of all runs of a seed."""

  config: ml_collections.ConfigDict
  data: Dataset
  recipes: tuple[Recipe, Recipe]
  """The recipes of plain runs, and of runs that drop."""
  hot: HotRows | None
  programs: tuple[CompiledFunctions, ...]
  """The programs of the recipes, kept so that no run compiles its own."""
  batches: tuple[int, int]
  """Batches of the source that a plain run reads, and a run that drops."""

  def batches_of(self, cell: Cell) -> int:
    """Returns the batches that the run of a cell reads."""
    return self.batches[cell.policy != PLAIN]


def cells(asked: Sequence[str], targets: Sequence[str]) -> list[Cell]:
  """Returns what is run for each seed: the plain run, then random, then others.

  Without policies asked for, these are `ANCHORS`.

  Raises:
    UserError: a policy does not exist, or a target is not a share.
  """
  for name in asked:
    choose(KNOWN, name, '--policies')
  names = dict.fromkeys([CONTROL, *(asked or ANCHORS)])
  shares = dict.fromkeys(map(_share, targets))
  return [
    Cell(PLAIN, 0.0),
    *(
      Cell(name, share)
      for number, share in enumerate(shares)
      for name in names
      if name != AUTO or number == 0
    ),
  ]


def _share(text: str) -> float:
  try:
    share = float(text)
  except ValueError:
    share = -1.0
  if not 0 < share < 1:
    raise UserError(
      'a target must be a share of the examples above 0 and below 1',
      got=text or 'none',
      where='--targets',
      hint='write them like 0.2,0.4',
    )
  return share


def configured(
  config: ml_collections.ConfigDict, cell: Cell
) -> ml_collections.ConfigDict:
  """Returns a copy of the config that drops what the cell says."""
  changed = config.copy_and_resolve_references()
  skip, small = changed.skip, cell.policy.endswith(SMALL)
  skip.mode = 'off' if cell.policy == PLAIN else 'examples'
  if cell.policy == AUTO:
    with skip.ignore_type():
      skip.drop = 'auto'
  elif cell.policy != PLAIN:
    skip.policy, skip.drop = cell.policy.removesuffix(SMALL), cell.target
  if small:
    skip.refill = False
  return changed


def compare(
  config: ml_collections.ConfigDict,
  own: str | None,
  policies: Sequence[str],
  targets: Sequence[str],
  seeds: int | None,
  epochs: int | None,
  longer: float,
  workdir: str | None,
) -> None:
  """Runs every cell for every seed, unless it is finished, and writes the page.

  The arguments are those of the program.

  Raises:
    UserError: bad settings, data or folder.
    KeyboardInterrupt: a signal came. It tells what is finished.
  """
  compiled()  # starts counting
  asked = cells(policies, targets)
  _check(config, own, epochs)
  screen = report.console()
  place = writable(str(folder(workdir, 'compare-')), '--workdir')
  again = cli.again(*([] if workdir else [f'--workdir={place}']))
  results = Results(place, config, longer=longer, own=own)
  most = max(SEEDS) if seeds is None else seeds
  numbers = range(config.seed, config.seed + most)

  def is_enough() -> bool:
    return seeds is None and _are_enough(results, numbers, asked)

  todo = [
    (seed, c) for seed in numbers for c in asked if not results.has(seed, c)
  ]
  finished = most * len(asked) - len(todo)
  if is_enough():
    todo = []
  make = functools.partial(case_of, own=own, longer=longer)
  try:
    case = make(config)
    report.introduce(screen, case.data, place)
    screen.print(
      f'{"up to " if seeds is None and todo else ""}{len(todo)} runs of'
      f' {case.batches[0]:,} batches'
      + (f', {finished} are finished' if finished else ''),
      highlight=False,
    )
    with contextlib.closing(_runs(screen, case, todo, make)) as runs:
      for run in runs:
        results.add(*run)
        if is_enough():
          break
  except KeyboardInterrupt:
    finished += sum(results.has(*run) for run in todo)
    raise KeyboardInterrupt(
      f'{finished} of {most * len(asked)} runs are finished, and this '
      f'continues: {again}'
    ) from None
  title = re.sub(r', seed \d+$', '', case.data.name)
  about = f'{machine.in_words(machine.here(again))}; {len(results.runs)} runs'
  page.write(
    place,
    title,
    case.data.bayes_auc is not None,
    results.runs,
    results.curve,
    about,
    config,
  )
  frame = page.overview(results.runs, results.curve)
  screen.print(report.table(f'{title}; ± 95 % intervals', frame))
  for words in page.warnings(results.runs, results.curve):
    report.warn(screen, words)
  screen.print(f'written to {place}', highlight=False)


def _check(
  config: ml_collections.ConfigDict, own: str | None, epochs: int | None
) -> None:
  """Changes the config as asked for, and checks it."""
  if epochs is not None:
    config.train.steps, config.train.epochs = 0, epochs
  if own:
    config.data.source = own
  errors.check(config)
  if not build.skips(config):
    config.skip.mode = 'examples'
    errors.check(config)  # the settings of skipping were not checked yet


def _are_enough(
  results: Results, numbers: Sequence[int], asked: Sequence[Cell]
) -> bool:
  """Whether the seeds that have begun are complete, and say what is asked."""
  of_seeds = [[results.has(seed, cell) for cell in asked] for seed in numbers]
  begun = [done for done in of_seeds if any(done)]
  complete = all(map(all, begun)) and len(begun) >= min(SEEDS)
  return complete and are_known(results.runs, HALF)


def _runs(
  screen: Console,
  case: Case,
  todo: Sequence[tuple[int, Cell]],
  make: Callable[..., Case],
) -> Generator[tuple[Run, list[Point]]]:
  """Yields the runs to do. `make` makes the case of another seed's config."""
  total = sum(case.batches_of(cell) for _, cell in todo)
  before = 0

  def tell(done: int, *facts: str) -> None:
    bar.show(before + done, *facts)

  with Bar(screen, total, 'batch', 'warming up') as bar:
    # Or the first run alone would pay for cold caches.
    steps = sum(build.skip_settings(case.config).chosen_phases[:3])
    plain, other = (min(steps + 20, most) for most in case.batches)
    for _, cell in (*todo[:1], *todo[-1:]):
      measure(case._replace(batches=(plain, other)), cell, lambda *_: None)
    for number, (seed, cell) in enumerate(todo, 1):
      words = f'run {number}/{len(todo)} {cell.policy} {cell.target:g}'
      bar.show(before, phase=words)
      if seed != case.config.seed:
        config = case.config.copy_and_resolve_references()
        config.seed = seed
        case = make(config, before=case)
      run, points = measure(case, cell, tell)
      yield run, points
      before += case.batches_of(cell)
      screen.print(
        f'seed {seed}  {cell.policy} {cell.target:g}: '
        f'{run.examples_trained:,} examples in {run.seconds:.1f} s, '
        f'AUC {report.auc(run.auc)}',
        highlight=False,
      )


def case_of(
  config: ml_collections.ConfigDict,
  own: str | None,
  longer: float,
  before: Case | None = None,
) -> Case:
  """Returns the case of the config's seed, with the programs of `before`.

  Raises:
    UserError: bad settings or data, or no such function.
  """
  data, model = _own(own, config) if own else (datasets.dataset(config), None)
  plain = build.total_steps(config, data)
  batches = plain, max(1, round(longer * plain))
  if before is not None:
    recipes = before.recipes
  else:
    changes = {} if model is None else {'model': model}
    first, other = (
      build.recipe(config, data, steps)._replace(**changes) for steps in batches
    )
    # Runs of one length share a recipe, which is then compiled once.
    recipes = first, first if batches[0] == batches[1] else other
  hot = build.hot(config, data, recipes[0])
  programs = tuple(map(compiled_of, recipes))
  return Case(config, data, recipes, hot, programs, batches)


def _own(name: str, config: ml_collections.ConfigDict) -> tuple[Dataset, Any]:
  """Returns the data set, and maybe the model, of a user's function."""
  result = called(name, config, '--own')
  is_pair = isinstance(result, tuple) and len(result) == 2
  data, model = result if is_pair else (result, None)
  if not isinstance(data, Dataset):
    raise UserError(
      'the function that --own names must return a Dataset, or one and a model',
      got=f'a {type(result).__name__}',
      where='--own',
      hint='make one with experiments.common.own.dataset',
    )
  return data, model


def measure(case: Case, cell: Cell, tell: Tell) -> tuple[Run, list[Point]]:
  """Trains and scores one run, and returns it with its learning curve.

  Raises:
    UserError: an invalid combination of settings, or a loss that is not finite.
  """
  config = configured(case.config, cell)
  batches, size = case.batches_of(cell), config.data.batch_size
  recipe = case.recipes[cell.policy != PLAIN]
  trainer = build.trainer(config, case.data, recipe, case.hot)
  meter = Meter(trainer.engine.counters)
  most = build.most_steps(config, case.data, batches)
  some = math.ceil(config.eval.curve_examples / config.eval.batch_size)
  points: list[Point] = []
  hot_share = promised = None

  def has_read(examples: float) -> bool:
    return trainer.engine.counters.examples_seen >= examples

  def scored(batches: int | None) -> Metrics:
    return evaluate(trainer, case.data.test(config.eval.batch_size), batches)

  def add_point(number: int, at: Metrics) -> None:
    counters = trainer.engine.counters
    counts = counters.examples_seen, counters.examples_trained
    figures = meter.seconds, _known(at.auc), at.log_loss
    points.append(Point(*cell, config.seed, number, *counts, *figures))

  with build.batches(config, trainer, case.data, batches) as planned:
    for number in range(1, POINTS + 1):
      mark = batches * size * number // POINTS
      stop = functools.partial(has_read, mark if number < POINTS else math.inf)
      begun = meter.step
      meter.start()
      for at in train(trainer, planned, most - begun, stop):
        meter.add(at)
        event = at.event or {}
        hot_share = event.get('examples_hot', hot_share)
        if 'log_loss_lost' in event:
          promised = max(promised or 0.0, event['log_loss_lost'])
        if at.step % config.log_steps == 0:
          facts = report.rates(meter.line())[:2]
          tell(at.counters.examples_seen // size, *facts)
      meter.stop()
      if number < POINTS and meter.step > begun:
        add_point(number, scored(some))
  metrics = scored(None)
  # A learning curve ends with a score like those of its other points.
  is_all = metrics.examples <= some * config.eval.batch_size
  add_point(POINTS, metrics if is_all else scored(some))
  counters = trainer.engine.counters._asdict()
  run = Run(
    *cell,
    **{key: count for key, count in counters.items() if key in Run._fields},
    seed=config.seed,
    batches=batches,
    steps=meter.step,
    examples_hot=hot_share,
    seconds=meter.seconds,
    seconds_choosing=planned.seconds_choosing if cell.target else 0.0,
    auc=_known(metrics.auc),
    log_loss=metrics.log_loss,
    calibration=metrics.calibration,
    test_examples=metrics.examples,
    promised=promised,
  )
  return run, points


def _known(auc: float | None) -> float:
  return math.nan if auc is None else auc
