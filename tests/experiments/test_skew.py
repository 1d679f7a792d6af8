"""The skew of proxies is the published one, measured as training does."""

import itertools

import numpy as np
import pytest

from configs import avazu
from experiments.common import build, datasets
from experiments.skew import job as skew
from slipstream_jax.selection.hot import access_counts, hot_rows
from slipstream_jax.synthetic.proxies import PROXIES
from slipstream_jax.synthetic.stream import PROFILE_START, TEST_START
from tests.support import small

FAST = [('kaggle', 0)]
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
  _, row, other = skew.lines_of(name, own, found)
  assert (row['hot'], row['share']) == ('examples', found.hot_examples)
  assert (other['hot'], other['share']) == (
    'examples, cut by share',
    found.by_share,
  )
  # For as many rows, ranking all tables together covers as many examples.
  assert found.by_share <= found.hot_examples + 0.001


@pytest.mark.parametrize('name', ['avazu', 'taobao'])
def test_skew_is_measured_as_training_does(name):
  # All rows seen are hot, so there are no ties to break.
  proxy = PROXIES[name]._replace(hot_bytes=1.0, profile_examples=5000)
  told = []
  found = skew.measured(proxy, judged=3000, part=700, tell=told.append)
  rows = sum(proxy.spec.rows)
  counts = access_counts(skew.lookups_of(proxy, PROFILE_START, 5000), rows)
  seen = np.flatnonzero(counts)
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
  assert wide.hot_bytes > 0.005
  assert 0.1 < tight.hot_examples < wide.hot_examples


@pytest.mark.parametrize('count', [1, 7])
def test_accesses_are_learned_from_the_first_batches(count):
  config = avazu.get_config()
  config.data.batch_size, config.hot.learn_batches = 64, count
  data = datasets.dataset(config)
  rows = build.recipe(config, data, 9).tables.num_rows
  first = itertools.islice(data.train(64), count)
  wanted = access_counts((batch.lookups for batch in first), rows)
  found = build.row_counts(config, data, rows)
  assert np.array_equal(found, wanted)
  assert wanted.sum() > 0
