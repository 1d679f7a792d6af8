"""Disks that fail: what was there stays, and nothing half-written is left."""

import errno
import os

import pytest

from slipstream_jax.checkpoint.chain import consolidate, find_chains, prune
from slipstream_jax.checkpoint.places import open_place
from tests.checkpoint import small
from tests.support.programs import no_file_above


@pytest.fixture
def two(tmp_path):
  """A place with a checkpoint of two links, and the chain."""
  place = open_place(tmp_path)
  chain = small.save(place, (), None, 1, range(40))
  return place, small.save(place, chain, 1, 2, range(5, 9))


def contents(path):
  return {file.name: file.read_bytes() for file in path.iterdir()}


def assert_writes_fail(place, chain, error):
  for attempt in (
    lambda: small.save(place, chain, 2, 3, range(1_000)),
    lambda: consolidate(place, chain),
  ):
    with pytest.raises(OSError, match=error):
      attempt()


def test_a_disk_that_ends_at_any_byte_leaves_all_as_it_was(tmp_path, two):
  place, chain = two
  before = contents(tmp_path)
  for room in range(0, 200, 3):
    with no_file_above(room):
      assert_writes_fail(place, chain, os.strerror(errno.EFBIG))
    after = contents(tmp_path)
    # Whole files that no manifest names may be there. Half ones are not.
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if name.endswith('-tmp')]
  prune(place, keep=2)
  assert contents(tmp_path) == before


def test_a_file_that_cannot_get_its_name_leaves_all_as_it_was(tmp_path, two):
  place, chain = two
  before = contents(tmp_path)
  taken = ['manifest-000000000003.json', 'base-000000000002-g.rows']
  for name in taken:
    (tmp_path / name).mkdir()
  assert_writes_fail(place, chain, os.strerror(errno.EISDIR))
  for name in taken:
    (tmp_path / name).rmdir()
  prune(place, keep=2)
  assert contents(tmp_path) == before
  assert find_chains(place).chains == [chain]


@pytest.mark.parametrize('failing', ['file', 'folder'])
def test_what_is_not_on_the_disk_is_no_success(failing, two, monkeypatch):
  place, chain = two
  calls, code = [], errno.EIO

  def sync(handle):
    calls.append(handle)  # a file's, then that of its folder
    if len(calls) % 2 == (failing == 'file'):
      raise OSError(code, 'injected')

  monkeypatch.setattr(os, 'fsync', sync)
  with pytest.raises(OSError, match='injected'):
    small.save(place, chain, 2, 3, [1])
  assert find_chains(place).chains == [chain]
  if failing == 'folder':
    code = errno.EINVAL  # a file system that cannot sync folders
    chain = small.save(place, chain, 2, 3, [1])
    assert find_chains(place).chains == [chain]


def test_files_that_cannot_be_read_are_passed_by_and_not_removed(tmp_path, two):
  place, chain = two
  for name in (chain[-1].rows['g'].name, 'manifest-000000000002.json'):
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(name)  # a loop, which the system refuses
  before = place.names()
  [found], [skip] = find_chains(place)
  assert found == chain[:1]
  assert skip.step == 2
  assert os.strerror(errno.ELOOP) in str(skip.why)
  # Nobody knows whether it is needed: the mount may come back.
  with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
    prune(place, keep=1)
  assert place.names() == before


def test_nothing_is_removed_where_nothing_can_be_restored(tmp_path, two):
  place, chain = two
  for link in chain:
    place.delete(link.rows['g'].name)
  before = contents(tmp_path)
  assert prune(place, keep=1) == []
  assert contents(tmp_path) == before


def test_only_our_own_files_are_removed(tmp_path, two):
  place, chain = two
  small.save(place, chain, None, 3, [1])
  names = ['notes.txt', 'base-camp.jpg', 'manifest-1.json', 'metrics.jsonl']
  for name in names:
    (tmp_path / name).write_text('mine')
  gone = prune(place, keep=1)
  assert len(gone) == 6
  assert gone[:2] == [f'manifest-00000000000{step}.json' for step in (1, 2)]
  assert {*names} < {*contents(tmp_path)}
