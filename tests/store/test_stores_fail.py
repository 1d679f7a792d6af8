"""What a disk refuses is said, no row is lost by it, and it is tried again."""

import errno
import threading

import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.store.scratch import ScratchFile, shape_of
from slipstream_jax.store.tiered import file, tiered, TieredStore
from tests.store.test_stores import block_of, first_of, N, TABLES

DIM = 7
ALL = np.arange(N)


def a_store(folder, capacity=20, **options):
  first = first_of(DIM, 0)
  store = TieredStore(first, folder, capacity, **options)
  store.reset(first)
  return store


def check(store, expected):
  block = store.gather(ALL, N)
  np.testing.assert_array_equal(block.rows, expected.rows)
  np.testing.assert_array_equal(block.state[0], expected.state[0])


class Disk:
  """Reads or writes of a store's scratch file, which may fail or wait."""

  def __init__(self, store, name):
    self.fails, self.open = False, threading.Event()
    self.open.set()
    original = getattr(store.file, name)

    def call(*arguments):
      assert self.open.wait(60)
      if self.fails:
        raise OSError(errno.ENOSPC, 'no room', 'a disk')
      return original(*arguments)

    setattr(store.file, name, call)


@pytest.fixture
def store(tmp_path):
  store = a_store(tmp_path)
  yield store
  store.close()


@pytest.fixture
def writes(store):
  return Disk(store, 'write')


@pytest.fixture
def reads(store):
  return Disk(store, 'read')


def test_a_full_disk_is_told_by_the_next_call_and_loses_no_row(store, writes):
  expected = block_of(DIM, 5 + ALL, N)
  writes.fails = True
  store.scatter(ALL, expected)  # most of them leave for the disk at once
  with pytest.raises(OSError, match='no room'):
    store.flush()
  check(store, expected)  # out of the queue
  with pytest.raises(OSError, match='no room'):
    store.flush()
  writes.fails = False
  store.flush()
  assert store.counts.written >= N - 20
  check(store, expected)


def test_rows_are_read_from_the_queue_while_the_disk_is_slow(store, writes):
  writes.open.clear()
  for value in (5, 9):  # of a row on its way twice, the last one counts
    expected = block_of(DIM, value + ALL, N)
    store.scatter(ALL, expected)
    check(store, expected)
  store.prefetch(ALL[:20])
  check(store, expected)
  assert store.counts.missed == store.counts.written == 0
  writes.open.set()
  store.flush()
  check(store, expected)


def test_who_finds_no_room_in_the_queue_waits(tmp_path):
  store = a_store(tmp_path, queue_bytes=1)
  writes = Disk(store, 'write')
  writes.open.clear()
  store.scatter(ALL, block_of(DIM, ALL, N))
  threading.Timer(0.2, writes.open.set).start()
  store.scatter(ALL, block_of(DIM, 3 + ALL, N))
  assert store.counts.waited_s > 0.1
  check(store, block_of(DIM, 3 + ALL, N))
  store.close()


def on_disk(store):
  """All rows written, the last 20 of them still in memory."""
  expected = block_of(DIM, 5 + ALL, N)
  store.scatter(ALL[::-1].copy(), block_of(DIM, 5 + ALL[::-1], N))
  store.flush()
  return expected


def test_a_fetch_that_fails_is_made_up_for(store, reads):
  expected = on_disk(store)
  reads.fails = True
  store.prefetch(ALL[:10])
  with pytest.raises(OSError, match='no room'):
    store.gather(ALL[:10], 10)
  reads.fails = False
  check(store, expected)


def test_what_is_written_while_it_is_fetched_stays(store, reads):
  expected = on_disk(store)
  reads.open.clear()
  store.prefetch(ALL[:10])
  changed = block_of(DIM, [77], 1)
  store.scatter(ALL[3:4], changed)
  reads.open.set()
  expected.rows[3], expected.state[0][3] = changed.rows[0], 77
  check(store, expected)


def test_a_step_waits_for_what_is_being_fetched(store, reads):
  expected = on_disk(store)
  reads.open.clear()
  store.prefetch(ALL[:10])
  threading.Timer(0.2, reads.open.set).start()
  block = store.gather(ALL[:10], 10)
  np.testing.assert_array_equal(block.rows, expected.rows[:10])
  counts = store.counts
  assert counts.waited_s > 0.1
  assert (counts.fetched, counts.missed) == (10, 0)


