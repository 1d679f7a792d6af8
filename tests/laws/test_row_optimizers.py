"""Laws that every member of ROW_OPTIMIZERS obeys."""

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


def step_rows(optimizer, layout, rows, leaves, globals_, gradient):
  @jax.jit
  def step(rows, leaves, globals_, gradient):
    state = join(layout, leaves, globals_)
    updates, state = optimizer.update(gradient, state, rows)
    return optax.apply_updates(rows, updates), *split(layout, state)

  return step(*jax.device_put((rows, leaves, globals_, gradient)))


@optimizers
def test_lazy_rows_follow_the_float64_oracle(name):
  optimizer = ROW_OPTIMIZERS[name](RATE)
  layout = row_state_layout(optimizer, DIM)
  rng = np.random.default_rng(0)
  table = rng.normal(size=(ROWS, DIM)).astype(np.float32)
  state = jax.jit(lambda: optimizer.init(jnp.zeros((ROWS, DIM))))()
  leaves, globals_ = jax.device_get(split(layout, state))
  leaves = [np.array(leaf) for leaf in leaves]
  oracle, expected = RowOracle(name, RATE), table.astype(np.float64)
  for _ in range(20):
    touched = rng.choice(ROWS, size=4, replace=False)
    gradient = rng.normal(size=(4, DIM)).astype(np.float32) * 0.3
    for row, g in zip(touched, gradient, strict=True):
      expected[row] = oracle.step(int(row), expected[row], g)
    new, new_leaves, globals_ = jax.device_get(
      step_rows(
        optimizer,
        layout,
        table[touched],
        tuple(leaf[touched] for leaf in leaves),
        globals_,
        gradient,
      )
    )
    table[touched] = new
    for leaf, values in zip(leaves, new_leaves, strict=True):
      leaf[touched] = values
  np.testing.assert_allclose(table, expected, atol=1e-5)


@optimizers
def test_a_row_does_not_depend_on_its_neighbours(name):
  optimizer = ROW_OPTIMIZERS[name](RATE)
  layout = row_state_layout(optimizer, DIM)
  rng = np.random.default_rng(1)
  rows = rng.normal(size=(ROWS, DIM)).astype(np.float32)
  gradient = rng.normal(size=(ROWS, DIM)).astype(np.float32)
  state = jax.device_get(
    jax.jit(lambda: optimizer.init(jnp.zeros((ROWS, DIM))))()
  )
  leaves, globals_ = split(layout, state)
  alone = tuple(leaf[:3] for leaf in leaves)
  both = step_rows(optimizer, layout, rows, leaves, globals_, gradient)
  few = step_rows(optimizer, layout, rows[:3], alone, globals_, gradient[:3])
  np.testing.assert_array_equal(
    jax.device_get(both[0])[:3], jax.device_get(few[0])
  )


@optimizers
def test_padding_does_not_move(name):
  optimizer = ROW_OPTIMIZERS[name](RATE)
  layout = row_state_layout(optimizer, DIM)
  state = jax.device_get(jax.jit(lambda: optimizer.init(jnp.zeros((3, DIM))))())
  leaves, globals_ = split(layout, state)
  nothing = tuple(np.zeros_like(leaf) for leaf in leaves)
  rows = np.zeros((3, DIM), np.float32)
  new, *_ = step_rows(optimizer, layout, rows, nothing, globals_, rows)
  np.testing.assert_array_equal(jax.device_get(new), rows)


@optimizers
def test_state_has_the_stated_row_leaves(name):
  optimizer = ROW_OPTIMIZERS[name](RATE)
  layout = row_state_layout(optimizer, DIM)
  leaves, _ = split(
    layout,
    jax.eval_shape(optimizer.init, jax.ShapeDtypeStruct((7, DIM), np.float32)),
  )
  stated = {
    'sgd': [],
    'adagrad': [(7, DIM)],
    'rowwise_adagrad': [(7,)],
    'lazy_adam': [(7,), (7, DIM), (7, DIM)],
  }
  assert [leaf.shape for leaf in leaves] == stated[name]


def test_counts_of_a_foreign_chain_stay_global():
  layout = row_state_layout(optax.adam(1e-3), DIM)
  assert layout.has_row_axis.count(True) == 2  # mu and nu
  assert layout.has_row_axis.count(False) >= 1  # the count


