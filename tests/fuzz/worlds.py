"""The few recipes that all cases share, so that each is compiled once."""

import functools
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import slipstream_jax as slip

RATE = 0.1
START = 0.1  # of sums of squares: a root of next to nothing knows no direction


class Model(nn.Module):
  """Logits that a few lines of numpy can compute, with their gradients.

  A constant, the dense features and the embeddings, each with weights, and
  the product of the first feature's embedding and the last one's.
  """

  @nn.compact
  def __call__(self, dense, embeddings):
    embeddings = jnp.stack(list(embeddings.values()), 1)
    normal = nn.initializers.normal(0.5)
    bias = self.param('bias', normal, ())
    slope = self.param('slope', normal, dense.shape[1:])
    weight = self.param('weight', normal, embeddings.shape[1:])
    if embeddings.ndim == 4:
      total = (embeddings * weight[None]).sum((1, 2, 3))
    else:
      total = (embeddings * weight[None]).sum((1, 2))
    ends = embeddings[:, 0] * embeddings[:, -1]
    met = ends.sum(tuple(range(1, ends.ndim)))
    return (dense * slope[None]).sum(1) + total + met + bias


class Column(Model):
  """Returns [B, 1], which broadcasts against labels [B]."""

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
  """Tables, shapes and optimizer of a case."""

  rows: tuple[int, ...]
  poolings: tuple[str, ...]
  optimizer: str
  dim: int
  dense: int
  length: int | None = None
  """L of the lookups [n, F, L]; None: they are [n, F]."""
  dtype: str = 'float32'
  sizes: tuple[int, ...] = (4,)
  """Batch sizes."""
  capacities: tuple[int, int] = (2, 9)
  """Of caches: fewer rows than a batch has, and some."""

  @property
  def hot(self):
    """H, always as many."""
    return max(1, sum(self.rows) * 4 // 5)

  @property
  def lookups(self):
    """Of one example."""
    return len(self.rows) * (self.length or 1)


WORLDS = {
  'plain': World(
    (11, 5), ('sum', 'mean'), 'rowwise_adagrad', 3, 2, sizes=(4, 16)
  ),
  'lists': World((40, 1, 7), ('mean', 'sum', 'sum'), 'adagrad', 8, 1, 3),
  'one': World((120,), ('sum',), 'sgd', 1, 2, sizes=(1, 5)),
  'no_dense': World((25, 3), ('sum', 'sum'), 'sgd', 2, 0, 2, sizes=(3, 8)),
  'adam': World((9, 9), ('sum', 'mean'), 'lazy_adam', 4, 2, 2),
  'bfloat16': World(
    (9, 30), ('mean', 'mean'), 'rowwise_adagrad', 4, 2, None, 'bfloat16'
  ),
  'float16': World((13, 6), ('sum', 'mean'), 'adagrad', 2, 1, 2, 'float16'),
  'sequence_length': World(
    (12, 20), ('none', 'none'), 'rowwise_adagrad', 3, 2, 3
  ),
}


@functools.cache
def tables(world):
  """Of a World."""
  names = [f't{i}' for i in range(len(world.rows))]
  return slip.TableSet(
    {
      name: slip.Table(rows, world.dim, world.dtype)
      for name, rows in zip(names, world.rows, strict=True)
    },
    {
      name: slip.Feature(name, pooling, world.length or 1)
      for name, pooling in zip(names, world.poolings, strict=True)
    },
  )


@functools.cache
def recipe(world, model=Model):
  """Of a World."""
  rows = OPTIMIZERS[world.optimizer]()
  return slip.Recipe(model(), tables(world), rows, optax.sgd(RATE))


def on_host(tree):
  """Arrays of either side as numpy's."""
  return jax.tree.map(np.asarray, jax.device_get(tree))
