"""Metrics against scikit-learn."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics

from slipstream_jax.errors import UserError
from slipstream_jax.training import metrics
from slipstream_jax.training.metrics import Predictions


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
