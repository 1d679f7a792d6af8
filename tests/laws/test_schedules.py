"""Laws of schedules: when they end, what they emit, how they resume."""

from unittest import mock

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.data.admission import InputShape
from slipstream_jax.errors import UserError
from slipstream_jax.placement import cached, PLACEMENTS
from slipstream_jax.schedules import slipstream as module
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Settings
from slipstream_jax.schedules.slipstream import slipstream
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.stream.pipeline import PlannedBatches
from slipstream_jax.stream.probe import StepProbe
from slipstream_jax.tables import Table, TableSet
from tests.support.schedule_bench import (
  cut,
  DENSE,
  facts,
  HOT_ROWS,
  in_time,
  inputs,
  ROWS,
  run,
  same,
  Stream,
  Trainer,
)

EVERY = [('rows', 'stale'), *(('inputs', name) for name in POLICIES)]
every_policy = pytest.mark.parametrize(('mode', 'policy'), EVERY)


@st.composite
def all_phases(draw, settle=1):
  """Phases that fit one another, with at least `settle` batches to settle."""
  warm_up, window = draw(st.integers(0, 4)), draw(st.integers(1, 4))
  settle = draw(st.integers(settle, settle + 4))
  again = draw(st.booleans())
  least = window + settle + (warm_up if again else 0)
  more = draw(st.one_of(st.none(), st.integers(1, 12)))
  period = 0 if more is None else least + more
  return Phases(warm_up, window, settle, period, again)


@st.composite
def all_settings(draw, settle=1):
  mode, policy = draw(st.sampled_from(EVERY))
  return Settings(
    mode,
    policy,
    draw(st.sampled_from([0, 0.3, 0.7, 1])),
    draw(all_phases(settle)),
    draw(st.sampled_from([None, 1, 2, (1, 1, 1)])),
    draw(st.integers(0, 1)),
    draw(st.sampled_from([None, None, None, 0.05])),
    draw(st.integers(0, 99)),
  )


@st.composite
def all_streams(draw):
  """A function that makes the same stream again and again."""
  n, size = draw(st.integers(1, 40)), draw(st.integers(1, 6))
  rng = np.random.default_rng(draw(st.integers(0, 10**6)))
  idle = draw(st.sampled_from([0, 0, 0.2, 0.6, 0.9]))
  weights = np.where(rng.random(n) < idle, 0, rng.choice([1, 1, 0.5, 2], n))
  batches = cut(inputs(weights, draw(st.integers(0, 99))), size)
  epochs = draw(st.sampled_from([None, 1, 2, 5]))
  return lambda: Stream(batches, epochs)


@pytest.fixture(autouse=True, scope='module')
def _few_idle_batches():
  with mock.patch.object(module, '_NOTHING', 40):
    yield


def assert_resumes(stream, settings, whole, positions, **how):
  for position in positions:
    rest = run(stream(), settings, position=position, **how)
    assert same(rest.emitted, whole.emitted[position.emitted :])
    assert rest.rows.tobytes() == whole.rows.tobytes()
    assert (rest.unreported, rest.error) == (whole.unreported, whole.error)


resumed = given(
  st.data(),
  all_streams(),
  all_settings(),
  st.one_of(st.none(), st.integers(0, 90)),
  st.sampled_from([1, 2, 7, 256]),
)


@resumed
def test_resuming_gives_what_was_to_come(data, stream, settings, limit, replay):
  resumes(data, stream, settings, limit, replay)


@pytest.mark.slow
@hypothesis_settings(max_examples=3000)
@resumed
def test_resuming_in_many_cases(data, stream, settings, limit, replay):
  resumes(data, stream, settings, limit, replay)


def resumes(data, stream, settings, limit, replay):
  with mock.patch.object(module, '_REPLAY', replay):
    how = {'batches': limit, 'most': 90}
    whole = run(stream(), settings, keep=True, **how)
    some = st.lists(st.integers(0, 89), min_size=3, max_size=3)
    few = [i % len(whole.positions) for i in data.draw(some) if whole.positions]
    chosen = [whole.positions[i] for i in few] + whole.positions[-1:]
    assert_resumes(stream, settings, whole, chosen, **how)


@every_policy
@pytest.mark.parametrize(('idle', 'replay'), [(0, 3), (0.3, 256)])
def test_resuming_after_every_batch(mode, policy, idle, replay):
  rng = np.random.default_rng(5)
  weights = np.where(rng.random(60) < idle, 0, 1)
  batches = cut(inputs(weights), 4)
  settings = Settings(mode, policy, 0.5, Phases(2, 4, 3, 13), seed=1)
  with mock.patch.object(module, '_REPLAY', replay):
    whole = run(Stream(batches, 2), settings, keep=True)
    events = [item.event['kind'] for item in whole.emitted if item.event]
    assert events.count('decision') >= 2
    assert whole.error is None
    assert_resumes(lambda: Stream(batches, 2), settings, whole, whole.positions)


