"""Data, hot rows and programs that all runs of a model and seed share.

Programs are compiled once per model, as recipes differ only in their
microbatches. Below full scale the synthetic stream is drawn once and held in
memory. Otherwise drawing it would be timed with systems that read it twice.
"""

import gc
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from experiments.common import build, datasets, interrupts
from experiments.common.meter import now
from experiments.reproduce import models
from slipstream_jax.data.numbered import ColumnBatches, Columns
from slipstream_jax.data.source import BatchSource, Dataset
from slipstream_jax.engine.buffers import to_device
from slipstream_jax.selection.hot import hot_rows, popular_rows
from slipstream_jax.training.compiled import compiled_of, CompiledFunctions
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import HotRows

_SHARE_EXAMPLES = 1 << 14  # on which hot shares are measured


class Asked(NamedTuple):
  """Settings of a reproduction, as flags give them."""

  models: tuple[str, ...]
  scale: str
  data: str | None
  """Folder of real data; None for synthetic proxies."""
  seeds: int
  drop: float
  """Drop target, as a share of the hot examples."""


class Case(NamedTuple):
  """The data and programs of all runs of a model and seed."""

  model: str
  config: ml_collections.ConfigDict
  data: Dataset
  steps: int
  """Batches of the source in a run."""
  hot: HotRows
  """Rows that fit the published share of the tables' bytes."""
  lookups_hot_share: float
  examples_hot_share: float
  flops: float
  """Floating-point operations per second of a plain matrix product here."""
  dense_parameters: int
  recipe: Recipe
  """The model's recipe for whole batches."""
  programs: dict[int, CompiledFunctions]
  """Compiled programs by microbatches, kept so that no run compiles its own."""

  def recipe_of(self, microbatches: int) -> Recipe:
    """Returns the recipe for batches of some parts."""
    recipe = self.recipe._replace(microbatches=microbatches)
    self.programs.setdefault(microbatches, compiled_of(recipe))
    return recipe


class Cases:
  """Makes cases when they are asked for, and keeps only the last one."""

  def __init__(self, asked: Asked) -> None:
    self._asked = asked
    self._case: Case | None = None

  def of(self, model: str, seed: int) -> Case:
    """Returns the case of a model and seed.

    Raises:
      UserError: its data cannot be read, or its settings are invalid.
    """
    case = self._case
    if case is None or (case.model, case.config.seed) != (model, seed):
      compiled = None
      if case is not None and case.model == model:
        compiled = case.recipe, case.programs
      self._case = case = None
      gc.collect()  # before more memory is taken
      self._case = case = _case_of(self._asked, model, seed, compiled)
    return case


def _case_of(
  asked: Asked,
  model: str,
  seed: int,
  before: tuple[Recipe, dict[int, CompiledFunctions]] | None,
) -> Case:
  """Makes a case, with the programs of the model's case before, if any."""
  config = models.config_of(model, asked.scale, asked.data, seed, asked.drop)
  data = datasets.dataset(config)
  steps = build.total_steps(config, data)
  recipe, programs = before or (build.recipe(config, data, steps), {})
  compiled = programs.setdefault(1, compiled_of(recipe))
  tables = recipe.tables
  sizes = compiled.row_bytes_by_table()
  config.hot.bytes = models.hot_bytes(model, row_bytes(recipe))
  counts = build.row_counts(config, data, tables.num_rows)
  data = data._replace(counts=lambda: counts)
  rows = popular_rows(counts, config.hot.bytes, sizes, tables.offsets)
  hot = hot_rows(rows, tables.num_rows)
  if asked.scale != models.FULL and config.data.path is None:
    data = _in_memory(data, config, steps)
  shares = _hot_shares(data, config.data.batch_size, hot)
  params = compiled.init_state(data.dense_features, seed).params
  dense_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
  return Case(
    *(model, config, data, steps, hot, *shares, matrix_flops()),
    dense_parameters,
    recipe,
    programs,
  )


