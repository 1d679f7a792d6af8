"""When Slipstream compares, decides and ends, on streams of any weights."""

from unittest import mock

from hypothesis import example, given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.schedules import slipstream as module
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.selection import target
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.types import Batch
from tests.support.schedule_bench import (
  cut,
  examples,
  ROWS,
  run,
  same,
  Stream,
)
from tests.support.schedule_draws import (
  all_phases,
  MODES_AND_POLICIES,
)

every_policy = pytest.mark.parametrize(('mode', 'policy'), MODES_AND_POLICIES)


@pytest.fixture(autouse=True, scope='module')
def _few_idle_batches():
  with mock.patch.object(module, '_NOTHING', 40):
    yield


@every_policy
@pytest.mark.parametrize('limited', [False, True])
def test_a_source_that_ends_as_a_decision_is_due(mode, policy, limited):
  """Whether its last examples fill a batch or not."""
  settings = Skip(0.5, policy, mode, Phases(1, 2, 2, 9))
  due = 1 + 2 + (2 if settings.compares_rows else 0)
  for weights in ([1] * due * 4, [1] * (due * 4 - 2) + [0, 0]):
    batches = cut(examples(weights), 4)
    how = {'batches': due} if limited else {}
    whole, ahead = (
      run(Stream(batches, 1), settings, ahead=ahead, **how) for ahead in (0, 1)
    )
    trained = sum((item.batch.weights > 0).sum() for item in whole.emitted)
    assert trained == sum(weights)
    assert whole.error is None
    assert same(ahead.emitted, whole.emitted)


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
  settings = Skip(0.5, policy, mode, phases)
  batches = cut(examples(weights), size)
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
  stream = Stream(cut(examples(np.ones(size * 40), seed, cold=0), size), 2)
  done = run(stream, Skip(0.5, 'stale', 'rows', phases))
  assert len(done.emitted) == 80
  for i, item in enumerate(done.emitted):
    opens, closes, decides = marks_of_full_batches(phases, i)
    assert item.edge.opens == opens
    assert item.edge.closes == (i + 1 if closes else None)
    assert (item.edge.stale is not None) == decides
    assert bool(item.event) == decides
    assert not decides or item.event['batches_seen'] == i


@given(all_phases(), st.sampled_from(list(POLICIES)), st.integers(0, 99))
@example(Phases(0, 1, 1, 4, False), 'importance', 1)
def test_decisions_on_full_batches_come_by_number(phases, policy, seed):
  stream = Stream(cut(examples(np.ones(5 * 40), seed, cold=0), 5), 2)
  settings = Skip(0.3, policy, 'examples', phases)
  done = run(stream, settings)
  if not settings.compares_rows:
    phases = phases._replace(window=0)
  due = [i for i in range(80) if marks_of_full_batches(phases, i)[2]]
  seen = [item.event['batches_seen'] for item in done.emitted if item.event]
  # A decision is in the record of the batch delivered next; of two before the
  # same batch the later one is, and the last may have nothing to go with.
  read = np.cumsum([item.seen for item in done.emitted]) // 5
  carried = {int(np.searchsorted(read, i, 'right')): i for i in due}
  carried.pop(len(done.emitted), None)
  assert seen == list(carried.values())
  closed = [item.edge.closes for item in done.emitted if item.edge.closes]
  windows = [i + 1 for i in range(80) if marks_of_full_batches(phases, i)[1]]
  assert closed == (windows if phases.window else [])


def test_a_decision_that_the_next_period_overtakes_is_dropped():
  """Of 6 examples a batch 1 counts: none is decided before the next window."""
  batches = cut(examples(np.arange(6 * 60) % 6 == 0), 6)
  settings = Skip(0.5, 'stale', 'rows', Phases(0, 2, 2, 8))
  done = run(Stream(batches, 4), settings)
  told = {item.event['kind'] for item in done.emitted if item.event}
  assert told == {'undecided'}
  assert all(item.edge.stale is None for item in done.emitted)
  assert sum(item.edge.opens for item in done.emitted) > 10


@every_policy
def test_an_endless_source_that_leaves_nothing_to_train(mode, policy):
  batches = cut(examples(np.ones(40), cold=0), 4)
  settings = Skip(1, policy, mode, Phases(1, 2, 2, 0), min_touches=0)
  if policy in ('stale', 'random') and mode == 'examples':
    done = run(Stream(batches), settings._replace(threshold=1e9))
    assert 'the drop target must leave examples to train, got 1,' in done.error
    assert 'none of the last 40 batches' in done.error
  done = run(Stream(cut(examples(np.zeros(40)), 4)), settings)
  assert 'examples of a weight above 0, got 40 batches in a row' in done.error


