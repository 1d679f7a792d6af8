"""The kernel updates rows as their optimizer does."""

import functools

from hypothesis import example, given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from slipstream_jax import row_kernels
from slipstream_jax.models.bags import spread
from slipstream_jax.training import fused
from slipstream_jax.training.fused import OfBags
from slipstream_jax.transforms.rowwise import rowwise_adagrad, sgd
from slipstream_jax.types import RowBlock
from tests.support.small import assert_same_bits

pytestmark = pytest.mark.skipif(
  not row_kernels.register(), reason='no kernels on this machine'
)


def rate(count):
  return 0.5 / (1 + count)


OPTIMIZERS = {
  'sgd': sgd(0.1),
  'sgd, schedule': sgd(rate),
  'rowwise_adagrad': rowwise_adagrad(0.1, eps=0.01),
  'rowwise_adagrad, schedule': rowwise_adagrad(rate),
}


@pytest.fixture(autouse=True)
def limits():
  """Yields the limits, and resets what a test has set."""
  before = [*row_kernels.limits]
  yield row_kernels.limits
  row_kernels.limits[:] = before


def functions(optimizer, lengths):
  """Updates by the kernel from bags, from their sum, and by the chain."""

  def by_chain(block, state, frozen, gradient):
    updates, state = optimizer.update(gradient, state, block.rows)
    rows = optax.apply_updates(block.rows, updates)
    rows = jnp.where(frozen[:, None], block.rows, rows)
    leaves = jax.tree.leaves(state)
    of_rows = [
      jnp.where(frozen, *pair)
      for pair in zip(block.state, leaves[: len(block.state)], strict=True)
    ]
    rest = tuple(leaves[len(of_rows) :])
    return RowBlock(rows, tuple(of_rows)), rest, (updates != 0).any(axis=1)

  def by_kernel(block, state, frozen, gradient):
    known = fused.known(optimizer, block)
    assert known is not None
    chain = functools.partial(by_chain, block, state, frozen)
    return fused.update(known, block, state, gradient, frozen, chain)

  def from_bags(block, state, frozen, sums, inverse):
    return by_kernel(block, state, frozen, OfBags(sums, inverse, lengths))

  def from_rows(block, state, frozen, sums, inverse):
    gradient = bits_of_spread(block.rows, sums, inverse)
    return by_kernel(block, state, frozen, gradient)

  def without(block, state, frozen, sums, inverse):
    gradient = bits_of_spread(block.rows, sums, inverse)
    return by_chain(block, state, frozen, gradient)

  def bits_of_spread(rows, sums, inverse):
    return spread(rows, sums, inverse, lengths)

  return tuple(map(jax.jit, (from_bags, from_rows, without)))


@settings(max_examples=15)  # each is compiled
@example('rowwise_adagrad', [20, 1], 64, 30, 128, 3, 0)
@given(
  st.sampled_from([*OPTIMIZERS]),
  st.lists(st.sampled_from([1, 2, 20]), min_size=1, max_size=3),
  st.sampled_from([1, 7, 64]),
  st.sampled_from([1, 30, 500]),
  st.sampled_from([1, 3, 16, 17, 40, 64, 128]),
  st.sampled_from([1, 2, 7]),
  st.integers(0, 2**32),
)
def test_the_kernel_updates_as_the_chain(
  name, lengths, examples, count, dim, threads, seed
):
  optimizer, rng = OPTIMIZERS[name], np.random.default_rng(seed)
  inverse = (count * rng.random((examples, sum(lengths))) ** 3).astype(np.int32)
  inverse[rng.random(inverse.shape) < 0.2] = -1
  sums = rng.normal(size=(examples, len(lengths), dim)).astype(np.float32)
  sums[rng.random(examples) < 0.5] = 0
  rows = rng.normal(size=(count, dim)).astype(np.float32)
  frozen = rng.random(count) < 0.3
  state = jax.jit(optimizer.init)(jax.device_put(rows))
  of_rows = tuple(
    rng.random(count).astype(np.float32)
    for leaf in jax.tree.leaves(state)
    if leaf.shape == (count,) and leaf.ndim
  )
  if of_rows:
    state = (state[0]._replace(sum_of_squares=of_rows[0]), *state[1:])
  arguments = jax.device_put(
    (RowBlock(rows, of_rows), state, frozen, sums, inverse)
  )
  from_bags, from_rows, without = functions(optimizer, tuple(lengths))
  row_kernels.limits[:] = threads, 1
  result = from_bags(*arguments)
  row_kernels.limits[:] = 1, 1
  assert_same_bits(from_rows(*arguments), result)
  block, leaves, touched = without(*arguments)
  np.testing.assert_array_equal(touched, result[2])
  assert list(map(int, leaves)) == list(map(int, result[1]))
  for expected, own in zip(
    jax.tree.leaves(block), jax.tree.leaves(result[0]), strict=True
  ):
    np.testing.assert_allclose(expected, own, rtol=1e-5, atol=1e-6)
  for before, own in zip(
    jax.tree.leaves(arguments[0]), jax.tree.leaves(result[0]), strict=True
  ):
    assert_same_bits(np.asarray(before)[frozen], np.asarray(own)[frozen])


def test_only_rows_that_a_kernel_can_update_are_known():
  half = RowBlock(np.ones((3, 4), ml_dtypes.bfloat16), ())
  whole = RowBlock(np.ones((3, 4), np.float32), ())
  assert fused.known(sgd(0.1), whole) is not None
  assert fused.known(sgd(0.1), half) is None
  assert fused.known(optax.chain(sgd(0.1)), whole) is None
