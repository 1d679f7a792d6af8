"""Laws that every member of ROW_OPTIMIZERS obeys."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.transforms.arguments import check_learning_rate
from slipstream_jax.transforms.row_state import join, row_state_layout, split
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from tests.support.oracles import RowOracle

optimizers = pytest.mark.parametrize('name', ROW_OPTIMIZERS)
ROWS, DIM, RATE = 12, 5, 0.1


@functools.cache
def lazy(name):
  """First leaves and globals of ROWS rows, and a jitted step of some rows."""
  optimizer = ROW_OPTIMIZERS[name](RATE)
  layout = row_state_layout(optimizer, DIM)

  @jax.jit
  def start():
    return split(layout, optimizer.init(jnp.zeros((ROWS, DIM))))

  @jax.jit
  def step(rows, leaves, globals_, gradient):
    state = join(layout, leaves, globals_)
    updates, state = optimizer.update(gradient, state, rows)
    return optax.apply_updates(rows, updates), *split(layout, state)

  leaves, globals_ = jax.device_get(start())
  return leaves, globals_, step


@optimizers
def test_lazy_rows_follow_the_float64_oracle(name):
  leaves, globals_, step = lazy(name)
  leaves, rng = [np.array(leaf) for leaf in leaves], np.random.default_rng(0)
  table = rng.normal(size=(ROWS, DIM)).astype(np.float32)
  oracle, expected = RowOracle(name, RATE), table.astype(np.float64)
  for _ in range(20):
    touched = rng.choice(ROWS, size=4, replace=False)
    gradient = rng.normal(size=(4, DIM)).astype(np.float32) * 0.3
    for row, g in zip(touched, gradient, strict=True):
      expected[row] = oracle.step(int(row), expected[row], g)
    some = tuple(leaf[touched] for leaf in leaves)
    arguments = jax.device_put((table[touched], some, globals_, gradient))
    table[touched], new_leaves, globals_ = jax.device_get(step(*arguments))
    for leaf, values in zip(leaves, new_leaves, strict=True):
      leaf[touched] = values
  np.testing.assert_allclose(table, expected, atol=1e-5)


@optimizers
def test_a_row_depends_on_itself_alone_and_padding_does_not_move(name):
  leaves, globals_, step = lazy(name)
  rng = np.random.default_rng(1)
  rows, gradient = rng.normal(size=(2, ROWS, DIM)).astype(np.float32)

  def move(leaves, rows, gradient):
    arguments = jax.device_put((rows, leaves, globals_, gradient))
    return jax.device_get(step(*arguments)[0])

  moved = move(leaves, rows, gradient)
  neighbours = np.arange(ROWS) >= 4
  for _ in range(5):
    rows[neighbours], gradient[neighbours] = rng.normal(size=(2, 8, DIM))
    np.testing.assert_array_equal(
      move(leaves, rows, gradient)[~neighbours], moved[~neighbours]
    )
  # XLA may fuse a product and a sum for one number of rows and not for another,
  # which moves a last bit. It does the same for these two.
  fewer = move(tuple(leaf[:3] for leaf in leaves), rows[:3], gradient[:3])
  np.testing.assert_array_equal(fewer, moved[:3])
  nothing = np.zeros((3, DIM), np.float32)
  zeros = tuple(np.zeros_like(leaf[:3]) for leaf in leaves)
  np.testing.assert_array_equal(move(zeros, nothing, nothing), nothing)


@optimizers
def test_state_has_the_stated_row_leaves(name):
  optimizer = ROW_OPTIMIZERS[name](RATE)
  like = jax.ShapeDtypeStruct((7, DIM), np.float32)
  state = jax.eval_shape(optimizer.init, like)
  leaves, _ = split(row_state_layout(optimizer, DIM), state)
  stated = {
    'sgd': [],
    'adagrad': [(7, DIM)],
    'rowwise_adagrad': [(7,)],
    'lazy_adam': [(7,), (7, DIM), (7, DIM)],
  }
  assert [leaf.shape for leaf in leaves] == stated[name]


@functools.cache
def walk(optimizer, dtype):
  """A jitted function of gradients, to the rows after each step and the state.

  Gradients are [steps, R, DIM], and all steps touch all rows.
  """

  @jax.jit
  def walked(gradients):
    def step(carry, gradient):
      rows, state = carry
      updates, state = optimizer.update(gradient, state, rows)
      rows = optax.apply_updates(rows, updates)
      return (rows, state), rows

    rows = jnp.zeros(gradients.shape[1:], dtype)
    carry = rows, optimizer.init(rows)
    (_, state), found = jax.lax.scan(step, carry, gradients)
    return found, state

  def call(gradients):
    found, state = jax.device_get(walked(jax.device_put(gradients)))
    return np.asarray(found, np.float64), state

  return call


def gradients_of(size, dtype, rows=100):
  rng = np.random.default_rng(0)
  signs = np.sign(rng.normal(size=(rows, DIM)))
  spread = np.exp2(rng.integers(-2, 3, size=(12, rows, DIM)))
  return (signs * spread * size).astype(dtype)


@optimizers
@pytest.mark.parametrize('dtype', [np.float16, ml_dtypes.bfloat16])
def test_leaves_of_half_precision_learn_and_never_break_or_stop(name, dtype):
  """As near the float64 oracle as rounding lets them, or as optax's are."""
  walked = walk(ROW_OPTIMIZERS[name](RATE), dtype)
  theirs = walk(optax.adam(RATE), dtype)
  for size in (1e-4, 1e-2, 1.0, 10.0, 300.0):
    gradients = gradients_of(size, dtype)
    found, state = walked(gradients)
    if name in ('rowwise_adagrad', 'lazy_adam'):
      for leaf in (found, *jax.tree.leaves(state)):
        assert np.isfinite(leaf.astype(np.float64)).all()
      assert (found[0] != 0).all()
      assert (found[-1] != found[0]).any(axis=1).all()
    if size in (1e-4, 300.0):
      continue
    oracle, rows, expected = RowOracle(name, RATE), np.zeros(found[0].shape), []
    for gradient in gradients.astype(np.float64):
      moved = [oracle.step(i, rows[i], g) for i, g in enumerate(gradient)]
      rows = np.array(moved)
      expected.append(rows)
    # One rounding of the row and one of what is added to it, in every step.
    allowed = 12 * 2 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
    if name == 'lazy_adam':
      off = np.abs(theirs(gradients)[0] - expected)
      allowed = max(allowed, np.where(np.isfinite(off), off, np.inf).max())
    assert np.abs(found - expected).max() <= allowed