@pytest.mark.parametrize('policy', ['surprise', 'stale'])
def test_resuming_the_default_run(policy):
  """Of configs/criteo.py:smoke, where batch 512 is one of `settle`."""
  batches = cut(inputs(np.ones(2 * 60)), 2)
  settings = Settings('inputs', policy, 0.3, Phases(10, 12, 4, 100))
  how = {'batches': 640, 'most': 640}
  whole = run(Stream(batches), settings, keep=True, **how)
  read = np.cumsum([item.seen for item in whole.emitted]) // 2
  at = [n for n in range(len(read)) if 505 <= read[n] <= 540]
  chosen = [whole.positions[i] for i in (199, 299, *at[::3], -1)]
  assert_resumes(lambda: Stream(batches), settings, whole, chosen, **how)


@every_policy
@pytest.mark.parametrize('limited', [False, True])
def test_a_source_that_ends_as_a_decision_is_due(mode, policy, limited):
  """Whether its last inputs fill a batch or not."""
  phases = Phases(1, 2, 2, 9)
  settings = Settings(mode, policy, 0.5, phases)
  due = 1 + 2 + (2 if settings.compares_rows else 0)
  for weights in ([1] * due * 4, [1] * (due * 4 - 2) + [0, 0]):
    batches = cut(inputs(weights), 4)
    how = {'batches': due} if limited else {}
    whole = run(Stream(batches, 1), settings, keep=True, **how)
    trained = sum((item.batch.weights > 0).sum() for item in whole.emitted)
    assert trained == sum(weights)
    assert whole.error is None
    for ahead in (0, 1):
      ended = run(Stream(batches, 1), settings, ahead=ahead, **how)
      assert same(ended.emitted, whole.emitted)
    assert_resumes(
      lambda b=batches: Stream(b, 1), settings, whole, whole.positions, **how
    )


planned_ahead = given(
  st.data(), all_streams(), st.integers(0, 6), st.integers(0, 5)
)


@planned_ahead
def test_looking_ahead_changes_nothing_and_ends(data, stream, ahead, prefetch):
  looks_ahead(data, stream, ahead, prefetch)


@pytest.mark.slow
@hypothesis_settings(max_examples=3000)
@planned_ahead
def test_looking_ahead_in_many_cases(data, stream, ahead, prefetch):
  looks_ahead(data, stream, ahead, prefetch)


def looks_ahead(data, stream, ahead, prefetch):
  settings = data.draw(all_settings(ahead + 1))
  plain = run(stream(), settings)
  other = run(stream(), settings, ahead=ahead, prefetch=prefetch)
  assert same(plain.emitted, other.emitted)
  assert (plain.unreported, plain.error) == (other.unreported, other.error)
  if plain.error is None:  # else what is held is not trained any more
    assert plain.rows.tobytes() == other.rows.tobytes()


HUNG = {
  'a_fifth_of_weight_0': (16, 20, np.arange(16 * 50) % 5 > 0, 16),
  'a_padded_remainder': (16, 17, np.ones(65), 16),
  'less_than_a_batch': (16, 1, np.ones(5), 0),
}


@every_policy
@pytest.mark.parametrize('case', HUNG)
def test_no_wait_for_a_batch_that_is_not_going_to_come(case, mode, policy):
  size, settle, weights, ahead = HUNG[case]
  phases = Phases(2, 3, settle, 3 * settle + 20)
  settings = Settings(mode, policy, 0.5, phases)
  batches = cut(inputs(weights), size)
  for prefetch in (0, 3):
    done = run(
      Stream(batches, None), settings, ahead=ahead, prefetch=prefetch, most=120
    )
    assert done.error is None
    assert len(done.emitted) == 120
    assert any(item.event.get('kind') == 'decision' for item in done.emitted)


# What a schedule does with full batches, as it did before it counted what was
# given to train: the default run keeps its bits.


def marks_of_full_batches(phases, batch):
  """(opens, closes, decides) by the batch's number alone."""
  since = batch - phases.warm_up
  if phases.period and phases.warm_up_again:
    since = batch % phases.period - phases.warm_up
  elif phases.period and since > 0:
    since %= phases.period
  closes = since == phases.window - 1
  return since == 0, closes, since == phases.window + phases.settle


@given(all_phases(), st.integers(1, 5), st.integers(0, 99))
def test_full_batches_are_marked_by_their_number(phases, size, seed):
  stream = Stream(cut(inputs(np.ones(size * 40), seed, cold=0), size), 2)
  done = run(stream, Settings('rows', 'stale', 0.5, phases))
  assert len(done.emitted) == 80
  for i, item in enumerate(done.emitted):
    opens, closes, decides = marks_of_full_batches(phases, i)
    assert item.edge.opens == opens
    assert item.edge.closes == (i + 1 if closes else None)
    assert (item.edge.stale is not None) == decides
    assert bool(item.event) == decides
    assert not decides or item.event['batches_seen'] == i


