"""Models over tables of unlike dims train on real samples, under placements.

Wide & Deep (arXiv 1606.07792) reads each id twice, as a weight and as a vector;
the two towers of a retrieval model share the tables of items and categories.
"""

import functools
import pathlib

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.data.numbered import ColumnBatches, Columns
from slipstream_jax.formats.criteo import criteo_raw
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.formats.taobao import taobao_raw
from slipstream_jax.models.layers import MLP
from slipstream_jax.tables import Feature, Table, TableSet
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import train
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import make_parts, planned
from slipstream_jax.transforms.rowwise import rowwise_adagrad

SAMPLES = pathlib.Path(__file__).resolve().parents[3] / 'shared' / 'data'
STEPS, BATCH = 40, 128


class WideDeep(nn.Module):
  """A linear model of the ids beside an MLP over their vectors."""

  @nn.compact
  def __call__(self, dense, embeddings):
    wide = [x for x in embeddings.values() if x.shape[1] == 1]
    deep = [x for x in embeddings.values() if x.shape[1] > 1]
    x = MLP([32, 16])(jnp.concatenate([dense, *deep], axis=1))
    return nn.Dense(1)(x)[:, 0] + sum(wide)[:, 0]


class TwoTowers(nn.Module):
  """The product of a vector of what was seen and one of the candidate."""

  @nn.compact
  def __call__(self, embeddings):
    def tower(*names):
      x = jnp.concatenate([embeddings[name] for name in names], axis=1)
      return MLP([32, 16], activate_last=False)(x)

    user, item = tower('seen', 'seen_kinds'), tower('item', 'kind')
    return (user * item).sum(axis=1)


def sample(name, read):
  path = SAMPLES / name
  if not path.exists():
    pytest.skip('shared samples absent')
  return in_memory(read(path))


def columns_of(source):
  """The examples that a data set gives its batches from."""
  return source.args[0]


@functools.cache
def wide_deep():
  """Tables and examples: each id is looked up in two tables."""
  data = sample('criteo/train.txt', criteo_raw)
  sizes = data.sizes
  tables = TableSet(
    {name: Table(size, 32) for name, size in sizes.items()}
    | {f'{name}_weight': Table(size, 1) for name, size in sizes.items()}
  )
  rows = sum(sizes.values())

  def twice(columns):
    both = [columns.lookups, columns.lookups + rows]
    return columns._replace(lookups=np.concatenate(both, axis=1))

  examples = [twice(columns_of(part)) for part in (data.train, data.test)]
  return WideDeep(), tables, data.dense_features, *examples


@functools.cache
def two_towers():
  """Items and categories, each both of the history and of the candidate."""
  data = sample(
    'taobao/UserBehavior.csv.gz',
    functools.partial(taobao_raw, min_history=1, bad_lines=1),
  )
  _, item, kind = data.sizes
  tables = TableSet(
    {item: Table(data.sizes[item], 16), kind: Table(data.sizes[kind], 8)},
    {
      'item': Feature(item),
      'seen': Feature(item, 'mean', 20),
      'kind': Feature(kind),
      'seen_kinds': Feature(kind, 'sqrtn', 20),
    },
  )

  def apart(columns):
    # Of users there is no table here: the rows of the others move down.
    lookups = columns.lookups[:, 1:]
    first = next(iter(data.sizes.values()))
    lookups = np.where(lookups < 0, -1, lookups - first)
    parts = [
      part
      for table in (0, 1)
      for part in (lookups[:, table, -1:], lookups[:, table, :-1])
    ]
    none = columns.dense[:, :0]
    return Columns(none, np.concatenate(parts, axis=1), columns.labels)

  examples = [apart(columns_of(part)) for part in (data.train, data.test)]
  return TwoTowers(), tables, 0, *examples


@functools.cache
def recipe_of(make):
  model, tables, *_ = make()
  return Recipe(model, tables, rowwise_adagrad(0.1), optax.adam(3e-3))


def start(make, placement='streamed'):
  return make_parts(recipe_of(make), placement, make()[2], seed=1)


def source(make):
  return ColumnBatches(make()[3], BATCH, shuffle_seed=0)


def bits(trainer):
  rows = trainer.engine.read_back()
  return jax.tree.leaves((rows, jax.device_get(trainer.state.params)))


@pytest.mark.parametrize('make', [wide_deep, two_towers])
def test_it_trains_on_a_real_sample(make, tmp_path):
  trainer = start(make)
  assert len({group.dim for group in recipe_of(make).tables.groups}) == 2
  with planned(trainer, source(make)) as batches:
    losses = [record.loss for record in train(trainer, batches, STEPS // 2)]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(trainer, batches.get_state())
    losses += [record.loss for record in train(trainer, batches, STEPS // 2)]
  assert np.mean(losses[-10:]) < 0.98 * np.mean(losses[:10])
  test = ColumnBatches(make()[4], BATCH, epochs=1, pad_remainder=True)
  assert evaluate(trainer, test).auc > 0.52

  # Elsewhere, and from the checkpoint: the same bits.
  resident, again = start(make, 'resident'), start(make)
  with planned(resident, source(make)) as batches:
    list(train(resident, batches, STEPS))
  with planned(again, source(make)) as batches:
    position = checkpoints.restore(again)
    batches.set_state(position.schedule_state)
    list(train(again, batches, STEPS // 2))
  checkpoints.close()
  for other in (resident, again):
    for a, b in zip(bits(trainer), bits(other), strict=True):
      np.testing.assert_array_equal(a, b)
