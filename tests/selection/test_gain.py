"""What scores are worth and what dropping costs, against simulations."""

import functools
import math

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.selection import gain
from slipstream_jax.selection.gain import NO_COUNTS, tally


def clicks(chances, seed=0):
  rng = np.random.default_rng(seed)
  return (rng.random(len(chances)) < chances).astype(np.float32)


def spread(examples, spread_of, seed=0):
  """Click chances, and labels drawn by them."""
  rng = np.random.default_rng(seed)
  chances = 1 / (1 + np.exp(-rng.normal(-1, spread_of, examples)))
  return chances.astype(np.float32), clicks(chances, seed + 1)


def counted_auc(labels, scores):
  """Over all pairs; ties count one half."""
  above = scores[labels > 0][:, None] - scores[labels == 0][None]
  return (above > 0).mean() + (above == 0).mean() / 2


@given(st.integers(0, 99), st.floats(0.1, 3))
def test_quality_equals_that_of_all_examples(seed, width):
  scores, labels = spread(600, width, seed)
  scores[::7] = np.float32(0.25)  # ties
  counted = tally(labels, scores)
  assert gain.auc(counted) == pytest.approx(
    counted_auc(labels, scores), abs=0.01
  )
  exact = -np.log(np.where(labels > 0, scores, 1 - scores)).mean()
  assert gain.log_loss(counted) == pytest.approx(exact, abs=1e-3)
  rate = labels.mean(dtype=np.float64)
  entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
  assert gain.base_log_loss(counted) == pytest.approx(entropy)


@given(st.integers(0, 99), st.integers(0, 50))
def test_tallies_add_up(seed, cut):
  scores, labels = spread(50, 1, seed)
  parts = [tally(labels[s], scores[s]) for s in (slice(cut), slice(cut, None))]
  whole = tally(labels, scores)
  np.testing.assert_allclose(parts[0] + parts[1], whole)


def test_of_nothing_nothing_is_known():
  none = NO_COUNTS
  assert gain.auc(none) is None
  assert gain.log_loss(none) is None
  assert gain.noise_of(none) == 0.25
  assert gain.advantage(none) == (0.0, math.inf)
  assert gain.verdict(none, 0.5) == 3
  scores = np.array([0.0, 1.0, np.nan, 0.5], np.float32)
  only = tally(np.ones(4, np.float32), scores)
  assert only.sum() == 3  # one is not known
  assert gain.auc(only) is None
  assert np.isfinite(gain.log_loss(only))


def test_a_calibrated_tally_knows_the_noise():
  """Whatever the scores were made of the chances, as long as it rises."""
  chances, labels = spread(200_000, 1.5)
  noise = (chances * (1 - chances)).mean()
  for scores in (chances, chances**2, np.sqrt(chances), chances / 3):
    counted = tally(labels, scores)
    assert gain.noise_of(counted) == pytest.approx(noise, abs=0.002)
    error = gain.errors(counted, labels, scores)
    assert (error**2).mean() == pytest.approx(noise, abs=0.002)


@given(st.integers(0, 99))
def test_a_calibration_never_falls_and_keeps_the_clicks(seed):
  scores, labels = spread(300, 2, seed)
  counted = tally(1 - labels, scores)  # scores that are all wrong
  chance = gain.calibrated(counted)
  assert (np.diff(chance) >= -1e-12).all()
  mass = counted.sum(axis=1)
  assert (mass * chance).sum() == pytest.approx((1 - labels).sum())


def test_the_variance_of_chances_that_follow_the_errors():
  chances, labels = spread(20_000, 1)
  error, kept = abs(chances - labels), 0.3
  noise = float((chances * (1 - chances)).mean())
  chosen = kept * error / (2 * noise)  # at the bound: none is cut at 1
  share = gain.extra_variance(error, chosen) / (1 / kept - 1)
  assert share == pytest.approx(gain.bound(noise, kept), abs=0.02)


def test_the_bound_of_an_offset_is_the_same():
  """By the information that kept examples have on their logit."""
  chances, _ = spread(10_000, 1)
  chances = chances.astype(np.float64)
  noise, kept = float((chances * (1 - chances)).mean()), 0.3
  scale = kept / (2 * noise)
  click, none = scale * (1 - chances), scale * chances
  share = chances * click + (1 - chances) * none
  assert share.mean() == pytest.approx(kept)
  now = chances * click / share
  information = (share * now * (1 - now)).mean()
  extra = noise / information - 1
  least = gain.bound(noise, kept)
  assert extra / (1 / kept - 1) == pytest.approx(least)


