"""Sums of bags by kernels have the bits of those by XLA."""

from concurrent import futures

from hypothesis import example, given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream_jax import row_kernels
from slipstream_jax.models.bags import bag_sums
from tests.support.small import assert_same_bits

pytestmark = pytest.mark.skipif(
  not row_kernels.register(), reason='no kernels on this machine'
)


@pytest.fixture(autouse=True)
def limits():
  """Yields the limits, and resets what a test has set."""
  before = [*row_kernels.limits]
  yield row_kernels.limits
  row_kernels.limits[:] = before


def functions(lengths, portable):
  """Sums, and their gradient with respect to the rows."""

  def sums(rows, inverse):
    return bag_sums(
      rows.astype(jnp.float32), inverse, lengths, portable=portable
    )

  def back(rows, inverse, cotangents):
    return jax.vjp(lambda rows: sums(rows, inverse), rows)[1](cotangents)[0]

  return jax.jit(sums), jax.jit(back)


def floats(rng, shape, tiny):
  """Any floats: zeros of both signs, tiny and huge ones among them."""
  odd = np.array([0, -0.0, 2e-38, -2e-38, 3e38, np.inf])
  # Where a single row is looked up, XLA leaves out the sum, and so does not
  # make what is below 2**-126 a zero.
  if tiny:
    odd = np.append(odd, [1e-45, -1e-40, 1e-38])
  x = rng.normal(size=shape).astype(np.float32)
  return np.where(rng.random(shape) < 0.2, rng.choice(odd, shape), x).astype(
    np.float32
  )


def draw(seed, examples, lengths, count, dim, padding):
  rng = np.random.default_rng(seed)
  tiny = examples > 2 and count > 2
  shape = examples, sum(lengths)
  inverse = (count * rng.random(shape) ** 3).astype(np.int32)
  inverse[rng.random(shape) < padding] = -1
  inverse[0] = 0
  rows = floats(rng, (count, dim), tiny)
  rows[0] = -0.0  # a bag of it alone is -0.0, and 0.0 with padding
  return rows, inverse, floats(rng, (examples, len(lengths), dim), tiny)


LENGTHS = st.lists(st.sampled_from([1, 1, 2, 3, 20, 33, 70]), min_size=1)


@pytest.mark.slow
@settings(max_examples=25)  # each is compiled
@example([600], 2, 3, 5, 0.0, 2, 'float32', 0)  # longer than XLA unrolls
@example([1], 1, 1, 16, 0.0, 1, 'float32', 2)  # a single lookup of -0.0
@given(
  LENGTHS.map(lambda lengths: lengths[:5]),
  st.sampled_from([1, 2, 7, 64]),
  st.sampled_from([1, 2, 30, 500]),
  st.sampled_from([1, 3, 16, 17, 40, 64, 100, 128, 200]),
  st.sampled_from([0.0, 0.3, 1.0]),
  st.sampled_from([1, 2, 3, 7]),
  st.sampled_from(['float32', 'float32', 'bfloat16', 'float16']),
  st.integers(0, 2**32),
)
def test_kernels_have_the_bits_of_xla(
  lengths, examples, count, dim, padding, threads, dtype, seed
):
  arrays = draw(seed, examples, lengths, count, dim, padding)
  rows, inverse, cotangents = jax.device_put(arrays)
  rows = rows.astype(dtype)
  results = []
  for portable in (True, False):
    sums, back = functions(tuple(lengths), portable)
    row_kernels.limits[:] = threads, 1
    results.append((sums(rows, inverse), back(rows, inverse, cotangents)))
  for by_xla, by_kernel in zip(*results, strict=True):
    by_xla, by_kernel = np.asarray(by_xla), np.asarray(by_kernel)
    assert by_xla.dtype == by_kernel.dtype
    # An infinity less another is not a number, whose bits nobody reads.
    either = [np.isnan(x.astype(np.float32)) for x in (by_xla, by_kernel)]
    np.testing.assert_array_equal(*either)
    kind = f'u{by_xla.itemsize}'  # tells -0.0 from 0.0
    bits = [np.where(either[0], 0, x.view(kind)) for x in (by_xla, by_kernel)]
    np.testing.assert_array_equal(*bits)


