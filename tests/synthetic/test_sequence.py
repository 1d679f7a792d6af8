"""Sequences lookups: what models see of them, and all that trains and skips."""

import jax
import numpy as np
import optax
import pytest

from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.errors import UserError
from slipstream_jax.models.embedding import embed, stacked
from slipstream_jax.placement import cached, PLACEMENTS
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.tables import features_of
from slipstream_jax.training.evaluate import predict
from slipstream_jax.training.loop import take_step, train
from slipstream_jax.training.trainer_parts import (
  make_parts,
  planned,
  slipstream,
)
from tests.support import oracles, small

STEPS = small.STEPS


def start(columns, placement='streamed', recipe=None):
  return make_parts(
    recipe or small.sequence_recipe(),
    PLACEMENTS.get(placement) or cached(100),
    small.DENSE,
    seed=3,
    hot=small.hot(columns),
  )


def final_bits(trainer):
  state = jax.tree.map(np.asarray, jax.device_get(trainer.state._asdict()))
  return jax.tree.leaves((trainer.engine.read_back(), state))


def assert_same_bits(one, other):
  assert len(one) == len(other) > 0
  for a, b in zip(one, other, strict=True):
    np.testing.assert_array_equal(a, b, strict=True)


def looked_up(rows, inverse):
  """Embeddings f32[B, F, L, D] of sequences."""
  features = features_of([f's{f}' for f in range(inverse.shape[1])], 4)
  return stacked(embed(rows, inverse.reshape(len(inverse), -1), features), '')


def test_embeddings_keep_their_steps_and_padding_is_zero():
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(9, 5)).astype(np.float32)
  inverse = rng.integers(-1, 9, (7, 3, 4)).astype(np.int32)
  found = jax.device_get(jax.jit(looked_up)(*jax.device_put((rows, inverse))))
  assert found.shape == (7, 3, 4, 5)
  assert (inverse < 0).any()
  for place in np.ndindex(*inverse.shape):
    row = inverse[place]
    expected = rows[row] if row >= 0 else np.zeros(5)
    np.testing.assert_array_equal(found[place], expected)


def test_gradient_of_a_row_sums_its_real_lookups():
  rng = np.random.default_rng(1)
  rows = rng.normal(size=(5, 3)).astype(np.float32)
  inverse = rng.integers(-1, 5, (6, 2, 4)).astype(np.int32)
  weights = rng.normal(size=(6, 2, 4, 3)).astype(np.float32)

  def total(rows, inverse, weights):
    return (looked_up(rows, inverse) * weights).sum()

  found = jax.device_get(
    jax.jit(jax.grad(total))(*jax.device_put((rows, inverse, weights)))
  )
  expected = np.zeros((5, 3))
  for place in np.ndindex(*inverse.shape):
    if inverse[place] >= 0:
      expected[inverse[place]] += weights[place]
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('length', [None, STEPS - 1])
def test_lookups_of_another_shape_are_refused(length):
  columns = small.columns(64, length=length)
  trainer = start(small.columns(64, length=STEPS))
  named = rf'must be \[32, 4, {STEPS}\], got \[32, 4{", 3" if length else ""}\]'
  batches = planned(trainer, ColumnBatches(columns, 32), 0)
  with batches, pytest.raises(UserError, match=named):
    next(batches)


def test_a_step_moves_rows_by_the_gradient_of_their_lookups():
  """Against the model's own slopes, row by row: plain SGD of one batch."""
  columns = small.columns(32, length=STEPS)
  recipe = small.sequence_recipe('sgd', rate=1.0)
  trainer = start(columns, recipe=recipe)
  item = next(planned(trainer, ColumnBatches(columns, 32), 0))
  before = trainer.engine.read_back()[0].rows.copy()
  variables = jax.device_get(trainer.state.variables)
  inverse = item.plans[0].inverse.reshape(32, 4, STEPS)
  embeddings = np.where(
    (inverse >= 0)[..., None], before[item.plans[0].rows][inverse], 0
  )

  def loss(embeddings, variables, dense, labels, real):
    by_name, real_by_name = (
      {name: x[:, f] for f, name in enumerate(small.SIZES)}
      for x in (embeddings, real)
    )
    logits = recipe.model.apply(variables, dense, by_name, real=real_by_name)
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

  batch = item.batch
  arrays = embeddings, variables, batch.dense, batch.labels, inverse >= 0
  slopes = jax.device_get(jax.jit(jax.grad(loss))(*jax.device_put(arrays)))
  expected = np.zeros(before.shape)
  for place in np.argwhere(inverse >= 0):
    row = item.plans[0].rows[inverse[tuple(place)]]
    expected[row] += slopes[tuple(place)]
  take_step(trainer, item)
  moved = before - trainer.engine.read_back()[0].rows
  assert np.abs(expected).max() > 1e-4
  np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-6)


