"""Laws that every member of ROW_OPTIMIZERS obeys."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slipstream_jax.transforms.row_state import join, row_state_layout, split
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from tests.oracles import RowOracle

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
    jax.eval_shape(optimizer.init, jax.ShapeDtypeStruct((7, DIM), float)),
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
