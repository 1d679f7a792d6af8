"""The synthetic stream: random access, shape of the log, planted teacher."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from slipstream_jax.synthetic.clicks import examples_at
from slipstream_jax.synthetic.spec import KAGGLE_ROWS, SyntheticSpec
from slipstream_jax.synthetic.stream import (
  bayes_auc,
  stream_dataset,
  TEST_START,
)
from slipstream_jax.tables import offsets

SMALL = SyntheticSpec(rows=(40, 7, 900, 1, 300), dense_features=4)
KAGGLE = SyntheticSpec()
HOT_ROWS = (256 << 20) // (4 * 16)  # 256 MiB of rows of D = 16
SAMPLE = 1 << 21  # about the papers' 5 % of 45 M examples


@pytest.fixture(scope='module')
def kaggle():
  """Examples of the Kaggle shape, from a part no other test reads."""
  return examples_at(KAGGLE, (1 << 30) + np.arange(1 << 18))


@settings(max_examples=20)
@given(
  st.lists(st.integers(1, 3) | st.integers(1, 5000), min_size=1, max_size=8),
  st.sampled_from([0.3, 1.0, 1.1, 3.0]),
  st.integers(0, (1 << 63) - 1),
)
def test_rows_stay_in_their_tables(rows, skew, seed):
  spec = SyntheticSpec(
    tuple(rows), 1, seed, skews=(skew,) * 3, field_skew=skew, own_share=0.3
  )
  columns, probabilities = examples_at(spec, np.arange(3000))
  starts = offsets(rows)
  assert columns.lookups.dtype == np.int32
  assert (columns.lookups >= starts[:-1]).all()
  assert (columns.lookups < starts[1:]).all()
  small = [f for f, size in enumerate(rows) if size <= 3 and skew < 2]
  for f in small:
    assert len(np.unique(columns.lookups[:, f])) == rows[f]
  assert np.isfinite(columns.dense).all()
  assert ((probabilities > 0) & (probabilities < 1)).all()


def test_dense_features_are_logs_of_counts(kaggle):
  dense = kaggle.columns.dense
  counts = np.expm1(dense.astype(np.float64))
  assert dense.dtype == np.float32
  assert dense.min() == 0
  few = dense < 5  # f32 resolves counts of this size
  np.testing.assert_allclose(counts[few], np.round(counts[few]), atol=1e-4)
  assert 0.3 < (dense[:, 0] == 0).mean() < 0.9


def test_80000_examples_have_as_many_ids_as_real_lines(kaggle):
  _, counts = np.unique(kaggle.columns.lookups[:80_000], return_counts=True)
  top = np.sort(counts)[-len(counts) // 100 :]
  assert len(counts) == pytest.approx(200_103, rel=0.1)
  assert (counts == 1).mean() == pytest.approx(0.71, abs=0.05)
  assert top.sum() / counts.sum() == pytest.approx(0.73, abs=0.05)


def test_most_examples_touch_only_hot_rows(kaggle):
  # Rows that the sample never met are cold, so with fewer seen than fit the
  # hot set, the ranking by counts comes down to having been seen.
  seen = np.zeros(sum(KAGGLE_ROWS), np.bool_)
  for start in range(0, SAMPLE, 1 << 18):
    columns = examples_at(KAGGLE, start + np.arange(1 << 18)).columns
    seen[columns.lookups] = True
  assert 0.04 < seen.mean() < 0.08  # FAE: 6.8 % of the bytes are hot
  assert seen.sum() < HOT_ROWS
  hot = seen[kaggle.columns.lookups].all(axis=1).mean()
  assert 0.68 < hot < 0.76  # FAE: 75.8 % of the examples are hot


def test_base_rate_and_bayes_auc_hold_for_every_seed():
  seed = 5
  data = stream_dataset(examples_at, SyntheticSpec(seed=seed), 1 << 18)
  assert 'NOT real data' in data.name
  assert data.base_rate == pytest.approx(0.25, abs=0.005)
  assert 0.80 < data.bayes_auc < 0.82
  columns, probabilities = examples_at(
    SyntheticSpec(seed=seed), TEST_START + np.arange(1 << 17)
  )
  drawn = roc_auc_score(columns.labels, probabilities)
  error = (drawn * (1 - drawn) / (columns.labels == 1).sum()) ** 0.5
  assert drawn == pytest.approx(data.bayes_auc, abs=4 * error)


def test_bayes_auc_is_the_weight_of_ordered_pairs():
  p = np.array([0.1, 0.4, 0.4, 0.9, 0.5])
  ahead = (p[:, None] > p) + 0.5 * (p[:, None] == p)
  weight = p[:, None] * (1 - p)
  expected = (ahead * weight).sum() / weight.sum()
  assert bayes_auc(p) == pytest.approx(expected, abs=1e-12)


def test_bayes_log_loss_is_that_of_the_true_probabilities():
  data = stream_dataset(examples_at, SMALL, 1 << 10)
  columns, p = examples_at(SMALL, TEST_START + np.arange(1 << 17))
  losses = -np.log(np.where(columns.labels == 1, p, 1 - p))
  error = losses.std() / len(losses) ** 0.5
  assert losses.mean() == pytest.approx(data.bayes_log_loss, abs=4 * error)


def test_a_fourth_share_is_that_of_triples():
  """Four products of three factors, each of one field, and a bias."""
  rows, examples = (7, 4, 3), np.arange(1 << 16)
  flat = SyntheticSpec(
    rows, 1, skews=(0.01,) * 3, own_share=1.0, signal=(0.0, 0.0, 0.0, 1.0)
  )
  columns, p = examples_at(flat, examples)
  at = tuple((columns.lookups - offsets(rows)[:-1]).T)
  logits = np.full(rows, np.nan)
  logits[at] = np.log(p / (1 - p))
  np.testing.assert_allclose(logits[at], np.log(p / (1 - p)))  # of rows alone
  sizes = np.linalg.svd(logits.reshape(7, 12), compute_uv=False)
  assert sizes[4] > 0.1 > 1e-9 > sizes[5]
  assert logits.std(axis=2).min() > 0  # no field is left out
  pairs = flat._replace(signal=(0.0, 0.0, 1.0))
  columns, p = examples_at(pairs, examples)
  for row in range(28):  # the only pair is that of the first two fields
    of_pair = (columns.lookups[:, 0] * 4 + columns.lookups[:, 1] - 7) == row
    assert np.ptp(p[of_pair]) < 1e-9


def test_a_share_of_zero_changes_nothing():
  ours, theirs = (
    examples_at(SMALL._replace(signal=signal), np.arange(999))
    for signal in ((0.2, 0.5, 0.3, 0.0), (0.2, 0.5, 0.3))
  )
  np.testing.assert_allclose(ours.probabilities, theirs.probabilities)
  np.testing.assert_array_equal(ours.columns.lookups, theirs.columns.lookups)


def click_rates(spec, field, top):
  """True click rate of the first `top` rows of a table."""
  columns, probabilities = examples_at(spec, np.arange(1 << 17))
  ids = columns.lookups[:, field] - offsets(spec.rows)[field]
  sums = np.bincount(ids, probabilities)[:top]
  return sums / np.bincount(ids)[:top]


def test_the_teacher_depends_on_its_own_seed_only():
  specs = [SMALL._replace(seed=s, teacher_seed=t) for s, t in ((1, 9), (2, 9))]
  same = [click_rates(spec, 0, 20) for spec in specs]
  other = click_rates(SMALL._replace(seed=1, teacher_seed=8), 0, 20)
  np.testing.assert_allclose(*same, atol=0.05)
  assert np.ptp(same[0]) > 0.1
  assert np.corrcoef(*same)[0, 1] > 0.95
  assert np.corrcoef(same[0], other)[0, 1] < 0.7
