"""The compiled step: one for all runs of a recipe, and what it refuses."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.errors import UserError
from slipstream_jax.placement import bucket, PLACEMENTS
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.training import watch
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import (
  make_parts,
  planned,
  slipstream,
)
from slipstream_jax.types import Batch, RowBlock
from tests.laws.test_placements import everything_after
from tests.support import by_hand, small
from tests.support.small import assert_same_bits

COLUMNS = small.columns(64 * 12)
HOT = small.hot(COLUMNS)


def own_loss(logits, labels):
  return optax.sigmoid_binary_cross_entropy(logits, labels)


def trainer_of(recipe):
  return make_parts(recipe, PLACEMENTS['streamed'], small.DENSE, hot=HOT)


def test_one_program_trains_with_a_watch_and_without():
  """So no bit can hang on what XLA fuses in the one and not in the other."""
  recipe = small.recipe()._replace(loss=lambda *args: own_loss(*args))
  source = ColumnBatches(COLUMNS, 64)
  plain = trainer_of(recipe)
  with planned(plain, source) as batches:
    sizes = {bucket(len(item.plans[0].rows)) for item in batches_of(12)}
    list(train(plain, batches, 12))
  assert by_hand.programs_of(recipe) == len(sizes)
  watched = trainer_of(recipe)
  settings = Skip(0.0, POLICIES['stale'], 'rows', Phases(1, 4, 2, 0))
  made = slipstream(watched, ColumnBatches(COLUMNS, 64), settings, 12)
  with made as batches:
    list(train(watched, batches, 12))
  assert watched.state.watch is not None
  assert by_hand.programs_of(recipe) == len(sizes)
  tables = (each.engine.read_back() for each in (plain, watched))
  assert_same_bits(*tables)
  assert_same_bits(*(jax.device_get(t.state.params) for t in (plain, watched)))


def batches_of(steps):
  source = ColumnBatches(COLUMNS, 64)
  with planned(trainer_of(small.recipe()), source, 0) as batches:
    yield from (next(batches) for _ in range(steps))


OPTIMIZERS_AND_DTYPES = [
  ('sgd', 'float32'),
  ('adagrad', 'float16'),
  ('rowwise_adagrad', 'bfloat16'),
  ('lazy_adam', 'float32'),
]


@pytest.mark.parametrize(('optimizer', 'dtype'), OPTIMIZERS_AND_DTYPES)
def test_a_still_row_keeps_every_bit(optimizer, dtype):
  """Subnormals too, which a CPU's additions flush, and negative zeros."""
  recipe = small.recipe(optimizer, table_dtype=dtype)
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(256, 8)).astype(dtype)
  tiny = np.finfo(np.float32) if dtype == 'float32' else jnp.finfo(dtype)
  rows[::2, 0] = np.array(tiny.smallest_subnormal, rows.dtype)
  rows[::2, 1] = -0.0
  place = np.full(256, 300, np.int32)  # cold
  place[:200] = rng.permutation(300)[:200]
  stale = rng.random(300) < 0.5
  inverse = rng.integers(0, 250, (64, 4), np.int32)
  block = RowBlock(
    rows,
    tuple(
      np.abs(rng.normal(size=(256, *leaf.shape))).astype(leaf.dtype)
      for leaf in compiled_of(recipe).untrained_row_state[0]
    ),
  )
  ones = np.ones(256, np.float32)
  batch = Batch(COLUMNS.dense[:64], None, COLUMNS.labels[:64], ones[:64])
  state = compiled_of(recipe).init_state(small.DENSE, 0)
  hot = hot_rows(np.arange(300), recipe.tables.num_rows)
  watches = watch.start(recipe.tables, [hot])
  watches = watch.freeze(watches, jax.device_put((stale,)))
  state = state._replace(watch=watches)
  args = ((block,), (inverse,), batch, np.float32(0), (ones,), (place,))
  state, (after,), _ = compiled_of(recipe).update(state, *jax.device_put(args))
  still = np.append(stale, [False])[place]
  used = np.isin(np.arange(256), inverse)
  assert (still & used).sum() > 50
  for old, new in zip(
    jax.tree.leaves(block), jax.tree.leaves(jax.device_get(after)), strict=True
  ):
    assert old[still].tobytes() == new[still].tobytes()
  new = np.asarray(jax.device_get(after).rows)
  assert (new != rows)[used & ~still].any()
  touches = jax.device_get(state.watch[0].skip.touches)
  assert touches.max() == 1
  assert touches[place[used & (place < 300)]].mean() > 0.9
  assert not np.delete(touches, place[:200]).any()


class Holding(nn.Module):
  """A model with a field of any kind."""

  held: object

  @nn.compact
  def __call__(self, dense, embeddings):
    return nn.Dense(1)(dense)[:, 0] + sum(
      x.sum(axis=1) for x in embeddings.values()
    )


def test_equal_fields_share_a_step_and_others_do_not():
  fields = [
    {'sizes': [3, 4], 'names': {'a', 'b'}},
    {'sizes': [3, 5], 'names': {'a', 'b'}},
    {'sizes': (3, 4), 'names': {'a', 'b'}},
    np.arange(3),
    np.arange(3.0),
    [Holding([1])],
    [Holding([2])],
    [1, [2, {'x': [3]}]],
  ]

  def recipe(value):
    return small.recipe()._replace(model=Holding(value))

  steps = [compiled_of(recipe(value)) for value in fields]
  assert len(set(map(id, steps))) == len(fields)
  again = {'names': {'b', 'a'}, 'sizes': [3, 4]}
  assert compiled_of(recipe(again)) is steps[0]
  assert compiled_of(recipe(np.arange(3))) is steps[3]
  assert compiled_of(recipe([Holding([1])])) is steps[5]


def test_a_field_that_nothing_can_compare_is_named():
  model = Holding({'weights': [jax.device_put(np.ones(3))]})
  with pytest.raises(UserError, match='values that can be compared') as error:
    trainer_of(small.recipe()._replace(model=model))
  assert error.value.where == 'Recipe.model.held.weights.0'


@pytest.mark.parametrize(
  ('optimizer', 'dtype'),
  [
    pytest.param(*pair, marks=[pytest.mark.slow] * (pair[1] != 'bfloat16'))
    for pair in OPTIMIZERS_AND_DTYPES
  ],
)
def test_64_bits_double_no_row_and_change_no_row_state(optimizer, dtype):
  columns = small.columns(64 * 6)
  how = {'normalization': 'batch', 'table_dtype': dtype}
  plain = everything_after('pinned', optimizer, columns, 6, **how)
  with jax.enable_x64(True):
    recipe = small.recipe(optimizer, **how)
    bytes_with = compiled_of(recipe).row_bytes
    wide = everything_after('pinned', optimizer, columns, 6, **how)
  assert bytes_with == compiled_of(recipe).row_bytes
  for one, other in zip(
    jax.tree.leaves(plain[:2]), jax.tree.leaves(wide[:2]), strict=True
  ):
    assert one.dtype == other.dtype
    np.testing.assert_allclose(
      other.astype(np.float32), one.astype(np.float32), rtol=1e-2, atol=1e-3
    )
