"""Trains each model with each rate and seed, and writes the page."""

from collections.abc import Iterator, Sequence
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections

from configs import common
from experiments.common import build, cli, datasets, errors, machine, report
from experiments.common.meter import compiled, Meter
from experiments.common.models import model_of
from experiments.common.progress import Bar
from experiments.common.results import keep_config, read, write
from experiments.common.workdir import folder, writable
from experiments.zoo import page
from experiments.zoo.hashing import (
  LONGER,
  Past,
  past_of,
  past_steps,
  shared,
  WAYS,
)
from experiments.zoo.page import Cell, Run
from slipstream_jax.data.source import BatchSource, Dataset, SourceWrapper
from slipstream_jax.errors import choose, UserError
from slipstream_jax.models.adapters import adapt, Inputs
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.loop import train
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.retrieval import NDCG, RECALL
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import Batch

RUNS = 'zoo.csv'


class Entry(NamedTuple):
  """A model of the zoo, as a config names it."""

  name: str
  """`config.model.name`."""
  layers: tuple[tuple[str, ...], ...] = ()
  """`config.model.layers` of a DHEN."""
  top: tuple[int, ...] = ()
  """`config.model.top`. Empty: that of the config."""
  dense: common.Chain = ()
  """`config.optimizer.dense`. Rates are then factors on its learning rate, and
  those of rows stay. Empty: that of the config."""
  way: str = ''
  """Name in `WAYS` of how ids share rows. Empty: as in the data."""
  fewer: int = 1
  """Factor by which each table has fewer rows."""
  longer: bool = False
  """Whether it is trained on the past as well, in which others only count."""


def _hashing(fewer: int) -> dict[str, Entry]:
  """Returns a DLRM for each way to share rows, and some trained longer."""
  ways = {way: Entry('dlrm', way=way, fewer=fewer) for way in WAYS}
  return ways | {
    f'{way}, longer': ways[way]._replace(longer=True) for way in LONGER
  }


_KINDS = ('dot', 'cross', 'attention', 'linear')
_OPTIMIZERS = ('adam', 'adagrad', 'muon', 'shampoo')
_CLICKS = {name: Entry(name) for name in ('dlrm', *common.ZOO)}
FAMILIES: dict[str, dict[str, Entry]] = {
  'clicks': _CLICKS,
  'dhen': {
    'dlrm': Entry('dlrm'),
    **{name: Entry('dhen', ((name,), (name,))) for name in _KINDS},
    'dot + linear': Entry('dhen', (('dot', 'linear'),) * 2),
    'all four': Entry('dhen', (_KINDS,) * 2),
  },
  'optimizers': {
    name: Entry('dlrm', dense=((name, {'learning_rate': 1e-3}),))
    for name in _OPTIMIZERS
  },
  'hash10': _hashing(10),
  'hash100': _hashing(100),
  'sequences': {name: Entry(name) for name in ('tbsm', *common.SEQUENCES)},
  'retrieval': {name: Entry(name) for name in ('two_tower', *common.SEQUENCES)},
}
"""Models by name. The first is that of the config, with which others are
compared."""


def zoo(
  config: ml_collections.ConfigDict,
  data: str | None,
  family: str,
  seeds: int,
  rates: Sequence[str],
  steps: int,
  workdir: str | None,
) -> None:
  """Runs every cell for every seed, unless it is finished, and writes the page.

  The arguments are those of the program.

  Raises:
    UserError: bad settings, data or folder.
  """
  compiled()  # starts counting
  entries = choose(FAMILIES, family, '--family')
  cells = [Cell(name, rate) for name in entries for rate in _rates(rates)]
  if data is not None:
    config.data.path = data
  config.skip.mode = 'off'
  if steps:
    config.train.steps = steps
  errors.check(config)
  wanted = next(iter(entries.values())).name
  if config.model.name != wanted:
    raise UserError(
      f'the family {family!r} needs the config of a model {wanted!r}, whose'
      ' widths all models have',
      got=config.model.name,
      where='config.model.name',
      hint='use configs/criteo.py:sample for clicks, configs/taobao.py:sample'
      ' for sequences, or configs/movielens.py:two_tower for retrieval',
    )
  screen = report.console()
  place = writable(str(folder(workdir, 'zoo-')), '--workdir')
  again = cli.again(*([] if workdir else [f'--workdir={place}']))
  keep_config(place, config, family=family)
  runs = [Run(**row) for row in read(place / RUNS, Run._fields, ['model'])]
  numbers = range(config.seed, config.seed + seeds)
  done = {run[:3] for run in runs}
  todo = [(*cell, x) for x in numbers for cell in cells]
  todo = [one for one in todo if one not in done]
  first = datasets.dataset(config)
  report.introduce(screen, first, place)
  if family == 'dhen':
    entries = widened(config, entries, first)
  total = len(todo) * build.total_steps(config, first)
  with Bar(screen, total, 'step', 'starting') as bar:
    for run in _runs(config, entries, todo, bar):
      runs.append(run)
      write(place / RUNS, Run._fields, (one._asdict() for one in runs))
      screen.print(
        f'seed {run.seed}  {run.model} {run.rate:g}: {page.quality_of(run)},'
        f' {1000 * run.seconds / run.steps:.2f} ms a step',
        highlight=False,
      )
  about = machine.in_words(machine.here(again))
  rows = page.write_page(place, first, runs, about)
  screen.print(report.table('the best rate of each model', rows))
  screen.print(f'written to {place}', highlight=False)


