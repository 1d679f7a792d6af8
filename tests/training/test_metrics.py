"""Metrics against scikit-learn."""

from fractions import Fraction
import math
import pickle

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics

import slipstream_jax as slip
from slipstream_jax.errors import UserError
from slipstream_jax.training import metrics
from slipstream_jax.training.metrics import check_metrics, Predictions, Tally


def sklearn_says(labels, logits):
  probability = 1 / (1 + np.exp(-logits.astype(np.float64)))
  log_loss = sklearn_metrics.log_loss(labels, probability, labels=[0, 1])
  rate = labels.mean()
  entropy = sklearn_metrics.log_loss(labels, np.full(len(labels), rate))
  return {
    'auc': sklearn_metrics.roc_auc_score(labels, logits),
    'log_loss': log_loss,
    'normalized_entropy': log_loss / entropy,
    'accuracy': sklearn_metrics.accuracy_score(labels, logits > 0),
    'calibration': probability.mean() / rate,
  }


@given(
  seed=st.integers(0, 10**6),
  examples=st.integers(2, 400),
  levels=st.sampled_from([None, 1, 2, 4]),
)
def test_random_and_tied_scores(seed, examples, levels):
  rng = np.random.default_rng(seed)
  labels = (rng.random(examples) < 0.3).astype(np.float32)
  labels[:2] = 0, 1
  logits = rng.normal(size=examples) * 3
  if levels is not None:
    logits = rng.integers(0, levels, examples) - 1.5
  logits = logits.astype(np.float32)
  found = metrics.compute(Predictions(labels, logits))._asdict()
  assert found.pop('examples') == len(labels)
  for name, expected in sklearn_says(labels, logits).items():
    assert found[name] == pytest.approx(expected, abs=1e-6), name


@given(
  seed=st.integers(0, 10**6),
  examples=st.integers(2, 400),
  levels=st.sampled_from([1, 5, 10**6]),
)
def test_ranks_have_the_bits_of_scipys(seed, examples, levels):
  rng = np.random.default_rng(seed)
  labels = (rng.random(examples) < 0.3).astype(np.float64)
  labels[:2] = 0, 1
  scores = rng.integers(-levels, levels + 1, examples) / 7
  scores[rng.random(examples) < 0.1] = rng.choice([-0.0, np.inf, -np.inf])
  positive = labels.sum()
  above = stats.rankdata(scores)[labels == 1].sum()
  above -= positive * (positive + 1) / 2
  expected = above / (positive * (examples - positive))
  assert metrics.auc(labels, scores) == expected


def test_merge_equals_computing_on_all():
  rng = np.random.default_rng(0)
  labels = (rng.random(90) < 0.4).astype(np.float32)
  logits = rng.normal(size=90).astype(np.float32)
  parts = [
    Predictions(labels[i : i + 30], logits[i : i + 30]) for i in (0, 30, 60)
  ]
  whole = metrics.compute(Predictions(labels, logits))
  assert metrics.compute(metrics.merge(parts)) == whole


def test_one_class_has_no_auc():
  nothing = np.zeros(5, np.float32)
  found = metrics.compute(Predictions(nothing, nothing))
  assert found.auc is None
  assert found.normalized_entropy is None
  assert found.calibration is None
  assert found.log_loss == pytest.approx(np.log(2))


def test_extreme_logits_stay_finite():
  labels = np.array([0, 1, 1, 0], np.float32)
  logits = np.array([-200, 200, 150, -90], np.float32)
  found = metrics.compute(Predictions(labels, logits))
  assert found.auc == 1.0
  assert found.log_loss < 1e-6


def test_what_diverged_is_not_finite():
  labels = np.array([0, 1, 1, 0], np.float32)
  logits = np.array([0, np.nan, 1, np.inf], np.float32)
  found = metrics.compute(Predictions(labels, logits))
  assert not np.isfinite(found.log_loss)
  assert np.isnan(found.auc)


