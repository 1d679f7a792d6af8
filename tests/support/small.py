"""Small data and recipes that several tests train."""

import functools

import jax
import numpy as np
import optax

from slipstream_jax.data.numbered import Columns
from slipstream_jax.data.source import SourceWrapper
from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.models.tbsm import TBSM
from slipstream_jax.selection.hot import access_counts, hot_rows, popular_rows
from slipstream_jax.store.base import FirstRows
from slipstream_jax.store.memory import MemoryStore
from slipstream_jax.tables import Feature, features_of, tables_of
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS

ROWS = (50, 7, 3000, 1)
DENSE = 4
# With at most 256 lookups, in bags of 2, all batches have one padded size. So
# tests that train them with one recipe compile and share one step.
BATCH = 32
STEPS = 4  # of sequences; as many as dense features


SIZES = {f't{i}': rows for i, rows in enumerate(ROWS)}
POOLINGS = ('sum', 'mean', 'sum', 'mean')


def tables(dim=8, dtype='float32', length=None):
  """Of bags of `length` lookups."""
  features = {
    name: Feature(name, pooling, length or 1)
    for name, pooling in zip(SIZES, POOLINGS, strict=True)
  }
  return tables_of(SIZES, features, dim, dtype)


def sequence_tables(dim=8):
  return tables_of(SIZES, features_of([*SIZES], STEPS), dim)


def columns(examples, *, length=None, seed=0, dim=8):
  """Random examples; skewed ids, so that batches hold duplicates."""
  rng = np.random.default_rng(seed)
  shape = (examples, len(ROWS)) + ((length,) if length else ())
  skew = rng.random(shape) ** 3
  limits = np.reshape(ROWS, (1, -1) + (1,) * (len(shape) - 2))
  ids = (skew * limits).astype(np.int64)
  if length:
    ids[rng.random(shape) < 0.4] = -1
  return Columns(
    rng.normal(size=(examples, DENSE)).astype(np.float32),
    tables(dim).lookups(ids),
    (rng.random(examples) < 0.3).astype(np.float32),
  )


def hot(columns, most=400):
  """The most popular rows of these examples."""
  counts = access_counts([columns.lookups], sum(ROWS))
  return hot_rows(popular_rows(counts, most, 1), sum(ROWS))


@functools.cache
def sequence_recipe(row_optimizer='rowwise_adagrad', dim=8, rate=0.05):
  """For `columns` of length STEPS."""
  model = {'bottom': (dim,), 'top': (8, 6), 'attention': (5,), 'final': (9,)}
  return Recipe(
    TBSM(**model),
    sequence_tables(dim),
    ROW_OPTIMIZERS[row_optimizer](rate),
    optax.adam(1e-3),
  )


@functools.cache  # one recipe, one compilation
def recipe(
  row_optimizer='rowwise_adagrad',
  dim=8,
  rate=0.05,
  table_dtype='float32',
  length=None,
  **model,
):
  """For `columns` of that length."""
  model = {'bottom': (16, dim), 'top': (16,)} | model
  return Recipe(
    DLRM(**model),
    tables(dim, table_dtype, length),
    ROW_OPTIMIZERS[row_optimizer](rate),
    optax.adam(1e-3),
  )


def hot_examples(hot, lookups):
  """Which examples, [n, F] or [n, F, L], look up hot rows only: bool[n]."""
  flat = hot.places(lookups).reshape(len(lookups), -1)
  return (flat < len(hot.rows)).all(axis=1)


def replace_rows(engine, blocks, seed=None):
  """Gives all rows of an engine the values of one block per group."""
  pieces = [(np.arange(len(one.rows)), one) for one in blocks]
  # Iterators, as checked types would want the same U in all groups.
  engine.reset([iter([piece]) for piece in pieces], seed)


class WithFresh(SourceWrapper):
  """A source that gives some batches, by their number, fresh rows."""

  def __init__(self, source, fresh):
    super().__init__(source)
    self.fresh = fresh

  def __next__(self):
    number = self.get_state()['delivered']
    return super().__next__()._replace(fresh=self.fresh.get(number))


def store_of(table):
  """A store whose arrays are those of the table."""
  first = FirstRows(
    len(table.rows),
    lambda rows: jax.tree.map(lambda leaf: leaf[rows], table),
    lambda: table,
  )
  store = MemoryStore(first)
  store.reset(first)
  return store


def everything(trainer):
  """Copies of all rows with their state, and of all else on the device."""
  parts = trainer.engine.read_back(), trainer.whole_state
  return jax.tree.map(np.array, jax.device_get(parts))


def assert_same_bits(one, other):
  """Two trees have equal arrays, on the device or not."""
  leaves, others = jax.device_get([*map(jax.tree.leaves, (one, other))])
  assert len(leaves) == len(others) > 0
  for a, b in zip(leaves, others, strict=True):
    np.testing.assert_array_equal(a, b, strict=not np.isscalar(a))
