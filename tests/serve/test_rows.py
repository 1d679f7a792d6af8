"""Rows from memory and from a file: the same, whatever the cache holds."""

import os
import platform
import threading

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slip_serve import reading
from slip_serve.errors import ServeError
from slip_serve.layout import padded
from slip_serve.rows import DiskRows, MemoryRows, unique

ROWS = 700


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  """By bytes of a record, a file of records and what is in it."""
  folder, rng = tmp_path_factory.mktemp('rows'), np.random.default_rng(0)
  files = {}
  for record in 5, 24, 64, 4096, 5000:
    records = rng.integers(0, 256, (ROWS, record)).astype(np.uint8)
    path = folder / str(record)
    path.write_bytes(records.tobytes())
    os.truncate(path, padded(records.nbytes))
    files[record] = path, records
  return files


def disk_rows(
  path, record, cache, depth=1024, direct=True, popular=None, pinned=()
):
  file = reading.RecordFile(path, record, depth, direct)
  return DiskRows(file, cache, popular, pinned)


class Counted:
  """Reads rows and adds up how many were asked for, and what reads return."""

  def __init__(self, rows):
    self.rows, self.asked, self.hits, self.bytes_read = rows, 0, 0, 0

  def read(self, rows, out):
    hits, nbytes = self.rows.read(rows, out)
    self.asked, self.hits = self.asked + len(rows), self.hits + hits
    self.bytes_read += nbytes

  def close(self):
    self.rows.close()


QUERIES = st.lists(
  st.lists(st.integers(0, ROWS - 1), unique=True, max_size=90), max_size=12
)


@given(
  QUERIES,
  st.sampled_from([5, 24, 64, 4096, 5000]),
  st.sampled_from([0, 1, 3, 8, 20, ROWS]),
  st.sampled_from([1, 2, 5, 1024]),
  st.booleans(),
  st.none() | st.permutations(range(ROWS)),
  st.lists(st.integers(0, ROWS), unique=True, max_size=6),
)
def test_a_cache_changes_no_byte(
  files, queries, record, cache, depth, direct, popular, ends
):
  path, records = files[record]
  popular = None if popular is None else np.array(popular)
  ends = sorted(ends)
  pinned = [*zip(ends[::2], ends[1::2], strict=False)]
  rows = Counted(disk_rows(path, record, cache, depth, direct, popular, pinned))
  try:
    for query in queries:
      out = np.zeros((len(query), record), np.uint8)
      rows.read(np.array(query, np.int64), out)
      np.testing.assert_array_equal(out, records[query])
    asked = np.concatenate([np.zeros(0), *queries])
    always = sum(
      np.sum((first <= asked) & (asked < end)) for first, end in pinned
    )
    assert always <= rows.hits <= rows.asked
    if not cache:
      assert rows.hits == always
    assert (rows.bytes_read == 0) == (rows.hits == rows.asked)
  finally:
    rows.close()


WAYS_TO_READ = ('queue', 'threads', 'full', 'refused', 'lost')


@pytest.mark.parametrize('direct', [False, True])
@pytest.mark.parametrize('way', WAYS_TO_READ)
@pytest.mark.parametrize('depth', [3, 64])
def test_records_are_read_alike_by_a_queue_and_by_threads(
  files, way, depth, direct, monkeypatch
):
  calls = reading._CALLS.get(platform.machine())
  if way == 'threads':  # as on a machine without queues
    monkeypatch.setattr(reading, '_CALLS', {})
  elif calls is None:
    pytest.skip('no queues here')
  elif way == 'lost':  # a call that there is not: nothing comes back
    broken = {platform.machine(): calls._replace(wait=99_999)}
    monkeypatch.setattr(reading, '_CALLS', broken)
  elif way == 'full':  # the system gives no queue
    broken = {platform.machine(): calls._replace(setup=99_999)}
    monkeypatch.setattr(reading, '_CALLS', broken)
  rng = np.random.default_rng(1)
  for record, (path, records) in files.items():
    file = reading.RecordFile(path, record, depth, direct)
    queued = file._queued
    if way == 'threads' or file._aligned == 1:
      assert not queued
    elif way == 'refused' and queued:
      # A number that the system does not know.
      queue = file._take()._replace(number=1)
      file._idle.append(queue)
    for count in 0, 1, 7, 300:
      rows = rng.choice(ROWS, count, replace=False)
      at = np.argsort(rows)[::2]
      out = np.zeros((count, record), np.uint8)
      nbytes = file.read(rows, at, out)
      assert nbytes >= len(at) * record or record < 512
      np.testing.assert_array_equal(out[at], records[rows[at]])
      others = np.setdiff1d(np.arange(count), at)
      assert not out[others].any()
    assert file._queued == (queued and way != 'lost')
    file.close()
    file.close()


