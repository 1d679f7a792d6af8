"""The drop target is held while scores, hot shares and batches change."""

import itertools

from hypothesis import assume, example, given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.checkpoint.state import pack, unpack
from slipstream_jax.selection.base import ExampleFacts, Fit, joined, select
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.selection.target import DropTarget

BATCHES = 240
BLIND = [name for name, one in POLICIES.items() if not one.stale_target(1.0)]


def stream(size, hot, skill, seed=0):
  """Facts of some batches, whose hot share and scorer change from a to b."""
  rng = np.random.default_rng(seed)
  for time in np.linspace(0, 1, BATCHES):
    truth = rng.beta(0.5, 1.5, size)
    knows = (1 - time) * skill[0] + time * skill[1]
    noise = rng.normal(0, 0.05, size)
    scores = knows * truth + (1 - knows) * 0.25 + noise
    none = np.zeros(size, np.float32)
    yield ExampleFacts(
      rng.random(size) < (1 - time) * hot[0] + time * hot[1],
      none > 0,
      none,
      (rng.random(size) < truth).astype(np.float32),
      np.clip(scores, 0.001, 0.999).astype(np.float32),
    )


def run(policy, asked, batches, seed=0, resume=False):
  """Dropped, asked for and hot of each batch, and what was told."""
  batches, rng = iter(batches), np.random.default_rng(seed)
  sample = list(itertools.islice(batches, 2))
  sample = joined(sample)
  target, of_all = DropTarget(policy, *asked), asked[1]
  target.decided(float(sample.hot.mean()))
  fitted, _ = target.fit(sample)
  rows, events = [], []
  for facts in batches:
    if resume:
      packed = pack(target.get_state())
      target = DropTarget(policy, *asked)
      target.set_state(unpack(packed.state, packed.data))
    if target.is_due():
      fitted = target.fit_again(fitted)
    uniforms = rng.random(len(facts.hot), np.float32)
    keep = select(policy, facts, fitted, uniforms).keep
    dropped = int(np.count_nonzero(~keep))
    event = target.count(facts, dropped)
    events += [event] if event else []
    of = len(facts.hot) if of_all else np.count_nonzero(facts.hot)
    rows.append((dropped, target.wanted(facts), of))
  return np.array(rows), events


def worst(rows):
  """By how much any 100 batches in a row miss, as a share."""
  sums = np.concatenate([np.zeros((1, 3)), np.cumsum(rows, axis=0)])
  dropped, asked, of = (sums[100:] - sums[:-100]).T
  return float(abs((dropped - asked) / np.maximum(of, 1)).max())


def may_be_met(policy, asked, hot, size):
  """Whether there is always enough to drop, and chance plays a small part."""
  drop, of_all, refit = asked
  least = min(hot)
  share = 1.0 if policy.thins_cold else least
  if policy.measure(CLICK)[0] == np.inf:
    share *= 0.7  # clicks are always kept
  most = 0.9 * share * (1 - policy.floor)
  wanted = drop if of_all else drop * (max(hot) if policy.thins_cold else least)
  # What chance does to the draws since a fit, at both ends of 100 batches.
  chance = 5 * np.sqrt(2 * 0.2 * refit * size)
  return wanted < most and chance <= 0.015 * 100 * size * (of_all or least)


CLICK = ExampleFacts(
  np.ones(1, bool),
  np.zeros(1, bool),
  np.zeros(1, np.float32),
  np.ones(1, np.float32),
  np.full(1, 0.5, np.float32),
)
shares = st.floats(0, 1)


@given(
  st.sampled_from(BLIND),
  st.floats(0.05, 0.7),
  st.booleans(),
  st.tuples(shares, shares),
  st.tuples(shares, shares),
  st.sampled_from([40, 100, 300]),
  st.integers(1, 10),
  st.integers(0, 99),
)
@example('surprise', 0.4, True, (0.45, 0.01), (0.0, 1.0), 256, 10, 0)
@example('random', 0.35, True, (0.8, 0.45), (0.5, 0.5), 256, 10, 0)
def test_any_100_batches_drop_what_was_asked(
  name, drop, of_all, hot, skill, size, refit, seed
):
  policy = POLICIES[name]
  asked = drop, of_all, refit
  assume(may_be_met(policy, asked, hot, size))
  rows, _ = run(policy, asked, stream(size, hot, skill, seed), seed)
  assert worst(rows) <= 0.02


