"""Synthetic twins: pure streams, their knobs, and the published skew."""

import pathlib
import zlib

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from experiments.skew import __main__ as skew
from experiments.skew import curves
from slipstream_jax.errors import UserError
from slipstream_jax.selection.hot import access_counts, hot_rows
from slipstream_jax.synthetic.clicks import (
  bayes_auc,
  inputs_at,
  SyntheticBatches,
  TEST_START,
)
from slipstream_jax.synthetic.drift import holder, REACH
from slipstream_jax.synthetic.proxies import twin_dataset, TWINS
from slipstream_jax.synthetic.shop import series_at, series_dataset
from slipstream_jax.synthetic.spec import KAGGLE_ROWS, SeriesSpec, SyntheticSpec
from slipstream_jax.tables import offsets
from tests.support import examples

SHARED = pathlib.Path(__file__).resolve().parents[3] / 'shared' / 'data'
DRIFT = 20_000
USER, ITEM, CATEGORY = range(3)
every_twin = pytest.mark.parametrize('name', TWINS)


def inputs_of(name, first=0, inputs=4096, **changes):
  twin = TWINS[name]
  positions = first + np.arange(inputs)
  return twin.law(twin.spec._replace(**changes), positions)


def assert_same(ours, theirs):
  for mine, other in zip(ours, theirs, strict=True):
    np.testing.assert_array_equal(mine, other)


@pytest.fixture(scope='module')
def shop():
  """Inputs of Taobao's twin."""
  return inputs_of('taobao', TEST_START + (1 << 30), 1 << 16)


def test_the_default_stream_has_the_bits_it_had_before_there_were_knobs():
  columns = inputs_at(SyntheticSpec(), np.arange(256)).columns
  assert zlib.crc32(columns.lookups.tobytes()) == 375970885
  assert zlib.crc32(columns.labels.tobytes()) == 3271972031
  assert TWINS['kaggle'].spec == SyntheticSpec()


@every_twin
@pytest.mark.parametrize('drift', [0, 700])
def test_an_input_depends_on_its_position_alone(name, drift):
  twin = TWINS[name]
  spec = twin.spec._replace(drift_inputs=drift)
  whole = twin.law(spec, np.arange(3000))
  picked = np.random.default_rng(0).permutation(3000)[:99]
  some = twin.law(spec, picked)
  assert_same(some.columns, whole.columns.take(picked))
  np.testing.assert_array_equal(some.probabilities, whole.probabilities[picked])
  by_batch = [
    next(SyntheticBatches(spec, 40, first=first, law=twin.law)).lookups
    for first in range(0, 3000, 40)
  ]
  np.testing.assert_array_equal(np.concatenate(by_batch), whole.columns.lookups)


@every_twin
def test_seeds_and_parts_differ(name):
  base = inputs_of(name).columns.lookups.reshape(4096, -1)
  for first, seed in ((0, 1), (TEST_START, 0), (4096, 0)):
    other = inputs_of(name, first, seed=seed).columns.lookups
    same = (other.reshape(4096, -1) == base).all(axis=1)
    assert same.mean() < 0.01
  again = inputs_of(name).columns.lookups.reshape(4096, -1)
  np.testing.assert_array_equal(again, base)


@every_twin
def test_rows_stay_in_their_tables(name):
  for drift in (0, 100):
    columns = inputs_of(name, inputs=1 << 15, drift_inputs=drift).columns
    starts = offsets(TWINS[name].spec.rows)
    lookups = columns.lookups.reshape(1 << 15, len(starts) - 1, -1)
    least = np.where(lookups < 0, starts[:-1, None], lookups)
    assert lookups.dtype == np.int32
    assert (least >= starts[:-1, None]).all()
    assert (lookups < starts[1:, None]).all()
    assert np.isfinite(columns.dense).all()


