"""Laws of every schedule: when it ends, what it emits, how it resumes."""

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.checkpoint.state import pack
from slipstream_jax.engine.pipeline import PlannedBatches, StepProbe
from slipstream_jax.engine.planner import Planner, Start
from slipstream_jax.errors import UserError
from slipstream_jax.placement import cached, PLACEMENTS
from slipstream_jax.schedules import slipstream as module
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.schedules.systems import SCHEDULES
from slipstream_jax.tables import tables_of
from tests.support.schedule_bench import (
  cut,
  examples,
  facts,
  HOT_ROWS,
  ROWS,
  run,
  same,
  Stream,
  TrainerParts,
)
from tests.support.schedule_draws import (
  all_streams,
  any_spec,
  assert_resumes,
  IN_ORDER,
  SOME,
)
from tests.support.watchdog import watchdog

every_schedule = pytest.mark.parametrize('name', SCHEDULES)


@pytest.fixture(autouse=True, scope='module')
def _few_idle_batches():
  with mock.patch.object(module, '_NOTHING', 40):
    yield


@every_schedule
@given(st.data(), all_streams(), st.sampled_from([1, 2, 7, 256]))
def test_resuming_gives_what_was_to_come(name, data, stream, replay):
  spec = data.draw(any_spec(name))
  with mock.patch.object(module, '_REPLAY', replay):
    whole = run(stream(), spec, keep=True, most=90)
    some = st.lists(st.integers(0, 89), min_size=3, max_size=3)
    few = [i % len(whole.positions) for i in data.draw(some) if whole.positions]
    chosen = [whole.positions[i] for i in few] + whole.positions[-1:]
    assert_resumes(stream, spec, whole, chosen, most=90)


def test_a_resumed_run_knows_that_rows_are_frozen():
  """Rows that get another id meanwhile are thawed, and no others."""
  batches = cut(examples(np.ones(160)), 4, fresh=True)
  frozen = Skip(0.7, 'stale', 'rows', Phases(1, 2, 2, 20), min_touches=0)
  with mock.patch.object(module, '_REPLAY', 3):
    whole = run(Stream(batches, 2), frozen, keep=True)
    assert_resumes(lambda: Stream(batches, 2), frozen, whole, whole.positions)


@every_schedule
def test_every_example_is_reported_once(name):
  batches = cut(examples(np.ones(200)), 4)
  done = run(Stream(batches, 1), SCHEDULES[name](*SOME[name]))
  seen = sum(item.seen for item in done.emitted) + done.unreported[0]
  dropped = sum(item.dropped for item in done.emitted) + done.unreported[1]
  trained = sum((item.batch.weights > 0).sum() for item in done.emitted)
  assert (seen, trained) == (200, 200 - dropped)
  assert bool(dropped) == (name == 'slipstream')


@pytest.mark.parametrize('name', IN_ORDER)
@given(st.data(), all_streams())
def test_fresh_rows_come_in_order_with_the_first_examples_after_them(
  name, data, stream
):
  """Each once; and the last one before an example, no later than with it."""
  source = Apart(stream())
  spec = data.draw(any_spec(name, in_order=True))
  done = run(source, spec, most=90)
  read = source.read
  fresh = [row for batch in read for row in fresh_of(batch)]
  found = [row for item in done.emitted for row in fresh_of(item.batch)]
  assert found == fresh[: len(found)]
  if name == 'plain':
    for item, batch in zip(done.emitted, read, strict=False):
      assert fresh_of(item.batch) == fresh_of(batch)
    return
  # How many there are up to the batch of each example, in the order of reading.
  counts = np.cumsum([len(fresh_of(batch)) for batch in read])
  left = iter(
    (value.tobytes(), count)
    for batch, count in zip(read, counts.tolist(), strict=True)
    for value in batch.dense[batch.weights > 0]
  )
  so_far = 0
  for item in done.emitted:
    so_far += len(fresh_of(item.batch))
    real = item.batch.weights > 0
    for value in item.batch.dense[real]:
      due = next(count for key, count in left if key == value.tobytes())
    # Padded is the last batch: what comes after its examples goes with it.
    assert so_far == due or (so_far > due and not real.all())


