"""Packed folders: sealed, opened, verified; unfinished and damaged ones."""

import json
import zlib

import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.packed import columns as packed
from slipstream_jax.packed.columns import Column
from tests.support.packed_folders import write_columns

FACTS = {'name': 'some', 'splits': {'train': [0, 3]}}


def arrays():
  rng = np.random.default_rng(0)
  return {
    'labels': np.array([0, 1, 1], np.uint8),
    'dense': rng.normal(size=(3, 2)).astype(np.float32),
    'C1': np.array([[1, 300], [65535, 0], [2, 2]], np.uint16),
    'C2': np.array([70_000, 1, 2**32 - 1], np.uint32),
    'vocabulary_C1': np.array([-(2**63), -1, 5], np.int64),
    'empty': np.empty(0, np.int64),
    'no_features': np.empty((3, 0), np.float32),
  }


@pytest.fixture
def folder(tmp_path):
  return write_columns(tmp_path / 'some', arrays(), FACTS)


def test_what_was_written_is_read(folder):
  found = packed.open_packed(str(folder))
  assert found.folder == folder
  assert set(found.columns) == set(arrays())
  for name, array in arrays().items():
    np.testing.assert_array_equal(found.columns[name], array)
    assert found.columns[name].dtype == array.dtype
    assert (folder / f'{name}.{array.dtype}').stat().st_size == array.nbytes
  assert {key: found.manifest[key] for key in FACTS} == FACTS
  assert found.manifest['version'] == packed.VERSION
  with pytest.raises(ValueError, match='read-only'):
    found.columns['labels'][0] = 1


def test_files_are_plain_little_endian_numbers(folder):
  raw = (folder / 'C1.uint16').read_bytes()
  assert raw[:6] == bytes([1, 0, 300 % 256, 300 // 256, 255, 255])


def test_verify_names_every_file_and_its_bytes(folder):
  sizes = {f'{n}.{a.dtype}': a.nbytes for n, a in arrays().items()}
  assert dict(packed.verify(folder)) == sizes
  entries = json.loads((folder / packed.MANIFEST).read_text())['columns']
  for entry in entries:
    data = (folder / f'{entry["name"]}.{entry["dtype"]}').read_bytes()
    assert entry['crc32'] == f'{zlib.crc32(data):08x}'


@pytest.mark.parametrize('name', [n for n, a in arrays().items() if a.nbytes])
def test_a_flipped_byte_is_found(folder, name):
  path = folder / f'{name}.{arrays()[name].dtype}'
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 4
  path.write_bytes(data)
  packed.open_packed(folder)  # sees sizes only: it must be quick
  with pytest.raises(UserError, match='checksum') as caught:
    list(packed.verify(folder))
  assert str(path) in str(caught.value)


@pytest.mark.parametrize('change', [-1, 1, None])
def test_another_size_or_no_file_is_refused(folder, change):
  path = folder / 'dense.float32'
  data, said = path.read_bytes() + b'0', 'got no file'
  path.unlink()
  if change is not None:
    path.write_bytes(data[: 24 + change])
    said = f'got {24 + change} bytes'
  for look in packed.open_packed, lambda f: list(packed.verify(f)):
    with pytest.raises(UserError, match='must have 24 bytes') as caught:
      look(folder)
    assert said in str(caught.value)


def test_only_a_sealed_folder_opens(tmp_path):
  forms = [Column('labels', 'uint8', (4,)), Column('C1', 'uint8', (4,))]
  (tmp_path / forms[0].file).write_bytes(bytes([1] * 4))
  with pytest.raises(UserError, match=r'C1\.uint8'):
    packed.finish(tmp_path, forms, {})
  assert not packed.is_finished(tmp_path)
  with pytest.raises(UserError, match='written last'):
    packed.open_packed(tmp_path)
  (tmp_path / forms[1].file).write_bytes(bytes([2] * 4))
  packed.finish(tmp_path, forms, {})
  assert packed.is_finished(tmp_path)
  assert packed.open_packed(tmp_path).columns['C1'].tolist() == [2] * 4
  assert not list(tmp_path.glob('*.tmp'))


def test_a_manifest_not_renamed_does_not_count(folder):
  manifest = folder / packed.MANIFEST
  manifest.rename(manifest.with_suffix('.json.tmp'))
  assert not packed.is_finished(folder)
  with pytest.raises(UserError, match='got a folder without one'):
    packed.open_packed(folder)


@pytest.mark.parametrize('text', ['', '{"columns": []}', '[]', '{"versi'])
def test_a_broken_manifest_is_refused(folder, text):
  (folder / packed.MANIFEST).write_text(text)
  with pytest.raises(
    UserError, match=r'manifest\.json must be as it was .*delete the folder'
  ):
    packed.open_packed(folder)


@pytest.mark.parametrize('version', [1, 99])
def test_another_version_is_refused(folder, version):
  path = folder / packed.MANIFEST
  manifest = json.loads(path.read_text())
  path.write_text(json.dumps(manifest | {'version': version}))
  match = f'version 3, got {version} .*delete the folder and prepare'
  with pytest.raises(UserError, match=match):
    packed.open_packed(folder)


@pytest.mark.parametrize(
  ('largest', 'name'),
  [(255, 'uint8'), (256, 'uint16'), (65536, 'uint32'), (2**32, 'uint64')],
)
def test_smallest_type(largest, name):
  assert packed.smallest_uint(largest) == name
