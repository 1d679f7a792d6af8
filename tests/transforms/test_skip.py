"""skip_stale: its schedule, its bits, and where it can run."""

import doctest
import functools

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.transforms import skip
from slipstream_jax.transforms.arguments import check_windows
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from slipstream_jax.transforms.skip import skip_stale
from tests.transforms.skip_oracle import (
  apply,
  bits,
  device_get,
  DIM,
  draw_updates,
  ROWS,
  run,
  Simulator,
  STEPS,
)


@jax.jit
def run_traced(rows, updates, *arguments):
  return run(skip_stale(*arguments), rows, updates)


@given(
  seed=st.integers(0, 10**6),
  threshold=st.sampled_from([0.0, 1e-3, 0.1, 1.0, np.inf]),
  every=st.integers(1, 10),
  min_touches=st.integers(0, 3),
  broken=st.booleans(),
  data=st.data(),
)
def test_schedule_equals_the_simulator(
  seed, threshold, every, min_touches, broken, data
):
  window = data.draw(st.integers(1, every))
  rng = np.random.default_rng(seed)
  rows = rng.normal(size=(ROWS, DIM)).astype(np.float32)
  updates = draw_updates(rng)
  if broken:
    updates[rng.integers(STEPS), rng.integers(ROWS)] = np.nan
  (_, state), (all_rows, masks, _) = device_get(
    run_traced(
      *jax.device_put(
        (rows, updates, np.float32(threshold), every, window, min_touches)
      )
    )
  )
  simulator = Simulator(rows, threshold, every, window, min_touches)
  for update, found, mask in zip(updates, all_rows, masks, strict=True):
    simulator.step(update)
    np.testing.assert_array_equal(mask, simulator.stale)
    np.testing.assert_array_equal(found, simulator.rows)
  np.testing.assert_array_equal(state.touches, simulator.touches)
  np.testing.assert_array_equal(state.snapshot, simulator.snapshot)
  assert state.count == STEPS


def chains():
  """Name -> chain(tail): an optimizer with `tail` as its last member."""

  def ending(optimizer):
    return lambda tail: optax.chain(optimizer, tail)

  def masked(tail):
    return optax.masked(
      optax.chain(optax.adam(0.1), tail), {'rows': True, 'bias': False}
    )

  def labelled(tail):
    return optax.multi_transform(
      {'rows': optax.chain(optax.adam(0.1), tail), 'bias': optax.sgd(0.1)},
      {'rows': 'rows', 'bias': 'bias'},
    )

  def injected(tail):
    make = optax.inject_hyperparams(
      lambda rate: optax.chain(optax.adam(rate), tail)
    )
    return make(rate=0.1)

  def accumulated(tail):
    steps = optax.MultiSteps(optax.chain(optax.adam(0.1), tail), 2)
    return steps.gradient_transformation()

  def accumulated_before(tail):
    steps = optax.MultiSteps(optax.adam(0.1), 2)
    return optax.chain(steps.gradient_transformation(), tail)

  return {
    **{name: ending(make(0.1)) for name, make in ROW_OPTIMIZERS.items()},
    'adamw': ending(optax.adamw(0.1)),
    'momentum': ending(optax.sgd(0.1, momentum=0.9)),
    'muon': ending(optax.contrib.muon(0.1)),
    'nothing finite': ending(optax.scale(np.nan)),
    'masked': masked,
    'multi_transform': labelled,
    'inject_hyperparams': injected,
    'MultiSteps': accumulated,
    'after MultiSteps': accumulated_before,
  }