def _rates(words: Sequence[str]) -> list[float]:
  """Returns the factors, each once.

  Raises:
    UserError: one is no positive number.
  """
  try:
    rates = [float(word) for word in words]
  except ValueError:
    rates = []
  if not rates or not all(0 < rate < math.inf for rate in rates):
    raise UserError(
      'rates must be positive factors on the learning rates',
      got=','.join(words) or 'none',
      where='--rates',
      hint='write them like 0.3,1,3',
    )
  return [*dict.fromkeys(rates)]


def configured(
  config: ml_collections.ConfigDict, entry: Entry, cell: Cell, seed: int
) -> ml_collections.ConfigDict:
  """Returns a copy of a DLRM's config for another model, rate and seed."""
  changed = config.copy_and_resolve_references()
  changed.seed = seed
  # So that both halves of the held-out examples have some of all times.
  changed.eval.batch_size = changed.data.batch_size
  with changed.unlocked():
    if entry.name != changed.model.name:
      common.another_model(changed, entry.name)
    if entry.layers:
      changed.model.layers = entry.layers
    if entry.top:
      changed.model.top = entry.top
  if entry.dense:
    changed.optimizer.dense = entry.dense
  for kind in ('dense',) if entry.dense else ('rows', 'dense'):
    changed.optimizer[kind] = tuple(
      (name, _scaled(arguments, cell.rate))
      for name, arguments in changed.optimizer[kind]
    )
  return changed


def widened(
  config: ml_collections.ConfigDict, entries: dict[str, Entry], data: Dataset
) -> dict[str, Entry]:
  """Returns the models with `top` so wide that all have the FLOPs of the most.

  All layers of a `top` are multiplied by one factor, up to 1,024.
  """

  def cost(name: str, factor: float) -> float:
    own = configured(config, wider(name, factor), Cell(name, 1.0), config.seed)
    return cost_of(own, data)[1]

  def wider(name: str, factor: float) -> Entry:
    top = tuple(round(factor * width) for width in config.model.top)
    return entries[name]._replace(top=top)

  most = max(cost(name, 1.0) for name in entries)
  equal = {}
  for name in entries:
    low, high = 1.0, 1024.0
    while high / low > 1.01:
      middle = math.sqrt(low * high)
      low, high = (middle, high) if cost(name, middle) < most else (low, middle)
    equal[name] = wider(name, low)
  return equal


def _scaled(arguments: Any, rate: float) -> dict[str, Any]:
  scaled = dict(arguments)
  if 'learning_rate' in scaled:
    scaled['learning_rate'] *= rate
  return scaled


def _runs(
  config: ml_collections.ConfigDict,
  entries: dict[str, Entry],
  todo: Sequence[tuple[str, float, int]],
  bar: Bar,
) -> Iterator[Run]:
  """Yields the runs to do. Seeds share recipes, and so what is compiled."""
  recipes: dict[Cell, Recipe] = {}
  programs = []  # kept, so that no run compiles its own
  pasts: dict[int, Past] = {}
  before = 0
  for number, (name, rate, seed) in enumerate(todo, 1):
    cell = Cell(name, rate)
    own = configured(config, entries[name], cell, seed)
    data = datasets.dataset(own)
    steps = build.total_steps(own, data)
    if way := entries[name].way:
      if seed not in pasts:
        pilot = configured(config, entries[name], Cell('pilot', 1.0), seed)
        pasts = {seed: past_of(pilot, data)}
      earlier = 0 if entries[name].longer else past_steps(steps)
      fewer = entries[name].fewer
      data = shared(data, WAYS[way], fewer, earlier, pasts[seed])
      steps -= earlier
    if cell not in recipes:
      recipes[cell] = build.recipe(own, data, steps)
      programs.append(compiled_of(recipes[cell]))
    bar.show(before, phase=f'run {number}/{len(todo)} {name} {rate:g}')
    yield measure(own, cell, data, recipes[cell], steps, bar, before)
    before += steps