@pytest.mark.parametrize(
  ('name', 'tables', 'dense', 'rows', 'base_rate'),
  [
    ('kaggle', 26, 13, 33.8e6, 0.256),
    ('terabyte', 26, 13, 266e6, 0.034),
    ('avazu', 21, 1, 9.3e6, 0.17),
    ('taobao', 3, 1, 5.1e6, 0.5),
  ],
)
def test_sizes_and_base_rates_are_those_published(
  name, tables, dense, rows, base_rate
):
  data = twin_dataset(name, test_inputs=1 << 16)
  assert 'NOT real data' in data.name
  assert len(data.tables) == tables
  assert data.dense_features == dense
  assert sum(t.rows for t in data.tables) == pytest.approx(rows, rel=0.012)
  assert data.base_rate == pytest.approx(base_rate, abs=0.008)
  batch = next(data.test(1 << 16))
  error = (base_rate / (1 << 16)) ** 0.5
  assert batch.labels.mean() == pytest.approx(data.base_rate, abs=5 * error)
  assert batch.dense.shape == (1 << 16, dense)
  assert 0.75 < data.bayes_auc < 0.95


@every_twin
def test_labels_are_drawn_from_the_probabilities(name):
  columns, probabilities = inputs_of(name, TEST_START, 1 << 17)
  order = np.argsort(probabilities).reshape(16, -1)
  expected = probabilities[order].mean(axis=1)
  error = np.sqrt(expected * (1 - expected) / order.shape[1])
  found = columns.labels[order].mean(axis=1)
  assert (np.abs(found - expected) < 4.5 * error).all()


# Drift


@settings(max_examples=40)
@given(
  st.integers(1, 10**6),
  st.integers(0, 10**6),
  st.integers(1, 10**5),
  st.integers(0, 2**32),
)
def test_a_rank_is_held_by_one_further_down_and_changes_hands(
  rank, below, drift_inputs, time
):
  key, ranks = np.uint64(17), rank + below
  held = holder(key, rank, ranks, time, drift_inputs)
  assert rank <= held <= min(ranks, REACH * rank)
  assert holder(key, rank, ranks, time, 0) == rank
  if time < drift_inputs:  # at most one change so far
    between = {
      holder(key, rank, ranks, t, drift_inputs)
      for t in np.linspace(0, time, 50).astype(int)
    }
    assert between <= {rank, held}


def test_half_of_the_ranks_change_hands_and_smoothly():
  def held(time):
    return np.array(
      [holder(np.uint64(5), r, 10**9, time, 1000) for r in range(1, 4001)]
    )

  start, ranks = held(0), np.arange(1, 4001)
  np.testing.assert_array_equal(start, ranks)
  for time, share in ((100, 0.05), (500, 0.25), (1000, 0.5), (9000, 0.5)):
    assert (held(time) != ranks).mean() == pytest.approx(share, abs=0.03)


def share_of(hot, lookups):
  return np.isin(lookups, hot).mean()


@pytest.mark.parametrize(
  ('name', 'field', 'rows'),
  [
    ('kaggle', 2, TWINS['kaggle'].spec.rows),
    ('avazu', 9, TWINS['avazu'].spec.rows),
    ('taobao', ITEM, (3000, 8000, 20)),  # of 4 M items none is met often
  ],
)
def test_what_was_hot_cools_down(name, field, rows):
  def lookups_at(time, drift):
    inputs = inputs_of(
      name, TEST_START + time, DRIFT, drift_inputs=drift, rows=rows
    )
    return inputs.columns.lookups[:, field].ravel()

  # A drift that has hardly begun: the first inputs are those without drift.
  slow = lookups_at(0, (1 << 32) - 1)
  assert (slow == lookups_at(0, 0)).mean() > 0.99
  seen, counts = np.unique(slow, return_counts=True)
  counts[seen < 0] = 0  # padding
  hot = seen[np.argsort(-counts, kind='stable')[:300]]
  still = share_of(hot, lookups_at(8 * DRIFT, 0))
  begun = share_of(hot, lookups_at(0, 10 * DRIFT))
  cooled = share_of(hot, lookups_at(80 * DRIFT, DRIFT))
  # Chosen by their counts in one sample, they have fewer in any other.
  assert still > 0.7 * share_of(hot, slow)
  assert begun > 0.85 * still
  assert cooled < 0.8 * still
  # One by one: many are as good as gone.
  later = lookups_at(80 * DRIFT, DRIFT)
  before = np.array([(slow == row).mean() for row in hot[:100]])
  after = np.array([(later == row).mean() for row in hot[:100]])
  assert 0.25 < (after < 0.25 * before).mean() < 0.65