class Apart(Stream):
  """Of which the same example is another one in each epoch."""

  def __init__(self, stream):
    super().__init__(stream.batches, stream.epochs)
    self.read = []

  def __next__(self):
    epoch = self.delivered // len(self.batches)
    batch = super().__next__()
    dense = batch.dense + np.float32(16 * epoch)
    self.read.append(batch._replace(dense=dense))
    return self.read[-1]


def fresh_of(batch):
  return [] if batch.fresh is None else batch.fresh.tolist()


@every_schedule
def test_asking_for_the_position_changes_nothing_and_closing_twice_is_no_error(
  name,
):
  def in_bytes(state):
    packed = pack(state)
    return packed.state, packed.data

  source = Stream(cut(examples(np.ones(40)), 4), 1)
  schedule = SCHEDULES[name](*SOME[name]).make(source, HOT_ROWS, StepProbe())
  for _ in range(4):
    item = next(schedule)
    asked = [in_bytes(schedule.get_state()) for _ in range(2)]
    assert asked == [in_bytes(item.state)] * 2
  schedule.close()
  schedule.close()
  assert source.closed == 2


@every_schedule
@given(st.data(), all_streams(), st.integers(0, 6), st.integers(0, 5))
def test_looking_ahead_changes_nothing_and_ends(
  name, data, stream, ahead, prefetch
):
  spec = data.draw(any_spec(name, ahead + 1))
  direct = run(stream(), spec, most=90)
  other = run(stream(), spec, most=90, ahead=ahead, prefetch=prefetch)
  assert same(direct.emitted, other.emitted)
  assert (direct.unreported, direct.error) == (other.unreported, other.error)
  if direct.error is None:  # else what is held is not trained any more
    assert direct.rows.tobytes() == other.rows.tobytes()


# Real threads, a real plan, a real mailbox; only the steps are numpy's.


@every_schedule
@given(
  st.data(),
  all_streams(),
  st.sampled_from(['pinned', 'streamed', 'cached']),
  st.integers(0, 4),
)
def test_prefetching_changes_nothing_and_ends(
  name, data, stream, placement, depth
):
  ahead = data.draw(st.integers(0, 4)) if placement == 'cached' else 0
  spec = data.draw(any_spec(name, ahead + 1))
  direct = run(stream(), spec, most=60)
  placed = (PLACEMENTS | {'cached': cached(5, look_ahead=ahead)})[placement]
  workers = data.draw(st.integers(1, 4))
  with watchdog():
    emitted, rows = planned(stream(), spec, placed, depth, workers)
  if direct.error is None:
    assert same(emitted, direct.emitted)
    assert rows.tobytes() == direct.rows.tobytes()
  else:
    assert same(emitted, direct.emitted[: len(emitted)])


def planned(source, spec, placement, depth, workers, most=60):
  trainer, probe, emitted = TrainerParts(), StepProbe(), []
  schedule = spec.make(source, HOT_ROWS, probe)
  tables = tables_of({'all': ROWS}, dim=1)
  hot = [HOT_ROWS]
  planner = Planner(
    schedule, [placement], tables, hot, lambda: Start([None], 0)
  )
  with PlannedBatches(planner, depth, probe, workers=workers) as batches:
    try:
      for item, _ in zip(batches, range(most), strict=False):
        emitted.append(facts(item.scheduled))
        trainer.step(item.scheduled)
        if item.scheduled.edge.closes is not None:
          probe.put(trainer.window, trainer.change)
        if item.scheduled.edge.scores is not None:
          number = item.scheduled.edge.scores
          probe.losses.put(number, trainer.losses[number])
        if item.scheduled.edge.predicts is not None:
          for number, _ in item.scheduled.edge.predicts.batches:
            probe.logits.put(number, trainer.logits[number])
    except UserError:
      pass
  return emitted, trainer.rows
