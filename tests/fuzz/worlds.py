"""The few recipes that all cases share, so that each is compiled once."""

from typing import NamedTuple

from flax import linen as nn
import jax
import numpy as np
import optax

import slipstream_jax as slip
from slipstream_jax.training.recipe import Recipe

RATE = 0.1
START = 0.1  # of sums of squares: a root of next to nothing knows no direction


class Model(nn.Module):
  """Logits that a few lines of numpy can compute, with their gradients.

  A constant, the dense features and the embeddings, each with weights, and
  the product of the first feature's embedding and the last one's, as far as the
  shorter goes; of a sequence that of its sum.
  """

  @nn.compact
  def __call__(self, dense, embeddings):
    normal = nn.initializers.normal(0.5)
    total = self.param('bias', normal, ())
    slope = self.param('slope', normal, dense.shape[1:])
    total += (dense * slope[None]).sum(1)
    for name, x in embeddings.items():
      weight = self.param(f'weight_{name}', normal, x.shape[1:])
      total += (x * weight[None]).sum(tuple(range(1, x.ndim)))
    first, *_, last = [*embeddings.values()] * 2
    first, last = (x.sum(1) if x.ndim == 3 else x for x in (first, last))
    dim = min(first.shape[1], last.shape[1])
    return total + (first[:, :dim] * last[:, :dim]).sum(1)


class Column(Model):
  """Returns [B, 1], which is the same as [B]."""

  def __call__(self, dense, embeddings):
    return super().__call__(dense, embeddings)[:, None]


class Pair(Model):
  """Returns a tuple."""

  def __call__(self, dense, embeddings):
    return super().__call__(dense, embeddings), dense


OPTIMIZERS = {
  'sgd': lambda: slip.ROW_OPTIMIZERS['sgd'](RATE),
  'adagrad': lambda: slip.adagrad(RATE, START),
  'rowwise_adagrad': lambda: slip.rowwise_adagrad(RATE, START),
  'lazy_adam': lambda: slip.ROW_OPTIMIZERS['lazy_adam'](RATE, eps=START),
}