@optimizers
def test_a_learning_rate_is_a_number_or_a_schedule(name):
  make = ROW_OPTIMIZERS[name]
  three, one = jax.device_put((np.ones(3), np.float32(1)))
  for rate in (-0.1, np.nan, np.inf, lambda: 1, lambda a, b: 1, three):
    with pytest.raises(UserError, match='learning rate must be') as error:
      make(rate)
    assert error.value.where == f'{name}, learning_rate'
  for rate in ({}, [0.1], 'x', None, 1j):  # types that tests check before
    with pytest.raises(UserError, match='a learning rate must be'):
      check_learning_rate(rate, name)
  for rate in (1, np.float32(0.1), one, lambda step, scale=1: 0.1):
    check_learning_rate(rate, name)
  make(0.0)


@optimizers
def test_learning_rates_that_are_no_numbers_yet_pass(name):
  make = ROW_OPTIMIZERS[name]
  rows = jax.device_put(np.ones((2, DIM), np.float32))

  @jax.jit
  def traced(rate):
    optimizer = make(rate)
    return optimizer.update(rows, optimizer.init(rows), rows)[0]

  negative = jax.device_get(traced(jax.device_put(np.float32(-RATE))))
  scheduled = make(lambda count: -RATE)
  state = jax.jit(scheduled.init)(rows)
  found = jax.device_get(jax.jit(scheduled.update)(rows, state, rows)[0])
  np.testing.assert_allclose(found, negative, rtol=1e-6)


REFUSED = {
  'factored': (optax.adafactor(RATE), 128, r'one entry per row.*\[1\] of 3'),
  'accumulated': (
    optax.MultiSteps(optax.adam(RATE), 3).gradient_transformation(),
    DIM,
    'apply gradients in the step that has them.*MultiStepsState',
  ),
  'held back': (
    optax.chain(optax.sgd(RATE), optax.apply_every(3)),
    DIM,
    'ApplyEvery',
  ),
  'growing': (
    optax.GradientTransformation(
      lambda rows: jnp.zeros(()), lambda u, state, rows: (u, u.sum(axis=1))
    ),
    DIM,
    r'keep the shapes of its state.*float32\[3\]',
  ),
  'rows last': (
    optax.GradientTransformation(
      lambda rows: jnp.zeros(rows.shape[::-1]),
      lambda u, state, rows: (u, state),
    ),
    DIM,
    'along its first axis',
  ),
}


@pytest.mark.parametrize('case', REFUSED)
def test_chains_whose_state_is_not_of_rows_are_refused(case):
  optimizer, dim, said = REFUSED[case]
  with pytest.raises(UserError, match=said) as error:
    row_state_layout(optimizer, dim)
  assert error.value.where == 'Trainer, row_optimizer'


@pytest.mark.parametrize('dim', [16, 128])
def test_other_chains_of_optax_are_not(dim):
  chains = {
    'adafactor': (optax.adafactor(RATE, factored=False), 1),
    'adam': (optax.adam(RATE), 2),  # its count is not of rows
    'adan': (optax.adan(RATE), 4),
    'ema': (optax.ema(0.9, debias=False), 1),
    'lamb': (optax.lamb(RATE), 2),
    'sm3': (optax.sm3(RATE), 2),
    'injected': (optax.inject_hyperparams(optax.adam)(RATE), 2),
    'finite': (optax.apply_if_finite(optax.adam(RATE), 3), 2),
  }
  for name, (chain, leaves) in chains.items():
    layout = row_state_layout(chain, dim)
    assert layout.has_row_axis.count(True) == leaves, name
    assert name != 'adam' or layout.has_row_axis.count(False) >= 1
