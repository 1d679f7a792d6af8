"""What `link` says, against a dictionary; and that plans need no more."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

from slipstream_jax.placement import cached, EVICTIONS, PLACEMENTS
from slipstream_jax.placement.base import link, plan_with
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.store.host_table import unique_rows

ALL = PLACEMENTS | {
  f'{name}_{rows}': cached(rows, name, look_ahead=2)
  for name in EVICTIONS
  for rows in (1, 5, 40)
}


UNIQUE = hnp.arrays(
  np.int64, st.integers(0, 30), elements=st.integers(0, 40), unique=True
)
# Rows that a product hashes to few places, too.
two_plans = given(
  both=st.tuples(UNIQUE, UNIQUE),
  without_slot=hnp.arrays(bool, (2, 41)),
  factor=st.sampled_from([1, 3, 1 << 20, 1 << 32]),
)


def plans(both, without_slot, factor):
  """Over rows of which some have slots."""
  return [
    plan_with(
      unique_rows((rows * factor)[:, None], 41 * factor),
      np.where(missing[rows], -1, 0),
    )
    for rows, missing in zip(both, without_slot, strict=True)
  ]


@two_plans
def test_link_is_a_look_up_in_a_dictionary(both, without_slot, factor):
  before, plan = plans(both, without_slot, factor)
  stored = {row: i for i, row in enumerate(before.rows[before.store].tolist())}
  linked = link(before, plan)
  expected = [stored.get(row, -1) for row in plan.rows[plan.load].tolist()]
  assert linked.forward.at.tolist() == expected
  assert linked.forward.before is before.rows
  for one, other in zip(linked[:-1], plan[:-1], strict=True):
    assert one is other


@two_plans
def test_linking_anew_forgets_the_old_link(both, without_slot, factor):
  before, plan = plans(both, without_slot, factor)
  again, once = link(before, link(plan, plan)), link(before, plan)
  assert again.forward.before is once.forward.before
  np.testing.assert_array_equal(again.forward.at, once.forward.at)


class Late:
  """A host table that gets what a step stored only after the next one's load.

  Rows are versions: how often they were trained.
  """

  def __init__(self, num_rows, contents):
    self.host, self.newest = [0] * num_rows, [0] * num_rows
    self.device = dict.fromkeys(contents.tolist(), 0)
    self.before, self.block, self.on_the_way = None, [], []
    self.forwarded = 0

  def step(self, plan, frozen):
    settled = len(self.on_the_way) - len(self.block)
    for row, version in self.on_the_way[:settled]:
      self.host[row] = version
    del self.on_the_way[:settled]
    for row in plan.evict.tolist():
      self.on_the_way.append((row, self.device.pop(row)))
    rows = plan.rows.tolist()
    loaded = dict.fromkeys(plan.load.tolist())
    if self.before is not None:
      plan = link(self.before, plan)
      for i, at in zip(plan.load, plan.forward.at.tolist(), strict=True):
        loaded[i] = None if at < 0 else self.block[at]
        self.forwarded += at >= 0
    for i, row in enumerate(rows):
      held = loaded.get(i) if i in loaded else self.device[row]
      version = self.host[row] if held is None else held
      assert version == self.newest[row], 'a stale version'
      self.newest[row] += row not in frozen
      if plan.slots[i] >= 0:
        self.device[row] = self.newest[row]
    kept = plan.slots >= 0
    # A clean row leaves unseen: who has its slot now is on the device.
    for row, slot in zip(plan.rows[kept], plan.slots[kept], strict=True):
      self.taken[int(slot)] = int(row)
    for row in set(self.device) - set(self.taken.values()):
      del self.device[row]
    self.before = plan
    self.block = [self.newest[rows[i]] for i in plan.store.tolist()]
    stored = plan.rows[plan.store].tolist()
    self.on_the_way += list(zip(stored, self.block, strict=True))


@pytest.mark.parametrize('name', ALL)
@given(
  lookups=hnp.arrays(
    np.int64, st.tuples(st.integers(1, 12), st.integers(1, 8)),
    elements=st.integers(-1, 30),
  ),
  frozen=st.none() | hnp.arrays(bool, 12),
)  # fmt: skip
def test_a_host_table_that_is_late_by_a_step_is_early_enough(
  name, lookups, frozen
):
  """Each row of the array is a batch; rows stand still from the start on."""
  placement, hot = ALL[name], hot_rows(np.arange(5, 29, 2), 31)
  contents = placement.keeps(31, hot)
  contents = np.arange(31) if contents is None else contents
  late = Late(31, contents[contents >= 0])
  late.taken = dict(enumerate(contents.tolist()))
  still = set() if frozen is None else set(hot.rows[frozen].tolist())
  if frozen is not None and placement.copies_frozen:
    late.taken = {}
  state = placement.freeze(placement.start(31, hot, None), frozen)
  batches = [unique_rows(batch[:, None], 31, hot) for batch in lookups]
  for number in range(len(batches)):
    state, plan = placement.plan(state, batches[number:])
    late.step(plan, still)


def test_it_forwards_what_batches_share():
  late, streamed = Late(31, np.empty(0, np.int64)), PLACEMENTS['streamed']
  late.taken, state = {}, streamed.start(31, None, None)
  for shift in (0, 3, 6):
    batch = unique_rows(np.arange(shift, shift + 8)[:, None], 31)
    late.step(streamed.plan(state, [batch])[1], set())
  assert late.forwarded == 5 + 5
