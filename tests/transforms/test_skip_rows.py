"""Steps that have some of the rows only: the bits of those that have all."""

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
import optax

from slipstream_jax.transforms.skip import skip_stale
from tests.transforms.skip_oracle import (
  device_get,
  draw_updates,
  ROWS,
  run,
)


@jax.jit
def all_rows(rows, updates, *arguments):
  return run(skip_stale(*arguments), rows, updates)


@jax.jit
def some_rows(rows, state, updates, *arguments):
  updates, state = skip_stale(*arguments).update(updates, state, rows)
  return optax.apply_updates(rows, updates), state


start = jax.jit(skip_stale(0.1, 5, 2).init)


@settings(max_examples=25)
@given(
  seed=st.integers(0, 10**6),
  threshold=st.sampled_from([0.0, 0.1, 1.0, np.inf]),
  every=st.integers(1, 9),
  min_touches=st.integers(0, 3),
  share=st.sampled_from([0.0, 0.1, 0.6]),
  broken=st.booleans(),
  data=st.data(),
)
def test_a_row_may_be_left_out_of_steps_that_do_not_touch_it(
  seed, threshold, every, min_touches, share, broken, data
):
  rng = np.random.default_rng(seed)
  window = data.draw(st.integers(1, every))
  arguments = jax.device_put(
    (np.float32(threshold), every, window, min_touches)
  )
  table, updates = draw_updates(rng)[0], draw_updates(rng)
  updates[:, rng.permutation(ROWS)[:4]] *= (
    rng.random((len(updates), 4, 1)) < 0.1
  )
  if broken:
    updates[rng.integers(len(updates)), rng.integers(ROWS)] = np.nan
  (rows, whole), _ = device_get(
    all_rows(*jax.device_put((table, updates)), *arguments)
  )
  state = device_get(start(jax.device_put(table)))
  (count, *steps), entries = state[:3], [np.array(x) for x in state[3:]]
  table = table.copy()
  everything = np.arange(ROWS)
  for step, update in enumerate(updates):
    visited = (update != 0).any(1) | (rng.random(ROWS) < share)
    used = rng.permutation(np.flatnonzero(visited))
    if step == len(updates) - 1:
      used = everything  # so that all entries are true as of the same step
    # Padded, so that little is compiled; what becomes of padding is dropped.
    at = np.append(used, rng.integers(0, ROWS, ROWS - len(used)))
    some = type(state)(count, *steps, *[entry[at] for entry in entries])
    new, after = device_get(
      some_rows(*jax.device_put((table[at], some, update[at])), *arguments)
    )
    table[used], count = new[: len(used)], after.count
    for entry, leaf in zip(entries, after[3:], strict=True):
      entry[used] = leaf[: len(used)]
  np.testing.assert_array_equal(table, rows)
  for entry, leaf in zip(entries, whole[3:], strict=True):
    np.testing.assert_array_equal(entry, leaf, strict=True)
