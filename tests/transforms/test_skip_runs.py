"""skip_stale donated, scanned, mapped, sharded: the same bits."""

import functools

import jax
import numpy as np
import optax
import pytest

from slipstream_jax.transforms.skip import skip_stale, SkipStaleState
from tests.support.small import assert_same_bits
from tests.transforms.skip_oracle import (
  device_get,
  DIM,
  draw_updates,
  ROWS,
  run,
)


def test_state_holds_no_alias_and_can_be_donated():
  tx = optax.chain(optax.sgd(0.1), skip_stale(0.1, 3, 2))
  updates = draw_updates(np.random.default_rng(6))
  params = jax.device_put({'a': updates[0], 'b': updates[1, :4, 0]})
  state = jax.jit(tx.init)(params)
  with jax.transfer_guard('allow'):
    eager = tx.init(params)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  def pointers(*trees):
    leaves = jax.tree.leaves(trees)
    return [leaf.unsafe_buffer_pointer() for leaf in leaves]

  for found in (state, eager):
    assert len(set(pointers(params, found))) == len(pointers(params, found))
  grads = jax.tree.map(lambda leaf: leaf * 0.5, jax.device_get(params))
  for _ in range(7):
    given_away = jax.tree.leaves((params, state))
    params, state = step(params, state, jax.device_put(grads))
    assert all(leaf.is_deleted() for leaf in given_away)
  assert len(set(pointers(params, state))) == len(pointers(params, state))


def test_scan_equals_a_python_loop():
  rng = np.random.default_rng(3)
  # All its products are exact, so that XLA, which may fuse the two programs in
  # different ways (Adam's differ without skip_stale, too), rounds alike.
  tx = optax.chain(optax.sgd(0.125, momentum=0.5), skip_stale(0.15, 6, 2))
  rows, grads = jax.device_put((draw_updates(rng)[0], draw_updates(rng)))
  scanned, (_, masks, _) = jax.jit(functools.partial(run, tx))(rows, grads)
  assert 0 < device_get(masks).mean() < 0.9
  state = jax.jit(tx.init)(rows)
  step = jax.jit(functools.partial(advance, tx))
  for g in grads:
    rows, state = step(rows, state, g)
  assert_same_bits(scanned, (rows, state))


def advance(tx, rows, state, grads):
  updates, state = tx.update(grads, state, rows)
  return optax.apply_updates(rows, updates), state


def test_an_ensemble_equals_its_members():
  rng = np.random.default_rng(4)
  tx = optax.chain(optax.scale(-1.0), skip_stale(0.1, 5, 2))
  rows = np.stack([draw_updates(rng)[0] for _ in range(3)])
  grads = np.stack([draw_updates(rng) for _ in range(3)])
  alone = jax.jit(functools.partial(run, tx))
  together = jax.jit(jax.vmap(functools.partial(run, tx)))
  members = together(*jax.device_put((rows, grads)))
  for i in range(3):
    one = alone(*jax.device_put((rows[i], grads[i])))
    assert_same_bits(jax.jit(lambda tree, i=i: member(tree, i))(members), one)


def member(tree, i):
  return jax.tree.map(lambda leaf: leaf[i], tree)


@pytest.mark.parametrize('init_inside', [False, True])
def test_row_shards_equal_the_whole(init_inside):
  mesh = jax.make_mesh((8,), ('shard',))
  rng = np.random.default_rng(5)
  tx = skip_stale(0.1, 5, 2)
  rows, updates = draw_updates(rng)[0], draw_updates(rng)
  whole = jax.jit(functools.partial(run, tx))(*jax.device_put((rows, updates)))
  by_row, by_step = jax.P('shard'), jax.P(None, 'shard')
  states = SkipStaleState(*[jax.P()] * 3, *[by_row] * 4)

  def go_on(rows, state, updates):
    return jax.lax.scan(
      lambda carry, u: (advance(tx, *carry, u), carry[1].stale),
      (rows, state),
      updates,
    )[0]

  def start(rows, updates):
    return go_on(rows, tx.init(rows), updates)

  shard = functools.partial(jax.shard_map, mesh=mesh)
  specs = (by_row, states)
  if init_inside:
    sharded = shard(start, in_specs=(by_row, by_step), out_specs=specs)
    found = jax.jit(sharded)(*put(mesh, (rows, by_row), (updates, by_step)))
  else:
    sharded = shard(go_on, in_specs=(*specs, by_step), out_specs=specs)
    rows, updates = put(mesh, (rows, by_row), (updates, by_step))
    found = jax.jit(sharded)(rows, jax.jit(tx.init)(rows), updates)
  assert_same_bits(found, whole[0])


def test_each_shard_tells_of_itself():
  mesh = jax.make_mesh((8,), ('shard',))
  by_row, told = jax.P('shard'), []
  tx = skip_stale(np.inf, 2, 1, on_stale=told.append)
  state = SkipStaleState(*[jax.P()] * 3, *[by_row] * 4)
  update = jax.shard_map(
    tx.update,
    mesh=mesh,
    in_specs=(by_row, state, by_row),
    out_specs=(by_row, state),
  )
  rows = np.ones((ROWS, DIM), np.float32)
  rows[: ROWS // 2] = 0  # untouched in four shards: their mask stays
  (rows,) = put(mesh, (rows, by_row))
  state = jax.jit(tx.init)(rows)
  for _ in range(3):
    _, state = jax.jit(update)(rows, state, rows)
  jax.effects_barrier()
  assert [mask.tolist() for mask in told] == [[True, True]] * 4


@pytest.mark.parametrize('kind', ['Auto', 'Explicit'])
def test_jit_shards_the_state_as_the_rows(kind):
  """A replicated snapshot would need the memory of a whole table per device."""
  axis_type = jax.sharding.AxisType[kind]
  mesh = jax.make_mesh((8,), ('shard',), axis_types=(axis_type,))
  tx = skip_stale(0.1, 3, 2)
  with jax.set_mesh(mesh):
    sharding = jax.sharding.NamedSharding(mesh, jax.P('shard'))
    ones = {'a': np.ones((ROWS, DIM), np.float32), 'b': np.ones(ROWS)}
    params = jax.device_put(ones, sharding)
    state = jax.jit(tx.init)(params)
    for _ in range(4):
      for leaf in jax.tree.leaves(state[3:]):
        assert leaf.sharding.spec[0] == 'shard'
      _, state = jax.jit(tx.update)(params, state, params)


def put(mesh, *pairs):
  return [
    jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    for x, spec in pairs
  ]
