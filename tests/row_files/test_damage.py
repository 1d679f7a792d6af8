"""Damaged files: a checksum says so, and nothing of them is ever handed out.

Ten thousand mutated inputs go to each reader, half of them past the checksums:
the right thing, or an error in a sentence; in little memory, and no time.
"""

import random
import tracemalloc
from types import SimpleNamespace

import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.row_files import layout, manifest, reader, writer
from slipstream_jax.row_files.chain import find_chains
from slipstream_jax.row_files.manifest import (
  check_file,
  name_of,
  read_manifest,
  write_file,
)
from slipstream_jax.row_files.places import open_place
from slipstream_jax.row_files.reader import check_row_file, read_row_file
from tests.row_files import small

KINDS = [('lazy_adam', 'raw'), ('odd', 'int3')]
MUTATED = 10_000
_LARGEST = 30_000_000
"""Bytes that a reader of a file of 2 kB may take: some pieces, and slack."""


def overwrite(place, name, data):
  place.write(name, [bytes(data)])


def small_file(place, kind, codec):
  """A row file of some pieces; its facts and its bytes."""
  with small.pieces_of(150):
    facts = small.write(place, 'a', kind, [*range(9, 60, 5), 900], codec)
  return facts, place.read('a', 1 << 20)


@pytest.mark.parametrize(('kind', 'codec'), KINDS)
def test_any_flipped_bit_of_a_row_file_is_seen(tmp_path, kind, codec):
  place = open_place(tmp_path)
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


def test_a_row_file_cut_anywhere_or_longer_is_seen(tmp_path):
  place = open_place(tmp_path)
  facts, data = small_file(place, *KINDS[0])
  cut = [data[:at] for at in range(len(data))]
  for other in [*cut, data + b'\0', data + data]:
    overwrite(place, 'a', other)
    for its_own in (facts, facts._replace(bytes=len(other))):
      with pytest.raises(UserError, match='must be as it was written'):
        check_row_file(place, its_own)


def test_another_row_file_in_its_place_is_seen(tmp_path):
  place = open_place(tmp_path)
  facts = small.write(place, 'a', 'rows', [1, 2])
  for rows, salt in [([1, 2], 1), ([1, 3], 0), ([1], 0)]:
    small.write(place, 'a', 'rows', rows, salt=salt)
    with pytest.raises(UserError, match='must be as it was written'):
      check_row_file(place, facts)


def test_any_flipped_bit_of_a_manifest_is_seen(tmp_path):
  place = open_place(tmp_path)
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


def test_a_manifest_of_another_step_is_seen(tmp_path):
  place = open_place(tmp_path)
  small.save(place, (), None, 7, [1, 2])
  overwrite(place, name_of(8), place.read(name_of(7), 1 << 20))
  with pytest.raises(UserError, match='of step 7'):
    read_manifest(place, 8)


def test_any_flipped_bit_of_another_file_is_seen(tmp_path):
  place = open_place(tmp_path)
  facts = write_file(place, 'a', [b'some', b'', b'bytes'])
  check_file(place, facts)
  for at in range(9):
    flipped = bytearray(b'somebytes')
    flipped[at] ^= 1 << at % 8
    overwrite(place, 'a', flipped)
    with pytest.raises(UserError, match='a file must have 9 bytes'):
      check_file(place, facts)


def test_damage_to_any_file_leads_to_the_checkpoint_before(tmp_path):
  place = open_place(tmp_path)
  first = small.save(place, (), None, 1, [1, 2])
  whole = small.save(place, first, None, 2, [1, 2, 3])
  whole = small.save(place, whole, 2, 3, [3, 4])
  needed = {name for name in place.names() if '00001' not in name}
  for name in needed:
    data = place.read(name, 1 << 20)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    for change in (
      lambda f=flipped, n=name: overwrite(place, n, f),
      lambda n=name: place.delete(n),
    ):
      change()
      [found], skipped = find_chains(place)
      # What is below an increment, its own dense file aside, it needs, too.
      stays = name.startswith('file') and '00002' in name
      assert found == (whole if stays else first if '2' in name else whole[:1])
      assert [skip.step for skip in skipped] == (
        [] if stays else [3, 2] if '2' in name else [3]
      )
      assert all(str(place.url) in str(skip.why) for skip in skipped)
      overwrite(place, name, data)
  assert find_chains(place).chains == [whole]


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
  for module in (layout, manifest, reader, writer):
    monkeypatch.setattr(module, 'zlib', zeros)


def no_more_than(most, call):
  """Memory that a call takes at its peak, beyond what there was."""
  tracemalloc.start()
  try:
    call()
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak < most


def mutated_row_files(place, kind, codec, count):
  facts, data = small_file(place, kind, codec)
  meant = list(read_row_file(place, facts))
  rng, read = random.Random(0), 0
  for _ in range(count):
    other = mutate(rng, data)
    overwrite(place, 'a', other)
    own = facts._replace(bytes=len(other))
    try:
      pieces = list(read_row_file(place, own))
    except UserError:
      pass
    else:
      read += 1
      rows = [row for piece in pieces for row in piece.rows.tolist()]
      assert rows == sorted(set(rows))
      assert len(pieces) <= len(meant) + 3
  return read


def test_mutated_row_files_are_refused(tmp_path):
  place = open_place(tmp_path)

  def all_of_them():
    for kind, codec in KINDS:
      assert mutated_row_files(place, kind, codec, MUTATED // 4) < 50

  no_more_than(_LARGEST, all_of_them)


def test_mutated_row_files_of_right_checksums_do_no_harm(tmp_path, unchecked):
  place = open_place(tmp_path)

  def all_of_them():
    for kind, codec in KINDS:
      assert mutated_row_files(place, kind, codec, MUTATED // 4) > 50

  no_more_than(_LARGEST, all_of_them)


def mutated_manifests(place, count):
  chain = small.save(place, (), None, 3, [1, 2])
  small.save(place, chain, 3, 7, [1, 2])
  data = place.read(name_of(7), 1 << 20)
  rng, read = random.Random(0), 0
  for _ in range(count):
    overwrite(place, name_of(7), mutate(rng, data))
    try:
      parsed = read_manifest(place, 7)
    except UserError:
      pass
    else:
      read += 1
      assert parsed.step == 7
      assert isinstance(parsed.identity, int)
      find_chains(place, deep=False)
  return read


def test_mutated_manifests_are_refused(tmp_path):
  place = open_place(tmp_path)
  no_more_than(_LARGEST, lambda: mutated_manifests(place, MUTATED // 2))


def test_mutated_manifests_of_right_checksums_do_no_harm(tmp_path, unchecked):
  place = open_place(tmp_path)

  def all_of_them():
    assert mutated_manifests(place, MUTATED // 2) > 50

  no_more_than(_LARGEST, all_of_them)


def test_json_of_any_depth_is_refused(tmp_path, unchecked):
  place = open_place(tmp_path)
  deep = b'[' * 200_000
  overwrite(
    place, name_of(7), b'{"version":1,"crc32":0,"body":' + deep + b'}\n'
  )
  with pytest.raises(UserError, match='JSON too deep'):
    read_manifest(place, 7)