def test_no_examples_have_no_metrics():
  with pytest.raises(UserError, match='at least one scored example'):
    metrics.compute(metrics.merge([]))


def the_bits_of_clicks(labels, logits):
  """The figures of clicks as their definitions give them at once."""
  labels, logits = labels.astype(np.float64), logits.astype(np.float64)
  rate = labels.mean()
  log_loss = float(np.mean(np.logaddexp(0.0, logits) - labels * logits))
  both = 0.0 < rate < 1.0
  entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate) if both else 0.0
  chance = float(np.mean(np.exp(-np.logaddexp(0.0, -logits))))
  return {
    'log_loss': log_loss,
    'normalized_entropy': float(log_loss / entropy) if both else None,
    'accuracy': float(np.mean((logits > 0) == (labels > 0.5))),
    'calibration': chance / float(rate) if rate > 0 else None,
  }


@given(
  seed=st.integers(0, 10**6),
  examples=st.integers(1, 3000),
  share=st.sampled_from([0.0, 0.01, 0.4, 1.0]),
  cuts=st.integers(1, 5),
)
def test_figures_of_clicks_have_the_bits_of_their_definitions(
  seed, examples, share, cuts
):
  rng = np.random.default_rng(seed)
  labels = (rng.random(examples) < share).astype(np.float32)
  logits = (4 * rng.normal(size=examples)).astype(np.float32)
  tally = Tally()
  for part in cut(labels, logits, rng.integers(0, examples + 1, cuts)):
    tally.add(part)
  values = dict(tally.metrics().values)
  assert list(values) == ['auc', *the_bits_of_clicks(labels, logits)]
  values.pop('auc')
  assert values == the_bits_of_clicks(labels, logits)


def cut(labels, logits, at):
  at = np.sort(at)
  pairs = zip(np.split(labels, at), np.split(logits, at), strict=True)
  return [Predictions(*pair) for pair in pairs]


MEANS = [m for m in slip.METRICS.values() if isinstance(m, slip.MeanMetric)]


@given(
  seed=st.integers(0, 10**6),
  examples=st.integers(1, 400),
  size=st.sampled_from([1e-30, 1.0, 1e12]),
  cuts=st.integers(1, 9),
)
def test_means_are_the_same_in_any_cut_and_order(seed, examples, size, cuts):
  rng = np.random.default_rng(seed)
  labels = (rng.random(examples) < 0.4).astype(np.float32)
  logits = size * rng.normal(size=examples) * 10 ** rng.normal(size=examples)
  logits = logits.astype(np.float32)
  whole = metrics.compute(Predictions(labels, logits), [MEANS])
  order = rng.permutation(examples)
  parts = cut(labels[order], logits[order], rng.integers(0, examples + 1, cuts))
  tally = Tally([MEANS])
  for part in parts:
    tally.add(part)
  assert tally.metrics() == whole
  for metric in MEANS:
    at_once = metric(labels.astype(float), logits.astype(float))
    found = whole.values[metric.name]
    assert found == (at_once and pytest.approx(at_once, rel=1e-12))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=40))
def test_sums_are_exact(numbers):
  with_room = [x / 2**10 for x in numbers]  # so that none overflows
  half = len(numbers) // 2
  total = metrics.exact_sum([], np.array(with_room[:half]))
  total = metrics.exact_sum(total, np.array(with_room[half:]))
  assert sum(map(Fraction, total)) == sum(map(Fraction, with_room))
  assert len(total) <= 41  # 53 bits each, of 2100


@given(
  seed=st.integers(0, 10**6),
  examples=st.integers(1, 400),
  offset=st.sampled_from([0.0, 3.0, 1e6]),
)
def test_ratings_against_scikit_learn(seed, examples, offset):
  rng = np.random.default_rng(seed)
  stars, rated = (offset + rng.normal(size=(2, examples))).astype(np.float32)
  found = metrics.compute(Predictions(stars, rated), [metrics.NUMBERS])
  given_ = stars.astype(float), rated.astype(float)
  assert found.rmse == pytest.approx(
    sklearn_metrics.root_mean_squared_error(*given_), rel=1e-12
  )
  assert found.mae == pytest.approx(
    sklearn_metrics.mean_absolute_error(*given_), rel=1e-12
  )


