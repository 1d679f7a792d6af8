"""The contract of an iterator that can be stopped, for planned batches."""

import gc
import itertools
import threading
import time
import traceback

import numpy as np
import pytest

from slipstream_jax.data.admission import CheckedSource, ExampleShape
from slipstream_jax.data.numbered import ColumnBatches, Columns
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.engine.planner import Planner, Start
from slipstream_jax.errors import UserError
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.schedules.base import PlainSchedule
from tests.support import small

# Batches ahead, and the threads that find unique rows.
AHEAD = [(0, 1), (1, 1), (2, 1), (8, 1), (0, 4), (1, 2), (2, 4), (2, 11)]
depths = pytest.mark.parametrize('depth', AHEAD)


class Source(ColumnBatches):
  """Counts what it made, can fail, and knows how often it was closed."""

  def __init__(self, fail_at=None, **kwargs):
    super().__init__(small.columns(64 * 6), 64, **kwargs)
    self.made, self.fail_at, self.closed = 0, fail_at, 0

  def __next__(self):
    if self.made == self.fail_at:
      raise RuntimeError('the disk is on fire')
    batch = super().__next__()
    self.made += 1
    return batch

  def close(self):
    self.closed += 1


def planned(source, depth, **others):
  depth, workers = depth if isinstance(depth, tuple) else (depth, 1)
  shape = ExampleShape(small.tables(), small.DENSE)
  schedule = PlainSchedule(CheckedSource(source, shape))
  planner = Planner(
    schedule,
    [PLACEMENTS['streamed']],
    shape.tables,
    [None],
    lambda: Start([None], 0),
  )
  return PlannedBatches(planner, depth, workers=workers, **others)


def labels(items):
  return [item.batch.labels.tolist() for item in items]


@depths
def test_order_is_that_of_the_source(depth):
  batches = planned(Source(epochs=2), depth)
  found = labels(batches)
  batches.close()
  assert found == [b.labels.tolist() for b in Source(epochs=2)]
  assert len(found) == 12


@depths
def test_state_counts_what_was_delivered_not_what_was_prefetched(depth):
  source = Source()
  batches = planned(source, depth)
  assert batches.get_state()['delivered'] == 0
  for count in range(1, 4):
    next(batches)
    assert batches.get_state()['delivered'] == count
    assert batches.get_state()['delivered'] == count  # asking is harmless
  batches.close()


@depths
def test_set_state_drops_what_is_in_flight(depth):
  batches = planned(Source(), depth)
  start = batches.get_state()
  first = labels(itertools.islice(batches, 3))
  state = batches.get_state()
  then = labels(itertools.islice(batches, 4))
  batches.set_state(state)
  assert labels(itertools.islice(batches, 4)) == then
  batches.set_state(start)
  assert labels(itertools.islice(batches, 3)) == first
  batches.close()


@depths
def test_an_error_in_the_source_surfaces_with_its_traceback(depth):
  batches = planned(Source(fail_at=3), depth)
  assert len(labels(itertools.islice(batches, 3))) == 3
  with pytest.raises(RuntimeError, match='the disk is on fire') as caught:
    next(batches)
  frames = ''.join(traceback.format_tb(caught.value.__traceback__))
  assert 'test_pipeline.py' in frames
  # An end here would pass for the end of the data.
  with pytest.raises(RuntimeError, match='the disk is on fire'):
    next(batches)
  batches.close()


@depths
def test_after_an_error_the_next_call_tries_the_same_batch_again(depth):
  source = Source(fail_at=3, epochs=1)
  batches = planned(source, depth)
  found = labels(itertools.islice(batches, 3))
  with pytest.raises(RuntimeError, match='the disk is on fire'):
    next(batches)
  source.fail_at = None
  found += labels(batches)
  batches.close()
  assert found == [b.labels.tolist() for b in Source(epochs=1)]


@depths
def test_a_batch_looked_at_is_not_used_yet(depth):
  batches = planned(Source(epochs=1), depth)
  first = batches.peek()
  assert batches.peek() is first
  assert batches.get_state()['delivered'] == 0
  batches.advance()
  assert batches.get_state()['delivered'] == 1
  assert next(batches) is not first
  assert len(list(batches)) == 4
  assert batches.peek() is None
  batches.close()