def test_ends_of_the_bound():
  assert gain.bound(0.25, 0.5) == 1  # balanced noise
  assert gain.bound(0.05, 0.5) == 0
  assert gain.bound(0.2, 1.0) == 0
  error = np.random.default_rng(0).random(1000)
  for kept in (0.1, 0.5, 1.0):  # at random
    extra = gain.extra_variance(error, np.full(1000, kept))
    assert extra == pytest.approx(1 / kept - 1)
  assert gain.extra_variance(0 * error, error) == 0
  for noise, kept in ((0.3, 0.5), (-0.1, 0.5), (0.1, 0.0), (0.1, 1.1)):
    with pytest.raises(UserError, match='share kept'):
      gain.bound(noise, kept)


def test_half_costs_what_a_quarter_leads_to_expect():
  """A mean of n draws is worse by v/2n in logits: known in closed form."""
  rng = np.random.default_rng(0)
  n, draws = 400, 4000
  labels = rng.random((draws, n + 1)) < 0.3
  scores, fewer = (
    np.clip(labels[:, :m].mean(axis=1), 0.01, 0.99).astype(np.float32)
    for m in (n, n // gain.FEWER)
  )
  lagging = gain.lag(labels[:, n].astype(np.float32), scores, fewer)
  expected = 1 / (2 * n)  # d/2n of one parameter
  mean = lagging[1] / lagging[0] / (gain.FEWER - 1)
  assert gain.cost_of_half(lagging) > expected
  deviation = (gain.cost_of_half(lagging) - mean) / gain.SURE
  assert abs(mean - expected) < 3 * deviation
  assert gain.cost_of_half(np.zeros(3)) == math.inf


def test_sums_fade_once_they_are_long():
  short, long = np.ones((512, 2)), np.full((512, 2), 1000.0)
  assert gain.faded(short, short.sum()) is short
  assert gain.faded(long, long.sum()).sum() == long.sum() / 2
  assert gain.faded(np.array([1e6, 4, 2]), 1e6).tolist() == [5e5, 2, 1]


def test_noise_has_nothing_to_gain():
  rng = np.random.default_rng(0)
  noise = rng.random(50_000).astype(np.float32)
  labels = clicks(np.full(50_000, 0.5), 1)
  assert gain.verdict(tally(labels, noise), 0.7) == 1
  # Seen, and yet too little of it.
  faint = 0.5 + 0.1 * (noise - 0.5)
  counted = tally(clicks(faint, 1), faint.astype(np.float32))
  assert gain.verdict(counted, 0.7) == 2
  chances, labels = spread(50_000, 1.5)
  assert gain.verdict(tally(labels, chances), 0.7) == 0


def test_few_examples_are_no_verdict():
  chances, labels = spread(60, 0.1)
  assert gain.verdict(tally(labels, chances), 0.7) == 3


def segments(means, error, batches=400):
  """Segments that grow as reports do, with these means of d."""
  before, out = 0.0, []
  for mean in means:
    weight = before * (gain.GROWN - 1) or 1e4
    squares = weight * (mean**2 + error**2 * (batches - 1))
    out.append(gain.Segment(before, weight, weight * mean, squares, batches))
    before += weight
  return out


@given(st.floats(1, 1e4), st.floats(0, 0.1))
def test_what_half_costs_a_model_that_learns_as_one_over_n(amount, gap):
  """And its scorer nothing: the difference is its excess, `amount` / n."""
  means = [
    gap + amount / (one.before + one.weight / 2)
    for one in segments([0] * 12, 0)
  ]
  known = segments(means, 1e-6)
  half = amount / (known[-1].before + known[-1].weight)
  found = gain.cost_to_model(known, 0.4)
  assert found.half >= half
  assert found.behind >= gap
  assert found.half == pytest.approx(means[-4] - means[-1], abs=1e-5)
  assert found.behind == pytest.approx(max(means[-1], 0.0), abs=1e-5)


def test_what_a_model_is_known_to_need():
  needs = functools.partial(gain.cost_to_model, loss=0.4)
  unknown = math.inf, math.inf
  assert needs(segments([0.3, 0.1, 0.01], 1e-4)) == unknown  # no doubling yet
  level = [0.0, 0.0, 0.0, 0.0]
  few, many = needs(segments(level, 1e-4)), needs(segments(level, 1e-2))
  assert few == pytest.approx((2.83e-4, 2e-4), rel=0.01)
  assert many == pytest.approx((2.83e-2, 2e-2), rel=0.01)
  better = needs(segments([-0.03] * 4, 1e-4))
  assert better == pytest.approx((2.83e-4, 0.0), rel=0.01)
  # It knows what the scorer does not.
  assert needs(segments([-0.04] * 4, 1e-4)) == unknown
  assert needs(segments([0.3, 0.3, 0.3, 0.3], 1e-4)).behind > 0.3


@given(st.floats(0, 3), st.floats(0.2, 3))
def test_what_is_affordable(most, power):
  def extra(drop):
    return (1 / (1 - drop) - 1) ** power

  drop = gain.affordable(extra, most)
  assert drop in gain.DROPS
  assert extra(drop) <= most or drop == 0
  after = gain.DROPS.index(drop) + 1
  assert after == len(gain.DROPS) or extra(gain.DROPS[after]) > most
