"""The engine as a state machine, against a dictionary of rows, bit by bit."""

import collections
import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.stateful import (
  initialize,
  invariant,
  precondition,
  rule,
  RuleBasedStateMachine,
)
import jax
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.placement import cached, EVICTIONS, PLACEMENTS
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.store.host_table import unique_rows
from slipstream_jax.stream.buffers import to_device
from slipstream_jax.stream.engine import Engine
from slipstream_jax.types import RowBlock

N, HOT, BATCH = 24, 10, 8
HOT_ROWS = hot_rows(np.arange(3, 3 + 2 * HOT, 2), N)
LOOKUPS = hnp.arrays(
  np.int64,
  st.tuples(st.just(2), st.just(BATCH // 2)),
  elements=st.integers(-1, N - 1),
)
STALE = hnp.arrays(bool, HOT)


def fresh_table():
  rows = np.arange(2 * N, dtype=np.float32).reshape(N, 2)
  return RowBlock(rows, (np.zeros(N, np.float32),))


@jax.jit
def trained(block, moves):
  """What a step makes of rows, for which the dictionary has the same bits."""
  return RowBlock(block.rows + moves[:, None], (block.state[0] + moves,))


class EngineMachine(RuleBasedStateMachine):
  @initialize(
    name=st.sampled_from([*PLACEMENTS, *EVICTIONS, *EVICTIONS]),
    # From less than a batch to a few rows more, and to all of them.
    capacity=st.sampled_from([3, BATCH, BATCH + 2, BATCH + 4, N]),
    look_ahead=st.integers(0, 4),
  )
  def start(self, name, capacity, look_ahead):
    self.placement = PLACEMENTS.get(name) or cached(capacity, name, look_ahead)
    self.engine = Engine(self.placement, fresh_table(), HOT_ROWS)
    table = fresh_table()
    self.saved = table
    self.expect(table)
    self.plan_anew()

  def expect(self, table):
    self.rows = {
      row: (table.rows[row].copy(), table.state[0][row]) for row in range(N)
    }

  def plan_anew(self):
    contents = self.engine.contents if self.engine.changed else None
    self.planner = self.placement.start(N, HOT_ROWS, contents)
    self.queue = collections.deque()
    self.frozen = set()

  @rule(seed=st.integers(0, 1 << 20), batches=st.integers(1, 6))
  def know_batches(self, seed, batches):
    """Few ids each, so that rows leave and are needed soon after."""
    rng = np.random.default_rng(seed)
    for _ in range(batches):
      lookups = rng.integers(-1, N, (2, BATCH // 2))
      self.queue.append(unique_rows(lookups, N, HOT_ROWS))

  @precondition(lambda self: self.queue)
  @rule(
    steps=st.integers(1, 6), ahead=st.integers(0, 4), move=st.integers(1, 9)
  )
  def take_steps(self, steps, ahead, move):
    for _ in range(min(steps, len(self.queue))):
      self.take_a_step(ahead, move)

  def take_a_step(self, ahead, move):
    self.carry_out(self.next_plan(ahead), move)

  def next_plan(self, ahead):
    window = [self.queue[i] for i in range(min(1 + ahead, len(self.queue)))]
    self.queue.popleft()
    self.planner, plan = self.placement.plan(
      self.planner, window[: 1 + self.placement.look_ahead]
    )
    return plan

  def carry_out(self, plan, move):
    block = self.engine.load(plan)
    self.check(plan, block)
    moves = np.zeros(len(block.rows), np.float32)
    for at, row in enumerate(plan.rows.tolist()):
      if row not in self.frozen:
        moves[at] = move
        rows, state = self.rows[row]
        self.rows[row] = rows + np.float32(move), state + np.float32(move)
    self.engine.store(plan, trained(block, to_device(moves)))

  def check(self, plan, block):
    rows, state = jax.device_get((block.rows, block.state[0]))
    assert len(set(plan.slots[plan.slots >= 0].tolist())) == (
      np.count_nonzero(plan.slots >= 0)
    )
    for at, row in enumerate(plan.rows.tolist()):
      np.testing.assert_array_equal(rows[at], self.rows[row][0])
      assert state[at] == self.rows[row][1]

  @precondition(lambda self: self.queue)
  @rule(ahead=st.integers(0, 4))
  def a_step_fails(self, ahead):
    """Between load and store; whoever goes on plans anew."""
    plan = self.next_plan(ahead)
    self.check(plan, self.engine.load(plan))
    self.another_planner_goes_on()

  @precondition(lambda self: self.queue)
  @rule(ahead=st.integers(0, 4), move=st.integers(1, 9))
  def a_step_fails_and_is_tried_again(self, ahead, move):
    """The plan that was loaded is loaded once more, then carried out."""
    plan = self.next_plan(ahead)
    self.engine.load(plan)
    self.carry_out(plan, move)

  @precondition(lambda self: self.queue)
  @rule(seed=st.integers(0, 1 << 20), batches=st.integers(1, 4))
  def a_plan_for_other_contents_is_refused(self, seed, batches):
    """Made after steps that the engine did not take; it changes nothing."""
    rng = np.random.default_rng(seed)
    stranger = self.placement.start(N, HOT_ROWS, self.engine.contents)
    for _ in range(1 + batches):
      lookups = rng.integers(-1, N, (2, BATCH // 2))
      found = [unique_rows(lookups, N, HOT_ROWS)]
      stranger, plan = self.placement.plan(stranger, found)
    with contextlib.suppress(UserError):
      self.engine.load(plan)
    self.another_planner_goes_on()

  @rule(stale=STALE)
  def rows_stand_still(self, stale):
    self.planner = self.placement.freeze(self.planner, stale)
    self.engine.freeze(stale)
    self.frozen = set(HOT_ROWS.rows[stale].tolist())

  @rule()
  def rows_thaw(self):
    self.planner = self.placement.freeze(self.planner, None)
    self.engine.freeze(None)
    self.frozen = set()

  @rule(lookups=LOOKUPS)
  def evaluate(self, lookups):
    plan = self.engine.plan(lookups)
    self.check(plan, self.engine.load(plan))

  @rule()
  def look_at_the_hot_rows(self):
    found = jax.device_get(self.engine.hot_rows_now())
    expected = [self.rows[row][0] for row in HOT_ROWS.rows.tolist()]
    np.testing.assert_array_equal(found, expected)

  def read_back(self):
    return jax.tree.map(np.array, self.engine.read_back())

  @rule()
  def checkpoint(self):
    self.saved = self.read_back()

  @rule()
  def crash_and_restore(self):
    self.engine.restore(jax.tree.map(np.array, self.saved))
    self.expect(self.saved)
    self.plan_anew()

  @rule()
  def another_planner_goes_on(self):
    self.engine.freeze(None)
    self.plan_anew()

  @rule()
  def all_rows_are_right(self):
    table = self.read_back()
    for row, (rows, state) in self.rows.items():
      np.testing.assert_array_equal(table.rows[row], rows)
      assert table.state[0][row] == state

  @invariant()
  def contents_are_unique_rows(self):
    contents = self.engine.contents
    if contents is not None:
      full = contents[contents >= 0]
      assert len(np.unique(full)) == len(full)

  def teardown(self):
    if hasattr(self, 'engine'):
      self.all_rows_are_right()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
  max_examples=100, stateful_step_count=40, deadline=None
)
