"""The synthetic stream: random access, shape of the log, planted teacher."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from slipstream_jax.errors import UserError
from slipstream_jax.synthetic.clicks import examples_at
from slipstream_jax.synthetic.spec import KAGGLE_ROWS, SyntheticSpec
from slipstream_jax.synthetic.stream import (
  bayes_auc,
  stream_batches,
  stream_dataset,
  TEST_START,
)
from slipstream_jax.tables import offsets

SMALL = SyntheticSpec(rows=(40, 7, 900, 1, 300), dense_features=4)
KAGGLE = SyntheticSpec()
HOT_ROWS = (256 << 20) // (4 * 16)  # 256 MiB of rows of D = 16
SAMPLE = 1 << 21  # about the papers' 5 % of 45 M examples


def joined(batches):
  """All batches' arrays, end to end."""
  return [
    np.concatenate(arrays)
    for arrays in zip(*(b[:4] for b in batches), strict=True)
  ]


def taken(source, batches):
  return [next(source) for _ in range(batches)]


def assert_equal(ours, theirs):
  """Arrays of two batches, or all of them joined, less what is None."""
  ours, theirs = ([x for x in b if x is not None] for b in (ours, theirs))
  for mine, other in zip(ours, theirs, strict=True):
    np.testing.assert_array_equal(mine, other)


@pytest.fixture(scope='module')
def kaggle():
  """Examples of the Kaggle shape, from a part no other test reads."""
  return examples_at(KAGGLE, (1 << 30) + np.arange(1 << 18))


def test_an_example_depends_on_its_position_alone():
  whole = examples_at(SMALL, np.arange(1000))
  picked = np.random.default_rng(0).permutation(1000)[:77]
  some = examples_at(SMALL, picked)
  assert_equal(some.columns, whole.columns.take(picked))
  np.testing.assert_array_equal(some.probabilities, whole.probabilities[picked])


def test_batch_size_changes_no_example():
  small = joined(taken(stream_batches(examples_at, SMALL, 24), 50))
  large = joined(taken(stream_batches(examples_at, SMALL, 400), 3))
  assert_equal(small, large)


def test_seeds_and_parts_differ():
  def lookups(spec, first):
    return next(stream_batches(examples_at, spec, 512, first=first)).lookups

  base = lookups(KAGGLE, 0)
  for spec, first in [
    (KAGGLE._replace(seed=1), 0),
    (KAGGLE._replace(seed=1, teacher_seed=0), 0),
    (KAGGLE, TEST_START),
    (KAGGLE, 512),
  ]:
    other = lookups(spec, first)
    assert not (other == base).all(axis=1).any()


def test_test_part_is_reserved_and_the_same_every_time():
  data = stream_dataset(examples_at, SyntheticSpec(rows=SMALL.rows), 1000)
  first, second = joined(data.test(300)), joined(data.test(300))
  assert_equal(first, second)
  theirs = examples_at(
    SyntheticSpec(rows=SMALL.rows), TEST_START + np.arange(1000)
  )
  dense, lookups, labels, weights = first
  assert_equal((dense[:1000], lookups[:1000], labels[:1000]), theirs.columns)
  assert len(labels) == 1200
  assert weights.sum() == 1000
  assert weights[:1000].all()
  assert (lookups[1000:] == -1).all()


@pytest.mark.parametrize('examples', [None, 330])
@pytest.mark.parametrize('delivered', [0, 1, 5])
def test_resumes_exactly(examples, delivered):
  source = stream_batches(examples_at, SMALL, 32, examples=examples)
  taken(source, delivered)
  state = source.get_state()
  rest = taken(source, 6)
  resumed = stream_batches(examples_at, SMALL, 32, examples=examples)
  resumed.set_state(state)
  assert resumed.get_state()['delivered'] == delivered
  for ours, theirs in zip(taken(resumed, 6), rest, strict=True):
    assert_equal(ours, theirs)
  resumed.close()
  resumed.close()


def test_ends_after_its_examples():
  source = stream_batches(examples_at, SMALL, 32, examples=64)
  assert len(list(source)) == 2
  assert next(source, None) is None
  assert source.get_state()['delivered'] == 2


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


