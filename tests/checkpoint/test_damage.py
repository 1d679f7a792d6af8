"""Damaged files: a checksum says so, and nothing of them is ever handed out.

Ten thousand mutated inputs go to each reader, half of them past the checksums:
the right thing, or an error in a sentence; in little memory, and no time.
"""

import contextlib
import random
import tracemalloc
from types import SimpleNamespace
import uuid

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

KINDS = [('lazy_adam', 'raw'), ('odd', 'int3')]
MUTATED = 10_000
TRACED = 300
"""Fewer, as looking at memory takes long."""
_LARGEST = 30_000_000
"""Bytes that a reader of a file of 2 kB may take: some pieces, and slack."""


@pytest.fixture
def place():
  return open_place(f'memory://{uuid.uuid4().hex}')


def overwrite(place, name, data):
  # Not by `write`, whose temporary files would take most of the time.
  place._system.pipe_file(place._at(name), bytes(data))


def small_file(place, kind, codec):
  """A row file of some pieces; its facts and its bytes."""
  with small.pieces_of(150):
    facts = small.write(place, 'a', kind, [*range(9, 60, 5), 900], codec)
  return facts, place.read('a', 1 << 20)


@pytest.mark.parametrize(('kind', 'codec'), KINDS)
def test_any_flipped_bit_of_a_row_file_is_seen(place, kind, codec):
  facts, data = small_file(place, kind, codec)
  good = dict.fromkeys([*range(9, 60, 5), 900], 0)
  meant = small.table_of(read_row_file(place, facts))
  assert meant.keys() == good.keys()
  for at in range(len(data)):
    flipped = bytearray(data)
    flipped[at] ^= 1 << at % 8
    overwrite(place, 'a', flipped)
    got = []
    with pytest.raises(UserError, match='must be as it was written'):
      got.extend(read_row_file(place, facts))
    for row, entry in small.table_of(got).items():
      assert entry == meant[row]
    with pytest.raises(UserError, match='must be as it was written'):
      check_row_file(place, facts)


def test_a_row_file_cut_anywhere_or_longer_is_seen(place):
  facts, data = small_file(place, *KINDS[0])
  cut = [data[:at] for at in range(len(data))]
  for other in [*cut, data + b'\0', data + data]:
    overwrite(place, 'a', other)
    for its_own in (facts, facts._replace(bytes=len(other))):
      with pytest.raises(UserError, match='must be as it was written'):
        check_row_file(place, its_own)


def test_another_row_file_in_its_place_is_seen(place):
  facts = small.write(place, 'a', 'rows', [1, 2])
  for rows, salt in [([1, 2], 1), ([1, 3], 0), ([1], 0)]:
    small.write(place, 'a', 'rows', rows, salt=salt)
    with pytest.raises(UserError, match='must be as it was written'):
      check_row_file(place, facts)


def test_any_flipped_bit_of_a_manifest_is_seen(place):
  small.save(place, (), None, 7, [1, 2])
  data = place.read(name_of(7), 1 << 20)
  for at in range(len(data)):
    flipped = bytearray(data)
    flipped[at] ^= 1 << at % 8
    overwrite(place, name_of(7), flipped)
    with pytest.raises(UserError, match='a manifest must be as it was'):
      read_manifest(place, 7)
  for at in range(len(data)):
    overwrite(place, name_of(7), data[:at])
    with pytest.raises(UserError, match='a manifest must be as it was'):
      read_manifest(place, 7)


def test_a_manifest_of_another_step_is_seen(place):
  small.save(place, (), None, 7, [1, 2])
  overwrite(place, name_of(8), place.read(name_of(7), 1 << 20))
  with pytest.raises(UserError, match='of step 7'):
    read_manifest(place, 8)


def test_any_flipped_bit_of_another_file_is_seen(place):
  facts = write_file(place, 'a', [b'some', b'', b'bytes'])
  assert read_file(place, facts) == b'somebytes'
  for at in range(9):
    flipped = bytearray(b'somebytes')
    flipped[at] ^= 1 << at % 8
    overwrite(place, 'a', flipped)
    with pytest.raises(UserError, match='a file must have 9 bytes'):
      read_file(place, facts)


