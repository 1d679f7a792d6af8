"""The skew of proxies is the published one, measured as training does."""

import pathlib

import numpy as np
import pytest

from experiments.skew import job as skew
from slipstream_jax.errors import UserError
from slipstream_jax.selection.hot import access_counts, hot_rows
from slipstream_jax.synthetic.proxies import PROXIES
from slipstream_jax.synthetic.stream import PROFILE_START, TEST_START
from tests.support import small

SHARED = pathlib.Path(__file__).resolve().parents[3] / 'shared' / 'data'
FAST = [('kaggle', 0), ('avazu', 0)]
MORE = [(name, seed) for name in skew.PUBLISHED for seed in (0, 1)]


@pytest.mark.parametrize(
  ('name', 'seed'),
  FAST
  + [pytest.param(*x, marks=pytest.mark.slow) for x in MORE if x not in FAST],
)
def test_the_skew_is_the_published_one(name, seed):
  proxy = PROXIES[name]
  own = proxy._replace(spec=proxy.spec._replace(seed=seed))
  found = skew.measured(own)
  assert found.hot_bytes == pytest.approx(proxy.hot_bytes, abs=0.03)
  assert found.hot_examples == pytest.approx(proxy.hot_examples, abs=0.03)
  _, row = skew.frame_of({name: found})
  assert (row['hot'], row['share']) == ('examples', found.hot_examples)


@pytest.mark.parametrize('name', ['avazu', 'taobao'])
def test_skew_is_measured_as_training_does(name):
  # All rows seen are hot, so there are no ties to break.
  proxy = PROXIES[name]._replace(hot_bytes=1.0, profile_examples=5000)
  told = []
  found = skew.measured(proxy, judged=3000, part=700, tell=told.append)
  rows = sum(proxy.spec.rows)
  counts = access_counts(skew.lookups_of(proxy, PROFILE_START, 5000), rows)
  seen = np.flatnonzero(counts)
  np.testing.assert_array_equal(found.curve, np.sort(counts[seen])[::-1])
  judged = np.concatenate(list(skew.lookups_of(proxy, TEST_START, 3000)))
  hot = small.hot_examples(hot_rows(seen, rows), judged)
  means = [part.mean() for part in np.split(hot, range(700, 3000, 700))]
  assert found.hot_examples == pytest.approx(np.mean(means))
  assert found.hot_bytes == len(seen) / rows
  assert told == sorted(told)
  assert told[-1] == 8000


def test_a_tight_budget_is_spent_on_the_most_popular():
  proxy = PROXIES['avazu']._replace(profile_examples=50_000)
  wide, tight = (
    skew.measured(proxy._replace(hot_bytes=share), judged=4096)
    for share in (1.0, 0.001)
  )
  assert tight.hot_bytes == pytest.approx(0.001, rel=1e-3)
  assert wide.hot_bytes == len(wide.curve) / sum(proxy.spec.rows) > 0.005
  assert 0.1 < tight.hot_examples < wide.hot_examples
  assert (np.diff(tight.curve) <= 0).all()


@pytest.mark.skipif(
  not SHARED.is_dir(), reason=f'shared samples absent: {SHARED}'
)
def test_real_samples_are_read(tmp_path):
  real = skew.samples_in(str(SHARED), list(PROXIES))
  lines = {name: sample.lines for name, sample in real.items()}
  assert lines == {'kaggle': 80_000, 'avazu': 9_999, 'taobao': 96_168}
  # 200,103 ids, and one for what is missing in each of 13 columns.
  assert len(real['kaggle'].curve) == pytest.approx(200_103, abs=26)
  for name, columns in (('kaggle', 26), ('avazu', 21), ('taobao', 3)):
    assert real[name].curve.sum() == columns * lines[name]
  skews = {
    name: skew.measured(
      PROXIES[name]._replace(profile_examples=500), judged=100
    )
    for name in ('avazu', 'taobao')
  }
  skew.plot(tmp_path / 'c.png', skews, real)
  assert (tmp_path / 'c.png').stat().st_size > 10_000


def test_a_sample_that_is_not_there_is_told(tmp_path):
  with pytest.raises(UserError, match='sample of avazu'):
    skew.samples_in(str(tmp_path), ['avazu'])
  assert skew.samples_in(None, ['avazu']) == {}
