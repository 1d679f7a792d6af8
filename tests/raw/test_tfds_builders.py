"""Builders of Criteo Kaggle and Avazu for TFDS, run without TensorFlow."""

import csv
import pathlib
import sys

import numpy as np
import pytest

from configs import tfds as config
from slipstream_jax.errors import UserError
from slipstream_jax.raw import avazu, criteo, lines, text
from slipstream_jax.raw.avazu import avazu_raw
from slipstream_jax.raw.in_memory import in_memory
from slipstream_jax.raw.tfds import FeatureMap, tfds_raw
from tests.support import programs
from tests.support.texts.criteo import GOOD

tfds = pytest.importorskip(
  'tensorflow_datasets', reason='tensorflow-datasets is not installed'
)
ROOT = pathlib.Path(__file__).resolve().parents[2]
SAMPLES = ROOT.parent / 'shared' / 'data'
needs_samples = pytest.mark.skipif(
  not SAMPLES.is_dir(), reason=f'shared samples absent: {SAMPLES}'
)


def read(raw):
  chunks = [chunk for part in raw.parts for chunk, _ in part.chunks()]
  fields = zip(*(chunk[:3] for chunk in chunks), strict=True)
  return [np.concatenate(field) for field in fields]


LINES = 500
PREPARE_AND_READ = """
import sys
import slipstream_jax.raw.tfds_builders
import tensorflow_datasets as tfds
from configs.tfds import MAPS
from slipstream_jax.raw.tfds import FeatureMap, tfds_raw

manual_dir, data_dir = sys.argv[1:]
for name in 'criteo_kaggle', 'avazu':
  download = tfds.download.DownloadConfig(manual_dir=manual_dir)
  source = tfds.data_source(
    name,
    split='train',
    data_dir=data_dir,
    download_and_prepare_kwargs={'download_config': download},
  )
  raw = tfds_raw(name, FeatureMap(**MAPS[name]), data_dir=data_dir)
  read = [chunk for part in raw.parts for chunk, _ in part.chunks()]
  assert sum(len(chunk.labels) for chunk in read) == len(source) == 500
assert 'tensorflow' not in sys.modules
"""


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """The first lines of the real samples, as built without TensorFlow."""
  folder = tmp_path_factory.mktemp('built')
  manual = folder / 'manual'
  manual.mkdir()
  for source, header in ('criteo/train.txt', 0), ('avazu/train.csv', 1):
    path = SAMPLES / source
    some = path.read_bytes().splitlines(keepends=True)[: LINES + header]
    (manual / path.name).write_bytes(b''.join(some))
  # If there is a TensorFlow, it must not be touched either.
  fake = folder / 'fake' / 'tensorflow'
  fake.mkdir(parents=True)
  (fake / '__init__.py').write_text('raise SystemExit("TensorFlow imported")')
  done = programs.finished(
    [sys.executable, '-c', PREPARE_AND_READ, manual, folder / 'data'],
    env={'PYTHONPATH': f'{ROOT}:{fake.parent}', 'HOME': str(folder)},
  )
  assert done.returncode == 0, done.stderr
  return folder


@needs_samples
def test_builders_keep_every_field_of_the_real_lines(built):
  source = tfds.builder('criteo_kaggle', data_dir=built / 'data')
  examples = source.as_data_source('train')
  text_lines = (built / 'manual' / 'train.txt').read_text().splitlines()
  for given, line in zip(examples, text_lines, strict=True):
    for column, field in zip(criteo.COLUMNS, line.split('\t'), strict=True):
      number = column == 'label' or column.startswith('I')
      wanted = int(field or -(2**31)) if number else field.encode()
      assert given[column] == wanted
  source = tfds.builder('avazu', data_dir=built / 'data')
  examples = source.as_data_source('train')
  with (built / 'manual' / 'train.csv').open(newline='') as file:
    for given, row in zip(examples, csv.DictReader(file), strict=True):
      assert set(row) | {'hour_of_day'} == set(given)
      assert given['hour_of_day'] == pytest.approx(int(row['hour'][-2:]) / 24)
      for column, field in row.items():
        value = given[column]
        shown = value.decode() if isinstance(value, bytes) else str(value)
        assert shown == field


@needs_samples
def test_a_built_set_trains_like_its_file(built):
  features = FeatureMap(**config.MAPS['avazu'])
  ours = in_memory(tfds_raw('avazu', features, data_dir=built / 'data'))
  theirs = in_memory(avazu_raw(built / 'manual' / 'train.csv'))
  assert ours.sizes == theirs.sizes
  mine, raw = next(ours.train(400)), next(theirs.train(400))
  np.testing.assert_array_equal(mine.labels, raw.labels)
  np.testing.assert_array_equal(mine.dense, raw.dense)
  # Ids of one count may change places: those of text are hashed.
  for column in range(len(avazu.TABLES)):
    both = mine.lookups[:, column], raw.lookups[:, column]
    pairs = set(zip(*both, strict=True))
    assert len(pairs) == len(set(both[0])) == len(set(both[1]))
  features = FeatureMap(**config.MAPS['criteo_kaggle'])
  built_set = tfds_raw('criteo_kaggle', features, data_dir=built / 'data')
  labels, dense, _ = read(built_set)
  (block,) = text.read_blocks(built / 'manual' / 'train.txt')
  chunk = criteo.chunk(lines.parse(block, criteo.SCHEMA), missing_flags=False)
  np.testing.assert_array_equal(labels, chunk.labels)
  np.testing.assert_array_equal(dense, chunk.dense)


def test_a_builder_says_which_file_it_wants(tmp_path):
  from slipstream_jax.raw import tfds_builders

  (tmp_path / 'given').mkdir()
  (tmp_path / 'given' / 'test.csv').touch()
  builder = tfds_builders.Avazu(data_dir=tmp_path)
  download = tfds.download.DownloadConfig(manual_dir=tmp_path / 'given')
  with pytest.raises(UserError, match=r'must hold one of train\.csv'):
    builder.download_and_prepare(download_config=download)


def test_a_builder_refuses_a_bad_line_and_one_that_is_cut_off(tmp_path):
  from slipstream_jax.raw import tfds_builders

  path = tmp_path / 'train.txt'
  download = tfds.download.DownloadConfig(manual_dir=tmp_path)
  for end, named in ('x\n', 'line 2, column C26'), (GOOD[:-2], 'must be whole'):
    path.write_text(f'{GOOD}\n{GOOD if named[0] == "l" else ""}{end}')
    builder = tfds_builders.CriteoKaggle(data_dir=tmp_path)
    with pytest.raises(UserError, match=named):
      builder.download_and_prepare(download_config=download)


def test_nothing_else_imports_the_builders():
  for path in ROOT.glob('slipstream_jax/**/*.py'):
    assert 'import tfds_builders' not in path.read_text()
    if path.name != 'tfds_builders.py':
      assert 'raw.tfds_builders' not in path.read_text()
