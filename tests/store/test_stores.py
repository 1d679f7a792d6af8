"""Every row store equals a dictionary, whatever it keeps its rows in."""

import os
import pathlib
import tempfile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, RuleBasedStateMachine
import jax
import ml_dtypes
import numpy as np

from slipstream_jax.distributed.lanes import even_lanes, lanes_of
from slipstream_jax.engine.own_rows import open_own
from slipstream_jax.store.base import (
  FirstRows,
  ignore_writes,
  set_rows,
  Storage,
)
from slipstream_jax.store.memory import MEMORY, MemoryStore
from slipstream_jax.store.threads import ALONE, Helpers
from slipstream_jax.store.tiered import TieredStore
from slipstream_jax.tables import tables_of
from slipstream_jax.types import RowBlock

N = 300
# Records of 18 bytes in 32, of 2048 in as many, of 4420 in two blocks.
DIMS = (7, 1022, 2208)
TABLES = {'a': 5, 'b': 100, 'c': N - 105}
ROWS = st.lists(st.integers(0, N - 1), unique=True, max_size=40)


def first_of(dim, seed):
  """Rows and state that a seed gives, by number alone."""

  def rows(wanted):
    base = (wanted[:, None] * 7 + np.arange(dim) + 1000 * seed) % 251
    return RowBlock(
      base.astype(ml_dtypes.bfloat16), ((wanted + seed).astype(np.float32),)
    )

  return FirstRows(
    N,
    rows,
    lambda: rows(np.arange(N)),
    tables=TABLES,
    table_of=lambda wanted: np.searchsorted([5, 105, N], wanted, 'right'),
  )


def block_of(dim, values, size):
  """A block of `size` rows whose first ones are of these values."""
  rows = np.full((size, dim), -1, np.float32)
  rows[: len(values)] = np.array(values, np.float32).reshape(-1, 1) % 251
  state = np.full(size, -1, np.float32)
  state[: len(values)] = values
  return RowBlock(rows.astype(ml_dtypes.bfloat16), (state,))


class OfProcesses:
  """The stores of several processes as one, each of which has its own rows."""

  def __init__(self, storage, first, owned):
    lanes, self.owned = sum(map(len, owned)), owned
    self.lanes = even_lanes(N, lanes)
    if lanes % 2 == 0:  # each of two hosts has a table
      (group,) = tables_of({'a': 5, 'b': N - 5}).groups
      self.lanes = lanes_of(group, lanes, ('a', 'b'))
    self.stores = [
      open_own(storage, [first], [self.lanes], own)[0] for own in owned
    ]

  def mine(self, rows, own):
    return np.isin(self.lanes.owners(rows), own)

  def gather(self, rows, size, helpers):
    whole = None
    for store, own in zip(self.stores, self.owned, strict=True):
      block = jax.tree.map(np.array, store.gather(rows, size, helpers))
      whole = block if whole is None else whole
      mine = np.flatnonzero(self.mine(rows, own))
      assert not np.delete(block.rows, mine, axis=0).any()
      assert not np.delete(block.state[0], mine).any()
      set_rows(whole, mine, jax.tree.map(lambda x, at=mine: x[at], block))
    return whole

  def scatter(self, rows, block, helpers):
    for store, own in zip(self.stores, self.owned, strict=True):
      changed = []
      store.before_write = changed.append
      store.scatter(rows, block, helpers)
      (some,) = changed
      np.testing.assert_array_equal(some, rows[self.mine(rows, own)])
      store.before_write = ignore_writes

  def prefetch(self, rows):
    for store in self.stores:
      store.prefetch(rows)

  def reset(self, first):
    for store, own in zip(self.stores, self.owned, strict=True):
      store.reset(first)
      # No process has room for the rows of others.
      room = len(own) * self.lanes.size
      assert len(store.table().rows) == len(store.table().state[0]) == room

  def table(self):
    return self.gather(np.arange(N), N, ALONE)

  def close(self):
    for store in self.stores:
      store.close()


class StoreMachine(RuleBasedStateMachine):
  @initialize(
    kind=st.sampled_from(['memory', 0, 1, 3, 20, 200, 1000]),
    owned=st.sampled_from([None, [(0,), (1,)], [(2, 0), (1, 3)]]),
    dim=st.sampled_from(DIMS),
    queue=st.sampled_from([1, 1 << 20]),
    workers=st.sampled_from([1, 2]),
    whole=st.lists(st.sampled_from([*TABLES]), max_size=2),
  )
  def start(self, kind, owned, dim, queue, workers, whole):
    self.folder = tempfile.mkdtemp()
    self.dim = dim
    self.first = first_of(dim, 0)

    def opened(groups):
      if kind == 'memory':
        return [*map(MemoryStore, groups)]
      return [
        TieredStore(one, self.folder, kind, queue, whole) for one in groups
      ]

    storage = Storage('drawn', opened)
    if owned is None:
      (self.store,) = storage.open([self.first])
    else:
      self.store = OfProcesses(storage, self.first, owned)
    self.helpers = Helpers(workers)
    self.begin_anew(0)

  @rule(seed=st.integers(0, 5))
  def begin_anew(self, seed):
    self.first = first_of(self.dim, seed)
    self.store.reset(self.first)
    self.expect(self.first.block())

  def expect(self, table):
    self.rows = {
      row: (np.array(table.rows[row]), np.array(table.state[0][row]))
      for row in range(N)
    }

  @rule(rows=ROWS, padding=st.integers(0, 5))
  def gather(self, rows, padding):
    size = len(rows) + padding
    self.check(rows, self.store.gather(np.array(rows, int), size, self.helpers))

  def check(self, rows, block):
    for at, row in enumerate(rows):
      np.testing.assert_array_equal(block.rows[at], self.rows[row][0])
      np.testing.assert_array_equal(block.state[0][at], self.rows[row][1])
    assert not block.rows[len(rows) :].any()
    assert not block.state[0][len(rows) :].any()

  @rule(rows=ROWS, value=st.integers(0, 1 << 20), padding=st.integers(0, 5))
  def scatter(self, rows, value, padding):
    block = block_of(
      self.dim, value + np.arange(len(rows)), len(rows) + padding
    )
    self.store.scatter(np.array(rows, int), block, self.helpers)
    for at, row in enumerate(rows):
      self.rows[row] = block.rows[at].copy(), block.state[0][at]

  @rule(rows=ROWS)
  def prefetch(self, rows):
    self.store.prefetch(np.array(rows, int))

  @rule()
  def flush(self):
    if isinstance(self.store, TieredStore):
      self.store.flush()

  @rule()
  def all_rows(self):
    self.check(range(N), self.store.table())

  def teardown(self):
    if hasattr(self, 'store'):
      self.all_rows()
      self.helpers.close()
      self.store.close()
      self.store.close()
      assert not list(pathlib.Path(self.folder).iterdir())
      os.rmdir(self.folder)


def test_first_values_of_processes_keep_their_bits():
  negative = np.full((N, 2), -0.0, np.float32)
  first = FirstRows(
    N,
    lambda rows: RowBlock(negative[rows], (negative[rows, 0],)),
    lambda: RowBlock(negative, (negative[:, 0],)),
  )
  (store,) = open_own(MEMORY, [first], [even_lanes(N, 2)], (1,))
  store.reset(first)
  block = store.table()
  assert np.signbit(block.rows).all()
  assert np.signbit(block.state[0]).all()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
  max_examples=50, stateful_step_count=30, deadline=None
)
