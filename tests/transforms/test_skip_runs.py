"""skip_stale donated, scanned, mapped, sharded, streamed: the same bits."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
import optax
import pytest

from slipstream_jax.transforms.skip import (
  close_window,
  open_window,
  skip_stale,
  SkipStaleState,
)
from tests.transforms.skip_oracle import (
  assert_same_bits,
  device_get,
  DIM,
  draw_updates,
  ROWS,
  run,
  Simulator,
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
  states = SkipStaleState(jax.P(), by_row, by_row, by_row)

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
  state = SkipStaleState(jax.P(), by_row, by_row, by_row)
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
  for _ in range(2):
    _, state = jax.jit(update)(rows, state, rows)
  jax.effects_barrier()
  assert [mask.tolist() for mask in told] == [[True, True]] * 4


def put(mesh, *pairs):
  return [
    jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    for x, spec in pairs
  ]


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_streamed_equals_in_memory(seed):
  rng = np.random.default_rng(seed)
  watched = rng.permutation(ROWS)[: ROWS // 2]  # of the table's rows
  place = np.full(ROWS + 1, -1, np.int32)
  place[watched] = np.arange(len(watched))
  table = draw_updates(rng)[0]
  hot = table[watched]
  state = streamed_init(jax.device_put(hot))
  whole = Simulator(hot, 0.1, 5, 2, 1)
  for count, update in enumerate(draw_updates(rng)):
    # Some rows of the batch get a zero update: those are not touched.
    used = (update != 0).any(1) | (rng.random(ROWS) < 0.2)
    used = np.flatnonzero(used)
    leaf = np.append(used, np.full(ROWS - len(used), ROWS))  # padded
    if count % 5 == 3:
      state = jax.jit(open_window)(state, jax.device_put(table[watched]))
    grads = np.append(update, np.full((1, DIM), np.nan, np.float32), 0)[leaf]
    kept, state = streamed_update(*jax.device_put((grads, state, place[leaf])))
    kept = device_get(kept)
    assert np.isnan(kept[len(used) :]).all()  # passed through
    table[used] += kept[: len(used)]
    if count % 5 == 4:
      state = streamed_close(state, jax.device_put(table[watched]))
    whole.step(update[watched])
    np.testing.assert_array_equal(device_get(state.stale), whole.stale)
    np.testing.assert_array_equal(table[watched], whole.rows)


STREAMED = skip_stale(0.1, 5, 2)
streamed_init = jax.jit(STREAMED.init)
streamed_close = jax.jit(lambda state, rows: close_window(state, rows, 0.1))


@jax.jit
def streamed_update(grads, state, row_index):
  return STREAMED.update(grads, state, row_index=row_index)
