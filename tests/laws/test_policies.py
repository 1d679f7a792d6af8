"""Laws that every member of POLICIES obeys."""

import itertools
import operator

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.selection.base import ExampleFacts, Fit, fit, Policy, select
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.selection.staleness import exact_threshold


def each(members):
  return pytest.mark.parametrize('policy', members, ids=lambda p: p.name)


policies = each(POLICIES.values())
TARGETS = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
SEEDS = 3000


def facts_for(policy, drop_target, examples=400, seed=0):
  """Examples of which as many are stale as the policy asks for."""
  rng = np.random.default_rng(seed)
  hot = rng.random(examples) < 0.7
  change = np.where(hot, rng.random(examples), np.inf)
  stale_target = policy.stale_target(drop_target)
  stale = change < exact_threshold(change[hot], stale_target)
  share = np.where(stale, 1.0, rng.random(examples)).astype(np.float32)
  scores = rng.beta(1, 3, examples).astype(np.float32)
  labels = (rng.random(examples) < scores).astype(np.float32)
  return ExampleFacts(hot, stale, share, labels, scores)


def each_field(facts, change):
  return ExampleFacts(*map(change, facts[:-1]))


def chosen(policy, drop_target, facts, seed=1):
  fitted = fit(policy, facts, drop_target)
  uniforms = np.random.default_rng(seed).random(len(facts.hot))
  return select(policy, facts, fitted, uniforms)


def over_seeds(policy, drop_target, facts):
  """The weights of SEEDS draws: f64[SEEDS, n]."""
  fitted = fit(policy, facts, drop_target)
  many = each_field(facts, lambda field: np.tile(field, SEEDS))
  uniforms = np.random.default_rng(5).random(len(many.hot))
  selection = select(policy, many, fitted, uniforms)
  return selection.weight.reshape(SEEDS, -1).astype(np.float64)


def gradients(facts):
  """Of a small logistic regression that predicts the scores: f64[n, 4]."""
  features = np.random.default_rng(7).normal(size=(len(facts.hot), 4))
  error = facts.scores.astype(np.float64) - facts.labels
  return error[:, None] * features


def test_the_list_says_what_its_members_are():
  assert [policy.name for policy in POLICIES.values()] == list(POLICIES)
  of = POLICIES.values()
  assert {p.name for p in of if p.correction == 'none'} == {'random', 'stale'}
  pilots = {
    *('surprise', 'surprise_offset', 'surprise_root', 'local_case_control')
  }
  offset = pilots - {'surprise'} | {'negatives'}
  assert {p.name for p in of if p.correction == 'offset'} == offset
  scored = pilots | {'importance', 'stale_importance', 'infobatch_once'}
  assert {p.name for p in of if p.scored} == scored
  cold = pilots | {'negatives', 'infobatch_once'}
  assert {p.name for p in of if p.thins_cold} == cold
  assert {p.name for p in of if p.constant} == {'infobatch_once'}


@policies
@pytest.mark.parametrize('target', TARGETS)
def test_a_selection_fits_together(policy, target):
  facts = facts_for(policy, target)
  keep, probability, weight, offset = chosen(policy, target, facts)
  fields = keep, probability, weight
  assert [f.dtype for f in fields] == [bool, np.float32, np.float32]
  assert [f.shape for f in fields] == [facts.hot.shape] * 3
  corrected = policy.correction != 'none'
  lowest = policy.floor if corrected else 0.0
  assert (probability >= np.float32(lowest)).all()
  assert (probability <= 1).all()
  assert (weight[~keep] == 0).all()
  expected = {
    'weight': 1 / probability[keep],
    'offset': np.float32(fit(policy, facts, target).weight),
    'none': 1,
  }
  np.testing.assert_array_equal(weight[keep], expected[policy.correction])
  assert keep[probability == 1].all()
  assert not keep[probability == 0].any()
  assert bool(lowest) == corrected  # else a weight could be infinite
  assert (offset is None) == (policy.correction != 'offset')
  if offset is not None:
    assert (offset.dtype, offset.shape) == (np.float32, facts.hot.shape)
    assert abs(offset).max() <= np.float32(-np.log(policy.floor))
  # What the policy may not thin is kept with weight 1, or that of all.
  whole = ~policy.thinned(facts)
  assert whole.any() == (not policy.thins_cold)
  assert keep[whole].all()
  of_all = fit(policy, facts, target).weight if offset is not None else 1
  assert (weight[whole] == np.float32(of_all)).all()
  assert offset is None or not offset[whole].any()


