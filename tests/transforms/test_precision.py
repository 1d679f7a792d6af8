"""Half precision: rows rounded by chance, matrix products summed in f32."""

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts, planned
from slipstream_jax.transforms.rowwise import stochastic_round
from tests.support import small

HALVES = {'bfloat16': ml_dtypes.bfloat16, 'float16': np.float16}
halves = pytest.mark.parametrize('dtype', HALVES)
rounded = jax.jit(
  lambda values, bits, dtype: stochastic_round(values, dtype, bits),
  static_argnums=2,
)


def with_bits(values, dtype, bits):
  values = np.asarray(values, np.float32)
  bits = np.broadcast_to(np.asarray(bits, np.uint32), values.shape)
  return np.asarray(rounded(*jax.device_put((values, bits)), dtype))


@halves
@given(st.floats(-6e4, 6e4, width=32), st.integers(0, 2**32 - 1))
def test_rounds_to_one_of_the_two_neighbours(dtype, value, bits):
  if abs(value) < 1e-30:
    return  # XLA flushes what f32 itself holds as a denormal
  got = with_bits([value], dtype, bits)[0]
  # Widened by f64, in which the neighbours' order is plain.
  nearest = np.float64(np.float32(value).astype(HALVES[dtype]))
  step = np.nextafter(
    np.float32(value).astype(HALVES[dtype]),
    HALVES[dtype](np.inf if nearest < value else -np.inf),
  )
  assert np.float64(got) in {nearest, np.float64(step)}


@halves
def test_what_the_dtype_holds_is_itself(dtype):
  values = np.arange(-(2**15), 2**15, dtype=np.int16).view(HALVES[dtype])
  values = values[np.isfinite(values.astype(np.float32))]
  if dtype == 'bfloat16':
    values = values[np.abs(values.astype(np.float32)) > 1e-37]
  for bits in (0, 2**32 - 1):
    got = with_bits(values.astype(np.float32), dtype, bits)
    np.testing.assert_array_equal(got, values)


@halves
def test_is_right_in_the_mean(dtype):
  rng = np.random.default_rng(0)
  values = (rng.normal(size=50) * 10.0 ** rng.integers(-4, 3, 50)).astype('f4')
  draws = 20_000
  bits = rng.integers(0, 2**32, (draws, 50), dtype=np.uint32)
  got = with_bits(np.tile(values, (draws, 1)), dtype, bits).astype(np.float64)
  lower, upper = got.min(0), got.max(0)
  spread = np.where(upper > lower, upper - lower, 1)
  # The mean of so many draws is that far off once in 10**6 times at most.
  assert (np.abs(got.mean(0) - values) / spread < 5 * 0.5 / draws**0.5).all()


def test_overflow_and_nan_stay_to_be_seen():
  got = with_bits([1e6, -1e6, np.nan], 'float16', 7)
  np.testing.assert_array_equal(got, np.float16([np.inf, -np.inf, np.nan]))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('dtype', 'rate'), [('bfloat16', 0.1), ('float16', 0.02)]
)
def test_small_updates_add_up(dtype, rate):
  """Steps far below a number's spacing move it all the same, in the mean."""

  def moved(table_dtype):
    recipe = small.recipe('sgd', rate=rate, table_dtype=table_dtype)
    trainer = make_parts(recipe, PLACEMENTS['streamed'], small.DENSE)
    before = np.array(trainer.engine.read_back()[0].rows, np.float32)
    source = ColumnBatches(small.columns(64 * 40), 64)
    with planned(trainer, source) as batches:
      losses = [record.loss for record in train(trainer, batches, 200)]
    after = np.array(trainer.engine.read_back()[0].rows, np.float32)
    return (after - before)[:57], losses  # of the two small tables

  exact, losses = moved('float32')
  half, half_losses = moved(dtype)
  step = np.abs(exact).mean() / 200
  spacing = np.spacing(HALVES[dtype](0.1)).astype(np.float32)
  assert step < spacing / 4  # rounded to nearest, nothing would ever move
  assert np.corrcoef(exact.ravel(), half.ravel())[0, 1] > 0.95
  np.testing.assert_allclose(half_losses, losses, atol=5e-3)


def examples(seed=0):
  rng = np.random.default_rng(seed)
  dense, rows = rng.normal(size=(64, 13)), 0.3 * rng.normal(size=(64, 26, 16))
  embeddings = {f'{i:02d}': rows[:, i].astype('f4') for i in range(26)}
  return jax.device_put((dense.astype('f4'), embeddings))


@pytest.mark.slow
@jax.transfer_guard('allow')
def test_bfloat16_products_are_summed_in_float32():
  args, model = examples(), DLRM(dtype='bfloat16')
  params = model.init(jax.random.key(0), *args)
  text = str(jax.make_jaxpr(model.apply)(params, *args))
  products = [line for line in text.splitlines() if 'dot_general' in line]
  assert len(products) == 8
  for line in products:
    assert ':f32[' in line.split('=')[0], line
  assert text.count('preferred_element_type=float32') == 8
  assert 'bf16' in text
  for leaf in jax.tree.leaves(params):
    assert leaf.dtype == jnp.float32


@jax.transfer_guard('allow')
def test_bfloat16_is_near_float32():
  args, full = examples(), DLRM()
  params = full.init(jax.random.key(0), *args)
  exact = full.apply(params, *args)
  half = DLRM(dtype='bfloat16').apply(params, *args)
  assert half.dtype == jnp.float32
  assert 0 < jnp.abs(half - exact).max() < 0.02 * jnp.abs(exact).max()

  def gradient(model, rows):
    by_name = jax.grad(lambda e: model.apply(params, args[0], e).sum())(rows)
    return jnp.stack([*by_name.values()])

  a, b = gradient(full, args[1]), gradient(DLRM(dtype='bfloat16'), args[1])
  assert b.dtype == jnp.float32
  assert jnp.vdot(a, b) > 0.99 * jnp.linalg.norm(a) * jnp.linalg.norm(b)
