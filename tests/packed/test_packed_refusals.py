"""What packed data refuse: arguments, states, folders, flipped bits."""

import itertools
import random
import shutil

import numpy as np
import pytest

from slipstream_jax.data.numbered import check_pad_remainder
from slipstream_jax.errors import UserError
from slipstream_jax.packed import columns as packed_columns
from slipstream_jax.packed.batches import PackedBatches
from slipstream_jax.packed.columns import BLOCKS, MANIFEST, open_packed
from slipstream_jax.packed.dataset import packed_dataset, packed_vocabulary
from slipstream_jax.tables import Feature, features_of
from tests.support import small
from tests.support.packed_folders import (
  features_facts,
  made_older,
  prepared,
  write_columns,
  write_folder,
)
from tests.support.raw_example import fields, raw_of
from tests.support.texts.mutations import check_sentence, flip
from tests.support.watchdog import watchdog

EXAMPLES = 300


def columns_of():
  return small.columns(EXAMPLES)


@pytest.fixture(scope='module')
def packed(tmp_path_factory):
  base = tmp_path_factory.mktemp('packed')
  return open_packed(write_folder(base, columns_of(), small.ROWS))


@pytest.mark.parametrize(
  ('arguments', 'named'),
  [
    ({'batch_size': 0}, 'a batch must hold at least one example, a whole'),
    ({'batch_size': 301}, 'for a batch of 301 each, got 300'),
    ({'batch_size': 200, 'shard': (0, 2)}, '2 shards need examples'),
    ({'first': -1}, r'\[0, 300\), got \[-1, 300\)'),
    ({'first': 7, 'end': 7}, r'got \[7, 7\)'),
    ({'end': 301}, r'got \[0, 301\)'),
    ({'shuffle_seed': -1}, r'whole number in \[0, 2\*\*63\), got -1'),
    ({'shard': (2, 2)}, r'got \(2, 2\)'),
    ({'shard': (0, 0)}, r'got \(0, 0\)'),
    ({'block': 0}, 'a block must hold at least one example, got 0'),
    ({'buffer_bytes': 70}, 'a buffer must hold at least two examples, got 0'),
  ],
)
def test_bad_arguments_are_named(packed, arguments, named):
  with pytest.raises(UserError, match=named):
    PackedBatches(packed, **{'batch_size': 10} | arguments)


@pytest.mark.parametrize(
  ('facts', 'arrays', 'named'),
  [
    ({'tables': None}, {}, 'the manifest must have tables'),
    ({'dense_features': 4}, {}, r'column dense must be float32 of shape'),
    ({}, {'a': np.zeros(5, np.int8)}, 'got int8'),
    ({'examples': 6}, {}, r'column labels must be uint8 of shape \(6,\)'),
    ({'features': [{'name': 'a'}]}, {}, 'must have tables.* KeyError..table'),
    (
      features_facts({'a': Feature('a', weighted=True)}),
      {},
      'column weights_a must be float32',
    ),
  ],
)
def test_columns_that_are_none_of_a_packed_data_set(
  tmp_path, facts, arrays, named
):
  good = {
    'dense_features': 3,
    'examples': 5,
    'tables': [{'name': 'a', 'rows': 2}],
    **features_facts(features_of('a')),
  }
  columns = {
    'labels': np.zeros(5, np.uint8),
    'dense': np.zeros((5, 3), np.float32),
    'a': np.zeros(5, np.uint8),
  }
  folder = write_columns(tmp_path, columns | arrays, good | facts)
  assert (folder / MANIFEST).exists()
  with pytest.raises(UserError, match=named):
    PackedBatches(open_packed(folder), 2)


@pytest.mark.filterwarnings('ignore:.*before blocks had checksums')
@pytest.mark.parametrize(('at', 'value'), [(0, 2), (17, 128), (59, 255)])
def test_a_flipped_label_byte_is_found_when_it_is_read(tmp_path, at, value):
  folder = write_folder(tmp_path, small.columns(60), small.ROWS)
  made_older(folder)  # else the checksum of the block is looked at first
  path = folder / 'labels.uint8'
  data = bytearray(path.read_bytes())
  data[at] = value
  path.write_bytes(data)
  packed = open_packed(folder)
  said = rf'0 or 1, got {value} \(.*labels.uint8, example {at}\)'
  source = PackedBatches(packed, 32, epochs=1, pad_remainder=True)
  with pytest.raises(UserError, match=said):
    list(source)
  source.close()