def measure(
  config: ml_collections.ConfigDict,
  cell: Cell,
  data: Dataset,
  recipe: Recipe,
  steps: int,
  bar: Bar,
  before: int,
) -> Run:
  """Trains one run, and scores it on each half of the held-out examples."""
  trainer, meter = trained(config, data, recipe, steps, bar, before)
  choosing, metrics = (
    build.evaluated(config, trainer, _half(data, first)) for first in (0, 1)
  )
  parameters, flops = cost_of(config, data)
  return Run(
    *cell,
    seed=config.seed,
    steps=meter.step,
    batch_size=config.data.batch_size,
    seconds=meter.seconds,
    choosing=_or_nan(choosing.values.get(RECALL, choosing.log_loss)),
    log_loss=metrics.log_loss,
    normalized_entropy=_or_nan(metrics.normalized_entropy),
    auc=_or_nan(metrics.auc),
    recall=_or_nan(metrics.values.get(RECALL)),
    ndcg=_or_nan(metrics.values.get(NDCG)),
    parameters=parameters,
    flops=flops,
  )


def trained(
  config: ml_collections.ConfigDict,
  data: Dataset,
  recipe: Recipe,
  steps: int,
  bar: Bar,
  before: int,
) -> tuple[TrainerParts, Meter]:
  """Returns a new trainer after so many steps, and how long they took."""
  trainer = build.trainer(config, data, recipe, build.hot(config, data, recipe))
  meter = Meter(trainer.engine.counters)
  with build.batches(config, trainer, data, steps) as planned:
    meter.start()
    for at in train(trainer, planned, steps):
      meter.add(at)
      if at.step % config.log_steps == 0:
        bar.show(before + at.step)
    meter.stop()
  return trainer, meter


class _EverySecond(SourceWrapper):
  """Every second batch of a source."""

  def __init__(self, source: BatchSource, first: int) -> None:
    """Takes over `source`, and leaves out its first batches."""
    super().__init__(source)
    self._left_out = first

  def __next__(self) -> Batch:
    for _ in range(self._left_out):
      super().__next__()
    self._left_out = 1
    return super().__next__()


def _half(data: Dataset, first: int) -> Dataset:
  """Returns the data set with half of the held-out batches: from 0 or 1 on."""
  return data._replace(test=lambda size: _EverySecond(data.test(size), first))


def _or_nan(value: float | None) -> float:
  return math.nan if value is None else value


def cost_of(
  config: ml_collections.ConfigDict, data: Dataset
) -> tuple[int, float]:
  """Returns a model's parameters, and FLOPs of an example's step.

  The FLOPs are those that XLA counts in the model, forward and backward, before
  it optimizes. Rows are not counted in either.
  """
  size, tables = config.data.batch_size, build.tables(config, data)
  model, floats = adapt(model_of(config.model)), jnp.float32
  embeddings, real = {}, {}
  for name, feature in tables.features.items():
    shape = (
      (size, feature.max_length) if feature.combiner == 'none' else (size,)
    )
    dim = tables.tables[feature.table].embedding_dim
    embeddings[name] = jax.ShapeDtypeStruct((*shape, dim), floats)
    real[name] = jax.ShapeDtypeStruct((size, feature.max_length), bool)
  dense = jax.ShapeDtypeStruct((size, data.dense_features), floats)
  weights = jax.ShapeDtypeStruct((size,), floats)

  def inputs(given: Any) -> Inputs:
    dense, embeddings, real, weights = given
    named = {'real': real, 'weights': weights, 'train': True}
    return Inputs(dense, embeddings, {**named, 'rng': jax.random.key(0)})

  def loss(params: Any, embeddings: Any, state: Any, given: Any) -> jax.Array:
    dense, _, *rest = given
    logits, _ = model.apply(params, state, inputs((dense, embeddings, *rest)))
    return jnp.sum(logits)

  given = dense, embeddings, real, weights
  params, state = jax.eval_shape(
    lambda given: model.init(jax.random.key(0), inputs(given)), given
  )
  step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
  cost: Any = step.lower(params, embeddings, state, given).cost_analysis()
  leaves = jax.tree.leaves(params)
  return sum(leaf.size for leaf in leaves), float(cost['flops']) / size
