"""Batches that are not filled up again, and the end of skipping."""

from hypothesis import given
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.errors import UserError
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.rebatch import (
  padded_size,
  real_examples,
  Rebatcher,
  SingleBatchQueue,
  SIZES,
)
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.schedules.slipstream import slipstream
from slipstream_jax.schedules.systems import SCHEDULES
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.store.host_table import row_weights, unique_rows_of
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts
from slipstream_jax.training.trainer_parts import slipstream as skipping
from tests.schedules.test_slipstream import COLUMNS, HOT
from tests.support import small
from tests.support.schedule_bench import cut, examples, run, same, Stream

PHASES = Phases(2, 4, 3, 13)


def alone(batch, index, size, *how):
  """The kept examples of a batch by themselves, and the scale of the step."""
  padded, scale = padded_size(len(index), len(batch.labels), size, *how)
  queue = SingleBatchQueue(size)
  queue.put(batch, index, padded)
  return queue.take(), scale


@given(st.integers(1, 300), st.data(), st.booleans(), st.floats(0.1, 20))
def test_a_step_is_as_long_as_that_of_the_whole_batch(
  size, data, corrected, weight
):
  seen = data.draw(st.integers(1, size))
  some = data.draw(st.integers(1, seen))
  all_seen = examples(np.full(seen, weight))
  index = np.sort(np.random.default_rng(seen).permutation(seen)[:some])
  kept = all_seen.map(lambda column: column[index])
  batch, scale = alone(all_seen, index, size, corrected)
  padded = len(batch.labels)
  assert some <= padded <= size
  # A step divides by the batch's size; what it divides is this.
  total = scale * float(batch.weights.sum(dtype=np.float64)) / padded
  if corrected:
    assert total == pytest.approx(some * weight / size, rel=1e-5)
  else:
    assert total == pytest.approx(weight * seen / size, rel=1e-5)
  back = real_examples(batch)
  np.testing.assert_array_equal(back.dense, kept.dense)
  # Rows feel how many examples one stands for, whatever the batch's size.
  assert back.weights.tobytes() == kept.weights.tobytes()
  if some == seen:
    assert scale == 1


@given(st.integers(1, 400), st.integers(1, 12))
def test_there_are_few_sizes(parts, multiple):
  size = parts * multiple
  kept = np.unique(np.linspace(1, size, 50).astype(int))
  batches = [
    alone(examples(np.ones(size)), np.arange(n), size, True, multiple)[0]
    for n in kept
  ]
  sizes = {len(batch.labels) for batch in batches}
  assert len(sizes) <= SIZES
  assert max(sizes) == size
  assert all(n % multiple == 0 for n in sizes)
  for n, batch in zip(kept, batches, strict=True):
    assert n <= len(batch.labels) < n + size / SIZES + 2 * multiple


@pytest.mark.parametrize('policy', POLICIES)
def test_every_source_batch_is_a_step_of_what_is_kept(policy):
  batches = cut(examples(np.ones(16 * 60)), 16)
  settings = Skip(0.3, policy, 'examples', PHASES, refill=False)
  done = run(Stream(batches, 1), settings)
  trained, index = 0, 0
  for item in done.emitted:
    batch = real_examples(item.batch)
    # All of one batch of the source, in their order.
    index += item.seen // 16
    source = {row.tobytes() for row in batches[index - 1].dense}
    assert all(row.tobytes() in source for row in batch.dense)
    assert len(batch.labels) == item.seen - item.dropped
    trained += len(batch.labels)
  dropped = sum(item.dropped for item in done.emitted) + done.unreported[1]
  assert trained + dropped == 16 * 60
  assert dropped > 0
  assert len({len(item.batch.labels) for item in done.emitted}) <= SIZES


def test_rows_with_another_id_wait_for_an_example():
  queue = SingleBatchQueue(4)
  batch = examples(np.ones(4))
  none = batch.map(lambda column: column[:0])
  vectors = {'fresh_vectors': np.array([7])}
  queue.put(none._replace(fresh=np.array([3]), **vectors))
  assert not queue.ready()
  again = SingleBatchQueue(4, queue.get_state())
  for one in (queue, again):
    one.put(batch._replace(fresh=np.array([5])))
    assert one.waiting == 4
    taken = one.take()
    assert taken.fresh.tolist() == [3, 5]
    assert taken.fresh_vectors.tolist() == [7, -1]
    assert not one.waiting


def test_rows_with_another_id_and_their_vectors_come_with_their_examples():
  queue, batch = Rebatcher(4), examples(np.ones(4))
  queue.put(batch._replace(fresh=np.array([3])))
  vectors = {'fresh_vectors': np.array([7, -1])}
  queue.put(batch._replace(fresh=np.array([5, 6]), **vectors))
  first, second = queue.take(), queue.take()
  assert (first.fresh.tolist(), first.fresh_vectors) == ([3], None)
  assert second.fresh.tolist() == [5, 6]
  assert second.fresh_vectors.tolist() == [7, -1]