def weighted_folder(folder):
  """Lists with weights, which `raw_of` has not, and labels of two heads."""
  rng = np.random.default_rng(3)
  arrays = {
    'labels': rng.integers(0, 2, (300, 2)).astype(np.uint8),
    'dense': rng.normal(size=(300, 1)).astype(np.float32),
    'a': rng.integers(0, 6, (300, 3)).astype(np.uint8),
    'weights_a': rng.random((300, 3)).astype(np.float32),
    'frequency_a': np.arange(5, dtype=np.uint32),
    'vocabulary_a': np.arange(4, dtype=np.int64),
  }
  facts = features_facts({'a': Feature('a', max_length=3, weighted=True)})
  tables = [{'name': 'a', 'rows': 5}]
  splits = {'train': (0, 200), 'test': (200, 300)}
  facts |= {'dense_features': 1, 'examples': 300, 'tables': tables}
  return write_columns(folder, arrays, facts | {'labels': 2, 'splits': splits})


def used(folder, draw):
  """All that some use of a folder gives, in one list of arrays."""
  rng = random.Random(draw)
  data = packed_dataset(folder, shuffle_seed=rng.choice([None, 0, 7]))
  arrays = []
  for part in rng.sample([data.train, data.test], rng.randint(0, 2)):
    source = part(
      rng.randint(1, 40),
      epochs=2,
      block=rng.choice([1, 7, 64, 1000]),
      buffer_bytes=rng.choice([4000, 1 << 20]),
    )
    for batch in itertools.islice(source, rng.choice([1, 3, 1000])):
      arrays += [array for array in batch if isinstance(array, np.ndarray)]
    source.close()
  if rng.random() < 0.3:
    arrays.append(data.counts())
  if rng.random() < 0.3:
    arrays.append(data.vocabulary()[0].rows(np.arange(50)))
  return arrays


def check_told(error, said, folder):
  """Checks that an error says what is damaged, where, and the remedy."""
  assert error.rule.startswith(said)
  assert str(folder) in error.where
  assert 'delete the folder and prepare' in error.hint


@pytest.mark.parametrize(
  'flips', [150, pytest.param(500, marks=pytest.mark.slow)]
)
def test_a_flipped_bit_is_never_read_as_a_number(tmp_path, monkeypatch, flips):
  """Whatever is read of a folder of which one bit was changed.

  It is not read, and all else is as it was; or an error names file and block.
  """
  monkeypatch.setattr(packed_columns, 'BLOCK_BYTES', 128)
  prepared(raw_of(fields(300), (0.3, 0.7)), tmp_path / 'ids')
  prepared(raw_of(fields(300, 2)), tmp_path / 'hashed', hash_rows=97)
  weighted_folder(tmp_path / 'weighted')
  goods = [tmp_path / name for name in ('ids', 'hashed', 'weighted')]
  rng, refused = random.Random(0), 0
  with watchdog(busy_s=100):
    for draw in range(flips):
      good = rng.choice(goods)
      name = rng.choice(sorted(path.name for path in good.iterdir()))
      bad = tmp_path / 'bad'
      shutil.copytree(good, bad)
      at, column = flip(bad / name, rng), name.rpartition('.')[0]
      try:
        got = used(bad, draw)
      except UserError as error:
        refused += 1
        check_sentence(error)
        block = f'block {at // 128} of column {column} must have the checksum'
        said = '' if name in {BLOCKS, MANIFEST} else block
        check_told(error, said, bad)
      else:
        for one, other in zip(used(good, draw), got, strict=True):
          np.testing.assert_array_equal(one, other)
      shutil.rmtree(bad)
  assert flips // 4 < refused < flips


def test_a_folder_from_before_blocks_had_checksums_is_read(tmp_path):
  """Also checks that what is read as a whole is compared all the same."""
  folder = write_folder(tmp_path, columns_of(), small.ROWS)
  expected = used(folder, 3)
  made_older(folder)
  with pytest.warns(UserWarning, match='not compared with checksums'):
    got = used(folder, 3)
  for one, other in zip(expected, got, strict=True):
    np.testing.assert_array_equal(one, other)
  flip(folder / 'frequency_t1.uint32', random.Random(0))
  with pytest.warns(UserWarning, match='not compared with checksums'):
    data = packed_dataset(folder)
  with pytest.raises(UserError, match=r'checksum.*frequency_t1.*delete the'):
    data.counts()


def test_another_way_to_pad_is_refused_and_named():
  # The function itself, because the type checks of tests refuse the argument.
  with pytest.raises(UserError, match=r"False, got 'drop' \(A, pad_remainder"):
    check_pad_remainder('drop', 'A')


def test_a_folder_without_vocabularies_names_them(tmp_path):
  folder = write_folder(tmp_path, small.columns(50), small.ROWS)
  with pytest.raises(UserError, match=r'column vocabulary_t0 .* got no column'):
    packed_vocabulary(folder)
