"""Criteo's Terabyte logs: days, samples of them, and what is wrong."""

import functools
import gzip

import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats import criteo, text
from slipstream_jax.formats.base import MISSING
from slipstream_jax.formats.criteo import terabyte_raw
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.packed import columns as packed
from slipstream_jax.vocabulary.hashed import HashVocabulary
from tests.support.texts.criteo import (
  check_every_field,
  lines,
  packed_of,
  slow_parse,
  three_days,
  write,
)


@pytest.mark.parametrize('cut', [40, 400, -9, -1])
def test_a_day_cut_in_the_middle_of_its_gzip(tmp_path, cut):
  write(tmp_path / 'day_0', lines(30))
  whole = gzip.compress(('\n'.join(lines(300)) + '\n').encode())
  (tmp_path / 'day_1.gz').write_bytes(whole[:cut])
  # No number of bad lines stands for what is not there.
  with pytest.raises(UserError, match='readable to its end') as caught:
    packed_of(terabyte_raw(tmp_path, bad_lines=99), tmp_path / 'data')
  assert f'{tmp_path / "day_1.gz"}, at or after line' in str(caught.value)
  assert not packed.is_finished(tmp_path / 'data')


@pytest.fixture
def days(tmp_path):
  """Three days, the second one gzip; and all of their lines in one file."""
  write(tmp_path / 'all.txt', three_days(tmp_path / 'days'))
  return tmp_path / 'days'


def test_days_follow_each_other_and_the_last_is_held_out(days, tmp_path):
  data = packed_of(terabyte_raw(days), tmp_path / 'data')
  assert data.manifest['parts'] == [
    {'name': 'day_9', 'examples': 200},
    {'name': 'day_10.gz', 'examples': 300},
    {'name': 'day_11', 'examples': 400},
  ]
  assert data.manifest['splits'] == {
    'train': [0, 500],
    'validation': [500, 700],
    'test': [700, 900],
  }
  check_every_field(slow_parse((tmp_path / 'all.txt').read_bytes()), data, 500)


def test_hashed_days(days, tmp_path):
  data = packed_of(terabyte_raw(days), tmp_path / 'data', hash_rows=97)
  rows = slow_parse((tmp_path / 'all.txt').read_bytes())
  ids = [[MISSING if v is None else v for v in row[14:]] for row in rows]
  for table, name in enumerate(criteo.TABLES):
    rank = data.columns[f'rank_{name}'].astype(int)
    buckets = HashVocabulary(97, table).rows(np.array(ids)[:, table])
    np.testing.assert_array_equal(data.columns[name], rank[buckets])
    assert data.manifest['tables'][table]['rows'] == rank.max() + 1


def test_a_sample_depends_on_places_and_labels_only(
  days, tmp_path, monkeypatch
):
  def kept(name, **arguments):
    return packed_of(terabyte_raw(days, **arguments), tmp_path / name)

  rows = slow_parse((tmp_path / 'all.txt').read_bytes())
  clicks = sum(row[0] for row in rows)
  half = kept('half', sample=0.5)
  assert 380 < half.manifest['examples'] < 520
  assert half.manifest['settings']['sample'] == 0.5
  small = functools.partial(text.read_blocks, block_bytes=5000)
  monkeypatch.setattr(text, 'read_blocks', small)
  again = kept('again', sample=0.5)
  assert again.manifest['columns'] == half.manifest['columns']
  other = kept('other', sample=0.5, seed=1)
  assert other.manifest['columns'] != half.manifest['columns']
  thin = kept('thin', sample_negatives=0.25)
  assert thin.columns['labels'].sum() == clicks, 'all clicks are kept'
  negatives = len(rows) - clicks
  left = thin.manifest['examples'] - clicks
  assert 0.15 * negatives < left < 0.35 * negatives
  # What is kept is a subsequence of the lines, whole.
  dense = np.log1p([[max(v or 0, 0) for v in row[1:14]] for row in rows])
  places = iter(dense.astype(np.float32).tolist())
  assert all(line in places for line in half.columns['dense'].tolist())


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    (lambda d: (d / 'day_10.gz').unlink(), 'got day_9, day_11'),
    (lambda d: write(d / 'day_10', lines(3)), 'day_10, day_10.gz'),
    (lambda d: [p.unlink() for p in d.iterdir()], 'got none'),
  ],
)
def test_days_that_are_missing_or_there_twice(days, change, said):
  change(days)
  with pytest.raises(UserError, match=said):
    terabyte_raw(days)


def test_other_files_beside_the_days_do_not_matter(days):
  for name in 'day_10.md5', 'README', 'day_x':
    (days / name).write_text('')
  assert len(terabyte_raw(days).parts) == 3


@pytest.mark.parametrize('name', ['sample', 'sample_negatives'])
@pytest.mark.parametrize('share', [0.0, -0.1, 1.1, float('nan')])
def test_shares_out_of_range(days, name, share):
  with pytest.raises(UserError, match=f'{name} must be above 0'):
    terabyte_raw(days, **{name: share})


def test_a_share_is_held_out_in_place_of_the_last_day(days):
  raw = terabyte_raw(days, test_share=0.1)
  assert raw.split(900, (200, 300, 400)) == {
    'train': (0, 810),
    'test': (810, 900),
  }
  data = in_memory(raw)
  assert data.train_examples == 810
  assert in_memory(terabyte_raw(days)).train_examples == 500