def test_what_is_popular_is_there_from_the_start(files):
  for record, (path, records) in files.items():
    popular = np.random.default_rng(2).permutation(ROWS)
    rows = disk_rows(path, record, 80, popular=popular)
    tags = rows._cache._tags
    kept = np.sort(tags[tags >= 0])
    assert len(kept) >= 60  # some sets of 8 are not full
    assert popular[0] in kept
    out = np.zeros((len(kept), record), np.uint8)
    assert rows.read(kept, out) == (len(kept), 0)
    np.testing.assert_array_equal(out, records[kept])
    rows.close()


@pytest.mark.parametrize('mapped', [False, True])
def test_memory_has_all_rows(files, mapped):
  path, records = files[64]
  rows = MemoryRows(path, ROWS, 64, mapped)
  query = np.array([5, 699, 0, 77])
  out = np.zeros((4, 64), np.uint8)
  assert rows.read(query, out) == (4, 0)
  np.testing.assert_array_equal(out, records[query])
  rows.close()


def test_what_fits_the_cache_is_read_once(files):
  path, _ = files[64]
  rows = Counted(disk_rows(path, 64, ROWS))
  # As few as surely share no set with more than 8.
  query = np.arange(8)
  out = np.zeros((8, 64), np.uint8)
  for _ in range(3):
    rows.read(query, out)
  assert rows.hits == 16
  # They lie side by side, so they come in one block.
  assert 512 <= rows.bytes_read <= 4096
  rows.close()


@pytest.mark.parametrize('cache', [0, 40, 400])
def test_threads_that_share_a_cache_get_their_rows(files, cache):
  path, records = files[64]
  rows = disk_rows(path, 64, cache, 16)
  failed = []

  def ask(seed):
    rng = np.random.default_rng(seed)
    for _ in range(60):
      # Few different ones, so that two ask for the same at once.
      query = rng.choice(ROWS // 4, rng.integers(1, 90), replace=False)
      out = np.zeros((len(query), 64), np.uint8)
      rows.read(query, out)
      if not np.array_equal(out, records[query]):
        failed.append(seed)

  threads = [threading.Thread(target=ask, args=[seed]) for seed in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  rows.close()
  assert not failed
  tags = rows._cache._tags
  kept = tags[tags >= 0]
  assert len(np.unique(kept)) == len(kept)  # no row twice


def test_the_one_not_asked_for_the_longest_goes(files):
  path, _ = files[24]
  rows = Counted(disk_rows(path, 24, 3))  # one set of three
  for row in 1, 2, 3, 1, 4, 1, 3, 4:
    rows.read(np.array([row]), np.zeros((1, 24), np.uint8))
  assert rows.hits == 4  # the second 1, the third, 3 and 4
  rows.close()


def test_a_file_cut_off_is_an_error(files, tmp_path):
  path = tmp_path / 'short'
  path.write_bytes(files[64][0].read_bytes()[: 64 * 100])
  rows = disk_rows(path, 64, 10)
  with pytest.raises(ServeError, match='none of row 600'):
    rows.read(np.array([600]), np.zeros((1, 64), np.uint8))
  rows.close()
  for popular in np.array([600]), np.array([5, 100, 3]):
    with pytest.raises(ServeError, match=f'none of row {popular.max()}'):
      disk_rows(path, 64, 10, popular=popular)
  before = len(os.listdir('/proc/self/fd'))
  rows = disk_rows(path, 64, 10, popular=np.array([99]))
  for _ in range(2):
    rows.close()
  assert len(os.listdir('/proc/self/fd')) == before
  with pytest.raises(ServeError, match='No such file'):
    disk_rows(tmp_path / 'none', 64, 10)


@given(st.lists(st.integers(-1, 40), max_size=200))
def test_unique_rows_are_those_of_a_dictionary(lookups):
  found, out = unique(np.array(lookups, np.int64))
  expected = [*dict.fromkeys(row for row in lookups if row >= 0)]
  assert found.tolist() == expected
  places = {row: place for place, row in enumerate(expected)} | {-1: -1}
  assert out.tolist() == [places[row] for row in lookups]
