"""The contract of an iterator that can be stopped, for planned batches."""

import gc
import threading
import time
import traceback

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
  initialize,
  precondition,
  rule,
  RuleBasedStateMachine,
)
import pytest

from slipstream_jax.data.admission import CheckedSource, ExampleShape
from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.engine.planner import Planner, Start
from slipstream_jax.errors import UserError
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.schedules.base import PlainSchedule
from tests.support import small

COLUMNS = small.columns(64 * 6)
THREADS = {'slipstream-planner', 'slipstream-worker'}
# Batches ahead, and the threads that find unique rows.
AHEAD = [(0, 1), (1, 1), (2, 1), (8, 1), (0, 4), (1, 2), (2, 4), (2, 11)]


class Source(ColumnBatches):
  """Counts what it made and how often it was closed. Fails at one batch."""

  def __init__(self, fail_at=None, **kwargs):
    super().__init__(COLUMNS, 64, **kwargs)
    self.made, self.fail_at, self.closed = 0, fail_at, 0

  def __next__(self):
    if self.get_state()['delivered'] == self.fail_at:
      raise RuntimeError('the disk is on fire')
    self.made += 1
    return super().__next__()

  def close(self):
    self.closed += 1


def planned(source, depth, workers=1):
  shape = ExampleShape(small.tables(), small.DENSE)
  planner = Planner(
    PlainSchedule(CheckedSource(source, shape)),
    [PLACEMENTS['streamed']],
    shape.tables,
    [None],
    lambda: Start([None], 0),
  )
  return PlannedBatches(planner, depth, workers=workers)


def running_threads():
  return THREADS & {thread.name for thread in threading.enumerate()}


class PlannedMachine(RuleBasedStateMachine):
  """Planned batches against a list and a place in it."""

  @initialize(
    ahead=st.sampled_from(AHEAD),
    epochs=st.integers(1, 2),
    fail_at=st.none() | st.integers(0, 11),
  )
  def start(self, ahead, epochs, fail_at):
    self.expected = [batch.labels.tolist() for batch in Source(epochs=epochs)]
    assert len(self.expected) == 6 * epochs
    if fail_at is not None:  # at a batch, not at the end
      fail_at %= 6 * epochs
    self.source = Source(fail_at, epochs=epochs)
    self.batches = planned(self.source, *ahead)
    self.states, self.at, self.fails = {}, 0, False

  def attempt(self, call):
    """The labels of an item, or None where it must be an end or an error."""
    if self.at == self.source.fail_at:
      with pytest.raises(RuntimeError, match='the disk is on fire') as caught:
        call()
      frames = ''.join(traceback.format_tb(caught.value.__traceback__))
      assert 'test_pipeline.py' in frames
      self.fails = True  # an end here would pass for the end of the data
      return None
    return call()

  @rule()
  def take(self):
    if self.at == len(self.expected):
      with pytest.raises(StopIteration):
        next(self.batches)
      return
    item = self.attempt(lambda: next(self.batches))
    if item is not None:
      assert item.batch.labels.tolist() == self.expected[self.at]
      self.at += 1

  @rule(uses=st.booleans())
  def look(self, uses):
    """An item that was looked at is not used yet."""
    first = self.attempt(self.batches.peek)
    if first is None:
      assert self.fails or self.at == len(self.expected)
      return
    assert first.batch.labels.tolist() == self.expected[self.at]
    assert self.batches.peek() is first
    if uses:
      self.batches.advance()
      self.at += 1

  @rule()
  def ask(self):
    """The position is of what was delivered, not of what was prefetched."""
    for _ in range(2):  # asking is harmless
      state = self.batches.get_state()
      assert state['delivered'] == self.at
    self.states[self.at] = state

  @precondition(lambda self: self.states)
  @rule(data=st.data())
  def go_back(self, data):
    """Drops what is in flight."""
    self.at = data.draw(st.sampled_from(sorted(self.states)))
    self.batches.set_state(self.states[self.at])
    self.fails = False  # the error may be read again before it is mended

  @precondition(lambda self: self.fails)
  @rule()
  def mend(self):
    """The next call tries the same batch again."""
    self.source.fail_at, self.fails = None, False

  def teardown(self):
    if not hasattr(self, 'batches'):
      return
    self.batches.close()
    self.batches.close()
    assert self.source.closed == 2
    assert not running_threads()
    with pytest.raises(StopIteration):
      next(self.batches)


TestPlannedMachine = PlannedMachine.TestCase
TestPlannedMachine.settings = settings(max_examples=25, stateful_step_count=25)


@pytest.mark.parametrize('depth', [-1, -7])
def test_a_negative_depth_is_refused(depth):
  with pytest.raises(UserError, match=f'at least 0, got {depth}'):
    planned(Source(), depth)


def test_an_iterator_that_nobody_closed_ends_its_thread():
  dropped = [planned(Source(), 2) for _ in range(20)]
  for batches in dropped:
    next(batches)
  threads = [t for t in threading.enumerate() if t.name == 'slipstream-planner']
  assert len(threads) == 20
  del dropped, batches
  gc.collect()
  for thread in threads:
    thread.join(60)
  assert not running_threads()


def test_prefetch_is_bounded():
  source = Source()
  batches = planned(source, 2)
  next(batches)
  time.sleep(0.3)
  # One delivered, two queued, one waiting for a place in the queue.
  assert source.made <= 4
  batches.close()