@given(all_phases(), st.sampled_from(list(POLICIES)), st.integers(0, 99))
def test_decisions_on_full_batches_come_by_number(phases, policy, seed):
  stream = Stream(cut(inputs(np.ones(5 * 40), seed, cold=0), 5), 2)
  settings = Settings('inputs', policy, 0.3, phases)
  done = run(stream, settings)
  if not settings.compares_rows:
    phases = phases._replace(window=0)
  due = [i for i in range(80) if marks_of_full_batches(phases, i)[2]]
  seen = [item.event['batches_seen'] for item in done.emitted if item.event]
  assert seen == due[: len(seen)]
  assert len(due) - len(seen) <= 1  # the last may have nothing to go with
  closed = [item.edge.closes for item in done.emitted if item.edge.closes]
  windows = [i + 1 for i in range(80) if marks_of_full_batches(phases, i)[1]]
  assert closed == (windows if phases.window else [])


def test_a_decision_that_the_next_period_overtakes_is_dropped():
  """Of 6 inputs a batch 1 counts: none is decided before the next window."""
  batches = cut(inputs(np.arange(6 * 60) % 6 == 0), 6)
  settings = Settings('rows', 'stale', 0.5, Phases(0, 2, 2, 8))
  done = run(Stream(batches, 4), settings)
  told = {item.event['kind'] for item in done.emitted if item.event}
  assert told == {'undecided'}
  assert all(item.edge.stale is None for item in done.emitted)
  assert sum(item.edge.opens for item in done.emitted) > 10


@every_policy
def test_an_endless_source_that_leaves_nothing_to_train(mode, policy):
  batches = cut(inputs(np.ones(40), cold=0), 4)
  settings = Settings(mode, policy, 1, Phases(1, 2, 2, 0), min_touches=0)
  if policy in ('stale', 'random') and mode == 'inputs':
    done = run(Stream(batches), settings._replace(threshold=1e9))
    assert 'the drop target must leave inputs to train, got 1,' in done.error
    assert 'none of the last 40 batches' in done.error
  done = run(Stream(cut(inputs(np.zeros(40)), 4)), settings)
  assert 'inputs of a weight above 0, got 40 batches in a row' in done.error


def test_a_finite_source_may_leave_nothing_to_train():
  batches = cut(inputs(np.ones(40), cold=0), 4)
  settings = Settings('inputs', 'random', 1, Phases(1, 2, 2, 0))
  done = run(Stream(batches, 2), settings)
  assert done.error is None
  assert done.unreported == (4 * 17, 4 * 17)


@pytest.mark.parametrize('mode', ['inputs', 'rows'])
def test_a_sample_without_hot_inputs_is_told(mode):
  batches = cut(inputs(np.ones(40), cold=3), 4)
  settings = Settings(mode, 'stale', 0.5, Phases(1, 2, 2, 0))
  done = run(Stream(batches), settings)
  assert 'got 8 inputs, 0 of them hot (Phases.settle)' in done.error


def test_settle_counts_no_batch_of_padding():
  """Without a window, too: of five batches one holds inputs."""
  batches = cut(inputs(np.repeat([1, 0], [4, 16]), cold=0), 4)
  for period, kinds in (
    (0, ['decision']),
    (12, ['decision'] * 4),
    (6, ['undecided'] * 7),  # the eighth has no batch to go with
  ):
    settings = Settings('inputs', 'random', 0.5, Phases(1, 2, 2, period))
    done = run(Stream(batches, 10), settings)
    assert [i.event['kind'] for i in done.emitted if i.event] == kinds


# Real threads, a real plan, a real mailbox; only the steps are numpy's.


@hypothesis_settings(max_examples=60)
@given(
  st.data(),
  all_streams(),
  st.sampled_from(['pinned', 'streamed', 'cached']),
  st.integers(0, 4),
)
def test_prefetching_changes_nothing_and_ends(data, stream, placement, depth):
  ahead = data.draw(st.integers(0, 4)) if placement == 'cached' else 0
  settings = data.draw(all_settings(ahead + 1))
  plain = run(stream(), settings, most=60)
  placed = (PLACEMENTS | {'cached': cached(5, look_ahead=ahead)})[placement]
  found, rows = in_time(lambda: planned(stream(), settings, placed, depth))
  if plain.error is None:
    assert same(found, plain.emitted)
    assert rows.tobytes() == plain.rows.tobytes()
  else:
    assert same(found, plain.emitted[: len(found)])


def planned(source, settings, placement, depth, most=60):
  trainer, probe, found = Trainer(), StepProbe(), []
  schedule = slipstream(settings).make(source, HOT_ROWS, probe)
  shape = InputShape(TableSet((Table('all', ROWS),), 1), DENSE)
  made = PlannedBatches(schedule, placement, shape, depth, HOT_ROWS, probe)
  with made as batches:
    try:
      for item, _ in zip(batches, range(most), strict=False):
        found.append(facts(item.scheduled))
        trainer.step(item.scheduled)
        if item.scheduled.edge.closes is not None:
          probe.put(trainer.window, trainer.change)
    except UserError:
      pass
  return found, trainer.rows