def test_rows_feel_how_many_examples_one_stands_for():
  """And no other number because the batch is smaller than the source's."""
  trainer = make_parts(
    small.recipe('adagrad'), PLACEMENTS['streamed'], small.DENSE, 3, HOT
  )
  settings = Skip(0.5, 'random_weighted', 'examples', PHASES, refill=False)
  source = ColumnBatches(COLUMNS, 64, shuffle_seed=1)
  sizes, felt = set(), set()
  with skipping(trainer, source, settings, 40) as batches:
    for item in batches:
      (plan,), (weights,) = item.plans, item.row_weights
      batch = item.batch
      stands_for = batch.weights * (64 / len(batch.labels))
      (group,) = trainer.engine.tables.groups
      unique = unique_rows_of(batch.lookups, group)
      np.testing.assert_array_equal(plan.rows, unique.rows)
      expected = row_weights(unique.inverse, stands_for, len(weights))
      np.testing.assert_allclose(weights, expected, rtol=1e-6)
      sizes.add(len(batch.labels))
      felt |= set(weights.round(3).tolist())
  assert len(sizes) > 1
  assert max(felt) > 1.5


def remembered():
  """A dense chain that keeps how many batches it was told were seen."""

  def init(params):
    return jnp.zeros(())

  def update(updates, state, params=None, *, batches_seen, **extra):
    return updates, jnp.asarray(batches_seen)

  return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize('refill', [True, False])
def test_learning_rates_follow_the_batches_of_the_source(refill):
  """Whatever the size of those that are trained."""
  recipe = small.recipe('adagrad')._replace(
    dense_optimizer=optax.chain(remembered(), optax.sgd(1e-3))
  )
  trainer = make_parts(recipe, PLACEMENTS['pinned'], small.DENSE, 3, HOT)
  settings = Skip(
    0.6, 'random_weighted', 'examples', PHASES, refit=3, refill=refill
  )
  source = ColumnBatches(COLUMNS, 64, shuffle_seed=1)
  with skipping(trainer, source, settings, 40) as batches:
    records = list(train(trainer, batches, 100))
  before, last = (record.counters for record in records[-2:])
  assert last.examples_dropped > 400
  assert float(trainer.state.dense_state[0]) == before.examples_seen / 64


@pytest.mark.parametrize('parts', [pytest.param(2, marks=pytest.mark.slow), 64])
def test_batches_of_any_size_train_in_parts(parts):
  recipe = small.recipe('adagrad')._replace(microbatches=parts)
  trainer = make_parts(recipe, PLACEMENTS['pinned'], small.DENSE, 3, HOT)
  settings = Skip(0.5, 'random', 'examples', PHASES, refill=False)
  source = ColumnBatches(COLUMNS, 64, shuffle_seed=1)
  with skipping(trainer, source, settings, 30) as batches:
    assert len(list(train(trainer, batches, 30))) == 30
  assert trainer.engine.counters.examples_dropped > 100


@pytest.mark.parametrize('policy', POLICIES)
@pytest.mark.parametrize('refill', [True, False])
def test_nothing_is_skipped_in_the_end(policy, refill):
  batches = cut(examples(np.ones(8 * 90)), 8)
  settings = Skip(0.4, policy, 'examples', PHASES, refill=refill)
  whole = run(Stream(batches, 1), settings, keep=True)
  ends = run(Stream(batches, 1), settings._replace(until=50), keep=True)
  read = np.cumsum([item.seen for item in ends.emitted])
  before = int((read <= 8 * 50).sum()) - 1
  assert before > 10
  # The same up to there; then there is nothing to drop, or to compare.
  assert same(whole.emitted[:before], ends.emitted[:before])
  after = [item for item in ends.emitted if item.dropped]
  last = read[[item.dropped > 0 for item in ends.emitted]].max()
  assert after
  assert last <= 8 * 50 + 2 * 8
  assert not any(item.edge.opens for item in ends.emitted[before + 3 :])
  never = settings._replace(until=0)
  plain = run(Stream(batches, 1), SCHEDULES['plain']())
  done = run(Stream(batches, 1), never)
  assert [i.batch.dense.tobytes() for i in done.emitted] == [
    i.batch.dense.tobytes() for i in plain.emitted
  ]


@pytest.mark.parametrize('follows', [{'drop': 'auto'}, {'scorer': 'model'}])
def test_regrouped_batches_do_not_follow_the_model(follows):
  regrouping = SCHEDULES['hotline'](3).regrouping
  ((name, value),) = follows.items()
  said = f"{name} '{value}' follows the model in the order of the source"
  with pytest.raises(UserError, match=said):
    slipstream(Skip(policy='surprise')._replace(**follows), None, regrouping)


def test_regrouped_batches_are_filled_up():
  regrouping = SCHEDULES['hotline'](3).regrouping
  with pytest.raises(UserError, match='go in the order of the source, got ref'):
    slipstream(Skip(0.3, refill=False), None, regrouping)
