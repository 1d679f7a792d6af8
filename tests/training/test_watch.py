"""A watch over some rows of a table follows `skip_stale` over just those."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st
import jax
import numpy as np

from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.selection.staleness import stale_rows
from slipstream_jax.tables import Table, TableSet
from slipstream_jax.training import watch
from slipstream_jax.transforms.skip import touched_rows
from tests.transforms.skip_oracle import (
  device_get,
  DIM,
  draw_updates,
  ROWS,
  Simulator,
)

touched_rows = jax.jit(touched_rows)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), past=st.sampled_from([-1, ROWS, 2**31 - 1]))
def test_a_watch_equals_the_simulator(seed, past):
  rng = np.random.default_rng(seed)
  hot = rng.permutation(ROWS)[: ROWS // 2]  # of the table's rows
  place = np.full(ROWS + 1, past, np.int32)
  place[hot] = np.arange(len(hot))
  table = draw_updates(rng)[0]
  tables = TableSet({'all': Table(ROWS, DIM)}, {})
  watched = watch.start(tables, [hot_rows(hot, ROWS)])
  whole = Simulator(table[hot], 0.1, 5, 2, 1)
  stood = 0
  for count, update in enumerate(draw_updates(rng)):
    if count and count % 5 == 0:
      watched = watch.closed(watched)
      moved = watched[0].moved
      stale = stale_rows(*device_get((moved[0], 0.1, moved[1])))
      watched = watch.freeze(watched, (jax.device_put(stale),))
    if count % 5 == 3:
      watched = watch.opened(watched)
    # Some rows of the batch get a zero update: those are not touched.
    used = (update != 0).any(1) | (rng.random(ROWS) < 0.2)
    used = np.flatnonzero(used)
    leaf = np.append(used, np.full(ROWS - len(used), ROWS))  # padded
    padded = np.append(table, np.zeros((1, DIM), np.float32), 0)
    row_index, grads = jax.device_put(
      (place[leaf], np.append(update, np.ones((1, DIM), np.float32), 0)[leaf])
    )
    now = jax.device_put(padded[leaf])
    snapshots, (still,) = watch.before(watched, (row_index,), (now,))
    still = device_get(still)
    assert not still[len(used) :].any()
    moving = used[~still[: len(used)]]
    table[moving] += update[moving]
    padded[:ROWS] = table
    then = jax.device_put(padded[leaf])
    masks = (touched_rows(grads),)
    watched = watch.after(watched, (row_index,), snapshots, (then,), masks)
    whole.step(update[hot])
    np.testing.assert_array_equal(
      device_get(watched[0].skip.stale), whole.stale
    )
    np.testing.assert_array_equal(table[hot], whole.rows)
    stood += still.sum()
  inside = device_get(watched[0].skip.touches) >= whole.touches
  assert inside.all()  # it counts outside of windows as well
  assume(stood)  # a few seeds freeze no row