def test_ratings_that_diverged_are_not_finite():
  stars, rated = np.ones((2, 3), np.float32)
  for bad in np.nan, np.inf:
    rated[1] = bad
    found = metrics.compute(Predictions(stars, rated), [metrics.NUMBERS])
    assert not math.isfinite(found.rmse)
    assert not math.isfinite(found.mae)


def r2(labels, logits):
  return sklearn_metrics.r2_score(labels, logits)


def test_metrics_of_ones_own():
  rng = np.random.default_rng(0)
  stars, rated = rng.normal(size=(2, 50)).astype(np.float32)
  bias = slip.MeanMetric('bias', lambda y, z: [z - y], lambda mean: mean)
  chosen = check_metrics(
    [slip.rmse, r2, bias, 'mae', sklearn_metrics.max_error], 'Trainer, metrics'
  )
  found = metrics.compute(Predictions(stars, rated), [chosen])
  assert list(found.values) == ['rmse', 'r2', 'bias', 'mae', 'max_error']
  given_ = stars.astype(float), rated.astype(float)
  assert found.r2 == r2(*given_)
  assert found.bias == np.mean(given_[1] - given_[0])
  assert found.max_error == max(abs(given_[0] - given_[1]))
  heads = Predictions(np.stack([stars] * 2, 1), np.stack([rated, -rated], 1))
  found = metrics.compute(heads, [chosen])
  assert found.r2 == np.mean([found.heads[0].r2, found.heads[1].r2])
  assert check_metrics(None, '') is None
  assert metrics.compute(Predictions(stars, rated), [[]]).values == {}


def test_results_are_attributes_that_are_listed_copied_and_shown():
  labels = np.array([0, 1, 1], np.float32)
  found = metrics.compute(Predictions(labels, np.zeros(3, np.float32)))
  assert 'log_loss' in dir(found)
  assert pickle.loads(pickle.dumps(found)) == found
  assert repr(found).startswith('Metrics(examples=3, auc=0.5, log_loss=0.69')
  assert not hasattr(found, 'rmse')
  assert [*found._asdict()] == ['examples', *found.values, 'heads']


def none(labels, logits):
  return None


def vector(labels, logits):
  return labels - logits


def word(labels, logits):
  return 'good'


def test_a_metric_may_have_no_value_but_must_be_a_number():
  some = Predictions(np.zeros(3, np.float32), np.zeros(3, np.float32))
  assert metrics.compute(some, [[none]]).none is None
  for wrong in vector, word:
    with pytest.raises(UserError, match=f'metric {wrong.__name__} must return'):
      metrics.compute(some, [[wrong]])


WRONG = {
  'one by itself': (slip.rmse, 'must be a list of functions'),
  'a name by itself': ('auc', "must be a list of functions.*got 'auc'"),
  'no metric': (['f1'], 'one of auc, log_loss, .*, mae, or a function'),
  'a number': ([0.5], 'one of auc, .*got 0.5'),
  'no name': ([lambda y, z: 0.0], "got '<lambda>'.*define it with def"),
  'twice': ([slip.auc, 'auc'], "a name of its own.*got 'auc'"),
  'a field': ([slip.MeanMetric('heads', lambda y, z: [y], float)], "'heads'"),
}


@pytest.mark.parametrize('case', WRONG)
def test_what_is_no_list_of_metrics_is_told(case):
  given_, says = WRONG[case]
  with pytest.raises(UserError, match=says) as error:
    check_metrics(given_, 'Trainer, metrics')
  assert error.value.where == 'Trainer, metrics'
