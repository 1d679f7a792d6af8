"""A state machine against a dictionary: steps, saves, crashes, restores.

What a crash leaves is what a killed process would: bytes of a file that has no
name yet, files that no manifest names, some of what was to be removed. Whatever
happens, the newest checkpoint that was published is what a restore finds.
"""

import pathlib
import shutil
import tempfile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
  initialize,
  invariant,
  rule,
  RuleBasedStateMachine,
)

from slipstream_jax.checkpoint.chain import (
  consolidate,
  drop_later,
  find_chains,
  prune,
)
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.checkpoint.policies import CHECKPOINT_POLICIES
from tests.checkpoint import small

STEPS = st.sets(st.integers(0, 9), max_size=6)
"""Rows that a step changes: few, so that checkpoints have many in common."""


class Killed(BaseException):
  """The process is no more."""


class Mortal:
  """A folder whose process is killed at the n-th thing that it changes."""

  def __init__(self, path):
    self.place, self.left = open_place(path), None
    for name in ('url', 'open', 'read', 'size', 'names', 'sweep'):
      setattr(self, name, getattr(self.place, name))

  def count(self):
    if self.left is not None:
      self.left -= 1
      if self.left < 0:
        raise Killed

  def write(self, name, pieces):
    parts = []
    try:
      for piece in pieces:
        self.count()
        parts.append(bytes(piece))
      self.count()
    except Killed:
      with open(f'{self.url}/{name}.slipstream-tmp', 'wb') as file:
        file.writelines(parts)
      raise
    size = self.place.write(name, parts)
    self.count()
    return size

  def delete(self, name):
    self.count()
    self.place.delete(name)


class Machine(RuleBasedStateMachine):
  """Rows are numbers of the step that changed them last."""

  def __init__(self):
    super().__init__()
    self.root = tempfile.mkdtemp(prefix='slipstream-')
    self.place = Mortal(pathlib.Path(self.root))
    self.step, self.table, self.changed = 0, {}, {}
    self.saved = {}  # of each published step, newest last: what it holds

  def teardown(self):
    shutil.rmtree(self.root)

  @initialize(
    policy=st.sampled_from(['consecutive', *CHECKPOINT_POLICIES]),
    steps=st.lists(STEPS, max_size=3),
  )
  def choose(self, policy, steps):
    self.policy = CHECKPOINT_POLICIES[policy]
    for rows in steps:
      self.train(rows)
      self.save()

  @rule(rows=STEPS)
  def train(self, rows):
    self.step += 1
    self.changed[self.step] = rows
    self.table |= dict.fromkeys(rows, self.step)

  @rule(rows=STEPS)
  def train_and_save(self, rows):
    self.train(rows)
    self.save()

  @rule()
  def save(self):
    self._save()

  def _save(self):
    if self.step in self.saved:
      return
    chain = next(iter(find_chains(self.place).chains), ())
    parent = self.policy(chain)
    since = -1 if parent is None else parent
    rows = set().union(
      *(rows for step, rows in self.changed.items() if step > since)
    )
    table, self.pending = dict(self.table), (self.step, dict(self.table))
    write_table(self.place, chain, parent, self.step, sorted(rows), table)
    self.saved[self.step] = table

  @rule(keep=st.integers(1, 3))
  def prune(self, keep):
    prune(self.place, keep)

  @rule(below=st.integers(0, 2))
  def consolidate(self, below):
    self._consolidate(below)

  def _consolidate(self, below):
    """The newest, or one beneath it."""
    for chain in find_chains(self.place).chains:
      consolidate(self.place, chain[: max(1, len(chain) - below)])

  @rule()
  def restore(self):
    """A run goes on from the newest: what was trained since is no more."""
    chains = find_chains(self.place).chains
    self.step = chains[0][-1].step if chains else 0
    self.table = dict(self.saved.get(self.step, {}))
    self.changed = {s: r for s, r in self.changed.items() if s <= self.step}

  @rule()
  def go_back(self):
    """The same from the one before, where it is kept."""
    chains = find_chains(self.place, most=2).chains
    if len(chains) == 2:
      step = chains[1][-1].step
      drop_later(self.place, step)
      self.saved = {s: t for s, t in self.saved.items() if s <= step}
      self.restore()

  @rule(
    left=st.integers(0, 12),
    during=st.sampled_from(['_save', '_consolidate', 'prune']),
    argument=st.integers(1, 2),
  )
  def kill(self, left, during, argument):
    self.place.left, self.pending = left, None
    try:
      if during == '_save':
        self._save()
      elif during == '_consolidate':
        self._consolidate(argument)
      else:
        prune(self.place, argument)
    except Killed:
      self.place.left = None
      # It may have been published, though nobody heard of it.
      if self.pending is not None:
        newest = next(iter(find_chains(self.place).chains), ())
        if newest and newest[-1].step == self.pending[0]:
          self.saved[self.pending[0]] = self.pending[1]
      self.restore()
    self.place.left = None

  @invariant()
  def the_newest_published_is_there(self):
    chains, skipped = find_chains(self.place)
    assert not skipped
    if not self.saved:
      assert not chains
      return
    [chain] = chains
    step = max(self.saved)
    assert chain[-1].step == step
    meant = {}
    for row, last in self.saved[step].items():
      meant |= small.expected('rows', [row], last)
    assert small.restored(self.place, chain) == meant


def write_table(place, chain, parent, step, rows, table):
  """As `small.save`, of rows with the values of the step that changed them."""
  pieces = [small.piece('rows', [row], table[row]) for row in rows]
  small.save_pieces(place, chain, parent, step, pieces, 'rows')


TestMachine = Machine.TestCase
TestMachine.settings = settings(
  max_examples=50, stateful_step_count=30, deadline=None
)
