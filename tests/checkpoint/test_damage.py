"""Damaged files: a checksum says so, and nothing of them is ever handed out.

Thousands of mutated files go to each reader, half of them past the checksums:
the right values, or an error in a sentence, in little memory.
"""

import contextlib
import random
import tracemalloc
from types import SimpleNamespace
import uuid

import fsspec
import pytest

from slipstream_jax.checkpoint import manifest, row_file
from slipstream_jax.checkpoint.chain import find_chains, read_chain
from slipstream_jax.checkpoint.manifest import (
  name_of,
  read_file,
  read_manifest,
  write_file,
)
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.checkpoint.row_file import check_row_file, read_row_file
from slipstream_jax.errors import UserError
from tests.checkpoint import small
from tests.support.texts.mutations import mutated

KINDS = [('lazy_adam', 'raw'), ('odd', 'int3')]
ROWS = [*range(9, 60, 5), 900]
MUTATED = 2_500
TRACED = 300  # fewer, as tracing memory takes long
LARGEST = 30_000_000  # bytes that a reader of a file of 2 kB may take
refused = pytest.raises(UserError, match='must be as it was written')


@pytest.fixture
def place():
  return open_place(f'memory://{uuid.uuid4().hex}')


def path_in(place, name=''):
  return f'{place.url.partition("://")[2]}/{name}'


def overwrite(place, name, data):
  """Not by `write`, whose temporary files would take most of the time."""
  fsspec.filesystem('memory').pipe_file(path_in(place, name), bytes(data))


def small_file(place, kind, codec):
  """Writes a row file of some pieces. Returns its facts and its bytes."""
  with small.pieces_of(150):
    facts = small.write(place, 'a', kind, ROWS, codec)
  return facts, place.read('a', 1 << 20)


def damaged(data):
  """Yields the bytes with each byte changed by a bit, and cut there."""
  for at in range(len(data)):
    flipped = bytearray(data)
    flipped[at] ^= 1 << at % 8
    yield flipped
    yield data[:at]


@pytest.mark.parametrize(('kind', 'codec'), KINDS)
def test_any_damage_of_a_row_file_is_seen(place, kind, codec):
  facts, data = small_file(place, kind, codec)
  meant = small.table_of(read_row_file(place, facts))
  assert [*meant] == ROWS
  for other in [*damaged(data), data + b'\0', data + data]:
    overwrite(place, 'a', other)
    read = []
    with refused:
      read.extend(read_row_file(place, facts))
    assert small.table_of(read).items() <= meant.items()
    for its_own in (facts, facts._replace(bytes=len(other))):
      with refused:
        check_row_file(place, its_own)


def test_another_row_file_in_its_place_is_seen(place):
  facts = small.write(place, 'a', 'rows', [1, 2])
  for rows, salt in [([1, 2], 1), ([1, 3], 0), ([1], 0)]:
    small.write(place, 'a', 'rows', rows, salt=salt)
    with refused:
      check_row_file(place, facts)


def test_any_damage_of_a_manifest_or_of_another_file_is_seen(place):
  small.save(place, (), None, 7, [1, 2])
  data = place.read(name_of(7), 1 << 20)
  for other in damaged(data):
    overwrite(place, name_of(7), other)
    with pytest.raises(UserError, match='a manifest must be as it was'):
      read_manifest(place, 7)
  overwrite(place, name_of(8), data)
  with pytest.raises(UserError, match='of step 7'):
    read_manifest(place, 8)
  facts = write_file(place, 'a', [b'some', b'', b'bytes'])
  assert read_file(place, facts) == b'somebytes'
  for other in damaged(b'somebytes'):
    overwrite(place, 'a', other)
    with pytest.raises(UserError, match='a file must have 9 bytes'):
      read_file(place, facts)


