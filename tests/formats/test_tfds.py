"""TensorFlow Datasets without TensorFlow: feature maps, ids, splits."""

import hashlib
import sys

import numpy as np
import pytest

from configs import tfds as config
from experiments.common import datasets, errors
from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import MISSING
from slipstream_jax.formats.tfds import FeatureMap, text_ids, tfds_raw
from tests.formats.test_raw_formats import read

tfds = pytest.importorskip(
  'tensorflow_datasets', reason='tensorflow-datasets is not installed'
)
EXAMPLES = 2000


def example(number: int) -> dict:
  """MovieLens' features, and some more."""
  return {
    'user_id': str(number % 7),
    'movie_id': '' if number % 11 == 0 else f'm{number % 13}é',
    'user_rating': 1 + number % 9 / 2,
    'raw_user_age': 20.0 + number % 30,
    'bucketized_user_age': 25.0,
    'user_gender': number % 2 == 0,
    'user_occupation_label': number % 22,
    'user_zip_code': f'{number % 50:05d}',
    'timestamp': number - 2,
    'movie_genres': [number % 5],
    'size': [number, -number],
    'packed': [number, number + 1],
    'broken': float('nan') if number == 1900 else 0.5,
    'inner': {'age': number % 3},
  }


def make_builder():
  """A set in MovieLens' shape, unshuffled; registered nowhere."""
  features = tfds.features.FeaturesDict(
    {
      'user_id': np.str_,
      'movie_id': tfds.features.Text(),
      'user_rating': np.float32,
      'raw_user_age': np.float32,
      'bucketized_user_age': np.float32,
      'user_gender': np.bool_,
      'user_occupation_label': tfds.features.ClassLabel(num_classes=22),
      'user_zip_code': np.str_,
      'timestamp': np.int64,
      'movie_genres': tfds.features.Sequence(
        tfds.features.ClassLabel(num_classes=5)
      ),
      'size': tfds.features.Tensor(shape=(2,), dtype=np.int32),
      'packed': tfds.features.Tensor(
        shape=(2,), dtype=np.int32, encoding='zlib'
      ),
      'broken': np.float32,
      'inner': {'age': np.int64},
    }
  )

  class Movielens(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Small."""

    VERSION = tfds.core.Version('1.0.0')
    BUILDER_CONFIGS = (tfds.core.BuilderConfig(name='100k-ratings'),)

    def _info(self):
      return tfds.core.DatasetInfo(
        builder=self, features=features, disable_shuffling=True
      )

    def _split_generators(self, dl_manager):
      return {'train': self._generate_examples()}

    def _generate_examples(self):
      for number in range(EXAMPLES):
        yield number, example(number)

  return Movielens


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tfds')
  builder = make_builder()(
    config='100k-ratings', data_dir=folder, file_format='array_record'
  )
  builder.download_and_prepare()
  return folder


def slow_text_id(value: str) -> int:
  if not value:
    return MISSING
  digest = hashlib.blake2b(value.encode(), digest_size=8).digest()
  return int.from_bytes(digest[::1], sys.byteorder) >> 1


NAME = 'movielens/100k-ratings'
MAP = FeatureMap(
  tables=(
    *('user_id', 'movie_id', 'timestamp', 'user_gender'),
    *('user_occupation_label', 'bucketized_user_age', 'inner/age'),
  ),
  label=('user_rating', '>=', 4.0),
  dense=('raw_user_age', 'size'),
)


@pytest.mark.parametrize('sizes', ['size', 'packed'])
def test_every_field_of_every_example(data_dir, monkeypatch, sizes):
  """Packed ones too, which cannot be taken from the records as they are."""
  monkeypatch.setattr('slipstream_jax.formats.tfds.CHUNK_EXAMPLES', 300)
  of = MAP._replace(dense=('raw_user_age', sizes))
  raw = tfds_raw(NAME, of, data_dir=data_dir)
  assert (raw.tables, raw.dense_features) == (MAP.tables, 3)
  assert raw.format == 'tfds'
  labels, dense, ids = read(raw)
  assert (labels.dtype, dense.dtype) == (np.float32, np.float32)
  assert (ids.dtype, ids.shape) == (np.int64, (EXAMPLES, 7))
  for number in range(EXAMPLES):
    given = example(number)
    stamp = given['timestamp']
    assert labels[number] == (given['user_rating'] >= 4)
    assert dense[number].tolist() == [given['raw_user_age'], *given[sizes]]
    assert ids[number].tolist() == [
      slow_text_id(given['user_id']),
      slow_text_id(given['movie_id']),
      stamp if stamp >= 0 else stamp - 2,
      given['user_gender'],
      given['user_occupation_label'],
      25,
      given['inner']['age'],
    ]
  parts = tuple(
    sum(len(chunk.labels) for chunk, _ in part.chunks()) for part in raw.parts
  )
  assert parts == (1600, 400)
  assert raw.split(EXAMPLES, parts) == {
    'train': (0, 1600),
    'test': (1600, EXAMPLES),
  }
  for part in raw.parts:
    progress = [read for _, read in part.chunks()]
    assert progress == sorted(progress)
    assert progress[-1] == part.size > 0


@pytest.mark.parametrize(
  ('label', 'wanted'),
  [
    (('user_rating', '>', 4.0), lambda e: e['user_rating'] > 4),
    (('user_rating', '<', 2), lambda e: e['user_rating'] < 2),
    (('user_rating', '<=', 2), lambda e: e['user_rating'] <= 2),
    (('user_gender', '==', True), lambda e: e['user_gender']),
    (('user_zip_code', '==', '00007'), lambda e: e['user_zip_code'] == '00007'),
    (('movie_id', '!=', 'm1é'), lambda e: e['movie_id'] != 'm1é'),
  ],
)
def test_label_rules(data_dir, label, wanted):
  features = FeatureMap(('user_id',), label)
  splits = {'train': 'train[:300]', 'test': 'train[300:400]'}
  raw = tfds_raw(NAME, features, data_dir=data_dir, **splits)
  labels, dense, _ = read(raw)
  assert labels.tolist() == [wanted(example(i)) for i in range(400)]
  assert dense.tolist() == [[0.0]] * 400, 'no dense feature is mapped'


def test_logs_of_dense_features(data_dir):
  features = MAP._replace(dense=('timestamp',), transform='log1p')
  raw = tfds_raw(NAME, features, data_dir=data_dir, train='train[:9]')
  dense = next(raw.parts[0].chunks())[0].dense
  expected = [np.log1p(max(i - 2, 0)) for i in range(9)]
  np.testing.assert_allclose(dense[:, 0], expected, rtol=1e-6)


def test_text_ids_never_change():
  # A vocabulary that was written once must fit texts that are hashed later.
  assert text_ids([b'abc', b'', b'abc', b'1']).tolist() == [
    3227650029775379948,
    MISSING,
    3227650029775379948,
    slow_text_id('1'),
  ]
  many = text_ids([str(i).encode() for i in range(50_000)])
  assert len(np.unique(many)) == 50_000
  assert many.min() >= 0


BAD = [
  (NAME, {'tables': ()}, {}, 'at least one table'),
  (NAME, {'tables': ('user_id', 'user_id')}, {}, 'none twice'),
  (NAME, {'tables': ('user',)}, {}, "got 'user'"),
  (NAME, {'tables': ('user_id/x',)}, {}, "got 'user_id/x'"),
  (NAME, {'tables': ('inner',)}, {}, 'must have one value'),
  (NAME, {'tables': ('movie_genres',)}, {}, "got 'movie_genres', Seq"),
  (NAME, {'tables': ('size',)}, {}, "got 'size', Tensor"),
  (NAME, {'tables': ('user_rating',)}, {}, 'whole numbers, got 1.5'),
  (NAME, {'dense': ('user_id',)}, {}, 'must be of numbers'),
  (NAME, {'dense': ('movie_genres',)}, {}, 'must be of numbers'),
  (NAME, {'dense': ('broken',)}, {}, r'finite numbers, got \[nan\]'),
  (NAME, {'tables': ('broken',)}, {}, 'whole numbers, got 0.5'),
  (NAME, {'label': ('broken', '>', 0)}, {}, 'be numbers, got nan'),
  (
    NAME,
    {'label': ('user_rating', '=>', 4)},
    {},
    "'=>', 4\\.?",
  ),
  (NAME, {'label': ('user_rating',)}, {}, 'must be .feature, comparison'),
  (NAME, {'label': ('size', '>', 0)}, {}, 'must have one value'),
  (NAME, {'transform': 'log'}, {}, "one of none, log1p, got 'log'"),
  (NAME, {}, {'train': 'validation'}, "made of train, got 'validation'"),
  (NAME, {}, {'test': 'train[x]'}, "got 'train.x.'"),
  ('movielens/100', {}, {}, "got 'movielens/100'"),
  ('no_such_set', {}, {}, '"Dataset no_such_set not found."'),
]


@pytest.mark.parametrize(('name', 'changes', 'splits', 'named'), BAD)
def test_what_cannot_be_is_named(data_dir, name, changes, splits, named):
  features = MAP._replace(**changes)
  with pytest.raises(UserError, match=named):
    read(tfds_raw(name, features, data_dir=data_dir, **splits))


@pytest.mark.parametrize(
  ('train', 'test', 'apart'),
  [
    ('train[:80%]', 'train[80%:]', True),
    ('train[10:20]', 'train[:10]', True),
    ('train[:5]+train[8:]', 'train[5:8]', True),
    ('train', 'train[80%:]', False),
    ('train[:80%]', 'train[:80%]', False),
    ('train[:5]+train[8:]', 'train[5:9]', False),
  ],
)
def test_splits_may_not_overlap(data_dir, train, test, apart):
  def raw():
    return tfds_raw(NAME, MAP, train=train, test=test, data_dir=data_dir)

  if apart:
    assert len(raw().parts) == 2
  else:
    with pytest.raises(UserError, match='must not be trained on'):
      raw()


def test_a_set_must_be_prepared(tmp_path):
  class NeverPrepared(make_builder()):
    """Known to TFDS by its name."""

  name = NeverPrepared.name
  with pytest.raises(UserError, match=f"array_record, got '{name}' in none"):
    tfds_raw(name, MAP, data_dir=tmp_path)


def test_the_config_trains_on_the_worked_example(data_dir):
  made = config.get_config(NAME)
  made.data.data_dir = str(data_dir)
  errors.check(made)
  data = datasets.dataset(made)
  assert list(data.sizes) == list(config.MAPS[NAME]['tables'])
  assert data.name.startswith('TFDS movielens/100k-ratings/1.0.0, train[:80%]')
  assert (data.train_examples, data.dense_features) == (1600, 1)
  assert config.get_config('other').data.features.tables == ()