def gradients(step):
  rng = np.random.default_rng(step)
  grads = rng.normal(size=(ROWS, DIM)).astype(np.float32)
  grads[: ROWS // 2] = np.abs(grads[: ROWS // 2])  # these keep moving
  grads[rng.random(ROWS) < 0.2] = 0
  return {'rows': grads, 'bias': rng.normal(size=2).astype(np.float32)}


@pytest.mark.parametrize('name', chains())
def test_bits_of_stale_rows_stand_and_others_move_as_without(name):
  make = chains()[name]
  threshold = {'nothing finite': np.inf, 'momentum': 0.8}.get(name, 0.12)
  tx, plain = make(skip_stale(threshold, 5, 2)), make(optax.identity())
  params = jax.device_put(gradients(99))
  state, plain_state = jax.jit(tx.init)(params), jax.jit(plain.init)(params)
  # One operation at a time: XLA may fuse two unlike programs unlike, and then
  # round unlike. JAX 0.12 does so with adagrad on a CPU with AVX-512.
  allowed = jax.transfer_guard_host_to_device('allow')
  update, plain_update = allowed(tx.update), allowed(plain.update)
  frozen = moved = 0
  for step in range(24):
    grads = jax.device_put(gradients(step))
    # A step's update depends on the state before it alone, so the plain
    # chain follows the same rows.
    updates, state = update(grads, state, params)
    free, plain_state = plain_update(grads, plain_state, params)
    mask = device_get(optax.tree.get(state, 'stale')['rows'])
    assert (device_get(updates['rows'])[mask] == 0).all()
    old, plain_rows = bits(params['rows']), apply(params, free)
    params = apply(params, updates)
    same = bits(params['rows']) == bits(plain_rows['rows'])
    assert same[~mask].all()
    np.testing.assert_array_equal(bits(params['rows'])[mask], old[mask])
    if name in ('masked', 'multi_transform'):
      np.testing.assert_array_equal(bits(updates['bias']), bits(free['bias']))
    frozen += mask.sum()
    moved += (~same).any(1).sum()
  assert name == 'nothing finite' or 0 < moved <= frozen


def test_a_negative_zero_keeps_its_sign():
  tx = skip_stale(1.0, 2, 1)
  rows = jax.device_put(np.array([[-0.0, 1.0]], np.float32))
  state = jax.jit(tx.init)(rows)._replace(
    stale=jax.device_put(np.ones(1, bool))
  )
  updates, _ = jax.jit(tx.update)(rows, state, rows)
  after = apply(rows, updates)
  np.testing.assert_array_equal(bits(after), bits(rows))


@pytest.mark.parametrize('scan', [False, True])
def test_on_stale_is_called_when_the_mask_changes(scan):
  rng = np.random.default_rng(7)
  rows, updates = draw_updates(rng)[0], draw_updates(rng)
  told = []
  tx = skip_stale(
    0.05, 5, 2, on_stale=lambda mask: told.append((type(mask), mask.copy()))
  )
  rows, updates = jax.device_put((rows, updates))
  if scan:
    _, (_, masks, _) = jax.jit(functools.partial(run, tx))(rows, updates)
  else:
    step = jax.jit(tx.update)
    state, masks = jax.jit(tx.init)(rows), []
    for update in updates:
      kept, state = step(update, state, rows)
      rows = apply(rows, kept)
      masks.append(state.stale)
  jax.effects_barrier()
  masks = device_get(masks)
  before = [np.zeros(ROWS, bool), *masks[:-1]]
  pairs = zip(before, masks, strict=True)
  changed = [mask for old, mask in pairs if (old != mask).any()]
  assert 4 < len(changed) == len(told) < STEPS
  for (kind, mask), expected in zip(told, changed, strict=True):
    assert kind is np.ndarray
    np.testing.assert_array_equal(mask, expected)


def test_on_stale_gets_the_tree_of_masks_and_cannot_be_mapped():
  told = []
  tx = skip_stale(np.inf, 2, 1, on_stale=told.append)
  rows = jax.device_put({'a': np.ones((2, 3), np.float32), 'b': np.ones(4)})
  state = jax.jit(tx.init)(rows)
  for _ in range(3):
    _, state = jax.jit(tx.update)(rows, state, rows)
  jax.effects_barrier()
  assert jax.tree.map(np.shape, told) == [{'a': (2,), 'b': (4,)}]
  several = jax.tree.map(lambda x: x[None], (rows, state))
  with pytest.raises(NotImplementedError, match='IO effect'):
    jax.jit(jax.vmap(tx.update))(several[0], several[1], several[0])


@pytest.mark.parametrize('injected', [False, True])
def test_a_schedule_may_set_the_threshold(injected):
  make, told = skip_stale, []
  # It is asked for the last step of a window, and injected by the next one.
  first = 4 + injected
  if injected:
    make = optax.inject_hyperparams(skip_stale, static_args='on_stale')
  tx = make(
    threshold=lambda count: jnp.where(count < first, 0.0, np.inf),
    every=4,
    window=2,
    on_stale=told.append,
  )
  rows = jax.device_put(np.ones((2, 2), np.float32))
  state = jax.jit(tx.init)(rows)
  masks = []
  for _ in range(9):
    _, state = jax.jit(tx.update)(rows, state, rows)
    masks.append(device_get(optax.tree.get(state, 'stale')).all())
  jax.effects_barrier()
  assert masks == [False] * 8 + [True]
  assert len(told) == 1


def test_a_schedule_is_asked_for_the_last_step_of_each_window():
  rng = np.random.default_rng(8)
  rows, updates = jax.device_put((draw_updates(rng)[0], draw_updates(rng)))
  limits = jax.device_put(np.array([0, 0.1, np.inf, 0, 0.2], np.float32))
  # Its values elsewhere must not matter.
  tx = skip_stale(
    lambda count: jnp.where(count % 5 == 4, limits[count // 5], jnp.nan), 5, 2
  )
  _, (_, masks, _) = jax.jit(functools.partial(run, tx))(rows, updates)
  simulator = Simulator(np.array(rows), 0, 5, 2, 1)
  for i, (update, mask) in enumerate(
    zip(*device_get((updates, masks)), strict=True)
  ):
    simulator.threshold = np.array(limits)[max(i // 5 - 1, 0)]
    simulator.step(update)
    np.testing.assert_array_equal(mask, simulator.stale)
  assert 0 < device_get(masks).mean() < 1


@pytest.mark.parametrize(
  ('arguments', 'got'),
  [
    ({'threshold': -1e-3}, '-0.001'),
    ({'threshold': float('nan')}, 'nan'),
    ({'every': 0}, '0'),
    ({'every': 2.5}, '2.5'),
    ({'window': 0}, '0'),
    ({'window': -1}, '-1'),
    ({'window': 11}, '11'),
    ({'min_touches': -1}, '-1'),
    ({'min_touches': 1.5}, '1.5'),
    ({'threshold': np.array(-1.0)}, '-1.0'),
    ({'threshold': np.ones(3)}, r'\[1. 1. 1.\]'),
    ({'threshold': np.array('x')}, 'x'),
    ({'every': 2**31}, '2147483648'),
    ({'every': np.ones(1, int)}, r'\[1\]'),
    ({'window': np.array(11)}, '11'),
  ],
)
def test_bad_arguments_are_named(arguments, got):
  good = {'threshold': 1e-3, 'every': 10, 'window': 2}
  with pytest.raises(UserError, match=f'got {got} ') as error:
    skip_stale(**{**good, **arguments})
  assert error.value.where == f'skip_stale, {next(iter(arguments))}'


@pytest.mark.parametrize('name', ['every', 'window', 'min_touches'])
def test_only_the_threshold_may_be_a_schedule(name):
  good = {'threshold': 1e-3, 'every': 10, 'window': 2, 'min_touches': 1}
  for value in (optax.constant_schedule(2), 'x', None, [2], 2j):
    with pytest.raises(UserError, match='only the threshold may') as error:
      check_windows(**{**good, name: value})
    assert error.value.where == f'skip_stale, {name}'
  for value in ('x', None, [0.1], 2j, lambda: 0, lambda a, b: 0):
    with pytest.raises(UserError, match='threshold must be at least 0'):
      check_windows(**{**good, 'threshold': value})


def test_on_stale_is_called_or_refused_before_there_is_a_stale_row():
  with pytest.raises(UserError, match=r"function .*, got 'log' \(skip_stale"):
    check_windows(1e-3, 10, 2, 1, 'log')


def test_an_update_may_leave_a_leaf_out():
  tx = skip_stale(np.inf, 3, 2)
  params = jax.device_put({'a': np.ones((4, 2), np.float32), 'b': np.ones(3)})
  state = jax.jit(tx.init)(params)
  for _ in range(4):
    updates, state = jax.jit(tx.update)({**params, 'b': None}, state, params)
  assert updates['b'] is None
  stale, touches = device_get((state.stale, state.touches))
  assert stale['a'].all()
  assert touches['a'].tolist() == [2] * 4
  assert not stale['b'].any()
  assert not touches['b'].any()


def test_rows_are_needed_and_have_an_axis():
  tx = skip_stale(1e-3, 10, 2)
  rows = jax.device_put(np.ones((2, 2), np.float32))
  with pytest.raises(UserError, match='got None'):
    tx.update(rows, jax.jit(tx.init)(rows))
  with pytest.raises(UserError, match='row axis, got a scalar'):
    jax.jit(tx.init)(jax.device_put(np.float32(1)))


def test_the_example_in_the_docstring():
  with jax.transfer_guard('allow'):
    result = doctest.testmod(skip)
  assert result.attempted >= 3
  assert not result.failed