def facts_of(case: Case) -> dict[str, Any]:
  """Returns what the report says of a model."""
  tables, config = case.recipe.tables, case.config
  synthetic, name = config.data.path is None, case.data.name
  if synthetic and 'synthetic proxy' not in name:
    name = f'synthetic proxy: {name}'
  return {
    'title': models.MODELS[case.model].title,
    'data': name,
    'synthetic': synthetic,
    'rows': tables.num_rows,
    'dim': config.model.dim,
    'tables': len(tables.tables),
    'features_per_example': sum(
      feature.max_length for feature in tables.features.values()
    ),
    'batch_size': config.data.batch_size,
    'steps': case.steps,
    'hot_rows': len(case.hot.rows),
    'row_bytes': row_bytes(case.recipe),
    'drop_target': config.skip.drop,
    'policy': config.skip.policy,
    'dense_parameters': case.dense_parameters,
  }


def row_bytes(recipe: Recipe) -> int:
  """Returns the bytes of all tables, with their row state."""
  sizes = compiled_of(recipe).row_bytes_by_table()
  pairs = zip(recipe.tables.tables.values(), sizes, strict=True)
  return sum(table.rows * size for table, size in pairs)


def _in_memory(
  data: Dataset, config: ml_collections.ConfigDict, steps: int
) -> Dataset:
  """Returns the data set with its examples in memory, in the same batches."""
  train = _columns(data.train(config.data.batch_size), steps)
  test = _columns(data.test(config.eval.batch_size), None)

  def source(size: int) -> BatchSource:
    return ColumnBatches(train, size)

  def held_out(size: int) -> BatchSource:
    return ColumnBatches(test, size, epochs=1, pad_remainder=True)

  return data._replace(train=source, test=held_out)


def _columns(source: BatchSource, batches: int | None) -> Columns:
  parts = []
  for batch in itertools.islice(interrupts.Checked(source), batches):
    real = batch.weights > 0
    columns = Columns(*batch[:3])
    parts.append(columns if real.all() else columns.take(real))
  source.close()
  pairs: Any = zip(*(part[:3] for part in parts), strict=True)
  return Columns(*(np.concatenate(column) for column in pairs))


def _hot_shares(
  data: Dataset, batch_size: int, hot: HotRows
) -> tuple[float, float]:
  """Returns the shares of hot lookups, and of examples with only those."""
  source = data.train(batch_size)
  lookups, examples = [], []
  batches = max(1, _SHARE_EXAMPLES // batch_size)
  for batch in itertools.islice(source, batches):
    places = hot.places(batch.lookups)[batch.weights > 0]
    places = places.reshape(len(places), -1)
    lookups.append((places[places >= 0] < len(hot.rows)).mean())
    examples.append((places < len(hot.rows)).all(axis=1).mean())
  source.close()
  return float(np.mean(lookups)), float(np.mean(examples))


def matrix_flops(size: int = 1024, times: int = 8) -> float:
  """Returns operations per second of a plain product: the best of some."""
  square = to_device(np.ones((size, size), np.float32))
  product = jax.jit(jnp.matmul)
  jax.block_until_ready(product(square, square))
  seconds = []
  for _ in range(times):
    started = now()
    jax.block_until_ready(product(square, square))
    seconds.append(now() - started)
  return 2 * size**3 / min(seconds)


def trainer_of(
  case: Case,
  config: ml_collections.ConfigDict,
  hot: HotRows | None = None,
) -> TrainerParts:
  """Makes a new trainer.

  Args:
    case: the case, which has data and programs.
    config: the config of the run.
    hot: its hot rows; None takes those that fit the config's budget.
  """
  recipe = case.recipe_of(build.system(config).microbatches)
  hot = hot or build.hot(config, case.data, recipe)
  return build.trainer(config, case.data, recipe, hot)
