"""Scorers at work in a schedule: of one's own, resumed, and asked what pays."""

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.schedules import chooser, scored
from slipstream_jax.schedules import slipstream as module
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.rebatch import corrected
from slipstream_jax.schedules.scored import BatchScorer
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.scoring import best
from slipstream_jax.scoring.base import in_words, scorer_named, SCORERS
from slipstream_jax.scoring.linear import EVERY, FULL, START
from slipstream_jax.selection import gain
from slipstream_jax.selection.base import ExampleFacts, Fit, select
from slipstream_jax.selection.policies import policy_named
from slipstream_jax.types import Batch
from tests.support.schedule_bench import cut, examples, HOT_ROWS, run, Stream
from tests.support.schedule_draws import assert_resumes

PHASES = Phases(2, 1, 3, 23)
SURPRISE = policy_named('surprise')
LEVEL = [gain.Segment(weight=1e4, batches=100)] * 4  # a model like its scorer


class Rate:
  """A scorer of one's own: the click rate of each first lookup so far."""

  def __init__(self, hot, features, dense_features):
    self.counts = np.ones((len(hot.place), 2))

  def learn(self, lookups, dense, labels):
    out = np.empty(len(labels), np.float32)
    for i, (row, label) in enumerate(zip(lookups[:, 0], labels, strict=True)):
      clicks, seen = self.counts[row]
      out[i] = clicks / (seen + 1)
      self.counts[row] += label, 1
    return out

  def get_state(self):
    return {'counts': self.counts.copy()}

  def set_state(self, state):
    self.counts = state['counts'].copy()


@pytest.mark.parametrize('scorer', [*SCORERS, Rate], ids=in_words)
@pytest.mark.parametrize('drop', [0.4, 'auto'])
def test_resuming_after_every_batch(scorer, drop):
  """With targets that change: where little is known, chance finds them."""
  batches = cut(examples(np.ones(100)), 4)
  settings = Skip(drop, phases=PHASES, refit=2, scorer=scorer, auto_cost=0.5)
  patches = mock.patch.multiple(scored, FIRST=20, EARLY=60)
  found = mock.patch.object(
    BatchScorer,
    'may_drop',
    lambda self, *_: (self._seen % 50 / 100, float(self._lag[1])),
  )
  tried = mock.patch.object(best, 'TRIAL', 50)
  with patches, found, tried, mock.patch.object(module, '_REPLAY', 3):
    whole = run(Stream(batches, 2), settings, keep=True)
    assert whole.error is None
    kinds = [item.event['kind'] for item in whole.emitted if item.event]
    assert {'decision', 'scorer'} <= set(kinds)
    drops = {
      item.event['drop']
      for item in whole.emitted
      if item.event and ('drop' in item.event)
    }
    assert len(drops) > 2 if drop == 'auto' else not drops
    assert_resumes(lambda: Stream(batches, 2), settings, whole, whole.positions)


@pytest.mark.parametrize('at', [8, 9, 12, 30, 34])
def test_frozen_weights_know_the_batches_before_their_refresh(at):
  """And no others, though their labels were learned from since."""
  whole = examples(np.ones(160))
  batches = cut(whole, 4)
  with mock.patch.object(scored, 'EARLY', 30):
    scoring = BatchScorer(scorer_named('linear'), HOT_ROWS, None, every=5)
    for batch in batches[:at]:
      scoring.learn(batch)
    known = scoring.refreshed_at(at, 4)
    scores = scoring.learn(batches[at])
  # Once 30 examples are known, after 8 batches, every fifth one refreshes.
  assert known == {8: 8, 9: 8, 12: 10, 30: 30, 34: 30}[at]
  scorer = scorer_named('linear')(HOT_ROWS, 3, 2)
  for batch in batches[:known]:
    scorer.learn(batch.lookups, batch.dense, batch.labels)
  columns = batches[at].lookups, batches[at].dense
  np.testing.assert_array_equal(scores, scorer.frozen().score(*columns))


