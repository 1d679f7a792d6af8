"""Synthetic twins: pure streams, their sizes, rates and saturation."""

import zlib

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from slipstream_jax.errors import UserError
from slipstream_jax.synthetic.clicks import inputs_at
from slipstream_jax.synthetic.proxies import twin_dataset, TWINS
from slipstream_jax.synthetic.spec import KAGGLE_ROWS, SyntheticSpec
from slipstream_jax.synthetic.stream import (
  bayes_auc,
  stream_batches,
  TEST_START,
)
from slipstream_jax.tables import offsets

every_twin = pytest.mark.parametrize('name', TWINS)


def inputs_of(name, first=0, inputs=4096, **changes):
  twin = TWINS[name]
  positions = first + np.arange(inputs)
  return twin.law(twin.spec._replace(**changes), positions)


def assert_same(ours, theirs):
  for mine, other in zip(ours, theirs, strict=True):
    np.testing.assert_array_equal(mine, other)


def test_the_default_stream_has_the_bits_it_had_before_there_were_knobs():
  columns = inputs_at(SyntheticSpec(), np.arange(256)).columns
  assert zlib.crc32(columns.lookups.tobytes()) == 375970885
  assert zlib.crc32(columns.labels.tobytes()) == 3271972031
  assert TWINS['kaggle'].spec == SyntheticSpec()


# Checksums of lookups and of labels.
BITS = {
  'kaggle': (3387321809, 2630078077),
  'terabyte': (1731533920, 3437533176),
  'avazu': (4211293404, 450882754),
  'taobao': (958259139, 1516741225),
}


@every_twin
def test_streams_stay_the_same_forever(name):
  columns = inputs_of(name, 10_000, 256, drift_inputs=1000).columns
  arrays = columns.lookups, columns.labels
  assert tuple(zlib.crc32(array.tobytes()) for array in arrays) == BITS[name]


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
    next(stream_batches(twin.law, spec, 40, first=first)).lookups
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


# Mistakes


@pytest.mark.parametrize('bad', [{'saturation': 3.0}, {'drift_inputs': -1}])
def test_knobs_out_of_range_are_told(bad):
  with pytest.raises(UserError, match=f'SyntheticSpec.{next(iter(bad))}'):
    twin_dataset('avazu', **bad)


def test_unknown_twins_and_knobs_are_told():
  with pytest.raises(UserError, match=r'kaggle, terabyte.*movielens'):
    twin_dataset('movielens')
  with pytest.raises(UserError, match='taobao twin has no saturation'):
    twin_dataset('taobao', saturation=0.5)
