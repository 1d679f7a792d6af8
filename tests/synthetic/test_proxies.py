"""Synthetic proxies: pure streams, their sizes, rates and saturation."""

import zlib

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from slipstream_jax.errors import UserError
from slipstream_jax.synthetic.clicks import examples_at
from slipstream_jax.synthetic.proxies import PROXIES, proxy_dataset
from slipstream_jax.synthetic.sequence_log import sequence_at
from slipstream_jax.synthetic.spec import (
  KAGGLE_ROWS,
  SequenceSpec,
  SyntheticSpec,
)
from slipstream_jax.synthetic.stream import (
  bayes_auc,
  stream_batches,
  stream_dataset,
  TEST_START,
)
from slipstream_jax.tables import offsets

every_proxy = pytest.mark.parametrize('name', PROXIES)


def examples_of(name, first=0, examples=4096, **changes):
  proxy = PROXIES[name]
  positions = first + np.arange(examples)
  return proxy.law(proxy.spec._replace(**changes), positions)


def assert_same(ours, theirs):
  """Arrays of two batches, less what is None."""
  ours, theirs = ([x for x in b if x is not None] for b in (ours, theirs))
  for mine, other in zip(ours, theirs, strict=True):
    np.testing.assert_array_equal(mine, other)


def test_the_default_stream_has_the_bits_it_had_before_there_were_knobs():
  columns = examples_at(SyntheticSpec(), np.arange(256)).columns
  assert zlib.crc32(columns.lookups.tobytes()) == 375970885
  assert zlib.crc32(columns.labels.tobytes()) == 3271972031
  assert PROXIES['kaggle'].spec == SyntheticSpec()


# Checksums of lookups and of labels.
BITS = {
  'kaggle': (2992315686, 1910303304),
  'terabyte': (1278346588, 1346005108),
  'avazu': (1723001300, 51023696),
  'taobao': (803053496, 1738254431),
  'movielens': (3869659554, 2405847438),
  'planted': (928213091, 3702099843),
}


@every_proxy
def test_streams_stay_the_same_forever(name):
  columns = examples_of(name, 10_000, 4096, drift_examples=1000).columns
  arrays = columns.lookups, columns.labels
  assert tuple(zlib.crc32(array.tobytes()) for array in arrays) == BITS[name]


@every_proxy
@pytest.mark.parametrize('drift', [0, 700])
def test_an_example_depends_on_its_position_alone(name, drift):
  proxy = PROXIES[name]
  spec = proxy.spec._replace(drift_examples=drift)
  whole = proxy.law(spec, np.arange(3000))
  picked = np.random.default_rng(0).permutation(3000)[:99]
  some = proxy.law(spec, picked)
  assert_same(some.columns, whole.columns.take(picked))
  np.testing.assert_array_equal(some.probabilities, whole.probabilities[picked])
  by_batch = [
    next(stream_batches(proxy.law, spec, 40, first=first)).lookups
    for first in range(0, 3000, 40)
  ]
  np.testing.assert_array_equal(np.concatenate(by_batch), whole.columns.lookups)


@every_proxy
def test_seeds_and_parts_differ(name):
  base = examples_of(name).columns.lookups.reshape(4096, -1)
  for first, seed in ((0, 1), (TEST_START, 0), (4096, 0)):
    other = examples_of(name, first, seed=seed).columns.lookups
    same = (other.reshape(4096, -1) == base).all(axis=1)
    assert same.mean() < 0.01
  again = examples_of(name).columns.lookups.reshape(4096, -1)
  np.testing.assert_array_equal(again, base)


@every_proxy
def test_rows_stay_in_their_tables(name):
  for drift in (0, 100):
    columns = examples_of(name, examples=1 << 15, drift_examples=drift).columns
    starts = offsets(PROXIES[name].spec.rows)
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
    ('movielens', 2, 2, 221_588, 0.5),
  ],
)
def test_sizes_and_base_rates_are_those_published(
  name, tables, dense, rows, base_rate
):
  data = proxy_dataset(name, test_examples=1 << 16)
  assert 'NOT real data' in data.name
  assert len(data.sizes) == tables
  assert data.dense_features == dense
  assert sum(data.sizes.values()) == pytest.approx(rows, rel=0.012)
  assert data.base_rate == pytest.approx(base_rate, abs=0.008)
  batch = next(data.test(1 << 16))
  error = (base_rate / (1 << 16)) ** 0.5
  assert batch.labels.mean() == pytest.approx(data.base_rate, abs=5 * error)
  assert batch.dense.shape == (1 << 16, dense)
  assert 0.75 < data.bayes_auc < 0.95


@every_proxy
def test_labels_are_drawn_from_the_probabilities(name):
  columns, probabilities = examples_of(name, TEST_START, 1 << 17)
  order = np.argsort(probabilities).reshape(16, -1)
  expected = probabilities[order].mean(axis=1)
  error = np.sqrt(expected * (1 - expected) / order.shape[1])
  found = columns.labels[order].mean(axis=1)
  assert (np.abs(found - expected) < 4.5 * error).all()