class World(NamedTuple):
  """Tables, features, shapes and optimizers of a case."""

  tables: dict[str, slip.Table]
  """The optimizer of each, or None, is its name in `OPTIMIZERS`."""
  features: dict[str, slip.Feature]
  optimizer: str
  """Of the tables without one of their own."""
  dense: int
  sizes: tuple[int, ...] = (4,)
  """Batch sizes."""
  capacities: tuple[int, int] = (2, 9)
  """Of caches: fewer rows than a batch has, and some."""

  @property
  def num_rows(self):
    """N."""
    return sum(table.rows for table in self.tables.values())

  @property
  def hot(self):
    """H, always as many."""
    return max(1, self.num_rows * 4 // 5)

  @property
  def lengths(self):
    """Of each feature."""
    return [feature.max_length for feature in self.features.values()]

  @property
  def lookups(self):
    """K, of one example."""
    return sum(self.lengths)

  @property
  def optimizers(self):
    """Of each table."""
    named = self.tables.items()
    return {name: table.optimizer or self.optimizer for name, table in named}

  @property
  def is_mixed(self):
    """Whether there is more than one table to a feature, or group of them."""
    owners = [feature.table for feature in self.features.values()]
    return self.groups > 1 or owners != [*self.tables]

  @property
  def groups(self):
    """How many there are."""
    kinds = {t[1:3] + (t.optimizer,) for t in self.tables.values()}
    return len(kinds)


def one_group(
  rows, poolings, optimizer, dim, dense, length=None, dtype='float32', **others
):
  """A World of equal tables, each with one feature of `length` lookups."""
  names = [f't{i}' for i in range(len(rows))]
  pairs = list(zip(names, rows, poolings, strict=True))
  return World(
    {name: slip.Table(size, dim, dtype) for name, size, _ in pairs},
    {name: slip.Feature(name, how, length or 1) for name, _, how in pairs},
    optimizer,
    dense,
    **others,
  )


GIVEN = np.random.default_rng(0).normal(size=(25, 2))
WORLDS = {
  'plain': one_group(
    (11, 5), ('sum', 'mean'), 'rowwise_adagrad', 3, 2, sizes=(4, 16)
  ),
  'lists': one_group((40, 1, 7), ('mean', 'sum', 'sum'), 'adagrad', 8, 1, 3),
  'one': one_group((120,), ('sum',), 'sgd', 1, 2, sizes=(1, 5)),
  'no_dense': one_group((25, 3), ('sum', 'sum'), 'sgd', 2, 0, 2, sizes=(3, 8)),
  'adam': one_group((9, 9), ('sum', 'mean'), 'lazy_adam', 4, 2, 2),
  'bfloat16': one_group(
    (9, 30), ('mean', 'mean'), 'rowwise_adagrad', 4, 2, None, 'bfloat16'
  ),
  'float16': one_group((13, 6), ('sum', 'mean'), 'adagrad', 2, 1, 2, 'float16'),
  'sequence_length': one_group(
    (12, 20), ('none', 'none'), 'rowwise_adagrad', 3, 2, 3
  ),
  'wide_and_deep': World(
    {'deep': slip.Table(30, 8), 'wide': slip.Table(30, 1, optimizer='sgd')},
    {'deep': slip.Feature('deep'), 'wide': slip.Feature('wide')},
    'adagrad',
    2,
  ),
  # A table of two features, its groups' columns and tables not side by side.
  'shared': World(
    {
      'user': slip.Table(9, 4),
      'item': slip.Table(25, 2, initializer=GIVEN),
      'country': slip.Table(1, 4),
    },
    {
      'item': slip.Feature('item'),
      'user': slip.Feature('user'),
      'history': slip.Feature('item', 'mean', 5),
      'country': slip.Feature('country', 'sqrtn', 2),
    },
    'rowwise_adagrad',
    1,
  ),
  'weighted': World(
    {
      'a': slip.Table(12, 3, optimizer='lazy_adam'),
      'b': slip.Table(7, 5),
      'c': slip.Table(18, 3),
    },
    {
      'sum': slip.Feature('a', 'sum', 4, weighted=True),
      'mean': slip.Feature('b', 'mean', 4, weighted=True),
      'sqrtn': slip.Feature('c', 'sqrtn', 4, weighted=True),
      'sequence': slip.Feature('a', 'none', 4, weighted=True),
      'plain': slip.Feature('c', 'mean', 4),
    },
    'adagrad',
    0,
  ),
  'four_groups': World(
    {
      'a': slip.Table(40, 128),
      'b': slip.Table(6, 1, 'float16', nn.initializers.normal(0.3)),
      'c': slip.Table(30, 16, 'bfloat16', optimizer='sgd'),
      'd': slip.Table(1, 16, unknown='row'),
    },
    {
      'd': slip.Feature('d'),
      'c': slip.Feature('c', 'sqrtn', 50),
      'a': slip.Feature('a', 'none', 3),
      'b': slip.Feature('b', 'mean', 2),
      'a again': slip.Feature('a', 'sum', 2),
    },
    'rowwise_adagrad',
    3,
    (2, 5),
  ),
}


def tables(world):
  """Of a World."""

  # One chain by name: tables of two equal ones would be two groups.
  chains = {name: OPTIMIZERS[name]() for name in OPTIMIZERS}
  return slip.TableSet(
    {
      name: table._replace(optimizer=chains.get(table.optimizer))
      for name, table in world.tables.items()
    },
    world.features,
  )


_recipes = {}


def recipe(world, model=Model):
  """Of a World; the same object for the same world, which is compiled once."""
  key = (repr(world), model)
  if key not in _recipes:
    if len(_recipes) > 50:  # what is compiled goes with them
      _recipes.clear()
    rows = OPTIMIZERS[world.optimizer]()
    _recipes[key] = Recipe(model(), tables(world), rows, optax.sgd(RATE))
  return _recipes[key]


def on_host(tree):
  """Arrays of either side as numpy's."""
  return jax.tree.map(np.asarray, jax.device_get(tree))