def test_a_reset_forgets_what_is_on_its_way(store, reads, writes):
  on_disk(store)
  for disk in (reads, writes):
    disk.open.clear()
  store.prefetch(ALL[:10])
  store.scatter(ALL[100:], block_of(DIM, ALL[100:], 200))
  for disk in (reads, writes):
    threading.Timer(0.1, disk.open.set).start()
  store.reset(first_of(DIM, 4))
  store.flush()
  check(store, first_of(DIM, 4).block())
  assert not store.file.has(ALL).any()


def test_a_folder_that_is_none_is_told(tmp_path):
  with pytest.raises(UserError, match='rows on a disk need a folder'):
    file(tmp_path / 'none').open([first_of(DIM, 0)])
  with pytest.raises(UserError, match='dram_bytes'):
    tiered(0, tmp_path)


def test_memory_is_shared_in_proportion(tmp_path):
  firsts = [first_of(DIM, 0), first_of(100, 0)]
  stores = tiered(N * 50, tmp_path).open(firsts)
  capacity = int(N * 50 / (18 + 35 + 204 + 35))
  for store, first in zip(stores, firsts, strict=True):
    assert len(store.gather(ALL[:0], 0).rows) == 0
    store.reset(first)
    store.scatter(ALL, first.block())
    store.flush()
    assert N - store.counts.written == capacity
    store.close()


def test_whole_tables_leave_the_memory_last(tmp_path):
  first, rng = first_of(DIM, 0), np.random.default_rng(0)
  width, own = 18 + 35, np.arange(5, 105)
  dram = width * (TABLES['b'] + 60)
  read = {}
  for whole in (), ('b',):
    (store,) = tiered(dram, tmp_path, whole).open([first])
    store.reset(first)
    store.scatter(own, block_of(DIM, own, 100))
    for _ in range(30):  # others pass through the memory
      others = rng.choice(np.r_[0:5, 105:N], 50, replace=False)
      store.scatter(others, block_of(DIM, others, 50))
    store.flush()
    before = store.counts
    block = store.gather(own, 100)
    np.testing.assert_array_equal(block.state[0], own)
    read[whole] = store.counts.missed - before.missed
    store.close()
  assert read[('b',)] == 0 < read[()]


@pytest.mark.parametrize(
  ('dram', 'whole', 'words'),
  [
    (1 << 20, ('nobody',), "must be some of a, b, c, got 'nobody'"),
    (1 << 20, 'a', "must be a list of names, got 'a'"),
    (53 * 104, ('a', 'b'), 'must fit its 5,512 bytes, got 5,565 bytes of a, b'),
  ],
)
def test_tables_that_cannot_be_kept_are_refused(tmp_path, dram, whole, words):
  with pytest.raises(UserError, match=words):
    tiered(dram, tmp_path, whole).open([first_of(DIM, 0)])
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('width', [1, 3, 8, 68, 260, 512, 513, 4096, 4097])
def test_no_record_crosses_a_block(width):
  per, block_bytes = shape_of(width)
  assert per >= 1
  assert per * width <= block_bytes < 2 * max(4096, width)
  assert block_bytes % 4096 == 0
  assert per == 1 or (per + 1) * width > 4096


def test_a_short_write_is_finished(monkeypatch, tmp_path):
  """What the kernel could not write whole is written a part at a time."""
  from slipstream_jax.store import scratch

  file = ScratchFile(tmp_path, 1000, 60)
  records = np.arange(60_000).reshape(1000, 60).astype(np.uint8)
  monkeypatch.setattr(scratch, 'write_blocks', lambda *a: a[-1])
  monkeypatch.setattr(scratch, 'read_records', lambda *a: a[-1])
  some = np.arange(0, 1000, 3)
  part = scratch.os.pwritev

  def half(fd, parts, start):
    (block,) = parts
    return part(fd, [block[: max(1, len(block) // 2)]], start)

  monkeypatch.setattr(scratch.os, 'pwritev', half)
  file.write(some, records[some])
  out = np.empty((len(some), 60), np.uint8)
  file.read(some, out)
  np.testing.assert_array_equal(out, records[some])
  assert set(np.flatnonzero(file.has(np.arange(1000)))) == set(some)
  file.close()