def spoiled(place, name):
  """Spoils a file in three ways, and yields whether it is gone."""
  data = bytearray(place.read(name, 1 << 20))
  data[len(data) // 2] ^= 4
  overwrite(place, name, data)
  yield False
  overwrite(place, name, data[:-1])
  yield False
  place.delete(name)
  yield True


def test_damage_to_any_file_leads_to_the_checkpoint_before(place):
  first = small.save(place, (), None, 1, [1, 2])
  second = small.save(place, first, None, 2, [1, 2, 3])
  third = small.save(place, second, 2, 3, [3, 4])
  found_with = {  # what is spoiled, what is found, and what is passed by
    name_of(2): (first, [3, 2]),
    second[0].rows['g'].name: (first, [3, 2]),
    second[0].files['dense'].name: (third, []),  # a link's own rows are enough
    name_of(3): (second, [3]),
    third[-1].rows['g'].name: (second, [3]),
    third[-1].files['dense'].name: (second, [3]),
  }
  assert {name for name in place.names() if '0001' not in name} == {*found_with}
  for name, (chain, passed_by) in found_with.items():
    data = place.read(name, 1 << 20)
    for is_gone in spoiled(place, name):
      [found], skipped = find_chains(place)
      assert found == chain
      gone = name if is_gone else None
      there = [step for step in passed_by if name_of(step) != gone]
      assert [skip.step for skip in skipped] == there
      assert all(path_in(place)[:-1] in str(skip.why) for skip in skipped)
    overwrite(place, name, data)
  assert find_chains(place).chains == [third]


@contextlib.contextmanager
def little_memory():
  """Fails if the block takes much memory at its peak."""
  tracemalloc.start()
  try:
    yield
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak < LARGEST


def reader_of(place, file):
  """Writes a file. Returns its name, and a reader that checks what it reads."""
  if file == 'manifest':
    chain = small.save(place, (), None, 3, [1, 2])
    small.save(place, chain, 3, 7, [1, 2])

    def read_as_manifest(size):
      read = read_manifest(place, 7)
      assert read.step == 7
      assert isinstance(read.identity, int)
      with contextlib.suppress(OSError):
        read_chain(place, 7)

    return name_of(7), read_as_manifest
  facts, _ = small_file(place, *KINDS[file])

  def read_as_rows(size):
    pieces = list(read_row_file(place, facts._replace(bytes=size)))
    rows = [row for piece in pieces for row in piece.rows.tolist()]
    assert rows == sorted(set(rows))
    for piece in pieces:
      assert all(len(x) == len(piece.rows) for x in piece.values.values())

  return 'a', read_as_rows


def ignore_checksums(monkeypatch):
  """All checksums are 0, so that what is mutated comes further."""
  zeros = SimpleNamespace(crc32=lambda data, value=0: 0)
  for module in (manifest, row_file):
    monkeypatch.setattr(module, 'zlib', zeros)


@pytest.mark.parametrize('checked', [True, False])
@pytest.mark.parametrize('file', [0, 1, 'manifest'])
def test_mutated_files_are_refused_or_harmless(
  file, checked, place, monkeypatch
):
  if not checked:
    ignore_checksums(monkeypatch)
  name, read = reader_of(place, file)
  data, rng, accepted = place.read(name, 1 << 20), random.Random(0), 0

  def read_mutated(count):
    nonlocal accepted
    for _ in range(count):
      other = mutated(data, rng)
      if other != data:
        overwrite(place, name, other)
        with contextlib.suppress(UserError):
          read(len(other))
          accepted += 1

  read_mutated(MUTATED)
  assert not accepted if checked else accepted > 50
  with little_memory():
    read_mutated(TRACED)


def test_json_of_any_depth_is_refused(place, monkeypatch):
  ignore_checksums(monkeypatch)
  head, deep = b'{"version":1,"crc32":0,"body":', b'[' * 200_000
  overwrite(place, name_of(7), head + deep + b'}\n')
  with pytest.raises(UserError, match='JSON too deep'):
    read_manifest(place, 7)
