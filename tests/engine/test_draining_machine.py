"""The engine's machine, drained at any time: a dictionary of that moment.

What a drain has are the rows that were marked, with the values that they had
when it began, whatever is stepped on, frozen, evicted or renewed meanwhile.
"""

import copy

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
import jax
import numpy as np

from slipstream_jax.checkpoint.row_snapshot import (
  begin_snapshot,
  Budget,
  save_device_rows,
)
from tests.engine.test_engine_machine import (
  EngineMachine,
  FRESH,
  GROUPS,
  own_rows,
)


def marked_rows(group, token):
  """The rows that changed since the token, ascending."""
  bits = np.unpackbits(group.dirty.bits(token), bitorder='little')
  return np.flatnonzero(bits).tolist()


class DrainingMachine(EngineMachine):
  drains = None

  def expect(self, tables):
    super().expect(tables)
    # Replaced rows are all marked, for nobody knows which of them differ.
    replaced = hasattr(self, 'marked')
    self.marked = [
      set(range(group.num_rows)) if replaced else set() for group in GROUPS
    ]
    self.since = [set(rows) for rows in self.marked]

  def carry_out(self, plans, move, fresh=None, vector=None):
    super().carry_out(plans, move, fresh, vector)
    for g, plan in enumerate(plans):
      changed = set(plan.rows.tolist()) - self.frozen[g]
      # A row that gets another id changes, also where it stands still.
      new = self.fresh[g] if fresh is not None else []
      changed |= {int(row) for row in new}
      self.marked[g] |= changed
      self.since[g] |= changed

  def renew(self, fresh, vector):
    super().renew(fresh, vector)
    self.fresh = fresh

  @rule(fresh=FRESH, value=st.integers(10, 20))
  def set_rows(self, fresh, value):
    super().set_rows(fresh, value)
    for g, rows in enumerate(own_rows(fresh)):
      self.marked[g] |= set(rows.tolist())
      self.since[g] |= set(rows.tolist())

  @rule(piece=st.sampled_from([1, 3, 100]))
  def begin_to_drain(self, piece):
    self.finish()
    self.back_then = copy.deepcopy(self.rows)
    self.going = [set(rows) for rows in self.marked]
    self.drains = []
    for group in self.engine.groups:
      budget = Budget(1 << 20)
      drain = begin_snapshot(group, group.dirty.bits(None), budget)
      drain._piece_rows = piece
      save_device_rows(group, drain)
      group.dirty.begin('this')
      self.drains.append(drain.pieces())
    self.since = [set() for _ in GROUPS]
    self.taken = [[] for _ in GROUPS]

  @precondition(lambda self: self.drains)
  @rule(g=st.integers(0, len(GROUPS) - 1), pieces=st.integers(1, 5))
  def take_some(self, g, pieces):
    for _ in range(pieces):
      piece = next(self.drains[g], None)
      if piece is None:
        return
      self.taken[g].append(jax.tree.map(np.array, piece))

  @precondition(lambda self: self.drains)
  @rule()
  def finish(self):
    for g, drain in enumerate(self.drains or ()):
      self.taken[g] += drain
      rows = [row for piece in self.taken[g] for row in piece[0].tolist()]
      assert rows == sorted(self.going[g])
      for some, block in self.taken[g]:
        for at, row in enumerate(some.tolist()):
          values, state = self.back_then[g][row]
          np.testing.assert_array_equal(block.rows[at], values)
          assert block.state[0][at] == state
    self.drains = None

  @rule()
  def marks_are_right(self):
    for g, group in enumerate(self.engine.groups):
      assert marked_rows(group, None) == sorted(self.marked[g])
      if group.dirty.knows('this'):
        assert marked_rows(group, 'this') == sorted(self.since[g])

  @rule()
  def crash_and_restore(self):
    self.finish()  # what is drained is waited for
    super().crash_and_restore()

  def teardown(self):
    if hasattr(self, 'engine'):
      self.finish()
      self.marks_are_right()
    super().teardown()


TestDrainingMachine = DrainingMachine.TestCase
TestDrainingMachine.settings = settings(
  max_examples=60,
  stateful_step_count=40,
  deadline=None,
  phases=[Phase.explicit, Phase.reuse, Phase.generate],
  report_multiple_bugs=False,
)
