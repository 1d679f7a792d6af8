"""Disks that fail: what was there stays, and nothing half-written is left."""

import builtins
import contextlib
import errno
import os
import pathlib

import pytest

from slipstream_jax.checkpoint import places
from slipstream_jax.checkpoint.chain import consolidate, find_chains, prune
from slipstream_jax.checkpoint.places import open_place
from tests.checkpoint import small
from tests.support.programs import no_file_above

CODES = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT]


class Failing:
  """A file that takes some bytes, some of the next, and then no more."""

  def __init__(self, file, room, code):
    self._file, self._room, self._code = file, room, code

  def write(self, data):
    taken = min(len(data), self._room)
    self._file.write(memoryview(data)[:taken])
    self._room -= taken
    if taken < len(data):
      raise OSError(self._code, os.strerror(self._code))
    return taken

  def __getattr__(self, name):
    return getattr(self._file, name)

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self._file.close()


@contextlib.contextmanager
def disk_with(room, code, monkeypatch):
  """Files that are written have room for so many bytes."""

  def opening(path, mode='r', **how):
    if 'w' not in mode:
      return builtins.open(path, mode, **how)
    return Failing(builtins.open(path, mode), room, code)

  with monkeypatch.context() as patch:
    patch.setattr(places, 'open', opening, raising=False)
    yield


def two(tmp_path):
  """A place with a checkpoint of two links."""
  place = open_place(tmp_path)
  chain = small.save(place, (), None, 1, range(40))
  return place, small.save(place, chain, 1, 2, range(5, 9))


def contents(path):
  return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize('code', CODES, ids=errno.errorcode.get)
def test_a_disk_that_ends_at_any_byte_leaves_all_as_it_was(
  tmp_path, monkeypatch, code
):
  place, chain = two(tmp_path)
  before = contents(tmp_path)
  for room in range(0, 200, 3):
    for attempt in (
      lambda: small.save(place, chain, 2, 3, range(30)),
      lambda: consolidate(place, chain),
    ):
      with (
        disk_with(room, code, monkeypatch),
        pytest.raises(OSError, match=os.strerror(code)) as raised,
      ):
        attempt()
      assert raised.value.errno == code
    after = contents(tmp_path)
    # Whole files that no manifest names may be there; half ones are not.
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if name.endswith('-tmp')]
  prune(place, keep=2)
  assert contents(tmp_path) == before


def test_a_file_as_long_as_the_system_lets_it_be(tmp_path):
  """A real short write: the system takes what there is room for."""
  place, chain = two(tmp_path)
  before = contents(tmp_path)
  too_large = os.strerror(errno.EFBIG)
  with no_file_above(1_000), pytest.raises(OSError, match=too_large):
    small.save(place, chain, 2, 3, range(1_000))
  assert contents(tmp_path) == before


@pytest.mark.parametrize('call', ['fsync', 'replace', 'open'])
def test_a_call_that_fails_leaves_all_as_it_was(tmp_path, monkeypatch, call):
  place, chain = two(tmp_path)
  before = contents(tmp_path)

  def fail(*args, **kwargs):
    raise OSError(errno.EIO, 'injected')

  with monkeypatch.context() as patch:
    owner = {'fsync': os, 'replace': pathlib.Path, 'open': places}[call]
    patch.setattr(owner, call, fail, raising=False)
    for attempt in (
      lambda: small.save(place, chain, 2, 3, [1]),
      lambda: consolidate(place, chain),
    ):
      with pytest.raises(OSError, match='injected'):
        attempt()
  assert contents(tmp_path) == before
  assert find_chains(place).chains == [chain]


def test_a_folder_that_does_not_sync_is_no_success(tmp_path, monkeypatch):
  place, chain = two(tmp_path)
  real, calls = os.fsync, []

  def second_fails(handle):
    calls.append(handle)
    if len(calls) % 2 == 0:
      raise OSError(calls_code[0], 'injected')
    real(handle)

  monkeypatch.setattr(os, 'fsync', second_fails)
  calls_code = [errno.EIO]
  with pytest.raises(OSError, match='injected'):
    small.save(place, chain, 2, 3, [1])
  assert find_chains(place).chains == [chain]
  calls_code[0] = errno.EINVAL  # a file system that cannot sync folders
  chain = small.save(place, chain, 2, 3, [1])
  assert find_chains(place).chains == [chain]


def test_files_that_cannot_be_read_are_passed_by_and_not_removed(
  tmp_path, monkeypatch
):
  place, chain = two(tmp_path)
  before = contents(tmp_path)
  bad = chain[-1].rows['g'].name
  real = builtins.open

  def opening(path, mode='r', **how):
    if pathlib.Path(path).name in (bad, 'manifest-000000000002.json'):
      raise OSError(errno.EIO, 'injected')
    return real(path, mode, **how)

  monkeypatch.setattr(places, 'open', opening, raising=False)
  [found], [skip] = find_chains(place)
  assert found == chain[:1]
  assert skip.step == 2
  assert 'injected' in str(skip.why)
  # Nobody knows whether it is needed: the mount may come back.
  with pytest.raises(OSError, match='injected'):
    prune(place, keep=1)
  assert contents(tmp_path) == before


def test_nothing_is_removed_where_nothing_can_be_restored(tmp_path):
  place, chain = two(tmp_path)
  for link in chain:
    place.delete(link.rows['g'].name)
  before = contents(tmp_path)
  assert prune(place, keep=1) == []
  assert contents(tmp_path) == before


def test_only_our_own_files_are_removed(tmp_path):
  place, chain = two(tmp_path)
  small.save(place, chain, None, 3, [1])
  names = ['notes.txt', 'base-camp.jpg', 'manifest-1.json', 'metrics.jsonl']
  for name in names:
    (tmp_path / name).write_text('mine')
  gone = prune(place, keep=1)
  assert len(gone) == 6
  assert gone[:2] == [
    'manifest-000000000001.json',
    'manifest-000000000002.json',
  ]
  assert {*names} < {*contents(tmp_path)}
