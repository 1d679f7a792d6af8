"""The engine as a state machine, against dictionaries of rows, bit by bit.

Its tables are three groups: one with many hot rows, one with few, one with
none; each has a placement of its own. What a step stores goes to the next one
on the device, as the planner linked them, or nobody, or somebody else.
"""

import collections
import contextlib
import tempfile

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

from slipstream_jax.engine import group_rows
from slipstream_jax.engine.buffers import to_device
from slipstream_jax.engine.engine import Engine
from slipstream_jax.errors import UserError
from slipstream_jax.placement import cached, EVICTIONS, PLACEMENTS
from slipstream_jax.placement.base import link
from slipstream_jax.selection.hot import hot_rows, stale_by_group
from slipstream_jax.store.base import Storage
from slipstream_jax.store.host_table import unique_rows_of, UntrainedRows
from slipstream_jax.store.memory import MEMORY
from slipstream_jax.store.tiered import file, TieredStore
from slipstream_jax.tables import Feature, Table, TableSet
from slipstream_jax.types import RowBlock
from tests.support import small

# The tables of a group do not lie side by side, nor do its columns.
TABLES = TableSet(
  {
    'a': Table(14, embedding_dim=2),
    'b': Table(6, embedding_dim=3),
    'c': Table(10, embedding_dim=2),
    'd': Table(5, embedding_dim=1),
  },
  {
    'd': Feature('d', max_length=2),
    'a': Feature('a', max_length=3),
    'b': Feature('b', max_length=2),
    'c': Feature('c', max_length=4),
    'a again': Feature('a'),
  },
)
GROUPS = TABLES.groups
N, K, BATCH = TABLES.num_rows, TABLES.num_columns, 2
FIRST, END = TABLES.column_rows
# In no order of groups, and none of `d`.
HOT_ROWS = hot_rows(np.array([21, 3, 15, 13, 1, 28, 29, 17, 0, 11]), N)
FRESH = st.lists(st.integers(0, N - 1), unique=True, max_size=12)
STALE = hnp.arrays(bool, len(HOT_ROWS.rows))


UNTRAINED = UntrainedRows(
  TABLES, [(np.zeros((), np.float32),)] * len(GROUPS), 1
)


def own_rows(fresh):
  """Global rows as those of each group."""
  parts = TABLES.in_groups(np.array(sorted(fresh), np.int64))
  return tuple(rows for _, rows in parts)


def drawn(rng):
  """Lookups of a batch: few ids each, so that rows leave and are needed."""
  rows = rng.integers(FIRST, END, (BATCH, K))
  return np.where(rng.random(rows.shape) < 0.2, -1, rows)


def link_of_others(before, plan):
  """Says of a step that was not taken that it holds all there is."""
  others = before._replace(rows=plan.rows, store=np.arange(len(plan.rows)))
  return link(others, plan)


def popular(rng):
  """Lookups of hot rows alone. Tables without any are not looked up."""
  of_columns = [
    HOT_ROWS.rows[(HOT_ROWS.rows >= first) & (HOT_ROWS.rows < end)]
    for first, end in zip(FIRST, END, strict=True)
  ]
  columns = [rng.choice(np.append(rows, -1), BATCH) for rows in of_columns]
  return np.stack(columns, axis=1)


FOLDER = tempfile.gettempdir()


def storage_of(dram):
  """In memory, on a disk, or on a disk with so many rows in memory."""
  if dram is None:
    return MEMORY
  if not dram:
    return file(FOLDER)

  def start(groups):
    return tuple(TieredStore(first, FOLDER, dram) for first in groups)

  return Storage('tiered', start)


# What the planner may know of the step before; the engine looks by itself.
LINKS = [link, lambda before, plan: plan, link_of_others]


@jax.jit
def trained(block, moves):
  """What a step makes of rows, for which the dictionary has the same bits."""
  return RowBlock(block.rows + moves[:, None], (block.state[0] + moves,))


