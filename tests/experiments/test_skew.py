"""The skew of proxies is the published one, and is measured as training
does."""

import pathlib

import numpy as np
import pytest

from experiments.skew import __main__ as skew
from experiments.skew import curves
from slipstream_jax.errors import UserError
from slipstream_jax.selection.hot import access_counts, hot_rows
from slipstream_jax.synthetic.proxies import PROXIES
from slipstream_jax.synthetic.stream import TEST_START
from tests.support import small

SHARED = pathlib.Path(__file__).resolve().parents[3] / 'shared' / 'data'
every_proxy = pytest.mark.parametrize('name', skew.PUBLISHED)


@pytest.mark.parametrize('name', ['kaggle', 'avazu'])
def test_the_skew_is_the_published_one(name):
  proxy = PROXIES[name]
  found = skew.measured(proxy)
  assert found.hot_bytes == pytest.approx(proxy.hot_bytes, abs=0.03)
  assert found.hot_examples == pytest.approx(proxy.hot_examples, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1])
@every_proxy
def test_the_skew_of_every_proxy_is_the_published_one(name, seed):
  proxy = PROXIES[name]
  found = skew.measured(proxy, seed)
  assert found.hot_bytes == pytest.approx(proxy.hot_bytes, abs=0.03)
  assert found.hot_examples == pytest.approx(proxy.hot_examples, abs=0.03)


@pytest.mark.parametrize('name', ['avazu', 'taobao'])
def test_skew_is_measured_as_training_does(name, monkeypatch):
  monkeypatch.setattr(skew, '_JUDGED', 3000)
  monkeypatch.setattr(skew, '_PART', 700)
  proxy = PROXIES[name]._replace(
    hot_bytes=1.0
  )  # all rows seen: no ties to break
  found = skew.measured(proxy, profile_examples=5000)
  rows = sum(proxy.spec.rows)
  profile = skew.lookups_of(proxy, skew.PROFILE_START, 5000)
  counts = access_counts(profile, rows)
  seen = np.flatnonzero(counts)
  np.testing.assert_array_equal(found.curve, np.sort(counts[seen])[::-1])
  judged = np.concatenate(list(skew.lookups_of(proxy, TEST_START, 3000)))
  hot = small.hot_examples(hot_rows(seen, rows), judged)
  parts = [len(p) for p in np.split(hot, range(700, 3000, 700))]
  means = [p.mean() for p in np.split(hot, range(700, 3000, 700))]
  assert len(parts) == 5
  assert found.hot_examples == pytest.approx(np.mean(means))
  assert found.hot_bytes == found.seen == len(seen) / rows


def test_a_tight_budget_is_spent_on_the_most_popular(monkeypatch):
  monkeypatch.setattr(skew, '_JUDGED', 4096)
  proxy = PROXIES['avazu']
  wide, tight = (
    skew.measured(proxy._replace(hot_bytes=share), profile_examples=50_000)
    for share in (1.0, 0.001)
  )
  assert tight.hot_bytes == pytest.approx(0.001, rel=1e-3)
  assert wide.hot_bytes == wide.seen > 0.005
  assert 0.1 < tight.hot_examples < wide.hot_examples
  assert (np.diff(tight.curve) <= 0).all()


@pytest.mark.skipif(
  not SHARED.is_dir(), reason=f'shared samples absent: {SHARED}'
)
def test_real_samples_are_read(tmp_path):
  real = curves.samples_in(str(SHARED), list(PROXIES))
  lines = {name: sample.lines for name, sample in real.items()}
  assert lines == {'kaggle': 80_000, 'avazu': 9_999, 'taobao': 96_168}
  # 200,103 ids, and one for what is missing in each of 13 columns.
  assert len(real['kaggle'].curve) == pytest.approx(200_103, abs=26)
  for name, columns in (('kaggle', 26), ('avazu', 21), ('taobao', 3)):
    assert real[name].curve.sum() == columns * lines[name]
  proxies = {name: PROXIES[name] for name in ('avazu', 'taobao')}
  seen = {
    name: curves.proxy_curve(proxy, 500) for name, proxy in proxies.items()
  }
  curves.plot(tmp_path / 'c.png', proxies, seen, real)
  assert (tmp_path / 'c.png').stat().st_size > 10_000


def test_a_sample_that_is_not_there_is_told(tmp_path):
  with pytest.raises(UserError, match='sample of avazu'):
    curves.samples_in(str(tmp_path), ['avazu'])
  assert curves.samples_in(None, ['avazu']) == {}
