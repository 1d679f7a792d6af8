"""A scratch file equals a dictionary, while its records are moved about."""

import errno
import threading

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.store import scratch
from slipstream_jax.store.scratch import file_bytes, ScratchFile, shape_of
from slipstream_jax.store.space import most_blocks, Space

# 409, 8, 2 and 1 records of a block.
WIDTHS = (10, 512, 2048, 5000)


def records_of(rows, value, width):
  """Records that tell the row and the value: of no two are they alike."""
  words = np.stack([rows, np.full(len(rows), value)], 1)
  own = words.astype('<u4').view(np.uint8).reshape(len(rows), 8)
  return np.tile(own, (1, -(-width // 8)))[:, :width]


def expected_of(values, rows, width):
  return np.concatenate(
    [np.empty((0, width), np.uint8)]
    + [records_of(np.array([row]), values[row], width) for row in rows]
  )


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
  width=st.sampled_from(WIDTHS),
  num_rows=st.integers(1, 700),
  calls=st.integers(1, 40),
  seed=st.integers(0, 99),
  clears=st.booleans(),
)
def test_it_equals_a_dictionary(
  width, num_rows, calls, seed, clears, tmp_path_factory
):
  rng = np.random.default_rng(seed)
  file = ScratchFile(tmp_path_factory.getbasetemp(), num_rows, width, 4)
  values = {}
  for number in range(calls):
    if clears and number == calls // 2:
      file.clear()
      values = {}
    some = rng.permutation(num_rows)[: rng.integers(0, num_rows + 1)]
    file.write(some, records_of(some, number, width))
    values |= dict.fromkeys(some.tolist(), number)
    written = np.flatnonzero(file.has(np.arange(num_rows)))
    assert written.tolist() == sorted(values)
    wanted = rng.permutation(sorted(values))[:50].astype(int)
    out = np.empty((len(wanted), width), np.uint8)
    file.read(wanted, out)
    np.testing.assert_array_equal(out, expected_of(values, wanted, width))
  size = scratch.os.fstat(file.fd).st_size
  assert size <= file_bytes(num_rows, width)
  file.close()


@settings(deadline=None)
@given(
  per=st.sampled_from([1, 2, 3, 8, 60]),
  num_rows=st.integers(1, 3000),
  most=st.integers(1, 700),
  seed=st.integers(0, 99),
)
def test_there_is_room_as_long_as_the_blocks_are_within_bounds(
  per, num_rows, most, seed
):
  """Whatever is written: two rows never share a place, and none is lost."""
  rng = np.random.default_rng(seed)
  space = Space(num_rows, per)
  for _ in range(30):
    some = rng.permutation(num_rows)[: rng.integers(1, most + 1)]
    step = space.spare * per
    for start in range(0, len(some), step):
      part = some[start : start + step]
      turns = 0
      while space.room < -(-len(part) // per):
        turns += 1
        assert turns < 9  # each one frees some
        rows = space.crowded()
        for begin in range(0, len(rows), step):
          moved = rows[begin : begin + step]
          space.put(moved, space.take(-(-len(moved) // per)))
      space.put(part, space.take(-(-len(part) // per)))
    written = np.flatnonzero(space.has(np.arange(num_rows)))
    assert space.rows == len(written)
    at = space.at(written)
    assert len(np.unique(at)) == len(at)
    assert at.max() < most_blocks(len(written), per, space.spare) * per


def test_who_reads_while_records_move_reads_what_was_written(tmp_path):
  """Every record that is read is whole, and of its row."""
  num_rows, width = 2000, 100
  file = ScratchFile(tmp_path, num_rows, width, 4)
  everything = np.arange(num_rows)
  file.write(everything, records_of(everything, 0, width))
  stop, wrong = threading.Event(), []

  def read():
    rng = np.random.default_rng(1)
    while not stop.is_set():
      some = rng.permutation(num_rows)[:300]
      out = np.empty((len(some), width), np.uint8)
      file.read(some, out)
      values = out[:, 4:8].copy().view('<u4')[:, 0]
      whole = np.array(
        [records_of(some[i : i + 1], values[i], width) for i in range(300)]
      )
      if (out != whole[:, 0]).any():
        wrong.append(some)

  readers = [threading.Thread(target=read) for _ in range(2)]
  for reader in readers:
    reader.start()
  rng = np.random.default_rng(2)
  for number in range(1, 400):
    some = rng.permutation(num_rows)[:200]
    file.write(some, records_of(some, number, width))
  stop.set()
  for reader in readers:
    reader.join()
  assert not wrong
  file.close()


@pytest.mark.parametrize('direct', [True, False])
def test_a_write_that_fails_leaves_the_records_of_before(
  direct, tmp_path, monkeypatch
):
  if not direct:
    monkeypatch.setattr(scratch, '_direct', lambda name: None)
  file = ScratchFile(tmp_path, 500, 60)
  rows = np.arange(500)
  file.write(rows, records_of(rows, 1, 60))
  write = scratch.os.pwritev
  monkeypatch.setattr(scratch, 'write_blocks', lambda *a: a[-1])

  def fails(*arguments):
    raise OSError(errno.ENOSPC, 'no room')

  monkeypatch.setattr(scratch.os, 'pwritev', fails)
  for _ in range(100):  # nor is room lost by it
    with pytest.raises(OSError, match='no room'):
      file.write(rows[::2], records_of(rows[::2], 2, 60))
  monkeypatch.setattr(scratch.os, 'pwritev', write)
  out = np.empty((500, 60), np.uint8)
  file.read(rows, out)
  np.testing.assert_array_equal(out, records_of(rows, 1, 60))
  file.write(rows[::2], records_of(rows[::2], 3, 60))
  file.read(rows, out)
  np.testing.assert_array_equal(out[::2], records_of(rows[::2], 3, 60))
  np.testing.assert_array_equal(out[1::2], records_of(rows[1::2], 1, 60))
  file.close()


@pytest.mark.parametrize('width', WIDTHS)
def test_a_file_is_half_as_large_again_as_its_rows(width):
  rows = 1_000_000
  per, size = shape_of(width)
  assert file_bytes(rows, width) <= 1.6 * (rows / per + 20) * size
