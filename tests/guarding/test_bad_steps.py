"""A step with a bad loss: as if it had not been taken, or past its batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slipstream_jax.data.numbered import ColumnBatches, Columns
from slipstream_jax.engine.planner import Slices
from slipstream_jax.errors import UserError
from slipstream_jax.initializers import Constant
from slipstream_jax.models.adapters import Functions
from slipstream_jax.tables import Feature, Table, TableSet
from slipstream_jax.training.loop import BadLoss, leave_out, train
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import make_parts, planned
from tests.support import short_runs, small
from tests.support.short_runs import BATCH, WHERE

BAD = 5  # number of the batch, from 0 on
FAR = 3e38  # finite, but not what a matrix product makes of it


def columns():
  made = small.columns(BATCH * 9, seed=5)
  signs = np.random.default_rng(0).choice([-1, 1], (BATCH, small.DENSE))
  made.dense[BATCH * BAD : BATCH * (BAD + 1)] = FAR * signs
  return made


def parts(placement, skips=True, of=None, devices=None):
  recipe = (of or small.recipe('adagrad'))._replace(skips_bad_steps=skips)
  over = None if devices is None else Slices(devices, 8)
  where = WHERE[placement]
  return make_parts(recipe, where, small.DENSE, 3, short_runs.HOT, over=over)


def everything(trainer):
  state = trainer.state._replace(step=0)
  return jax.tree.map(
    np.array, jax.device_get((trainer.engine.read_back(), state))
  )


def assert_same(one, other):
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  for a, b in pairs:
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  ('placement', 'devices'),
  [*((name, None) for name in WHERE), ('pinned', 8), ('look_ahead', 2)],
)
def test_a_bad_step_changes_nothing(placement, devices):
  trainer = parts(placement, devices=devices)
  with planned(trainer, ColumnBatches(columns(), BATCH), 0) as batches:
    before = after = None
    for number in range(9):
      (record,) = train(trainer, batches, 1)
      if number == BAD - 1:
        before = everything(trainer)
      if number == BAD:
        after = everything(trainer)
        assert not np.isfinite(record.loss)
      else:
        assert np.isfinite(record.loss)
  assert_same(before, after)
  assert int(jax.device_get(trainer.state.step)) == 9
  assert trainer.engine.counters.examples_trained == 9 * BATCH


@pytest.mark.parametrize('devices', [None, 2])
def test_of_a_chain_that_skips_it_changes_nothing_either(devices):
  trainer = parts('pinned', of=short_runs.chain(), devices=devices)
  with planned(trainer, ColumnBatches(columns(), BATCH), 0) as batches:
    list(train(trainer, batches, BAD))
    before = everything(trainer)
    (record,) = train(trainer, batches, 1)
    assert not np.isfinite(record.loss)
    assert_same(before, everything(trainer))
    assert all(np.isfinite(r.loss) for r in train(trainer, batches, 3))


def test_bad_rows_of_one_device_make_a_bad_step():
  """The loss and the gradients of all that other devices update are finite."""
  tables = {
    'good': Table(64, 4, initializer=Constant(0.5)),
    'bad': Table(8, 2, initializer=Constant(0.0)),
  }
  model = Functions(
    init=lambda key, dense, embeddings: {'w': jnp.zeros(())},
    apply=lambda params, dense, embeddings: (
      params['w']
      + embeddings['good'].sum(-1)
      # The root of 0 has no derivative.
      + jnp.sqrt(jnp.square(embeddings['bad']).sum(-1))
    ),
  )
  features = {name: Feature(name) for name in tables}
  sgd = optax.sgd(0.1)
  recipe = Recipe(
    model, TableSet(tables, features), sgd, sgd, skips_bad_steps=True
  )
  first = recipe.tables.first_rows
  lookups = np.stack([first['good'] + np.arange(64), np.full(64, first['bad'])])
  columns = Columns(np.zeros((64, 1), np.float32), lookups.T, np.ones(64))
  for devices in None, 1, 8:
    over = None if devices is None else Slices(devices, 8)
    trainer = make_parts(recipe, 'streamed', 1, 3, over=over)
    before = everything(trainer)
    with planned(trainer, ColumnBatches(columns, 64), 0) as batches:
      (record,) = train(trainer, batches, 1)
    assert np.isnan(record.loss)
    assert_same(before, everything(trainer))


def test_all_placements_skip_alike():
  ends = []
  for placement in 'streamed', 'resident', 'look_ahead':
    trainer = parts(placement)
    with planned(trainer, ColumnBatches(columns(), BATCH), 2) as batches:
      losses = [record.loss for record in train(trainer, batches, 9)]
    ends.append((losses, everything(trainer)))
  for end in ends[1:]:
    assert_same(ends[0], end)


def test_without_being_asked_training_ends_there():
  trainer = parts('streamed', skips=False)
  batches = planned(trainer, ColumnBatches(columns(), BATCH))
  with pytest.raises(BadLoss, match='loss must stay finite') as caught:
    list(train(trainer, batches, 9))
  batches.close()
  error = caught.value
  assert (error.step, error.examples_seen) == (BAD + 1, BATCH * (BAD + 1))
  assert f'step {BAD + 1}, after {BATCH * (BAD + 1)} examples' in str(error)


@pytest.mark.parametrize('placement', ['streamed', 'look_ahead', 'pinned'])
@pytest.mark.parametrize('depth', [0, 2])
def test_who_leaves_it_out_trains_as_if_it_were_not_there(placement, depth):
  trainer = parts(placement, skips=False)
  with planned(trainer, ColumnBatches(columns(), BATCH), depth) as batches:
    list(train(trainer, batches, BAD))
    assert leave_out(trainer, batches)
    losses = [record.loss for record in train(trainer, batches, 3)]
  counters = trainer.engine.counters
  assert counters.examples_seen == 9 * BATCH
  assert counters.examples_trained == 8 * BATCH
  assert counters.examples_dropped == BATCH

  keep = np.ones(BATCH * 9, bool)
  keep[BATCH * BAD : BATCH * (BAD + 1)] = False
  other = parts(placement, skips=False)
  whole = ColumnBatches(columns().take(np.flatnonzero(keep)), BATCH)
  with planned(other, whole, depth) as batches:
    expected = [record.loss for record in train(other, batches, 8)]
  # Optimizers may ask how many batches were seen; these do not.
  assert losses == expected[BAD:]
  assert_same(everything(trainer), everything(other))


def test_where_the_source_ends_nothing_is_left_out():
  trainer = parts('streamed', skips=False)
  source = ColumnBatches(columns(), BATCH, epochs=1)
  with planned(trainer, source, 0) as batches:
    list(train(trainer, batches, BAD))
    assert [leave_out(trainer, batches) for _ in range(5)] == [True] * 4 + [
      False
    ]


def test_what_a_schedule_counts_on_is_not_left_out():
  trainer, batches = short_runs.start('streamed', 'rows', 0)
  with batches:
    list(train(trainer, batches, 2))  # the next one opens a window
    with pytest.raises(UserError, match='nothing else depends'):
      leave_out(trainer, batches)
    list(train(trainer, batches, 3))


def test_rows_updated_on_the_host_cannot_be_held():
  recipe = small.recipe()._replace(skips_bad_steps=True)
  with pytest.raises(UserError, match='skips_bad_steps'):
    make_parts(recipe, 'streamed', small.DENSE, rows='parameter_server')
