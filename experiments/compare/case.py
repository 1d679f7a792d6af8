"""One seed of a comparison: its data and programs, and one run of it."""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import ml_collections

from experiments.common import build, datasets, report
from experiments.common import own as functions
from experiments.common.build import most_steps
from experiments.common.meter import Meter
from experiments.compare.grid import Cell, configured
from experiments.compare.lines import PLAIN, Point, Run
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.training.compiled import compiled_of, CompiledFunctions
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import train
from slipstream_jax.training.metrics import Metrics
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import HotRows

POINTS = 10
"""Of a learning curve, its end among them."""
Tell = Callable[..., object]
"""Called with the batches of the source read so far, and facts of them."""


class Case(NamedTuple):
  """What is the same for all runs of a seed."""

  config: ml_collections.ConfigDict
  data: Dataset
  recipes: tuple[Recipe, Recipe]
  """Of plain runs, and of those that drop."""
  hot: HotRows | None
  programs: tuple[CompiledFunctions, ...]
  """Of the recipes: held, or each run would compile its own anew."""
  batches: tuple[int, int]
  """That a plain run reads of the source, and one that drops."""

  def batches_of(self, cell: Cell) -> int:
    """Batches that the run of a cell reads."""
    return self.batches[cell.policy != PLAIN]


def case_of(
  config: ml_collections.ConfigDict,
  own: str | None,
  longer: float,
  before: Case | None = None,
) -> Case:
  """The case of the config's seed.

  Args:
    config: which skips.
    own: name of a function of one's own that gives data, and maybe a model.
    longer: batches that runs which drop read, over those of a plain run.
    before: that of another seed, whose programs serve here, too.

  Raises:
    UserError: bad settings or data, or no such function.
  """
  data, model = _own(own, config) if own else (datasets.dataset(config), None)
  plain = build.total_steps(config, data)
  batches = plain, max(1, round(longer * plain))
  if before is not None:
    recipes = before.recipes
  else:
    # A recipe for all runs of one length, so that it is compiled once.
    first = _recipe(config, data, plain, model)
    same = batches[0] == batches[1]
    other = first if same else _recipe(config, data, batches[1], model)
    recipes = first, other
  hot = build.hot(config, data, recipes[0])
  return Case(
    config, data, recipes, hot, tuple(map(compiled_of, recipes)), batches
  )


def _recipe(
  config: ml_collections.ConfigDict, data: Dataset, steps: int, model: Any
) -> Recipe:
  recipe = build.recipe(config, data, steps)
  return recipe if model is None else recipe._replace(model=model)


def _own(name: str, config: ml_collections.ConfigDict) -> tuple[Dataset, Any]:
  """What a function of one's own makes of the config."""
  result = functions.called(name, config, '--own')
  if isinstance(result, Dataset):
    return result, None
  pair = isinstance(result, tuple) and len(result) == 2
  if not pair or not isinstance(result[0], Dataset):
    raise UserError(
      'the function that --own names must return a Dataset, or one and a model',
      got=f'a {type(result).__name__}',
      where='--own',
      hint='make one with experiments.common.own.dataset',
    )
  return result


def measure(case: Case, cell: Cell, tell: Tell) -> tuple[Run, list[Point]]:
  """Trains and scores one run; the points are those of its learning curve.

  Raises:
    UserError: settings that cannot be, or a loss that is not finite.
  """
  config = configured(case.config, cell)
  batches, size = case.batches_of(cell), config.data.batch_size
  recipe = case.recipes[cell.policy != PLAIN]
  trainer = build.trainer(config, case.data, recipe, case.hot)
  meter = Meter(trainer.engine.counters)
  most = most_steps(config, case.data, batches)
  points: list[Point] = []
  hot_share = None
  with build.batches(config, trainer, case.data, batches) as planned:
    for number in range(1, POINTS + 1):
      mark = batches * size * number // POINTS if number < POINTS else None
      begun, stop = meter.step, functools.partial(_read, trainer, mark)
      meter.start()
      for at in train(trainer, planned, most - begun, stop):
        meter.add(at)
        hot_share = (at.event or {}).get('examples_hot', hot_share)
        if at.step % config.log_steps == 0:
          facts = report.rates(meter.line())[:2]
          tell(at.counters.examples_seen // size, *facts)
      meter.stop()
      if mark is not None and meter.step > begun:
        scored = _scored(case, trainer, config.eval.curve_examples)
        points.append(_point(case, cell, number, trainer, meter, scored))
    choosing = planned.seconds_choosing
  metrics = _scored(case, trainer, None)
  some = metrics  # on the examples of the other points
  if metrics.examples > _batches(config) * config.eval.batch_size:
    some = _scored(case, trainer, config.eval.curve_examples)
  points.append(_point(case, cell, POINTS, trainer, meter, some))
  return _run(case, cell, trainer, meter, metrics, hot_share, choosing), points


def _read(trainer: TrainerParts, mark: int | None) -> bool:
  """Whether so many examples of the source were read."""
  return mark is not None and trainer.engine.counters.examples_seen >= mark


def _batches(config: ml_collections.ConfigDict) -> int:
  """Test batches that a point is scored on."""
  return math.ceil(config.eval.curve_examples / config.eval.batch_size)


def _scored(case: Case, trainer: TrainerParts, examples: int | None) -> Metrics:
  source = case.data.test(case.config.eval.batch_size)
  most = None if examples is None else _batches(case.config)
  return evaluate(trainer, source, most)


def _point(
  case: Case,
  cell: Cell,
  number: int,
  trainer: TrainerParts,
  meter: Meter,
  metrics: Metrics,
) -> Point:
  counters = trainer.engine.counters
  return Point(
    *cell,
    case.config.seed,
    number,
    counters.examples_seen,
    counters.examples_trained,
    meter.seconds,
    _known(metrics.auc),
    metrics.log_loss,
  )


def _run(
  case: Case,
  cell: Cell,
  trainer: TrainerParts,
  meter: Meter,
  metrics: Metrics,
  hot_share: float | None,
  choosing: float,
) -> Run:
  counters = trainer.engine.counters
  return Run(
    *cell,
    case.config.seed,
    case.batches_of(cell),
    meter.step,
    counters.examples_seen,
    counters.examples_trained,
    counters.examples_dropped,
    hot_share,
    meter.seconds,
    choosing if cell.policy != PLAIN else 0.0,
    _known(metrics.auc),
    metrics.log_loss,
    metrics.calibration,
    metrics.examples,
    counters.bytes_loaded,
    counters.bytes_stored,
  )


def _known(auc: float | None) -> float:
  return math.nan if auc is None else auc
