"""Laws that optax.contrib asks of its members, asked of ours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from slipstream_jax.transforms.shampoo import shampoo
from slipstream_jax.transforms.skip import skip_stale
from slipstream_jax.transforms.weights import weight_aware
from tests.support.small import assert_same_bits

# Name -> factory and its arguments.
TRANSFORMS = {
  'shampoo': (
    lambda learning_rate: shampoo(learning_rate, every=2, block_size=3),
    {'learning_rate': 0.1},
  ),
  'skip_stale': (skip_stale, {'threshold': 1e-3, 'every': 3, 'window': 2}),
  'weight_aware': (
    lambda learning_rate: weight_aware(optax.adam(learning_rate)),
    {'learning_rate': 0.1},
  ),
  **{
    name: (make, {'learning_rate': 0.1})
    for name, make in ROW_OPTIMIZERS.items()
  },
}
DTYPES = ['float16', 'bfloat16', 'float32']
every_transform = pytest.mark.parametrize('name', list(TRANSFORMS))


@functools.cache  # so that the laws share what is compiled
def build(name):
  make, arguments = TRANSFORMS[name]
  return make(**arguments)


def on_device(dtype='float32', dim=4):
  rows = np.linspace(-1, 1, 8 * dim).reshape(8, dim)
  return jax.device_put({'a': rows.astype(dtype), 'b': rows[:3].astype(dtype)})


def types(tree):
  return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def steps(tx, params, count=4):
  """Updates and state of each step, whose gradients are the parameters."""
  update, state = jax.jit(tx.update), jax.jit(tx.init)(params)
  for _ in range(count):
    updates, state = update(params, state, params)
    yield updates, state


@every_transform
def test_extra_arguments_are_accepted(name):
  tx, params = build(name), on_device()
  (plain, _), *_ = steps(tx, params)
  state = jax.jit(tx.init)(params)
  extra, _ = jax.jit(lambda *args: tx.update(*args, unexpected_argument=1))(
    params, state, params
  )
  assert_same_bits(plain, extra)


@every_transform
def test_the_second_call_does_not_recompile(name):
  tx, params, traced = build(name), on_device(), []

  @jax.jit
  def update(*arguments):
    traced.append(None)
    return tx.update(*arguments)

  with jax.transfer_guard('allow'):  # states made eagerly and in jit alike
    states = tx.init(params), jax.jit(tx.init)(params)
  for state in states:
    for _ in range(4):
      _, state = update(params, state, params)
  assert len(traced) == 1


@every_transform
def test_map_params_works(name):
  tx, params = build(name), on_device()
  state = jax.jit(tx.init)(params)
  with jax.transfer_guard('allow'):  # it calls init outside jit
    same = optax.tree.map_params(tx, lambda leaf: leaf, state)
  assert jax.tree.structure(same) == jax.tree.structure(state)
  jax.tree.map(np.testing.assert_array_equal, *jax.device_get((same, state)))


@every_transform
@pytest.mark.parametrize('dtype', [*DTYPES, 'float64'])
def test_types_are_preserved(name, dtype):
  """Those of updates and state, accumulated or not."""
  with jax.enable_x64(dtype == 'float64'):
    params = on_device(dtype)
    expected = types(jax.eval_shape(build(name).init, params))
    for updates, state in steps(build(name), params):
      assert types(updates) == types(params)
      assert types(state) == expected
    accumulated = optax.MultiSteps(build(name), 4)
    (updates, _), *_ = steps(accumulated, params, 1)
  assert types(updates) == types(params)
  assert not any(np.any(leaf) for leaf in jax.device_get([*updates.values()]))


@every_transform
def test_it_can_be_scanned_and_be_a_branch(name):
  tx = build(name)

  @jax.jit
  def some_steps(params):
    def step(carry, _):
      params, state = carry
      updates, new = tx.update(params, state, params)
      # Two branches of one type, or an error.
      new = jax.lax.cond(params['a'][0, 0] > 0, lambda: state, lambda: new)
      return (optax.apply_updates(params, updates), new), None

    return jax.lax.scan(step, (params, tx.init(params)), length=5)[0]

  for dtype in DTYPES:
    params = on_device(dtype)
    _, state = some_steps(params)
    assert types(state) == types(jax.eval_shape(tx.init, params))


@every_transform
def test_hyperparameters_can_be_injected(name):
  make, arguments = TRANSFORMS[name]
  injected, params = optax.inject_hyperparams(make)(**arguments), on_device()
  pairs = zip(steps(build(name), params), steps(injected, params), strict=True)
  for (updates, state), (found, injected_state) in pairs:
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
      *jax.device_get(((updates, state), (found, injected_state.inner_state))),
    )


@every_transform
def test_the_state_can_be_planned_without_rows(name):
  tx, params = build(name), on_device()
  like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
  expected = types(jax.jit(tx.init)(params))
  assert types(jax.eval_shape(tx.init, like)) == expected
  with jax.transfer_guard('allow'):
    assert types(tx.init(like)) == expected


@every_transform
@pytest.mark.parametrize('shape', [(0,), (0, 4), (3, 0), (3, 0, 2), None])
def test_leaves_may_be_empty(name, shape):
  params = {'a': np.ones((2, 4)), 'b': np.ones(shape or ()), 'c': {}}
  params = jax.device_put(params if shape else {})
  taken = list(steps(build(name), params))  # with a window of skip_stale
  assert all(types(updates) == types(params) for updates, _ in taken)
  state = taken[-1][1]
  assert types(jax.eval_shape(build(name).init, params)) == types(state)
  for leaf in jax.tree.leaves(jax.device_get(state)):
    assert np.isfinite(leaf).all()


@every_transform
def test_leaves_may_be_absent(name):
  params = on_device()
  few = {**params, 'none': None, 'masked': optax.MaskedNode(), 'tree': {}}
  pairs = zip(steps(build(name), params), steps(build(name), few), strict=True)
  for updates, others in pairs:
    assert others[0]['none'] is None
    assert jax.tree.structure(others[0]) == jax.tree.structure(few)
    assert_same_bits(updates, others)


@every_transform
def test_a_constant_schedule_is_its_number(name):
  make, arguments = TRANSFORMS[name]
  number = next(iter(arguments))  # may follow a schedule
  constant = optax.constant_schedule(arguments[number])
  scheduled = make(**{**arguments, number: constant})
  moved, apply = [], jax.jit(optax.apply_updates)
  for tx in (build(name), scheduled):
    rows = on_device()
    update, state = jax.jit(tx.update), jax.jit(tx.init)(rows)
    for _ in range(7):
      updates, state = update(rows, state, rows)
      rows = apply(rows, updates)
    moved.append(rows)
  assert_same_bits(*moved)


@every_transform
def test_a_step_that_is_not_finite_can_be_left_out(name):
  params = on_device()
  broken = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * np.nan, x))
  tx = optax.apply_if_finite(build(name), 5)
  update, state = jax.jit(tx.update), jax.jit(tx.init)(params)
  for plain, plain_state in steps(build(name), params):
    updates, state = update(broken(params), state, params)
    assert not any(leaf.any() for leaf in jax.device_get([*updates.values()]))
    updates, state = update(params, state, params)
    assert_same_bits((updates, state.inner_state), (plain, plain_state))


# Not of Shampoo, which cuts and multiplies along all axes.
@pytest.mark.parametrize('name', [n for n in TRANSFORMS if n != 'shampoo'])
@pytest.mark.parametrize('axes', [('x',), (None, 'x')])
def test_the_state_is_sharded_as_the_rows_are(name, axes):
  mesh = jax.make_mesh(
    (8,), ('x',), axis_types=(jax.sharding.AxisType.Explicit,)
  )
  sharding = jax.sharding.NamedSharding(mesh, jax.P(*axes))
  tx = build(name)
  with jax.set_mesh(mesh), jax.transfer_guard('allow'):
    params = jnp.zeros((16, 8), jnp.float16, out_sharding=sharding)
    eager = tx.init(params)
    found = [eager, tx.update(params, eager, params)[1]]
    found.append(jax.jit(tx.init)(params))
    found.append(jax.jit(tx.update)(params, eager, params)[1])
  kinds = [jax.tree.map(lambda x: str(jax.typeof(x)), state) for state in found]
  assert kinds[0] == kinds[1] == kinds[2] == kinds[3]
