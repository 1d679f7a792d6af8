"""What a drain hands out are the values at its boundary, whoever writes."""

import threading

import numpy as np
import pytest

from slipstream_jax.checkpoint.row_snapshot import Budget, RowSnapshot
from slipstream_jax.types import RowBlock
from tests.support.programs import LIMIT_S

BYTES = 12


def table_of(rng, num_rows):
  rows = rng.random((num_rows, 2), np.float32)
  return RowBlock(rows, (rng.random(num_rows, np.float32),))


def taken(table, rows):
  """A copy of some rows."""
  return RowBlock(table.rows[rows], (table.state[0][rows],))


def bits_of(wanted):
  return np.packbits(wanted, bitorder='little')


def assert_pieces(pieces, wanted, before):
  rows = np.concatenate([p[0] for p in pieces] or [np.empty(0, np.int64)])
  np.testing.assert_array_equal(rows, np.flatnonzero(wanted))
  for rows, block in pieces:
    np.testing.assert_array_equal(block.rows, before.rows[rows])
    np.testing.assert_array_equal(block.state[0], before.state[0][rows])


@pytest.mark.parametrize('budget', [1, 500, 1 << 20])
@pytest.mark.parametrize('resident', [False, True])
def test_with_two_threads_and_whatever_budget(budget, resident):
  rng, num_rows = np.random.default_rng(budget), 3000
  for _ in range(5):
    table = table_of(rng, num_rows)
    before = taken(table, np.arange(num_rows))
    wanted, room = rng.random(num_rows) < 0.7, Budget(budget)
    gather = lambda rows: taken(table, rows)  # noqa: B023, E731
    drain = RowSnapshot(bits_of(wanted), num_rows, BYTES, gather, room, 40)
    pieces = []
    thread = threading.Thread(target=lambda: pieces.extend(drain.pieces()))  # noqa: B023
    thread.start()
    if resident:
      drain.save(np.arange(num_rows), gather)
    drain.ready()
    for _ in range(60):
      rows = rng.permutation(num_rows)[:50]
      drain.before_write(rows)
      table.rows[rows] = -rng.random((len(rows), 2))
    thread.join(LIMIT_S)
    assert drain.done
    assert_pieces(pieces, wanted, before)
    assert room.most <= max(budget, 50 * BYTES)
    room.take(budget)  # all was given back


def test_nobody_waits_for_a_drain_that_failed():
  table = table_of(np.random.default_rng(0), 100)
  room = Budget(10 * BYTES)
  drain = RowSnapshot(
    bits_of(np.ones(100, bool)), 100, BYTES, lambda r: taken(table, r), room, 7
  )
  left = drain.pieces()
  drain.ready(7)
  assert len(next(left)[0]) == 7
  failing = threading.Timer(0.1, lambda: (drain.close(), room.close()))
  failing.start()
  drain.save(np.arange(7, 100), lambda rows: taken(table, rows))
  failing.join()
  drain.ready()
  drain.before_write(np.arange(100))
  with pytest.raises(Exception, match='only rows below 7 were read'):
    next(left)


class Switching:
  """A lock; once its thread lets go of it, another one runs for a while."""

  def __init__(self, inner, then):
    self.inner, self.then = inner, then

  def __enter__(self):
    return self.inner.__enter__()

  def __exit__(self, *error):
    self.inner.__exit__(*error)
    then, self.then = self.then, lambda: None
    then()

  def __getattr__(self, name):
    return getattr(self.inner, name)


def test_rows_that_are_claimed_in_between_are_waited_for():
  table = table_of(np.random.default_rng(0), 64)
  before = taken(table, np.arange(64))
  reading, written = threading.Event(), threading.Event()

  def gather(rows):
    if threading.current_thread() is not threading.main_thread():
      reading.set()
      written.wait(0.5)  # a slow disk: what is written meanwhile would be read
    return taken(table, rows)

  drain = RowSnapshot(
    bits_of(np.ones(64, bool)), 64, BYTES, gather, Budget(1 << 20), 8
  )
  drain.ready()
  left, pieces = drain.pieces(), []
  thread = threading.Thread(target=lambda: pieces.extend(left))

  def claim():
    thread.start()
    assert reading.wait(LIMIT_S)

  drain._changed = Switching(drain._changed, claim)
  drain.before_write(np.arange(16))
  table.rows[:16] = -1
  written.set()
  thread.join(LIMIT_S)
  assert_pieces(pieces, np.ones(64, bool), before)