def test_a_scorer_that_learns_is_surprised_less_often():
  """What one fit misses by, re-fitting does not."""
  changing = {'size': 256, 'hot': (0.5, 0.5), 'skill': (0.0, 1.0)}
  policy = POLICIES['surprise']
  once, told_of_it = run(policy, (0.4, True, 0), stream(**changing))
  again, nothing = run(policy, (0.4, True, 10), stream(**changing))
  assert worst(once) > 0.04
  assert worst(again) < 0.01
  assert told_of_it
  assert not nothing


def test_a_hot_share_that_falls_below_the_target_is_told():
  policy, asked = POLICIES['random'], (0.4, True, 10)
  rows, events = run(policy, asked, stream(256, (0.5, 0.02), (0, 0)))
  last = events[-1]
  assert last['asked'] == 0.4
  assert last['missed'] > 0.1
  assert last['dropped'] == pytest.approx(last['hot_share'], abs=0.05)
  assert last['hot_share'] < 0.8 * last['hot_share_before']
  # What can be done is done: nearly all that is hot is dropped in the end.
  assert rows[-20:, 0].sum() > 0.9 * 20 * 256 * 0.03


def test_what_is_owed_is_given_up_after_a_while():
  """Hot examples come back, and are not all dropped for ever."""
  policy, asked = POLICIES['random'], (0.4, True, 10)
  gone = list(stream(128, (0.02, 0.02), (0, 0)))
  back = list(stream(128, (0.9, 0.9), (0, 0), seed=1))
  rows, _ = run(policy, asked, back[:20] + gone[:100] + back)
  came = rows[118:]
  assert came[60:, 0].sum() == pytest.approx(came[60:, 1].sum(), rel=0.05)


@pytest.mark.parametrize('name', BLIND)
def test_it_goes_on_from_its_state_to_the_bit(name):
  changing = {'size': 24, 'hot': (0.9, 0.3), 'skill': (0.2, 0.9)}
  for refit in (0, 1, 7):
    asked = 0.3, True, refit
    one, two = (
      run(POLICIES[name], asked, stream(**changing), resume=resume)
      for resume in (False, True)
    )
    np.testing.assert_array_equal(one[0], two[0])
    assert one[1] == two[1]


def test_drop_0_is_never_fitted():
  asked = 0.0, True, 1
  rows, events = run(
    POLICIES['surprise'], asked, stream(24, (0.5, 0.5), (0, 1))
  )
  assert not rows[:, 0].any()
  assert not events


@pytest.mark.parametrize('of_all', [True, False])
def test_a_policy_keeps_its_fit_where_nothing_may_be_dropped(of_all):
  target = DropTarget(POLICIES['random'], 0.5, of_all, 1)
  cold = next(stream(24, (0.0, 0.0), (0, 0)))
  target.count(cold, 0)
  assert target.is_due()
  assert target.fit_again(Fit(0.25)) == Fit(0.25)
  assert not target.is_due()


def test_examples_without_a_score_fit_nothing():
  """Any scale fits them, and could drop most of the first that have one."""
  target = DropTarget(POLICIES['surprise_offset'], 0.4, True, 1)
  known = next(stream(400, (1, 1), (1, 1)))
  unknown = known._replace(scores=np.full(400, np.nan, np.float32))
  fitted, missed = target.fit(unknown)
  assert fitted == Fit(np.inf)
  assert missed == 0.4
  target.count(unknown, 0)
  assert target.fit_again(fitted) == fitted
  target.count(known, 0)
  assert target.fit_again(fitted).scale < np.inf


def test_a_decision_says_what_cannot_be_dropped():
  facts = next(stream(4000, (0.25, 0.25), (1, 1)))
  hot = float(facts.hot.mean())
  for name, drop, of_all, short in (
    ('random', 0.6, True, 0.6 - hot),
    ('random', 0.6, False, 0),
    ('random_weighted', 0.6, True, 0.6 - 0.95 * hot),
    ('surprise', 0.6, True, 0),
    ('surprise', 1.0, True, 0.05),
  ):
    _, found = DropTarget(POLICIES[name], drop, of_all, 10).fit(facts)
    assert found == pytest.approx(short, abs=0.001)