@policies
def test_target_0_is_the_identity(policy):
  facts = facts_for(policy, 0.5)  # stale examples do not matter then
  *fields, offset = chosen(policy, 0.0, facts)
  for field in fields:
    assert (field == 1).all()
  assert offset is None or not offset.any()


@policies
def test_target_1_keeps_what_it_must(policy):
  facts = facts_for(policy, 1.0)
  probability = chosen(policy, 1.0, facts).probability
  if policy.thins_cold:  # as many as are hot, of all that it may leave out
    fitted = fit(policy, facts, 1.0)
    measure = policy.measure(facts._replace(constant=fitted.constant))
    least = np.where(np.isinf(measure), 1, policy.floor).mean()
    expected = max(1 - facts.hot.mean(), least)
    assert probability.mean() == pytest.approx(expected)
    return
  probability = probability[facts.hot]
  assert (probability[probability < 1] == np.float32(policy.floor)).all()
  assert policy.correction == 'weight' or not probability.any()


@policies
def test_equal_draws_give_equal_bits_however_the_examples_are_cut(policy):
  facts = facts_for(policy, 0.5)
  fitted = fit(policy, facts, 0.5)
  uniforms = np.random.default_rng(2).random(400)
  whole = select(policy, facts, fitted, uniforms)
  parts = []
  for i, j in itertools.pairwise((0, 1, 150, 150, 399, 400)):
    part = each_field(facts, operator.itemgetter(slice(i, j)))
    parts.append(select(policy, part, fitted, uniforms[i:j]))
  for one, *pieces in zip(whole, *parts, strict=True):
    if one is not None:
      np.testing.assert_array_equal(one, np.concatenate(pieces), strict=True)


def dropped_share(selection, facts):
  """Expected number of examples dropped, as a share of the hot ones."""
  return (1 - selection.probability.astype(float)).sum() / facts.hot.sum()


@policies
@pytest.mark.parametrize('target', [0.3, 0.6])
def test_what_is_fitted_on_a_sample_holds_for_others(policy, target):
  fitted = fit(policy, facts_for(policy, target, 20_000, seed=3), target)
  facts = facts_for(policy, target, 20_000, seed=4)
  uniforms = np.random.default_rng(6).random(20_000)
  kept = select(policy, facts, fitted, uniforms).keep
  dropped = np.count_nonzero(~kept) / facts.hot.sum()
  assert dropped == pytest.approx(target, abs=0.015)


@policies
def test_the_expected_share_dropped_is_the_target(policy):
  """And a higher target keeps no example more likely."""
  most, shares = None, []
  for target in reversed(TARGETS):
    facts = facts_for(policy, target)
    selection = chosen(policy, target, facts)
    dropped = dropped_share(selection, facts)
    most = dropped if most is None else most
    # The threshold counts whole examples.
    tolerance = 1 / facts.hot.sum() if policy.name == 'stale' else 1e-6
    assert dropped == pytest.approx(min(target, most), abs=tolerance)
    shares.append(selection.probability.mean())
  assert (np.diff(shares) > -1e-6).all()
  assert shares[-1] - shares[0] > 0.3
  facts, before = facts_for(policy, 0.5), np.ones(400)
  for target in TARGETS:
    probability = chosen(policy, target, facts).probability
    assert (probability <= before).all()
    before = probability