def test_a_finite_source_may_leave_nothing_to_train():
  batches = cut(examples(np.ones(40), cold=0), 4)
  settings = Skip(1, 'random', 'examples', Phases(1, 2, 2, 0))
  done = run(Stream(batches, 2), settings)
  assert done.error is None
  assert done.unreported == (4 * 17, 4 * 17)


DEGENERATE = {
  'hot_share_falls_to_0': {'late': {'cold': 3}},
  'never_hot': {'early': {'cold': 3}, 'late': {'cold': 3}},
  'hot_share_comes_back': {'early': {'cold': 3}},
  'one_class': {'label': 1},
  'no_click': {'label': 0},
  'one_row': {'row': 3},
  'one_cold_row': {'row': ROWS - 1},
  'one_example': {'copies': 1},
  'three_examples': {'copies': 3},
}


def degenerate(name, seed):
  """Batches of 4 of such a stream, over which popularity may drift."""
  case, n = DEGENERATE[name], 240
  halves = [
    examples(np.ones(n // 2), seed, **case.get(half, {'cold': 0.1}))
    for half in ('early', 'late')
  ]
  whole = Batch(
    *(np.concatenate(pair) for pair in list(zip(*halves, strict=True))[:4])
  )
  if 'label' in case:
    whole = whole._replace(labels=np.full_like(whole.labels, case['label']))
  if 'row' in case:
    whole = whole._replace(lookups=np.full_like(whole.lookups, case['row']))
  if 'copies' in case:
    at = np.arange(n) % case['copies']
    whole = whole.map(lambda column: column[at])
  return cut(whole, 4)


@pytest.mark.parametrize('name', DEGENERATE)
@every_policy
def test_no_stream_ends_a_run_and_a_missed_target_is_told(name, mode, policy):
  """Whatever the examples are, all of them are read, trained or dropped."""
  batches, rng = degenerate(name, 0), np.random.default_rng(len(policy))
  settings = Skip(
    float(rng.choice([0.2, 0.5, 0.9])),
    policy,
    mode,
    Phases(1, 2, 2, int(rng.choice([0, 9, 60]))),
    drop_of=str(rng.choice(['all', 'hot'])),
    refit=int(rng.choice([0, 1, 10])),
    refill=bool(rng.integers(2)),
    min_touches=int(rng.integers(2)),
  )
  with mock.patch.object(target, 'STRETCH', 10):
    done = run(Stream(batches, 2), settings, most=1000)
  assert done.error is None
  assert sum(i.seen for i in done.emitted) + done.unreported[0] == 2 * 240
  told = [i.event for i in done.emitted if i.event]
  dropped = sum(i.dropped for i in done.emitted) + done.unreported[1]
  short = settings.drop - dropped / (2 * 240)
  if mode == 'examples' and settings.drop_of == 'all' and short > 0.2:
    assert any(abs(event.get('missed') or 0) > 0.02 for event in told)
  if name == 'never_hot' and settings.drop_of == 'hot':
    assert 'undecided' in {event['kind'] for event in told}


@every_policy
def test_skipping_begins_once_examples_are_hot_again(mode, policy):
  batches = degenerate('hot_share_comes_back', 0)
  phases = Phases(1, 2, 2, 20)
  settings = Skip(0.5, policy, mode, phases, drop_of='hot', min_touches=0)
  done = run(Stream(batches, 1), settings)
  kinds = [item.event['kind'] for item in done.emitted if item.event]
  assert kinds[0] == 'undecided'
  assert kinds[-1] in ('decision', 'scorer')
  stale = [item.edge.stale for item in done.emitted]
  dropped = sum(i.dropped for i in done.emitted) + done.unreported[1]
  frozen = any(rows is not None and rows.any() for rows in stale)
  assert frozen if mode == 'rows' else dropped


def test_what_left_nothing_to_train_is_given_up_below_a_target_of_1():
  """All rows stand still by this threshold, so nothing else would be left."""
  batches = cut(examples(np.ones(40), cold=0), 4)
  settings = Skip(0.5, 'stale', 'examples', Phases(1, 2, 2, 0), min_touches=0)
  done = run(Stream(batches), settings._replace(threshold=1e9), most=90)
  assert done.error is None
  assert len(done.emitted) == 90
  told = [item.event for item in done.emitted if item.event]
  (event,) = (event for event in told if event['kind'] == 'undecided')
  assert (event['missed'], event['batches_left_out']) == (-0.5, 40)


def test_settle_counts_no_batch_of_padding():
  """Without a window, too: of five batches one holds examples."""
  batches = cut(examples(np.repeat([1, 0], [4, 16]), cold=0), 4)
  for period, kinds in (
    (0, ['decision']),
    (12, ['decision'] * 4),
    (6, ['undecided'] * 7),  # the eighth has no batch to go with
  ):
    settings = Skip(0.5, 'random', 'examples', Phases(1, 2, 2, period))
    done = run(Stream(batches, 10), settings)
    assert [i.event['kind'] for i in done.emitted if i.event] == kinds