class EngineMachine(RuleBasedStateMachine):
  @initialize(
    names=st.lists(
      st.sampled_from([*PLACEMENTS, *EVICTIONS, *EVICTIONS]),
      min_size=len(GROUPS),
      max_size=len(GROUPS),
    ),
    # From less than a batch to a few rows more, and to all of them.
    capacity=st.sampled_from([1, 3, 8, 10, 12, 24]),
    look_ahead=st.integers(0, 4),
    links=st.sampled_from(LINKS),
    # In DRAM, three rows of each group and up; None: all of them.
    dram=st.sampled_from([None, None, 0, 3, 20]),
  )
  def start(self, names, capacity, look_ahead, links, dram):
    self.links = links
    self.placements = [
      PLACEMENTS.get(name) or cached(capacity, name, look_ahead)
      for name in names
    ]
    self.least_bytes, group_rows.EARLY_BYTES = group_rows.EARLY_BYTES, 0
    self.look_ahead = max(one.look_ahead for one in self.placements)
    self.saved = [UNTRAINED.block(g) for g in range(len(GROUPS))]
    self.engine = Engine(UNTRAINED, self.placements, HOT_ROWS, storage_of(dram))
    self.hot = self.engine.hot_of_groups
    self.expect(self.saved)
    self.plan_anew()

  def expect(self, tables):
    self.rows = [
      {row: (t.rows[row].copy(), t.state[0][row]) for row in range(len(t.rows))}
      for t in tables
    ]

  def first_states(self, contents):
    return [
      placement.start(group.num_rows, hot, rows)
      for placement, group, hot, rows in zip(
        self.placements, GROUPS, self.hot, contents, strict=True
      )
    ]

  def plan_anew(self):
    changed = self.engine.changed
    contents = self.engine.slot_maps if changed else [None] * len(GROUPS)
    self.planners = self.first_states(contents)
    self.queue, self.before = collections.deque(), [None] * len(GROUPS)
    self.made = collections.deque()  # plans that are not carried out yet
    self.frozen = [set() for _ in GROUPS]

  def unique(self, lookups):
    return [
      unique_rows_of(lookups, group, hot)
      for group, hot in zip(GROUPS, self.hot, strict=True)
    ]

  @rule(
    seed=st.integers(0, 1 << 20),
    batches=st.integers(1, 6),
    hot=st.sampled_from([0, 0.5, 0.9]),
  )
  def know_batches(self, seed, batches, hot):
    rng = np.random.default_rng(seed)
    for _ in range(batches):
      draw = popular if rng.random() < hot else drawn
      self.queue.append(self.unique(draw(rng)))

  @precondition(lambda self: self.queue)
  @rule(plans=st.integers(1, 6), ahead=st.integers(0, 4))
  def plan_ahead(self, plans, ahead):
    for _ in range(min(plans, len(self.queue))):
      self.made.append(self.plan_next(ahead))

  @precondition(lambda self: self.queue or self.made)
  @rule(
    steps=st.integers(1, 6), ahead=st.integers(0, 4), move=st.integers(1, 9)
  )
  def take_steps(self, steps, ahead, move):
    for _ in range(min(steps, len(self.queue) + len(self.made))):
      self.carry_out(self.next_plans(ahead), move)

  @precondition(lambda self: self.queue or self.made)
  @rule(
    ahead=st.integers(0, 4),
    move=st.integers(1, 9),
    fresh=FRESH,
    vector=st.none() | st.integers(20, 30),
  )
  def take_a_step_with_new_ids(self, ahead, move, fresh, vector):
    self.carry_out(self.next_plans(ahead), move, fresh, vector)

  @rule(fresh=FRESH, value=st.integers(10, 20))
  def set_rows(self, fresh, value):
    """They keep their state, in whatever order they come."""
    for g, rows in enumerate(own_rows(fresh)):
      values = np.full((len(rows), GROUPS[g].dim), value, np.float32)
      self.engine.groups[g].set_rows(rows[::-1], values)
      for row in rows.tolist():
        self.rows[g][row] = values[0], self.rows[g][row][1]

  def next_plans(self, ahead):
    return self.made.popleft() if self.made else self.plan_next(ahead)

  def plan_next(self, ahead):
    window = [self.queue[i] for i in range(min(1 + ahead, len(self.queue)))]
    self.queue.popleft()
    known = window[: 1 + self.look_ahead]
    self.planners, plans = self.planned(self.planners, known)
    plans = tuple(
      plan if before is None else self.links(before, plan)
      for before, plan in zip(self.before, plans, strict=True)
    )
    self.before = [
      plan if plan.moves else before
      for before, plan in zip(self.before, plans, strict=True)
    ]
    self.engine.prefetch(plans)
    return plans

  def planned(self, planners, known):
    pairs = [
      placement.plan(planner, [uniques[g] for uniques in known])
      for g, (placement, planner) in enumerate(
        zip(self.placements, planners, strict=True)
      )
    ]
    return [one for one, _ in pairs], tuple(plan for _, plan in pairs)

  def carry_out(self, plans, move, fresh=None, vector=None):
    fresh = None if fresh is None else own_rows(fresh)
    vectors = None
    if vector is not None:  # every other id has one
      vectors = [
        (own[::2], np.full((len(own[::2]), group.dim), vector, np.float32))
        for own, group in zip(fresh, GROUPS, strict=True)
      ]
    blocks = self.engine.load(plans, fresh, vectors=vectors)
    if fresh is not None:
      self.renew(fresh, vector)
    self.check(plans, blocks)
    after = []
    for g, (plan, block) in enumerate(zip(plans, blocks, strict=True)):
      moves = np.zeros(len(block.rows), np.float32)
      for at, row in enumerate(plan.rows.tolist()):
        if row not in self.frozen[g]:
          moves[at] = move
          rows, state = self.rows[g][row]
          self.rows[g][row] = rows + np.float32(move), state + np.float32(move)
      after.append(trained(block, to_device(moves)))
    self.engine.store(plans, after, fresh)

  def renew(self, fresh, vector):
    for g, rows in enumerate(fresh):
      new = UNTRAINED.rows(g, rows)
      if vector is not None:
        new.rows[::2] = vector
      for at, row in enumerate(rows.tolist()):
        self.rows[g][row] = new.rows[at].copy(), new.state[0][at]

  def check(self, plans, blocks):
    for g, (plan, block) in enumerate(zip(plans, blocks, strict=True)):
      rows, state = jax.device_get((block.rows, block.state[0]))
      assert len(set(plan.slots[plan.slots >= 0].tolist())) == (
        np.count_nonzero(plan.slots >= 0)
      )
      for at, row in enumerate(plan.rows.tolist()):
        np.testing.assert_array_equal(rows[at], self.rows[g][row][0])
        assert state[at] == self.rows[g][row][1]

  @precondition(lambda self: self.queue or self.made)
  @rule(ahead=st.integers(0, 4), fresh=st.none() | FRESH)
  def a_step_fails(self, ahead, fresh):
    """Between load and store; whoever goes on plans anew."""
    plans = self.next_plans(ahead)
    if fresh is None:
      self.check(plans, self.engine.load(plans))
    else:  # no row is another one before it is stored
      self.engine.load(plans, own_rows(fresh))
    self.another_planner_goes_on()

  @precondition(lambda self: self.queue or self.made)
  @rule(
    ahead=st.integers(0, 4), move=st.integers(1, 9), fresh=st.none() | FRESH
  )
  def a_step_fails_and_is_tried_again(self, ahead, move, fresh):
    """The plans that were loaded are loaded once more, then carried out."""
    plans = self.next_plans(ahead)
    self.engine.load(plans, None if fresh is None else own_rows(fresh))
    self.carry_out(plans, move, fresh)

  @precondition(lambda self: self.queue)
  @rule(seed=st.integers(0, 1 << 20), batches=st.integers(1, 4))
  def a_plan_for_other_contents_is_refused(self, seed, batches):
    """Made after steps that the engine did not take; it changes nothing."""
    rng = np.random.default_rng(seed)
    strangers = self.first_states(self.engine.slot_maps)
    for _ in range(1 + batches):
      strangers, plans = self.planned(strangers, [self.unique(drawn(rng))])
    with contextlib.suppress(UserError):
      self.engine.load(plans)
    self.another_planner_goes_on()

  @rule(stale=STALE)
  def rows_stand_still(self, stale):
    self.refreeze(stale)
    masks = stale_by_group(stale, self.hot)
    self.frozen = [
      set(hot.rows[mask].tolist())
      for hot, mask in zip(self.hot, masks, strict=True)
    ]

  @rule()
  def rows_thaw(self):
    self.refreeze(None)
    self.frozen = [set() for _ in GROUPS]

  def refreeze(self, stale):
    while self.made:  # they were planned for rows as they are frozen now
      self.carry_out(self.made.popleft(), 1)
    masks = stale_by_group(stale, self.hot)
    of_groups = zip(self.placements, self.planners, masks, strict=True)
    self.planners = [one.freeze(state, mask) for one, state, mask in of_groups]
    self.engine.freeze(stale)

  @rule(seed=st.integers(0, 1 << 20))
  def evaluate(self, seed):
    plans = self.engine.plan(drawn(np.random.default_rng(seed)))
    self.check(plans, self.engine.load(plans))

  def read_back(self):
    return jax.tree.map(np.array, self.engine.read_back())

  @rule()
  def checkpoint(self):
    self.saved = self.read_back()

  @rule()
  def crash_and_restore(self):
    small.replace_rows(self.engine, self.saved)
    self.expect(self.saved)
    self.plan_anew()

  @rule()
  def another_planner_goes_on(self):
    self.engine.freeze(None)
    self.plan_anew()

  @rule()
  def all_rows_are_right(self):
    for table, known in zip(self.read_back(), self.rows, strict=True):
      for row, (rows, state) in known.items():
        np.testing.assert_array_equal(table.rows[row], rows)
        assert table.state[0][row] == state

  @invariant()
  def contents_are_unique_rows(self):
    for contents in self.engine.slot_maps:
      if contents is not None:
        full = contents[contents >= 0]
        assert len(np.unique(full)) == len(full)

  def teardown(self):
    if hasattr(self, 'engine'):
      self.all_rows_are_right()
      self.engine.close()
      group_rows.EARLY_BYTES = self.least_bytes


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
  max_examples=50, stateful_step_count=40, deadline=None
)
