"""Slipstream on streams whose examples change while it skips."""

import numpy as np
import pytest

from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from tests.support.schedule_bench import cut, examples, run, Stream

SIZE, BATCHES = 64, 320
ONCE = Phases(2, 0, 4, 0)


def cooling(first, last, batches=BATCHES):
  """Batches of which more and more examples look up one cold row."""
  shares = np.linspace(first, last, batches)
  return [
    cut(examples(np.ones(SIZE), seed, cold), SIZE)[0]
    for seed, cold in enumerate(shares.tolist())
  ]


def dropped(done, first, end):
  """Share of the examples dropped of these batches of the source."""
  read = np.cumsum([item.seen for item in done.emitted])
  some = (read > first * SIZE) & (read <= end * SIZE)
  items = [i for i, one in zip(done.emitted, some, strict=True) if one]
  return sum(i.dropped for i in items) / sum(i.seen for i in items)


def told(done):
  events = [item.event for item in done.emitted if item.event]
  return [event for event in events if event['kind'] == 'missed']


@pytest.mark.parametrize('policy', ['random', 'random_weighted', 'surprise'])
@pytest.mark.parametrize('refill', [True, False])
def test_a_share_of_all_is_held_while_fewer_are_hot(policy, refill):
  settings = Skip(0.3, policy, phases=ONCE, refill=refill)
  done = run(Stream(cooling(0.1, 0.6), 1), settings, most=BATCHES)
  for first in range(20, 200, 20):
    assert dropped(done, first, first + 100) == pytest.approx(0.3, abs=0.02)
  events = told(done)
  assert events  # of the hot share
  assert all(abs(event['missed']) <= 0.02 for event in events)
  assert events[-1]['hot_share'] < 0.8 * events[-1]['hot_share_before']


def test_one_fit_misses_by_what_becomes_cold():
  settings = Skip(0.3, 'random', phases=ONCE, refit=0)
  done = run(Stream(cooling(0.1, 0.6), 1), settings, most=BATCHES)
  assert dropped(done, 200, 300) < 0.25
  assert told(done)[-1]['missed'] > 0.05


def test_what_cannot_be_met_is_told():
  settings = Skip(0.5, 'random', phases=ONCE)
  done = run(Stream(cooling(0.2, 0.95), 1), settings, most=BATCHES)
  last = told(done)[-1]
  assert last['asked'] == 0.5
  assert last['missed'] > 0.1
  assert last['dropped'] == pytest.approx(last['hot_share'], abs=0.05)


def test_hot_rows_are_counted_again_each_period():
  """The cold row is the most popular one, and so it is hot by then."""
  batches = cooling(0.1, 1.8)
  settings = Skip(0.5, 'random', phases=ONCE._replace(period=60))
  done = run(Stream(batches, 1), settings, most=BATCHES)
  assert dropped(done, 200, 300) == pytest.approx(0.5, abs=0.02)
  never = run(Stream(batches, 1), settings._replace(refit=0), most=BATCHES)
  assert dropped(never, 200, 300) < 0.35


def test_drop_of_hot_is_a_share_of_the_hot_ones():
  batches = cooling(0.5, 0.5)
  settings = Skip(0.5, 'random', phases=ONCE, drop_of='hot')
  done = run(Stream(batches, 1), settings, most=BATCHES)
  hot = (1 - 0.5 / 3) ** 3  # of three lookups none is of the cold row
  assert dropped(done, 100, 300) == pytest.approx(0.5 * hot, abs=0.02)
  of_all = run(
    Stream(batches, 1), settings._replace(drop_of='all'), most=BATCHES
  )
  assert dropped(of_all, 100, 300) > 0.4


def test_no_hot_example_is_needed_where_all_are_thinned():
  batches = cut(examples(np.ones(400), cold=3), 4)
  settings = Skip(0.5, 'surprise', phases=Phases(1, 0, 2, 0))
  done = run(Stream(batches, 1), settings)
  assert done.error is None
  assert sum(item.dropped for item in done.emitted) > 150
  hot = run(Stream(batches, 1), settings._replace(drop_of='hot'))
  assert hot.error is None
  assert not any(item.dropped for item in hot.emitted)
  events = [item.event for item in hot.emitted if item.event]
  assert {event['kind'] for event in events} == {'undecided'}