@pytest.mark.parametrize('name', ['importance', 'stale_importance', 'surprise'])
def test_scores_make_gradients_vary_less(name):
  """Against thinning the same number blindly."""

  def variance(policy, target):
    facts = facts_for(policy, target)
    draws = over_seeds(policy, target, facts) @ gradients(facts)
    return draws.var(axis=0).sum()

  blind = variance(POLICIES['random_weighted'], 0.5)
  assert variance(POLICIES[name], 0.5) < 0.5 * blind


def test_stale_drops_exactly_the_stale_examples():
  facts = facts_for(POLICIES['stale'], 0.4)
  selection = chosen(POLICIES['stale'], 0.4, facts)
  np.testing.assert_array_equal(selection.keep, ~facts.stale)


@pytest.mark.parametrize('name', ['importance', 'stale_negatives'])
def test_every_click_is_kept_at_weight_1(name):
  facts = facts_for(POLICIES[name], 0.9)
  selection = chosen(POLICIES[name], 0.9, facts)
  assert (selection.weight[facts.labels == 1] == 1).all()
  assert not selection.keep.all()


@pytest.mark.parametrize('name', ['importance', 'stale_importance'])
def test_an_example_without_a_score_is_kept(name):
  facts = facts_for(POLICIES[name], 0.5)
  scores = facts.scores.copy()
  scores[::4] = np.nan
  selection = chosen(POLICIES[name], 0.5, facts._replace(scores=scores))
  assert (selection.weight[::4] == 1).all()
  assert selection.probability[facts.hot].mean() == pytest.approx(0.5)


def test_of_equal_errors_the_fresher_example_is_kept_rather():
  facts = facts_for(POLICIES['stale_importance'], 0.5)._replace(
    scores=np.full(400, 0.5, np.float32)
  )
  p = chosen(POLICIES['stale_importance'], 0.5, facts).probability
  order = np.argsort(facts.stale_share[facts.hot])
  assert (np.diff(p[facts.hot][order]) <= 0).all()
  assert p[facts.hot].min() < p[facts.hot].max()


@given(
  measure=hnp.arrays(
    np.float64,
    st.integers(1, 30),
    elements=st.one_of(
      st.just(0.0), st.just(1.0), st.just(np.inf), st.floats(1e-3, 10)
    ),
  ),
  floor=st.sampled_from([0.0, 0.05, 0.5]),
  target=st.floats(0.01, 1),
)
def test_the_fitted_scale_meets_the_target_of_any_measure(
  measure, floor, target
):
  n = len(measure)
  policy = Policy('any', lambda facts: measure, 'none', floor, lambda t: 0.0)
  nothing = np.zeros(n, np.float32)
  facts = ExampleFacts(np.ones(n, bool), nothing > 0, nothing, nothing)
  fitted = fit(policy, facts, target)
  kept = select(policy, facts, fitted, nothing).probability.mean()
  least = np.where(np.isinf(measure), 1, floor).mean()
  most = np.where(measure > 0, 1, floor).mean()
  assert kept == pytest.approx(np.clip(1 - target, least, most), abs=1e-6)
  assert 0 <= fitted.scale < np.inf


@policies
def test_what_a_policy_cannot_fit_is_refused(policy):
  facts = facts_for(policy, 0.5)
  for target in (-0.1, 1.1, np.nan):
    with pytest.raises(UserError, match=rf'in \[0, 1\], got {target}'):
      fit(policy, facts, target)
  with pytest.raises(UserError, match='400 examples, none hot'):
    fit(policy, facts._replace(hot=np.zeros(400, bool)), 0.5)
  facts = facts._replace(scores=None)
  if not policy.scored:
    chosen(policy, 0.5, facts)
    return
  with pytest.raises(UserError, match=f'{policy.name} needs scores'):
    fit(policy, facts, 0.5)
  with pytest.raises(UserError, match=f'{policy.name} needs scores'):
    select(policy, facts, Fit(1.0), np.zeros(400))