def walk(optimizer, gradients, dtype):
  """Rows [steps, ROWS, DIM] after each step, all of which touch all of them."""

  @jax.jit
  def walked(gradients):
    def step(carry, gradient):
      rows, state = carry
      updates, state = optimizer.update(gradient, state, rows)
      rows = optax.apply_updates(rows, updates)
      return (rows, state), rows

    rows = jnp.zeros(gradients.shape[1:], dtype)
    (_, state), found = jax.lax.scan(
      step, (rows, optimizer.init(rows)), gradients
    )
    return found, state

  found, state = jax.device_get(walked(jax.device_put(gradients)))
  return np.asarray(found, np.float64), state


def gradients_of(size, dtype, rows=100):
  rng = np.random.default_rng(0)
  signs = np.sign(rng.normal(size=(rows, DIM)))
  spread = np.exp2(rng.integers(-2, 3, size=(12, rows, DIM)))
  return (signs * spread * size).astype(dtype)


halves = pytest.mark.parametrize('dtype', [np.float16, ml_dtypes.bfloat16])
SIZES = [1e-4, 1e-2, 1.0, 10.0, 300.0]


@optimizers
@halves
@pytest.mark.parametrize('size', SIZES[1:4])
def test_leaves_of_half_precision_learn(name, dtype, size):
  """As near the float64 oracle as rounding lets them, or as optax's are."""
  gradients = gradients_of(size, dtype)
  found, _ = walk(ROW_OPTIMIZERS[name](RATE), gradients, dtype)
  oracle, rows, expected = RowOracle(name, RATE), np.zeros(found[0].shape), []
  for gradient in gradients.astype(np.float64):
    rows = np.array(
      [oracle.step(i, rows[i], g) for i, g in enumerate(gradient)]
    )
    expected.append(rows)
  off = np.abs(found - expected).max()
  # One rounding of the row and one of what is added to it, in every step.
  allowed = 12 * 2 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
  if name == 'lazy_adam':
    theirs = np.abs(walk(optax.adam(RATE), gradients, dtype)[0] - expected)
    allowed = max(allowed, np.where(np.isfinite(theirs), theirs, np.inf).max())
  assert off <= allowed


@pytest.mark.parametrize('name', ['rowwise_adagrad', 'lazy_adam'])
@halves
@pytest.mark.parametrize('size', SIZES)
def test_leaves_of_half_precision_never_break_or_stop(name, dtype, size):
  found, state = walk(
    ROW_OPTIMIZERS[name](RATE), gradients_of(size, dtype), dtype
  )
  for leaf in (found, *jax.tree.leaves(state)):
    assert np.isfinite(leaf.astype(np.float64)).all()
  assert (found[0] != 0).all()
  assert (found[-1] != found[0]).any(axis=1).all()


@optimizers
@pytest.mark.parametrize('rate', [-0.1, float('nan'), float('inf')])
def test_a_learning_rate_is_at_least_0(name, rate):
  with pytest.raises(
    UserError, match='learning rate must be a finite'
  ) as error:
    ROW_OPTIMIZERS[name](rate)
  assert error.value.where == f'{name}, learning_rate'


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
  make(0.0)


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
    'adan': (optax.adan(RATE), 4),
    'lamb': (optax.lamb(RATE), 2),
    'sm3': (optax.sm3(RATE), 2),
    'injected': (optax.inject_hyperparams(optax.adam)(RATE), 2),
    'finite': (optax.apply_if_finite(optax.adam(RATE), 3), 2),
  }
  for name, (chain, leaves) in chains.items():
    layout = row_state_layout(chain, dim)
    assert layout.has_row_axis.count(True) == leaves, name


@pytest.mark.parametrize('name', ROW_OPTIMIZERS)
def test_a_learning_rate_is_a_number_or_a_schedule(name):
  three, one = jax.device_put((np.ones(3), np.float32(1)))
  for rate in (lambda: 1, lambda a, b: 1, three):
    with pytest.raises(UserError, match='a learning rate must be') as error:
      ROW_OPTIMIZERS[name](rate)
    assert error.value.where == f'{name}, learning_rate'
  for rate in ({}, [0.1], 'x', None, 1j):  # types that tests check before
    with pytest.raises(UserError, match='a learning rate must be'):
      check_learning_rate(rate, name)
  for rate in (1, np.float32(0.1), one, lambda step, scale=1: 0.1):
    check_learning_rate(rate, name)