def test_effects_stay_with_the_row():
  spec = SyntheticSpec(
    rows=(500,), dense_features=1, signal=(0, 1, 0), drift_inputs=1000
  )
  early = inputs_at(spec, np.arange(3000))
  late = inputs_at(spec, np.arange(10**6, 10**6 + 3000))
  chance = {}
  for columns, probabilities in (early, late):
    for row, p in zip(columns.lookups[:, 0], probabilities, strict=True):
      assert chance.setdefault(row, p) == p
  seen = [set(np.unique(part.columns.lookups)) for part in (early, late)]
  assert len(seen[0] & seen[1]) > 20


def test_base_rate_holds_while_popularity_drifts():
  rates = []
  for epoch in range(8):
    part = inputs_of(
      'kaggle', TEST_START + epoch * 10**6, 1 << 14, drift_inputs=10**6
    )
    rates.append(part.probabilities.mean())
  assert np.ptp(rates) > 1e-3  # else nothing drifted
  assert np.mean(rates) == pytest.approx(0.25, abs=0.03)


def test_what_is_tested_on_may_follow_on_training():
  data = twin_dataset(
    'kaggle', rows=(50, 900, 7), test_inputs=64, drift_inputs=10, test_at=777
  )
  spec = SyntheticSpec(rows=(50, 900, 7), drift_inputs=10)
  theirs = inputs_at(spec, TEST_START + 777 + np.arange(64))
  assert_same(next(data.test(64))[:3], theirs.columns)


# Saturation


def learned(spec, inputs):
  """Share of the way to the Bayes AUC that log odds of rows go."""
  known = inputs_at(spec, np.arange(inputs)).columns
  test = inputs_at(spec, TEST_START + np.arange(1 << 14))
  lookups, tables = known.lookups, len(spec.rows)
  shown = np.bincount(lookups.ravel(), minlength=sum(spec.rows)) + 20.0
  clicks = np.bincount(
    lookups.ravel(), np.repeat(known.labels, tables), minlength=sum(spec.rows)
  )
  clicks += 20 * known.labels.mean()
  odds = np.log(clicks) - np.log(shown - clicks)
  scores = odds[test.columns.lookups].sum(axis=1)
  found = roc_auc_score(test.columns.labels, scores)
  return (found - 0.5) / (bayes_auc(test.probabilities) - 0.5)