# Saturation


def learned(spec, examples):
  """Share of the way to the Bayes AUC that log odds of rows go."""
  known = examples_at(spec, np.arange(examples)).columns
  test = examples_at(spec, TEST_START + np.arange(1 << 14))
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
  plain = examples_of('avazu')
  loud = examples_of('avazu', saturation=0.5)
  assert_same(plain.columns[:2], loud.columns[:2])
  assert not np.allclose(plain.probabilities, loud.probabilities)


# Ends and mistakes


@pytest.mark.parametrize(
  ('law', 'spec'),
  [
    (examples_at, SyntheticSpec(rows=(40, 7, 900), drift_examples=10)),
    (sequence_at, SequenceSpec(rows=(90, 500, 12), steps=4)),
  ],
)
@pytest.mark.parametrize('at', [0, 777])
def test_the_test_part_is_reserved_and_the_same_every_time(law, spec, at):
  data = stream_dataset(law, spec, 100, test_at=at)
  *whole, last = first = list(data.test(32))
  for one, other in zip(first, data.test(32), strict=True):
    assert_same(one, other)
  theirs = law(spec, TEST_START + at + np.arange(100)).columns
  for number, batch in enumerate(whole):
    assert_same(batch[:3], theirs.take(slice(32 * number, 32 * number + 32)))
    assert batch.weights.all()
  assert last.weights.tolist() == [1] * 4 + [0] * 28
  assert (last.lookups[4:] == -1).all()
  assert_same([x[:4] for x in last[:3]], theirs.take(slice(96, 100)))


CLICKS, SHOP = (examples_at, SyntheticSpec()), (sequence_at, SequenceSpec())
BAD = [
  (CLICKS, {'rows': ()}, 'rows'),
  (CLICKS, {'rows': (3, 0)}, '(3, 0)'),
  (CLICKS, {'rows': (3, 2.5)}, '2.5'),
  (CLICKS, {'dense_features': 0}, 'dense_features'),
  (CLICKS, {'seed': -1}, '-1'),
  (CLICKS, {'teacher_seed': 1 << 63}, 'teacher_seed'),
  (CLICKS, {'skews': (1.0, -0.1, 1.0)}, '-0.1'),
  (CLICKS, {'field_skew': 0}, 'field_skew'),
  (CLICKS, {'own_share': 1.5}, '1.5'),
  (CLICKS, {'signal': (0, 0, 0)}, 'signal'),
  (CLICKS, {'logit_std': float('nan')}, 'nan'),
  (CLICKS, {'base_rate': 1}, 'base_rate'),
  (CLICKS, {'saturation': 3.0}, 'saturation'),
  (CLICKS, {'drift_examples': -1}, 'drift_examples'),
  (SHOP, {'rows': (9, 3)}, '(9, 3)'),
  (SHOP, {'rows': (9, 3, 5)}, 'categories'),
  (SHOP, {'steps': 0}, 'steps'),
  (SHOP, {'seed': -1}, '-1'),
  (SHOP, {'skews': (1.0, 0.0, 1.0)}, 'skews'),
  (SHOP, {'heads': (2.0, 0.0)}, 'heads'),
  (SHOP, {'interests': 0}, 'interests'),
  (SHOP, {'favourites': 65}, '65'),
  (SHOP, {'loyalty': 1.5}, '1.5'),
  (SHOP, {'short_share': -0.1}, 'short_share'),
  (SHOP, {'stray_share': 0}, 'stray_share'),
  (SHOP, {'base_rate': 1}, 'base_rate'),
  (SHOP, {'drift_examples': -5}, '-5'),
]


@pytest.mark.parametrize(('stream', 'changed', 'shown'), BAD)
def test_bad_specs_are_told_in_one_sentence(stream, changed, shown):
  law, spec = stream
  with pytest.raises(UserError) as error:
    stream_batches(law, spec._replace(**changed), 8)
  assert shown in str(error.value)
  assert f'{type(spec).__name__}.{next(iter(changed))}' in str(error.value)


def test_bad_sizes_proxies_and_knobs_are_told():
  for make, said in (
    (lambda: stream_batches(*CLICKS, 0), 'at least one example, a whole'),
    (
      lambda: stream_batches(*CLICKS, 8, examples=-3),
      'examples must be a whole number, at least 1, got -3',
    ),
    (
      lambda: stream_dataset(*CLICKS, 0),
      'test_examples must be a whole number, at least 1, got 0',
    ),
    (lambda: proxy_dataset('netflix'), r'kaggle, terabyte.*movielens'),
    (
      lambda: proxy_dataset('avazu', saturation=3.0),
      'SyntheticSpec.saturation',
    ),
    (
      lambda: proxy_dataset('taobao', saturation=0.5),
      'taobao proxy has no saturation',
    ),
  ):
    with pytest.raises(UserError, match=said):
      make()