def test_evaluation_pads_batches_and_drops_the_padding():
  columns = small.columns(100, length=STEPS)
  trainer = start(columns)

  def logits(batch_size):
    source = ColumnBatches(columns, batch_size, epochs=1, pad_remainder=True)
    return predict(trainer, source).logits

  whole, parts = logits(100), logits(64)
  assert whole.shape == (100,)
  np.testing.assert_allclose(whole, parts, rtol=1e-5, atol=1e-6)


def settings(mode='examples'):
  return Skip(
    0.5,
    POLICIES['random' if mode == 'examples' else 'stale'],
    mode,
    Phases(warm_up=2, window=6, settle=2, period=30),
    alpha=(2, 2, 2, 2),
  )


def test_skipping_leaves_sequence_out_by_alpha_per_table():
  columns = small.columns(64 * 40, length=STEPS)
  trainer = start(columns, 'pinned')
  chosen = settings()._replace(policy=POLICIES['stale'])
  source = ColumnBatches(columns, 64, shuffle_seed=1)
  with slipstream(trainer, source, chosen, 30) as batches:
    records = list(train(trainer, batches, 30))
  counters = records[-1].counters
  assert counters.examples_seen == 30 * 64
  assert counters.examples_trained + counters.examples_dropped == 30 * 64
  assert counters.examples_dropped > 64
  (event,) = [r.event for r in records if r.event]
  assert event['examples_hot'] > 0.1


def test_alpha_must_count_tables_and_steps():
  columns = small.columns(64 * 40, length=STEPS)
  trainer = start(columns, 'pinned')
  for alpha in ((2, 2, 2), (2, 2, 2, STEPS + 1)):
    chosen = settings()._replace(policy=POLICIES['stale'], alpha=alpha)
    source = ColumnBatches(columns, 64)
    named = pytest.raises(UserError, match=rf'alpha must be in \[1, {STEPS}\]')
    with slipstream(trainer, source, chosen, 30) as batches, named:
      list(train(trainer, batches, 30))


def test_placement_changes_no_number_while_stale_rows_stand_still():
  columns = small.columns(64 * 40, length=STEPS)
  results = []
  for name in ('streamed', 'pinned'):
    trainer = start(columns, name)
    source = ColumnBatches(columns, 64, shuffle_seed=1)
    with slipstream(trainer, source, settings('rows'), 30) as batches:
      records = list(train(trainer, batches, 30))
    assert any(r.event and r.event['rows_stale'] for r in records)
    results.append(final_bits(trainer))
  assert_same_bits(*results)


def test_a_resumed_run_ends_with_the_bits_of_a_whole_one(tmp_path):
  columns = small.columns(64 * 10, length=STEPS)

  def run(trainer, batches, steps):
    with batches:
      list(train(trainer, batches, steps))
      return batches.get_state()

  def batches(trainer):
    return planned(trainer, ColumnBatches(columns, 64, shuffle_seed=1), 2)

  whole = start(columns)
  run(whole, batches(whole), 16)
  first, checkpoints = start(columns), Checkpoints(tmp_path)
  checkpoints.save(first, run(first, batches(first), 9))
  second = start(columns)
  more = batches(second)
  step, state, *_ = checkpoints.restore(second)
  checkpoints.close()
  assert step == 9
  more.set_state(state)
  run(second, more, 7)
  assert_same_bits(final_bits(whole), final_bits(second))


def test_the_pooling_oracle_agrees_on_sums_of_sequence():
  """Summed over steps, a sequence is the multi-hot feature of its lookups."""
  rng = np.random.default_rng(2)
  rows = rng.normal(size=(9, 5)).astype(np.float32)
  inverse = rng.integers(-1, 9, (7, 3, 4)).astype(np.int32)
  found = jax.device_get(
    jax.jit(lambda *a: looked_up(*a).sum(axis=2))(
      *jax.device_put((rows, inverse))
    )
  )
  expected = oracles.pool(rows.astype(float), inverse, ('sum',) * 3)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