@pytest.mark.parametrize('depth', [-1, -7])
def test_depths_that_cannot_be(depth):
  with pytest.raises(UserError, match=f'at least 0, got {depth}'):
    planned(Source(), depth)


def test_an_iterator_that_nobody_closed_ends_its_thread():
  def names():
    return [thread.name for thread in threading.enumerate()]

  dropped = [planned(Source(), 2) for _ in range(20)]
  for batches in dropped:
    next(batches)
  assert names().count('slipstream-planner') == 20
  threads = [t for t in threading.enumerate() if t.name == 'slipstream-planner']
  del dropped, batches
  gc.collect()
  for thread in threads:
    thread.join(60)
  assert 'slipstream-planner' not in names()


@depths
def test_the_end_stays_the_end(depth):
  batches = planned(Source(epochs=1), depth)
  assert len(list(batches)) == 6
  for _ in range(3):
    with pytest.raises(StopIteration):
      next(batches)
  batches.close()


@depths
def test_close_is_idempotent_and_leaves_no_thread(depth):
  source = Source()
  batches = planned(source, depth)
  next(batches)
  batches.close()
  batches.close()
  assert source.closed == 2
  names = {thread.name for thread in threading.enumerate()}
  assert not names & {'slipstream-planner', 'slipstream-worker'}
  with pytest.raises(StopIteration):
    next(batches)


@depths
def test_closing_before_the_first_read(depth):
  planned(Source(), depth).close()


def test_prefetch_is_bounded():
  source = Source()
  batches = planned(source, 2)
  next(batches)
  time.sleep(0.3)
  # One delivered, two queued, one waiting for a place in the queue.
  assert source.made <= 4
  batches.close()


def test_batches_are_padded_with_nothing():
  columns = small.columns(70)
  source = ColumnBatches(columns, 64, epochs=1, pad_remainder=True)
  whole, rest = list(source)
  assert whole.weights.sum() == 64
  assert rest.weights.sum() == 6
  assert (rest.lookups[6:] == -1).all()
  np.testing.assert_array_equal(rest.lookups[:6], columns.lookups[64:])


def test_shuffled_epochs_hold_every_example_once():
  columns = small.columns(64 * 3)
  source = ColumnBatches(columns, 64, shuffle_seed=5)
  epochs = [
    np.concatenate([batch.dense for batch in itertools.islice(source, 3)])
    for _ in range(2)
  ]
  for epoch in epochs:
    np.testing.assert_array_equal(
      np.sort(epoch, axis=0), np.sort(columns.dense, axis=0)
    )
  assert not np.array_equal(*epochs)


BAD_BATCHES = {
  'row_out_of_bounds': (
    lambda b: b._replace(lookups=b.lookups + 3000),
    r'lookups of feature 0 \(t0\) must be in \[0, 50\)',
  ),
  'features': (lambda b: b._replace(lookups=b.lookups[:, :2]), r'\[64, 4\]'),
  'dense': (
    lambda b: b._replace(dense=b.dense[:, :1]),
    r'4\].*\[64, 1\]',
  ),
  'lengths': (lambda b: b._replace(dense=b.dense[:9]), r'\[64, 4\].*\[9, 4\]'),
  'weights': (lambda b: b._replace(weights=b.weights[:, None]), r'\[64, 1\]'),
}


@pytest.mark.parametrize('case', BAD_BATCHES)
@pytest.mark.parametrize('depth', [0, 2])
def test_a_batch_that_does_not_fit_is_refused(case, depth):
  change, said = BAD_BATCHES[case]

  class Bad(Source):
    def __next__(self):
      return change(super().__next__())

  with planned(Bad(), depth) as batches, pytest.raises(UserError, match=said):
    next(batches)


@pytest.mark.parametrize('size', [0, -1, 100])
def test_batch_sizes_that_cannot_be(size):
  with pytest.raises(UserError, match=f'{size}|got 64'):
    ColumnBatches(small.columns(64), size)


def test_uneven_columns():
  columns = small.columns(64)
  with pytest.raises(UserError, match=r'got \[10, 64, 64\]'):
    ColumnBatches(Columns(columns.dense[:10], *columns[1:]), 8)
