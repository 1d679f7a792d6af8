"""Trains each model with each rate and seed, and writes the page."""

from collections.abc import Iterator, Sequence
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from configs import common
from experiments.common import build, cli, datasets, errors, machine, report
from experiments.common.meter import compiled, Meter
from experiments.common.models import model_of
from experiments.common.progress import Bar
from experiments.common.results import keep_config, read, write
from experiments.common.workdir import folder, writable
from experiments.zoo import page
from experiments.zoo.page import Cell, Run
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import choose, UserError
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import train
from slipstream_jax.training.recipe import Recipe

RUNS = 'zoo.csv'
_LAST = 5  # a fifth of the steps, whose loss chooses the rate


class Entry(NamedTuple):
  """A model of the zoo, as a config names it."""

  name: str
  """`config.model.name`."""
  layers: tuple[tuple[str, ...], ...] = ()
  """`config.model.layers` of a DHEN."""


_KINDS = ('dot', 'cross', 'attention', 'linear')
_CLICKS = {name: Entry(name) for name in ('dlrm', *common.ZOO)}
FAMILIES: dict[str, dict[str, Entry]] = {
  'clicks': _CLICKS,
  'dhen': {
    'dlrm': Entry('dlrm'),
    **{name: Entry('dhen', ((name,), (name,))) for name in _KINDS},
    'dot + linear': Entry('dhen', (('dot', 'linear'),) * 2),
    'all four': Entry('dhen', (_KINDS,) * 2),
  },
}
"""Models by name, the one that others are compared with first."""


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
  if config.model.name != 'dlrm':
    raise UserError(
      'the zoo needs the config of a DLRM, whose widths all models have',
      got=config.model.name,
      where='config.model.name',
      hint='use configs/criteo.py:planted or configs/criteo.py:sample',
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
  total = len(todo) * build.total_steps(config, first)
  with Bar(screen, total, 'step', 'starting') as bar:
    for run in _runs(config, entries, todo, bar):
      runs.append(run)
      write(place / RUNS, Run._fields, (one._asdict() for one in runs))
      screen.print(
        f'seed {run.seed}  {run.model} {run.rate:g}: log loss'
        f' {run.log_loss:.4f}, {1000 * run.seconds / run.steps:.2f} ms a step',
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
  with changed.unlocked():
    if entry.name != 'dlrm':
      common.another_model(changed, entry.name)
    if entry.layers:
      changed.model.layers = entry.layers
  for kind in ('rows', 'dense'):
    changed.optimizer[kind] = tuple(
      (name, _scaled(arguments, cell.rate))
      for name, arguments in changed.optimizer[kind]
    )
  return changed


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
  before = 0
  for number, (name, rate, seed) in enumerate(todo, 1):
    cell = Cell(name, rate)
    own = configured(config, entries[name], cell, seed)
    data = datasets.dataset(own)
    steps = build.total_steps(own, data)
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
  """Trains and scores one run."""
  trainer = build.trainer(config, data, recipe, build.hot(config, data, recipe))
  meter = Meter(trainer.engine.counters)
  losses = []
  with build.batches(config, trainer, data, steps) as planned:
    meter.start()
    for at in train(trainer, planned, steps):
      meter.add(at)
      losses.append(at.loss)
      if at.step % config.log_steps == 0:
        bar.show(before + at.step)
    meter.stop()
  metrics = evaluate(trainer, data.test(config.eval.batch_size))
  parameters, flops = cost_of(config, data)
  return Run(
    *cell,
    seed=config.seed,
    steps=len(losses),
    batch_size=config.data.batch_size,
    seconds=meter.seconds,
    last_loss=float(np.mean(losses[-max(1, len(losses) // _LAST) :])),
    log_loss=metrics.log_loss,
    normalized_entropy=metrics.normalized_entropy or math.nan,
    auc=math.nan if metrics.auc is None else metrics.auc,
    parameters=parameters,
    flops=flops,
  )


def cost_of(
  config: ml_collections.ConfigDict, data: Dataset
) -> tuple[int, float]:
  """Returns a model's parameters, and FLOPs of an example's step.

  The FLOPs are those that XLA counts in the model, forward and backward, before
  it optimizes. Rows are not counted in either.
  """
  model, size = model_of(config.model), config.data.batch_size
  dense = jax.ShapeDtypeStruct((size, data.dense_features), jnp.float32)
  row = jax.ShapeDtypeStruct((size, config.model.dim), jnp.float32)
  inputs = dense, dict.fromkeys(data.features, row)
  variables = jax.eval_shape(
    lambda *given: model.init(jax.random.key(0), *given), *inputs
  )

  def loss(params: Any, dense: Any, embeddings: Any) -> jax.Array:
    given = {**variables, 'params': params}
    logits: Any = model.apply(given, dense, embeddings)
    return jnp.sum(logits)

  params = variables['params']
  step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2)))
  cost: Any = step.lower(params, *inputs).cost_analysis()
  leaves = jax.tree.leaves(params)
  return sum(leaf.size for leaf in leaves), float(cost['flops']) / size
