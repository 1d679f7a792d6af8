"""Lines of a reproduction are kept whole, and read as they were."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import stats

from experiments.pages import estimates
from experiments.reproduce import results
from experiments.reproduce.results import append, Cell, Naive, OK, read, Skew
from slipstream_jax.errors import UserError

whole = st.none() | st.integers(0, 10**13)
real = st.none() | st.floats(allow_infinity=False)
words = st.sampled_from(['ok', 'a, "b"\nc', ' ', 'größer | 5 %', '\r\n', "'"])
lines = st.lists(
  st.builds(
    Cell,
    st.sampled_from(['rm1', 'rm2']),
    st.sampled_from(['xdl', 'plain']),
    st.just('off'),
    st.integers(0, 9),
    words,
    steps=whole,
    seconds=real,
    auc=real,
    bytes_loaded=whole,
  )
  | st.builds(Naive, st.just('rm1'), st.just('hot'), st.just(0), auc=real)
)


def kept(line):
  """What comes back: words in one line, and NaN as not known."""
  values = []
  for value in line:
    if isinstance(value, str):
      value = ' '.join(value.split()) or None
    values.append(None if value != value else value)
  return type(line)(*values)


def of_kind(group, kind):
  return [kept(line) for line in group if type(line) is kind]


@settings(max_examples=50, deadline=None)
@given(st.lists(lines, max_size=4), st.integers(1, 10**6), st.booleans())
def test_what_was_kept_is_read(tmp_path_factory, batches, cut, goes_on):
  folder = tmp_path_factory.mktemp('lines')
  for batch in batches:
    append(folder, batch)
  every = list(itertools.chain(*batches))
  for kind in (Cell, Naive):
    assert read(folder, kind) == of_kind(every, kind)
  path = folder / results.FILES[Cell]
  if not path.exists():
    return
  size = path.stat().st_size
  cut = cut % size + 1
  with path.open('r+b') as file:
    file.truncate(size - cut)
  left = read(folder, Cell)
  assert left == of_kind(every, Cell)[: len(left)]
  if goes_on:  # a grid that continues writes behind whole lines alone
    another = Cell('rm4', 'fae', 'off', 3, OK, seconds=1.25)
    append(folder, [another])
    assert read(folder, Cell) == [*left, another]


def test_every_kind_comes_back_with_its_types(tmp_path):
  skew = Skew('rm1', 3, 0.25, 0.5)
  append(tmp_path, [skew])
  (back,) = read(tmp_path, Skew)
  assert back == skew
  assert [type(x) for x in back] == [str, int, float, float]
  assert set(results.FILES.values()) == {
    *('cells.csv', 'curves.csv', 'phases.csv', 'skew.csv', 'rows.csv'),
    *('naive.csv', 'thresholds.csv', 'link.csv'),
  }


@pytest.mark.parametrize(
  ('text', 'said'),
  [
    ('model,rank\r\nrm1,3\r\n', 'columns must be model, rank, share'),
    ('model,rank,share,cumulative_share\r\nrm1,x,1,1\r\n', 'line 2 must'),
    ('model,rank,share,cumulative_share\r\nrm1,1,1\r\n', 'line 2 must'),
  ],
)
def test_a_damaged_file_is_named(text, said, tmp_path):
  (tmp_path / 'skew.csv').write_bytes(text.encode())
  with pytest.raises(UserError, match=said) as caught:
    read(tmp_path, Skew)
  assert 'skew.csv' in str(caught.value)


values = st.lists(st.floats(0.1, 1e3), min_size=2, max_size=8)


@given(values)
def test_a_mean_has_students_interval(values):
  estimate = estimates.mean(values)
  half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
  low, high = np.mean(values) - half, np.mean(values) + half
  assert estimate.mean == pytest.approx(np.mean(values))
  assert estimate.low == pytest.approx(low, rel=1e-6, abs=1e-9)
  assert estimate.high == pytest.approx(high, rel=1e-6, abs=1e-9)


@given(values, st.randoms(use_true_random=False))
def test_a_ratio_the_other_way_round_is_its_inverse(tops, random):
  bottoms = [random.uniform(0.1, 10) for _ in tops]
  one, other = estimates.ratio(tops, bottoms), estimates.ratio(bottoms, tops)
  assert one.mean == pytest.approx(stats.gmean(np.array(tops) / bottoms))
  assert math.log(one.mean) == pytest.approx(-math.log(other.mean), abs=1e-9)
  if one.high < 1e300 and other.high < 1e300:
    assert math.log(one.low) == pytest.approx(-math.log(other.high), abs=1e-6)


def test_too_few_values_have_no_interval():
  assert estimates.mean([]) is None
  assert estimates.mean([2.0]) == estimates.Estimate(2.0, None, None, 1)
  assert estimates.ratio([], []) is None
  assert estimates.ratio([3.0], [2.0]).mean == pytest.approx(1.5)
  assert estimates.ratio([3.0, 0.0], [2.0, 1.0]) is None
  assert estimates.of_test_set(0.8, 0, 10) is None
  assert estimates.of_test_set(0.8, 10, 10) is None


@pytest.mark.parametrize('rate', [1.0, 2.5])
def test_an_auc_spreads_as_hanley_and_mcneil_say(rate):
  """Their formula is exact for scores of exponential laws: draw many."""
  rng = np.random.default_rng(0)
  positives, negatives = 60, 90
  above = rng.exponential(rate, (4000, positives))
  below = rng.exponential(1.0, (4000, negatives))
  aucs = (above[:, :, None] > below[:, None, :]).mean((1, 2))
  expected = rate / (1 + rate)
  estimate = estimates.of_test_set(expected, positives, positives + negatives)
  half = estimate.high - estimate.mean
  assert aucs.mean() == pytest.approx(expected, abs=0.005)
  assert half == pytest.approx(1.96 * aucs.std(), rel=0.05)


def test_a_line_may_end_within_a_letter(tmp_path):
  cell = Cell('rm4', 'fae', 'off', 3, OK, seconds=1.25)
  other = cell._replace(model='größer')
  append(tmp_path, [cell, other])
  path = tmp_path / results.FILES[Cell]
  data = path.read_bytes()
  path.write_bytes(data[: data.index('ö'.encode()) + 1])
  assert read(tmp_path, Cell) == [cell]
  append(tmp_path, [other])
  assert read(tmp_path, Cell) == [cell, other]
