"""Laws of corrections: whatever the measure, training learns what it would."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.selection.base import (
  ExampleFacts,
  fit,
  Policy,
  select,
)
from slipstream_jax.selection.policies import POLICIES, policy_named

SEEDS = 2000
by_offset = pytest.mark.parametrize(
  'policy',
  [p for p in POLICIES.values() if p.correction == 'offset'],
  ids=lambda policy: policy.name,
)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def world(examples, seed):
  """Features f64[n, 4], and facts of clicks that are logistic in them."""
  rng = np.random.default_rng(seed)
  features = np.column_stack(
    [np.ones(examples), rng.normal(size=(examples, 3))]
  )
  logits = features @ rng.normal(0, [1, 0.7, 0.7, 0.7])
  labels = (rng.random(examples) < sigmoid(logits)).astype(np.float32)
  none = np.zeros(examples, np.float32)
  # A pilot that is wrong about slopes, and about the base rate.
  scores = sigmoid(0.7 * logits + rng.normal(0, 0.5) + 0.5 * features[:, 1])
  hot = rng.random(examples) < 0.8
  return features, ExampleFacts(hot, none > 0, none, labels, scores)


@st.composite
def measures(draw):
  """Facts and features to any positive measure of an example and its label."""
  slopes = draw(st.lists(st.floats(-1.5, 1.5), min_size=8, max_size=8))
  kind = draw(st.sampled_from(['exponential', 'surprise', 'steps', 'clicks']))

  def measure(facts, features):
    x, y = features, facts.labels
    if kind == 'surprise':
      return abs(y - facts.scores)
    if kind == 'clicks':
      return np.where(y > 0, np.inf, np.exp(x[:, 1] * slopes[0]))
    own = x @ np.array(slopes[:4]) + y * (x @ np.array(slopes[4:]))
    return np.exp(own) if kind == 'exponential' else 1.0 + (own > 0) * 3

  return measure


@st.composite
def policies(draw, correction):
  """A measure, and a policy of it once there are features."""
  measure = draw(measures())
  floor, uniform = draw(
    st.sampled_from([(0.02, 0.0), (0.1, 0.0), (0.05, 0.25)])
  )
  thins_cold = draw(st.booleans())

  def policy(features):
    def own(facts):
      # More examples at once are the same ones again.
      return measure(facts, np.resize(features, (len(facts.hot), 4)))

    return Policy(
      *('any', own, correction, floor, lambda target: 0.0),
      thins_cold=thins_cold,
      uniform=uniform,
    )

  return policy


def newton(features, labels, offset):
  """The maximum-likelihood estimate of logistic slopes, and their errors."""
  slopes = np.zeros(features.shape[1])
  for _ in range(30):
    p = sigmoid(features @ slopes + offset)
    information = (features * (p * (1 - p))[:, None]).T @ features
    step = np.linalg.solve(information, features.T @ (labels - p))
    slopes = slopes + step
    if abs(step).max() < 1e-10:
      break
  return slopes, np.sqrt(np.diag(np.linalg.inv(information)))


@given(
  policies('offset'), st.sampled_from([0.2, 0.5, 0.8]), st.integers(0, 2**32)
)
def test_the_estimate_from_the_sample_is_that_of_all(make, target, seed):
  features, facts = world(20_000, seed)
  policy = make(features)
  fitted, rng = fit(policy, facts, target), np.random.default_rng(seed + 1)
  expected, _ = newton(features, facts.labels, 0.0)
  estimates = []
  for _ in range(4):
    chosen = select(policy, facts, fitted, rng.random(len(features)))
    keep, offset = chosen.keep, chosen.offset.astype(float)
    estimate, error = newton(features[keep], facts.labels[keep], offset[keep])
    estimates.append(estimate)
  # The errors of one sample, in units of which one differs by more than 3 in
  # one of 700 cases, and the mean of four hardly ever by 2.
  assert (abs(np.mean(estimates, axis=0) - expected) < 3 * error).all()


def test_without_the_offset_it_is_another_one():
  features, facts = world(20_000, 0)
  policy = POLICIES['surprise_offset']
  uniforms = np.random.default_rng(1).random(len(features))
  keep = select(policy, facts, fit(policy, facts, 0.5), uniforms).keep
  estimate, error = newton(features[keep], facts.labels[keep], 0.0)
  expected, _ = newton(features, facts.labels, 0.0)
  assert (abs(estimate - expected) > 5 * error).any()


@given(
  policies('weight'), st.sampled_from([0.2, 0.5, 0.8]), st.integers(0, 2**32)
)
def test_the_mean_gradient_over_draws_is_that_of_all(make, target, seed):
  features, facts = world(100, seed)
  if not facts.hot.any():
    return
  policy = make(features)
  many = ExampleFacts(*(np.tile(field, SEEDS) for field in facts[:-1]))
  fitted = fit(policy, facts, target)
  uniforms = np.random.default_rng(seed + 1).random(len(many.hot))
  weight = select(policy, many, fitted, uniforms).weight.reshape(SEEDS, -1)
  gradient = (facts.scores - facts.labels)[:, None] * features
  draws = weight.astype(float) @ gradient / 100
  error = draws.std(axis=0, ddof=1) / np.sqrt(SEEDS)
  # Of a few draws with large weights, no normal ones: so five of them.
  assert (
    abs(draws.mean(axis=0) - gradient.mean(axis=0)) < 5 * error + 1e-6
  ).all()


@by_offset
@pytest.mark.parametrize('target', [0.0, 0.3, 0.9])
@pytest.mark.parametrize('uniform', [0.0, 0.25])
def test_an_offset_is_what_the_labels_chances_differ_by(
  policy, target, uniform
):
  """Those of being kept with a click and without: no more is needed."""
  _, facts = world(400, 3)
  policy = policy._replace(uniform=uniform)
  fitted = fit(policy, facts, target)
  ones = np.ones(400, np.float32)

  def as_if(labels):
    return select(policy, facts._replace(labels=labels), fitted, ones / 2)

  click, none, own = as_if(ones), as_if(0 * ones), as_if(facts.labels)
  ratio = click.probability.astype(float) / none.probability
  for one in (click, none, own):
    np.testing.assert_allclose(one.offset, np.log(ratio), rtol=1e-5, atol=1e-6)
  clicked = facts.labels > 0
  expected = np.where(clicked, click.probability, none.probability)
  np.testing.assert_array_equal(own.probability, expected)
  kept = own.probability.astype(float).mean()
  assert fitted.weight == pytest.approx(1 / kept)


def test_local_case_control_is_as_published():
  """Accepted with |y - p|, the offset is minus the logit of p."""
  _, facts = world(20_000, 5)
  policy = POLICIES['local_case_control']
  dropped = 1 - abs(facts.labels - facts.scores).mean()
  fitted = fit(policy, facts, dropped, of_all=True)
  assert fitted.scale == pytest.approx(1)
  chosen = select(policy, facts, fitted, np.zeros(20_000))
  logits = np.log(facts.scores / (1 - facts.scores))
  np.testing.assert_allclose(chosen.offset, -logits, rtol=1e-4, atol=1e-4)


def test_scores_of_0_and_1_leave_offsets_finite():
  _, facts = world(400, 6)
  facts = facts._replace(scores=np.arange(400, dtype=np.float32) % 2)
  for name in ('surprise_offset', 'local_case_control'):
    policy = POLICIES[name]
    chosen = select(policy, facts, fit(policy, facts, 0.5), np.zeros(400))
    assert np.isfinite(chosen.offset).all()
    assert chosen.keep.all()


def test_infobatch_thins_what_is_below_the_mean_loss_alike():
  _, facts = world(400, 7)
  policy = POLICIES['infobatch_once']
  fitted = fit(policy, facts, 0.3, of_all=True)
  chosen = select(policy, facts, fitted, np.zeros(400))
  own = np.where(facts.labels > 0, facts.scores, 1 - facts.scores)
  loss = -np.log(own)
  assert fitted.constant == pytest.approx(loss.mean())
  below = loss < loss.mean()
  assert (chosen.probability[~below] == 1).all()
  r = 0.3 / below.mean()
  np.testing.assert_allclose(chosen.weight[below], 1 / (1 - r), rtol=1e-5)


@given(policies('weight'), st.sampled_from([0.2, 0.5, 0.8]))
def test_a_uniform_part_moves_no_target(make, target):
  features, facts = world(400, 8)
  policy = make(features)
  kept = []
  for uniform in (0.0, 0.25, 1.0):
    mixed = policy._replace(uniform=uniform)
    fitted = fit(mixed, facts, target)
    kept.append(select(mixed, facts, fitted, np.zeros(400)).probability)
  np.testing.assert_allclose(*(p.mean() for p in kept[:2]), rtol=1e-5)
  np.testing.assert_allclose(*(p.mean() for p in kept[1:]), rtol=1e-5)
  some = kept[2][kept[0] < 1]
  if len(some):
    np.testing.assert_allclose(some, some[0])  # all alike
    assert kept[1].min() >= 0.25 * some[0]


@by_offset
def test_labels_that_are_no_clicks_are_refused(policy):
  _, facts = world(400, 9)
  soft = facts._replace(labels=np.full(400, 0.5, np.float32))
  with pytest.raises(UserError, match=r'labels that are 0 or 1, got 0\.5'):
    select(policy, soft, fit(policy, facts, 0.5), np.zeros(400))


@pytest.mark.parametrize(
  ('changes', 'rule'),
  [
    ({'correction': 'margin'}, 'one of weight, offset, none'),
    ({'floor': 0.0}, "'weight' must be above 0, and at most 1, got 0.0"),
    ({'floor': 2.0}, 'at most 1, got 2.0'),
    ({'floor': np.nan}, 'got nan'),
    ({'correction': 'none', 'floor': -1.0}, r'in \[0, 1\], got -1'),
    ({'uniform': 1.5}, r'in \[0, 1\], got 1.5'),
  ],
)
def test_a_policy_that_cannot_be_made_up_for_is_refused(changes, rule):
  policy = POLICIES['surprise']._replace(**changes)
  with pytest.raises(UserError, match=rule):
    policy_named(policy)