def test_access_curve_is_straight_on_log_log(kaggle):
  counts = np.bincount(kaggle.columns.lookups.ravel())
  counts = np.sort(counts)[::-1]
  ranks = np.unique(np.geomspace(10, 100_000, 60).astype(int))
  x, y = np.log(ranks), np.log(counts[ranks - 1])
  slope, _ = np.polyfit(x, y, 1)
  assert -1.3 < slope < -0.9  # 80,000 real lines: -1.1
  assert np.corrcoef(x, y)[0, 1] ** 2 > 0.98


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


def test_fields_of_an_item_come_together(kaggle):
  lookups = kaggle.columns.lookups
  items, users = [2, 5, 8, 11, 14], [0, 3, 6, 9, 12]
  order = np.argsort(lookups[:, 2], kind='stable')
  same = np.diff(lookups[order, 2]) == 0
  # Rare items only: the popular ones agree by chance.
  same &= lookups[order[1:], 2] > lookups[:, 2].min() + 1000

  def agreement(field):
    return (np.diff(lookups[order, field]) == 0)[same].mean()

  assert min(map(agreement, items)) > 0.9
  assert max(map(agreement, users)) < 0.3


def test_labels_are_drawn_from_the_probabilities(kaggle):
  tests = examples_at(KAGGLE, TEST_START + np.arange(1 << 17))
  for columns, probabilities in (kaggle, tests):
    order = np.argsort(probabilities).reshape(16, -1)
    expected = probabilities[order].mean(axis=1)
    error = np.sqrt(expected * (1 - expected) / order.shape[1])
    found = columns.labels[order].mean(axis=1)
    assert (np.abs(found - expected) < 4.5 * error).all()


@pytest.mark.parametrize('seed', [0, 5])
def test_base_rate_and_bayes_auc_hold_for_every_seed(seed):
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


def log_odds(columns, known):
  """Smoothed log odds of each row in `known`, as features of `columns`."""
  rows = sum(KAGGLE_ROWS)
  lookups = known.lookups.ravel()
  clicks = np.repeat(known.labels, known.lookups.shape[1])
  shown = np.bincount(lookups, minlength=rows) + 40.0
  clicked = np.bincount(lookups, clicks, minlength=rows) + 10.0
  odds = np.log(clicked) - np.log(shown - clicked)
  return np.concatenate([columns.dense, odds[columns.lookups]], axis=1)


def test_rows_and_dense_features_can_be_learned(kaggle):
  known = kaggle.columns.take(slice(0, 1 << 17))
  train = kaggle.columns.take(slice(1 << 17, 1 << 18))
  test = examples_at(KAGGLE, TEST_START + np.arange(1 << 16))
  model = LogisticRegression(solver='newton-cholesky')
  model.fit(log_odds(train, known), train.labels)
  scores = model.decision_function(log_odds(test.columns, known))
  found = roc_auc_score(test.columns.labels, scores)
  best = bayes_auc(test.probabilities)
  assert 0.6 < (found - 0.5) / (best - 0.5) < 0.95


@pytest.mark.parametrize(
  ('changed', 'shown'),
  [
    ({'rows': ()}, 'rows'),
    ({'rows': (3, 0)}, '(3, 0)'),
    ({'rows': (3, 2.5)}, '2.5'),
    ({'dense_features': 0}, 'dense_features'),
    ({'seed': -1}, '-1'),
    ({'teacher_seed': 1 << 63}, 'teacher_seed'),
    ({'skews': (1.0, -0.1, 1.0)}, '-0.1'),
    ({'field_skew': 0}, 'field_skew'),
    ({'own_share': 1.5}, '1.5'),
    ({'signal': (0, 0, 0)}, 'signal'),
    ({'logit_std': float('nan')}, 'nan'),
    ({'base_rate': 1}, 'base_rate'),
  ],
)
def test_bad_specs_are_told_in_one_sentence(changed, shown):
  with pytest.raises(UserError) as error:
    stream_batches(examples_at, SMALL._replace(**changed), 8)
  assert shown in str(error.value)
  assert f'SyntheticSpec.{next(iter(changed))}' in str(error.value)


def test_bad_sizes_are_told():
  with pytest.raises(UserError, match='at least one example, a whole'):
    stream_batches(examples_at, SMALL, 0)
  with pytest.raises(
    UserError, match='examples must be a whole number, at least 1, got -3'
  ):
    stream_batches(examples_at, SMALL, 8, examples=-3)
  with pytest.raises(
    UserError, match='test_examples must be a whole number, at least 1, got 0'
  ):
    stream_dataset(examples_at, SMALL, 0)