def spoiled(place, name):
  """Names ways to spoil a file, with what does it and gives nothing back."""
  data = bytearray(place.read(name, 1 << 20))
  data[len(data) // 2] ^= 4
  yield 'flipped', lambda: overwrite(place, name, data)
  yield 'cut', lambda: overwrite(place, name, data[:-1])
  yield 'gone', lambda: place.delete(name)


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
    for how, spoil in spoiled(place, name):
      spoil()
      [found], skipped = find_chains(place)
      assert found == chain
      gone = name if how == 'gone' else None
      there = [step for step in passed_by if name_of(step) != gone]
      assert [skip.step for skip in skipped] == there
      inner = place.url.partition('://')[2]
      assert all(inner in str(skip.why) for skip in skipped)
      overwrite(place, name, data)
  assert find_chains(place).chains == [third]


def mutate(rng, data):
  """Bytes changed, lost, repeated, moved, or numbers made large."""
  data = bytearray(data)
  for _ in range(rng.randint(1, 4)):
    at = rng.randrange(len(data) + 1)
    end = at + rng.randint(0, 40)
    kind = rng.randrange(6)
    if kind == 0 and data:
      data[at % len(data)] = rng.randrange(256)
    elif kind == 1:
      del data[at:end]
    elif kind == 2:
      data[at:at] = data[end : end + 30]
    elif kind == 3:
      data[at:end] = bytes(end - at)
    elif kind == 4:
      data[at : at + 8] = rng.choice([b'\xff' * 4, b'\xff' * 8, b'\0\0\0\x7f'])
    else:
      data[at:end] = rng.choice(
        [b'99999999999', b'-1', b'null', b'[[', b'{}', b'1e999', b'"\\ud800"']
      )
  return bytes(data)


@pytest.fixture
def unchecked(monkeypatch):
  """All checksums are 0, so that what is mutated comes further."""
  zeros = SimpleNamespace(crc32=lambda data, value=0: 0)
  for module in (manifest, row_file):
    monkeypatch.setattr(module, 'zlib', zeros)


@contextlib.contextmanager
def little_memory():
  """What is read here takes little, at its peak."""
  tracemalloc.start()
  try:
    yield
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak < _LARGEST


def read_mutated(place, name, call, count):
  """Calls with each mutation of a file; how many were read, without error."""
  data, rng, read = place.read(name, 1 << 20), random.Random(0), 0
  for _ in range(count):
    other = mutate(rng, data)
    overwrite(place, name, other)
    with contextlib.suppress(UserError):
      call(len(other))
      read += 1
  overwrite(place, name, data)
  return read


def row_file_calls(place):
  """Readers of a row file of each kind that look at what they read."""
  for kind, codec in KINDS:
    facts, _ = small_file(place, kind, codec)

    def call(size, facts=facts):
      pieces = list(read_row_file(place, facts._replace(bytes=size)))
      rows = [row for piece in pieces for row in piece.rows.tolist()]
      assert rows == sorted(set(rows))
      for piece in pieces:
        assert all(len(x) == len(piece.rows) for x in piece.values.values())

    yield call


def manifest_call(place):
  """The reader of a manifest, which is then used."""
  chain = small.save(place, (), None, 3, [1, 2])
  small.save(place, chain, 3, 7, [1, 2])

  def call(size):
    manifest = read_manifest(place, 7)
    assert manifest.step == 7
    assert isinstance(manifest.identity, int)
    with contextlib.suppress(OSError):
      read_chain(place, 7)

  return call


def test_mutated_row_files_are_refused(place):
  for call in row_file_calls(place):
    assert read_mutated(place, 'a', call, MUTATED // 4) < 50
    with little_memory():
      read_mutated(place, 'a', call, TRACED)


def test_mutated_row_files_of_right_checksums_do_no_harm(place, unchecked):
  for call in row_file_calls(place):
    assert read_mutated(place, 'a', call, MUTATED // 4) > 50
    with little_memory():
      read_mutated(place, 'a', call, TRACED)


def test_mutated_manifests_are_refused(place):
  call = manifest_call(place)
  assert read_mutated(place, name_of(7), call, MUTATED // 2) < 50
  with little_memory():
    read_mutated(place, name_of(7), call, TRACED)


def test_mutated_manifests_of_right_checksums_do_no_harm(place, unchecked):
  call = manifest_call(place)
  assert read_mutated(place, name_of(7), call, MUTATED // 2) > 50
  with little_memory():
    read_mutated(place, name_of(7), call, TRACED)


def test_json_of_any_depth_is_refused(place, unchecked):
  head, deep = b'{"version":1,"crc32":0,"body":', b'[' * 200_000
  overwrite(place, name_of(7), head + deep + b'}\n')
  with pytest.raises(UserError, match='JSON too deep'):
    read_manifest(place, 7)