def test_the_more_saturation_the_sooner_all_is_learned():
  small = SyntheticSpec(
    rows=tuple(max(3, rows // 50) for rows in KAGGLE_ROWS), signal=(0, 1, 0)
  )
  soon = [
    learned(small._replace(saturation=s), 1 << 12) for s in (0, 0.25, 0.5, 1.0)
  ]
  assert (np.diff(soon) > 0.01).all()
  assert soon[-1] > soon[0] + 0.1


def test_saturation_changes_clicks_and_nothing_else():
  plain = inputs_of('avazu')
  loud = inputs_of('avazu', saturation=0.5)
  assert_same(plain.columns[:2], loud.columns[:2])
  assert not np.allclose(plain.probabilities, loud.probabilities)


# Series


def test_a_series_is_past_steps_then_padding_then_the_candidate(shop):
  lookups, dense = shop.columns.lookups, shop.columns.dense
  assert lookups.shape == (1 << 16, 3, 21)
  there = lookups >= 0
  assert (there == there[:, :1]).all()  # in all three tables alike
  assert there[:, :, -1].all()
  past = there[:, 0, :-1].sum(axis=1)
  np.testing.assert_array_equal(there[:, 0, :-1], np.arange(20) < past[:, None])
  np.testing.assert_allclose(dense[:, 0], np.log1p(past), rtol=1e-6)
  assert past.min() == 1
  assert (past < 20).mean() == pytest.approx(0.2, abs=0.02)
  users = np.where(there[:, USER], lookups[:, USER], lookups[:, USER, -1:])
  assert (users == users[:, :1]).all()


def test_an_item_has_one_category(shop):
  items = shop.columns.lookups[:, ITEM].ravel()
  categories = shop.columns.lookups[:, CATEGORY].ravel()
  pairs = np.unique(np.stack([items, categories]), axis=1)
  assert len(np.unique(pairs[0])) == pairs.shape[1] > 50_000


def test_the_past_predicts_the_click(shop):
  lookups, labels = shop.columns.lookups, shop.columns.labels
  categories, items = lookups[:, CATEGORY], lookups[:, ITEM]
  met = (categories[:, :-1] == categories[:, -1:]).sum(axis=1)
  auc = roc_auc_score(labels, met)
  assert 0.85 < auc < bayes_auc(shop.probabilities)
  others = np.roll(categories[:, :-1], 1, axis=0)
  foreign = (others == categories[:, -1:]).sum(axis=1)
  assert roc_auc_score(labels, foreign) == pytest.approx(0.5, abs=0.01)
  # The candidate alone tells nothing.
  assert roc_auc_score(labels, items[:, -1]) == pytest.approx(0.5, abs=0.02)


def test_users_come_back_to_items(shop):
  full = shop.columns.lookups[:, ITEM, :20]
  full = np.sort(full[(full >= 0).all(axis=1)], axis=1)
  distinct = 1 + (np.diff(full, axis=1) > 0).sum(axis=1)
  assert 12 < distinct.mean() < 18


def test_a_user_keeps_interests_from_input_to_input(shop):
  users = shop.columns.lookups[:, USER, -1]
  categories = shop.columns.lookups[:, CATEGORY, :20]
  order = np.argsort(users, kind='stable')
  same = np.flatnonzero(np.diff(users[order]) == 0)[:2000]
  first, second = categories[order[same]], categories[order[same + 1]]

  def overlap(mine, theirs):
    met = (mine[:, :, None] == theirs[:, None]) & (mine[:, :, None] >= 0)
    return met.any(axis=2).sum() / (mine >= 0).sum()

  assert overlap(first, second) > 0.8
  assert overlap(first, np.roll(second, 7, axis=0)) < 0.3


def test_the_last_batch_of_a_series_is_padded():
  spec = SeriesSpec(rows=(90, 500, 12), steps=4)
  data = series_dataset(spec, 10)
  *_, last = data.test(8)
  assert last.lookups.shape == (8, 3, 5)
  assert (last.lookups[2:] == -1).all()
  np.testing.assert_array_equal(last.weights, [1, 1, 0, 0, 0, 0, 0, 0])
  whole = series_at(spec, TEST_START + np.arange(10)).columns
  np.testing.assert_array_equal(last.lookups[:2], whole.lookups[8:])


# Skew


@pytest.mark.parametrize('name', ['kaggle', 'avazu'])
def test_the_skew_is_the_published_one(name):
  twin = TWINS[name]
  found = skew.measured(twin)
  assert found.hot_bytes == pytest.approx(twin.hot_bytes, abs=0.03)
  assert found.hot_inputs == pytest.approx(twin.hot_inputs, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1])
@every_twin
def test_the_skew_of_every_twin_is_the_published_one(name, seed):
  twin = TWINS[name]
  found = skew.measured(twin, seed)
  assert found.hot_bytes == pytest.approx(twin.hot_bytes, abs=0.03)
  assert found.hot_inputs == pytest.approx(twin.hot_inputs, abs=0.03)


@pytest.mark.parametrize('name', ['avazu', 'taobao'])
def test_skew_is_measured_as_training_does(name, monkeypatch):
  monkeypatch.setattr(skew, '_JUDGED', 3000)
  monkeypatch.setattr(skew, '_PART', 700)
  monkeypatch.setattr(skew, '_PENDING', 5000)
  twin = TWINS[name]._replace(hot_bytes=1.0)  # all rows seen: no ties to break
  found = skew.measured(twin, profile_inputs=5000)
  rows = sum(twin.spec.rows)
  profile = skew.lookups_of(twin, skew.PROFILE_START, 5000)
  counts = access_counts(profile, rows)
  seen = np.flatnonzero(counts)
  np.testing.assert_array_equal(found.curve, np.sort(counts[seen])[::-1])
  judged = np.concatenate(list(skew.lookups_of(twin, TEST_START, 3000)))
  hot = examples.hot_inputs(hot_rows(seen, rows), judged)
  parts = [len(p) for p in np.split(hot, range(700, 3000, 700))]
  means = [p.mean() for p in np.split(hot, range(700, 3000, 700))]
  assert len(parts) == 5
  assert found.hot_inputs == pytest.approx(np.mean(means))
  assert found.hot_bytes == found.seen == len(seen) / rows


def test_a_tight_budget_is_spent_on_the_most_popular(monkeypatch):
  monkeypatch.setattr(skew, '_JUDGED', 4096)
  twin = TWINS['avazu']
  wide, tight = (
    skew.measured(twin._replace(hot_bytes=share), profile_inputs=50_000)
    for share in (1.0, 0.001)
  )
  assert tight.hot_bytes == pytest.approx(0.001, rel=1e-3)
  assert wide.hot_bytes == wide.seen > 0.005
  assert 0.1 < tight.hot_inputs < wide.hot_inputs
  assert (np.diff(tight.curve) <= 0).all()


@pytest.mark.skipif(
  not SHARED.is_dir(), reason=f'shared samples absent: {SHARED}'
)
def test_real_samples_are_read(tmp_path):
  real = curves.samples_in(str(SHARED), list(TWINS))
  lines = {name: sample.lines for name, sample in real.items()}
  assert lines == {'kaggle': 80_000, 'avazu': 9_999, 'taobao': 96_168}
  # 200,103 ids, and one for what is missing in each of 13 columns.
  assert len(real['kaggle'].curve) == pytest.approx(200_103, abs=26)
  for name, columns in (('kaggle', 26), ('avazu', 21), ('taobao', 3)):
    assert real[name].curve.sum() == columns * lines[name]
  twins = {name: TWINS[name] for name in ('avazu', 'taobao')}
  seen = {name: curves.twin_curve(twin, 500) for name, twin in twins.items()}
  curves.plot(tmp_path / 'c.png', twins, seen, real)
  assert (tmp_path / 'c.png').stat().st_size > 10_000


def test_a_sample_that_is_not_there_is_told(tmp_path):
  with pytest.raises(UserError, match='sample of avazu'):
    curves.samples_in(str(tmp_path), ['avazu'])
  assert curves.samples_in(None, ['avazu']) == {}


# Mistakes


@pytest.mark.parametrize(
  ('changed', 'shown'),
  [
    ({'rows': (9, 3)}, '(9, 3)'),
    ({'rows': (9, 3, 5)}, 'categories'),
    ({'steps': 0}, 'steps'),
    ({'seed': -1}, '-1'),
    ({'skews': (1.0, 0.0, 1.0)}, 'skews'),
    ({'heads': (2.0, 0.0)}, 'heads'),
    ({'interests': 0}, 'interests'),
    ({'favourites': 65}, '65'),
    ({'loyalty': 1.5}, '1.5'),
    ({'short_share': -0.1}, 'short_share'),
    ({'stray_share': 0}, 'stray_share'),
    ({'base_rate': 1}, 'base_rate'),
    ({'drift_inputs': -5}, '-5'),
  ],
)
def test_bad_logs_are_told_in_one_sentence(changed, shown):
  with pytest.raises(UserError) as error:
    series_at(SeriesSpec()._replace(**changed), np.arange(4))
  assert shown in str(error.value)
  assert f'SeriesSpec.{next(iter(changed))}' in str(error.value)


@pytest.mark.parametrize('bad', [{'saturation': 3.0}, {'drift_inputs': -1}])
def test_knobs_out_of_range_are_told(bad):
  with pytest.raises(UserError, match=f'SyntheticSpec.{next(iter(bad))}'):
    twin_dataset('avazu', **bad)


def test_unknown_twins_and_knobs_are_told():
  with pytest.raises(UserError, match=r'kaggle, terabyte.*movielens'):
    twin_dataset('movielens')
  with pytest.raises(UserError, match='taobao twin has no saturation'):
    twin_dataset('taobao', saturation=0.5)
