"""A chain that ends with `skip_stale` trains the rows of an engine."""

from hypothesis import given, Phase, settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from slipstream_jax.training.loop import take_step, train
from tests.support.small import assert_same_bits, everything
from tests.training.skip_chain import (
  batches_for,
  Bystander,
  in_memory,
  never_judged,
  NUMBERS,
  recipe,
  skip_numbers,
  start,
  WHERE,
)

STEPS = 42
few = settings(
  max_examples=12, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
placements = st.sampled_from(sorted(WHERE))


def run(of, placement, its_numbers, depth=2):
  """What is there before and after, and the records of the steps."""
  trainer = start(of, placement, **its_numbers)
  before = everything(trainer)
  with batches_for(trainer, depth) as batches:
    records = list(train(trainer, batches, STEPS))
  return before, everything(trainer), records


@pytest.mark.parametrize(
  'dtype', ['float32', pytest.param('bfloat16', marks=pytest.mark.slow)]
)
def test_placement_changes_no_number(dtype):
  of = recipe('hot', 'lazy_adam', dtype)
  _, expected, records = run(of, 'streamed', {})
  assert sum(r.event is not None for r in records) == 3
  for name in WHERE:
    _, found, others = run(of, name, {})
    assert_same_bits(expected, found)
    assert [r.loss for r in records] == [r.loss for r in others]


@pytest.mark.slow
@few
@given(numbers=skip_numbers(), placement=placements, depth=st.integers(0, 6))
def test_hot_rows_stand_still_as_a_bystander_says(numbers, placement, depth):
  of = recipe()
  before, after, _ = run(of, placement, numbers, depth)
  (block,), bystander = before[0], Bystander(**NUMBERS | numbers)
  rows, params = in_memory(of, never_judged(block), numbers, STEPS, bystander)
  own = rows._replace(state=rows.state[: len(block.state)])
  assert_same_bits((own, params), (after[0][0], after[1].params))
  np.testing.assert_array_equal(after[1].entries[0].own.stale, bystander.stale)


def none(step, rows, touched):
  """No row stands still."""
  return np.zeros(len(rows), bool)


@pytest.mark.slow
@few
@given(numbers=skip_numbers())
def test_with_all_rows_watched_it_is_the_chain_in_memory(numbers):
  of = recipe('all')
  before, after, _ = run(of, 'resident', numbers)
  rows, params = in_memory(of, before[0][0], numbers, STEPS, none)
  # The last four leaves are true as of a row's last step: here all had it.
  one, other = (b._replace(state=b.state[:-4]) for b in (rows, after[0][0]))
  assert_same_bits((one, params), (other, after[1].params))


def test_momentum_in_memory_also_moves_rows_without_a_lookup():
  """So the engine, which is lazy, has other bits: docs/skipping.md."""
  of = recipe('all', 'lazy_adam')
  before, after, _ = run(of, 'resident', {})
  rows, _ = in_memory(of, before[0][0], {}, STEPS, none)
  assert (rows.rows != after[0][0].rows).any(axis=1).sum() > 100


def test_rows_stand_still_by_what_all_rows_did():
  """As a bystander sees it, who compares whole tables."""
  trainer = start(recipe('hot', 'rowwise_adagrad', 'float16'))
  bystander, touched, moved = Bystander(**NUMBERS), None, 0
  with batches_for(trainer) as batches:
    for step in range(STEPS):
      before = jax.tree.map(np.array, trainer.engine.read_back()[0])
      item = batches.peek()
      still = bystander(step, before.rows, touched)
      take_step(trainer, item, batches.advance)
      after = trainer.engine.read_back()[0]
      used = np.zeros(len(still), bool)
      used[item.plans[0].rows] = True
      # By the state, as half precision may round what moved to itself.
      touched = before.state[0] != after.state[0]
      # Opposite gradients of a row may cancel, so not each that is used.
      assert not (touched & ~(used & ~still)).any()
      assert touched.sum() > 0.8 * (used & ~still).sum()
      assert (after.rows == before.rows)[~touched].all()
      moved += (after.rows != before.rows).any(1).sum()
  jax.block_until_ready(trainer.state)
  assert bystander.stood > 500
  assert moved > 1000
