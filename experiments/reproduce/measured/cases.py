"""What all runs of a model and seed share: data, rows that are hot, programs.

Programs are compiled once per model: recipes differ in their microbatches
alone. A synthetic stream is drawn once and held in memory at the laptop's
scale, or drawing it would be timed with systems that read it twice.
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

_JUDGED = 1 << 14  # examples whose hot share is measured


class Asked(NamedTuple):
  """What a reproduction is asked for."""

  models: tuple[str, ...]
  """Of `MODELS`."""
  scale: str
  """Of `SCALES`."""
  data: str | None
  """Folder of real data; None: synthetic proxies."""
  seeds: int
  """How many, from 0 on."""
  drop: float
  """Drop target, as a share of the hot examples."""


class Case(NamedTuple):
  """What all runs of a model and seed share."""

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
  """Products and sums a second of a plain matrix product here."""
  dense_parameters: int
  """Numbers that the model itself has, without rows."""
  programs: 'Programs'


class Programs:
  """A model's recipes, and what is compiled of them, held until all is done."""

  def __init__(self, recipe: Recipe) -> None:
    """Of the recipe, and of those that differ in microbatches alone."""
    self._recipe = recipe
    self._held: dict[int, CompiledFunctions] = {}

  def of(self, microbatches: int) -> Recipe:
    """The recipe with so many parts of a batch."""
    recipe = self._recipe._replace(microbatches=microbatches)
    self._held.setdefault(microbatches, compiled_of(recipe))
    return recipe


class Cases:
  """Makes cases as they are asked for, and keeps the last one alone."""

  def __init__(self, asked: Asked) -> None:
    """Makes nothing yet."""
    self._asked = asked
    self._case: Case | None = None
    self._seed = -1

  def of(self, model: str, seed: int) -> Case:
    """The case of a model and seed.

    Raises:
      UserError: its data cannot be read, or its settings cannot be.
    """
    case, self._case = self._case, None
    if case is not None and (case.model, self._seed) == (model, seed):
      self._case = case
      return case
    programs = None
    if case is not None and case.model == model:
      programs = case.programs
    del case
    gc.collect()  # before more is taken
    self._case = case_of(self._asked, model, seed, programs)
    self._seed = seed
    return self._case


def case_of(
  asked: Asked, model: str, seed: int, programs: Programs | None = None
) -> Case:
  """The case of a model and seed.

  Args:
    asked: what a reproduction is asked for.
    model: of `MODELS`.
    seed: of data, model, rows and choices.
    programs: of the model with another seed, if there are any.

  Raises:
    UserError: its data cannot be read, or its settings cannot be.
  """
  config = models.config_of(model, asked.scale, asked.data, seed, asked.drop)
  data = datasets.dataset(config)
  steps = build.total_steps(config, data)
  programs = programs or Programs(build.recipe(config, data, steps))
  recipe = programs.of(1)
  sizes = compiled_of(recipe).row_bytes_by_table()
  pairs = zip(recipe.tables.tables.values(), sizes, strict=True)
  table_bytes = sum(table.rows * size for table, size in pairs)
  config.hot.bytes = models.hot_bytes(model, table_bytes)
  counts = build.row_counts(config, data, recipe.tables.num_rows)
  data = data._replace(counts=lambda: counts)
  rows = popular_rows(counts, config.hot.bytes, sizes, recipe.tables.offsets)
  hot = hot_rows(rows, recipe.tables.num_rows)
  if asked.scale == models.LAPTOP and config.data.path is None:
    data = held(data, config.data.batch_size, steps, config.eval.batch_size)
  shares = _hot_shares(data, config.data.batch_size, hot)
  compiled = compiled_of(recipe)
  params = compiled.init_state(data.dense_features, seed).params
  return Case(
    *(model, config, data, steps, hot, *shares, matrix_flops()),
    sum(leaf.size for leaf in jax.tree.leaves(params)),
    programs,
  )


def held(
  data: Dataset, batch_size: int, steps: int, test_batch_size: int
) -> Dataset:
  """The data set with its examples in memory, in the same batches."""
  train = _columns(data.train(batch_size), steps)
  test = _columns(data.test(test_batch_size), None)

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
  """Shares of lookups of hot rows, and of examples of such lookups alone."""
  source = data.train(batch_size)
  lookups, examples = [], []
  for batch in itertools.islice(source, max(1, _JUDGED // batch_size)):
    places = hot.places(batch.lookups)[batch.weights > 0]
    places = places.reshape(len(places), -1)
    lookups.append((places[places >= 0] < len(hot.rows)).mean())
    examples.append((places < len(hot.rows)).all(axis=1).mean())
  source.close()
  return float(np.mean(lookups)), float(np.mean(examples))


def matrix_flops(size: int = 1024, times: int = 8) -> float:
  """Products and sums a second of a plain product: the best of some."""
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
  """A trainer of the case, before its first step.

  Args:
    case: whose data and programs it takes.
    config: of the run.
    hot: its hot rows; None takes those that the config's budget has room for.
  """
  recipe = case.programs.of(build.system(config).microbatches)
  hot = hot or build.hot(config, case.data, recipe)
  return build.trainer(config, case.data, recipe, hot)