def test_the_second_linear_scorer_learns_from_a_quarter():
  """Also once the first one learns from few examples."""
  rng, size = np.random.default_rng(0), 1 << 14
  scoring = BatchScorer(scorer_named('linear'), HOT_ROWS, 0.1)
  for _ in range(2 * FULL // size):
    labels = (rng.random(size) < 0.5).astype(np.float32)
    lookups, none = np.zeros((size, 1), np.int32), np.empty((size, 0))
    scoring.learn(Batch(none.astype(np.float32), lookups, labels, labels))
  # Of clicks by chance, each slope learned from is about 1/2.
  learned = [
    4 * (state['dense'][-1, 1] - START)
    for state in scoring.get_state()['scorers']
  ]
  assert learned[0] == pytest.approx(FULL + FULL / EVERY, rel=0.05)
  assert learned[1] == pytest.approx(learned[0] / gain.FEWER, rel=0.05)


def test_events_tell_what_scores_are_worth():
  batches = cut(examples(np.ones(100)), 4)
  done = run(Stream(batches, 2), Skip(0.4, phases=PHASES, scorer=Rate))
  events = [item.event for item in done.emitted if item.event]
  for event in events:
    assert 0 <= event['scorer_auc'] <= 1
    assert event['verdict'] in range(len(gain.VERDICTS))
    assert 0 <= event['variance_bound'] <= 1
    assert 0 <= event['noise'] <= 0.25
    assert all(
      value is None or np.isfinite(value)
      for value in (event['scorer_log_loss'], event['base_log_loss'])
    )


@pytest.mark.parametrize('trial', [30, 10**6])
def test_events_tell_which_scorer_is_the_best(trial):
  batches = cut(examples(np.ones(100)), 4)
  with mock.patch.object(best, 'TRIAL', trial):
    done = run(Stream(batches, 2), Skip(0.4, phases=PHASES, scorer='best'))
  events = [item.event for item in done.emitted if item.event]
  chosen = [event.get('scorer_chosen') for event in events]
  assert (chosen[-1] in {'linear', 'pairs'}) == (trial == 30)


def batch_of(labels, lookups):
  n = len(labels)
  dense, weights = np.zeros((n, 0), np.float32), np.ones(n, np.float32)
  return Batch(dense, lookups, labels.astype(np.float32), weights)


def learned(chances, lookups, cost=0.01, cuts=512):
  """Scores a stream, with a second scorer; and what it knows of the last."""
  rng = np.random.default_rng(5)
  labels = rng.random(len(chances)) < chances
  scoring = BatchScorer(scorer_named('pairs'), HOT_ROWS, cost)
  whole = batch_of(labels, lookups)
  for start in range(0, len(labels), cuts):
    part = slice(start, start + cuts)
    scores = scoring.learn(batch_of(whole.labels[part], lookups[part]))
  n = len(scores)
  share = np.zeros(n, np.float32)
  facts = ExampleFacts(share == 0, share > 0, share, whole.labels[-n:], scores)
  return scoring, facts


def test_auto_drops_nothing_of_balanced_noise():
  rng = np.random.default_rng(0)
  lookups = rng.integers(0, 12, (20_000, 3))
  scoring, facts = learned(np.full(20_000, 0.5), lookups, cost=0.5)
  assert scoring.may_drop(SURPRISE, facts, LEVEL, 0.5) == (0, 0)
  assert 'base rate' in gain.VERDICTS[scoring.report(0.3)['verdict']]


def test_auto_drops_easy_examples_and_more_as_it_may_cost_more():
  rng = np.random.default_rng(0)
  lookups = rng.integers(0, 12, (20_000, 3))
  chances = np.where(lookups[:, 0] < 9, 0.01, 0.6)
  drops = []
  for cost in (1e-6, 1e-3, 1e-2):
    scoring, facts = learned(chances, lookups, cost)
    drop, lost = scoring.may_drop(SURPRISE, facts, LEVEL, 0.5)
    report = scoring.report(drop)
    assert lost <= cost * report['scorer_log_loss']
    assert report['verdict'] == 0
    drops.append(drop)
  assert drops == sorted(drops)
  assert drops[-1] >= 0.3


def test_auto_knows_nothing_before_it_has_seen_some():
  rng = np.random.default_rng(0)
  lookups = rng.integers(0, 12, (60, 3))
  scoring, facts = learned(np.full(60, 0.2), lookups, cuts=20)
  assert scoring.may_drop(SURPRISE, facts, LEVEL, 0.5) == (0, 0)


def test_what_is_known_does_not_depend_on_batches():
  rng = np.random.default_rng(0)
  lookups = rng.integers(0, 12, (600, 3))
  states = [
    learned(np.full(600, 0.3), lookups, cuts=cuts)[0].get_state()
    for cuts in (600, 100, 7)
  ]
  for state in states[1:]:
    for mine, first in zip(state['scorers'], states[0]['scorers'], strict=True):
      for name, array in first.items():
        np.testing.assert_array_equal(mine[name], array)
    np.testing.assert_array_equal(state['whole'], states[0]['whole'])
    np.testing.assert_allclose(state['lag'], states[0]['lag'], rtol=1e-9)
    assert state['lag'][0] == 150  # one example in four


class Halves(Rate):
  def learn(self, lookups, dense, labels):
    return super().learn(lookups, dense, labels)[1:]


class Logits(Rate):
  def learn(self, lookups, dense, labels):
    return super().learn(lookups, dense, labels) - 2


@pytest.mark.parametrize('scorer', [Halves, Logits, lambda *_: object()])
def test_a_scorer_that_is_none(scorer):
  batches = cut(examples(np.ones(40)), 4)
  done = run(Stream(batches, 1), Skip(0.4, phases=PHASES, scorer=scorer))
  assert 'a scorer must' in done.error
  assert '(Skip.scorer)' in done.error


def test_a_scorer_has_the_same_name_in_every_process():
  assert in_words(Rate) == f'{__name__}.Rate'
  assert in_words(SCORERS['linear']) == in_words('linear') == 'linear'
  words = Skip(scorer=SCORERS['pairs']).in_words()
  assert words == Skip(scorer='pairs').in_words()
  assert Skip(drop='auto').in_words() != words


@given(
  st.integers(0, 99),
  st.sampled_from(['surprise', 'surprise_offset', 'local_case_control']),
  st.floats(0.1, 20),
  st.booleans(),
)
def test_one_loop_selects_what_the_policy_says(seed, name, scale, offset):
  """Scores that are not known among them."""
  rng, policy = np.random.default_rng(seed), policy_named(name)
  batch = examples(rng.uniform(0.5, 2, 90), seed, offset=offset)
  scores, uniforms = rng.random((2, 90), np.float32)
  scores[rng.random(90) < 0.1] = np.nan
  share = np.zeros(90, np.float32)
  facts = ExampleFacts(share == 0, share > 0, share, batch.labels, scores)
  fitted = Fit(scale, weight=1.25)
  expected = select(policy, facts, fitted, uniforms)
  wanted, index = corrected(batch, expected)
  arguments = batch, facts, fitted, uniforms
  found, kept = chooser._select_by_error(policy, *arguments)
  np.testing.assert_array_equal(kept, index)
  np.testing.assert_array_equal(found.weights, wanted.weights)
  if wanted.offset is None:
    assert found.offset is None
  else:
    np.testing.assert_allclose(found.offset, wanted.offset, rtol=1e-6)


def test_one_loop_counts_what_the_estimates_count():
  rng = np.random.default_rng(0)
  labels = (rng.random(5000) < 0.3).astype(np.float32)
  scores = rng.random(5000, np.float32) ** 8
  scores[::50] = np.nan
  out = np.zeros_like(gain.NO_COUNTS)
  scored._tally(labels, scores, gain.LIMIT, out)
  np.testing.assert_array_equal(out, gain.tally(labels, scores))