@pytest.mark.parametrize('threads', [1, 3])
@pytest.mark.parametrize('dim', [3, 16, 17, 64, 144])
def test_factors_are_applied_in_the_order_of_lookups(dim, threads, limits):
  limits[:] = threads, 1
  lengths, rng = (20, 1, 3), np.random.default_rng(0)
  inverse = (30 * rng.random((16, 24)) ** 3).astype(np.int32)
  inverse[rng.random(inverse.shape) < 0.2] = -1
  shares = rng.normal(size=inverse.shape).astype(np.float32)
  rows = rng.normal(size=(30, dim)).astype(np.float32)
  cotangents = rng.normal(size=(16, 3, dim)).astype(np.float32)
  sums, gradient = np.zeros_like(cotangents), np.zeros_like(rows)
  bag_of = np.repeat(range(3), lengths)
  for b, column in np.ndindex(inverse.shape):
    row, share = inverse[b, column], shares[b, column]
    bag = b, bag_of[column]
    if row >= 0:
      sums[bag] += share * rows[row]
      gradient[row] += share * cotangents[bag]

  def both(portable, rows, inverse, shares, cotangents):
    def function(rows, shares):
      return bag_sums(rows, inverse, lengths, shares, portable)

    return *jax.vjp(function, rows, shares)[1](cotangents), function(
      rows, shares
    )

  arrays = jax.device_put((rows, inverse, shares, cotangents))
  by_xla, by_kernel = (
    jax.jit(both, static_argnums=0)(portable, *arrays)
    for portable in (True, False)
  )
  np.testing.assert_array_equal(by_kernel[0], gradient)
  np.testing.assert_array_equal(by_kernel[2], sums)
  for one, other in zip(by_xla, by_kernel, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_kernels_are_in_use_where_they_can_be():
  rows = jax.ShapeDtypeStruct((9, 4), jnp.float32)
  inverse = jax.ShapeDtypeStruct((2, 5), jnp.int32)
  cotangents = jax.ShapeDtypeStruct((2, 2, 4), jnp.float32)
  for portable in (True, False):
    sums, back = functions((2, 3), portable)
    texts = [
      sums.lower(rows, inverse).as_text(),
      back.lower(rows, inverse, cotangents).as_text(),
    ]
    names = row_kernels.POOL, row_kernels.SPREAD
    for name, text in zip(names, texts, strict=True):
      assert (name in text) != portable
    on_gpu = sums.trace(rows, inverse).lower(lowering_platforms=('cuda',))
    assert row_kernels.POOL not in on_gpu.as_text()
  shares = jax.ShapeDtypeStruct((2, 5), jnp.float32)
  weighted = jax.jit(lambda *arrays: bag_sums(*arrays[:2], (2, 3), arrays[2]))
  assert row_kernels.POOL in weighted.lower(rows, inverse, shares).as_text()


def test_threads_of_python_share_the_kernels(limits):
  lengths = (1, 20, 5)
  arrays = jax.device_put(draw(0, 256, lengths, 300, 64, 0.1))
  sums, back = functions(lengths, False)
  limits[:] = 4, 1
  expected = sums(*arrays[:2]), back(*arrays)

  def again(_):
    return sums(*arrays[:2]), back(*arrays)

  with futures.ThreadPoolExecutor(8) as pool:
    for result in pool.map(again, range(64)):
      assert_same_bits(result, expected)


def test_a_batch_of_batches_is_mapped():
  lengths = (2, 3)
  rows, inverse, _ = draw(1, 8, lengths, 9, 16, 0.2)
  rows, whole, parts = jax.device_put((rows, inverse, inverse.reshape(2, 4, 5)))
  sums, _ = functions(lengths, False)
  mapped = np.asarray(jax.jit(jax.vmap(sums, (None, 0)))(rows, parts))
  assert_same_bits(mapped.reshape(8, 2, 16), sums(rows, whole))
