"""Batches of packed data sets: which examples come when, and that they are
whole.

Example i of the folder here is told by its dense features, so any batch can be
compared, field by field, with what was written.
"""

import functools
import itertools
import json
import threading

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.data.numbered import Columns
from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import UserError
from slipstream_jax.hashing import hashed
from slipstream_jax.packed import batches as packed_batches
from slipstream_jax.packed import order
from slipstream_jax.packed import reader as packed_reader
from slipstream_jax.packed.batches import PackedBatches
from slipstream_jax.packed.columns import open_packed
from slipstream_jax.tables import features_of, tables_of
from tests.support.packed_folders import (
  features_facts,
  write_columns,
  write_folder,
)

EXAMPLES = 300
ROWS = (3, 300, 70_000, 1)  # uint8, uint16, uint32, uint8


@functools.cache
def columns_of(length=None):
  rng = np.random.default_rng(5)
  shape = (EXAMPLES, len(ROWS)) + ((length,) if length else ())
  limits = np.reshape(ROWS, (1, -1) + (1,) * (len(shape) - 2))
  ids = (rng.random(shape) * limits).astype(np.int64)
  if length:
    ids[rng.random(shape) < 0.4] = -1
  number = np.arange(EXAMPLES, dtype=np.float32)
  return Columns(
    np.stack([number, -number, number**2], axis=1),
    tables_of(dict(zip('abcd', ROWS, strict=True))).lookups(ids),
    (rng.random(EXAMPLES) < 0.4).astype(np.float32),
  )


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  base = tmp_path_factory.mktemp('packed')
  return {
    length: write_folder(base / str(length), columns_of(length), ROWS)
    for length in (None, 4)
  }


@functools.cache
def opened(folder):
  return open_packed(folder)


@pytest.fixture(scope='module')
def packed(folders):
  return opened(folders[None])


def numbers(batch, length=None):
  """Which examples a batch holds, -1 for padding; all they hold is checked."""
  real = batch.weights == 1
  found = np.where(real, batch.dense[:, 0], -1).astype(int)
  whole = columns_of(length)
  for ours, theirs in zip(whole[:3], batch[:3], strict=True):
    np.testing.assert_array_equal(ours[found[real]], theirs[real])
    assert ours.dtype == theirs.dtype
    assert ours.shape[1:] == theirs.shape[1:]
  assert batch.weights.dtype == np.float32
  padding = [column[~real] for column in batch[:4]]
  assert (padding[1] == -1).all()
  assert not any(padding[i].any() for i in (0, 2, 3))
  return found


def epochs_of(packed, batch_size, epochs=1, length=None, **arguments):
  """Examples of each batch of each epoch: int[epochs, batches, batch_size]."""
  source = PackedBatches(packed, batch_size, epochs=epochs, **arguments)
  found = np.array([numbers(batch, length) for batch in source])
  source.close()
  assert len(found) == epochs * source.batches_per_epoch
  return found.reshape(epochs, -1, batch_size)


@st.composite
def arguments_of(draw):
  first = draw(st.integers(0, EXAMPLES - 1))
  end = draw(st.integers(first + 1, EXAMPLES))
  shards = draw(st.integers(1, 4))
  pads = draw(st.booleans())
  most = EXAMPLES if pads else (end - first) // shards
  return {
    'batch_size': draw(st.integers(1, max(1, most))),
    'shards': shards if most else 1,
    'first': first,
    'end': end,
    'pad_remainder': pads,
    'shuffle_seed': draw(st.none() | st.integers(0, 2**63 - 1)),
    'block': draw(st.integers(1, 60)),
    'buffer_bytes': draw(st.integers(2 * 40, 2 * 40 * 200)),
  }


def shards_of(packed, shards, epochs=1, **drawn):
  """The same of each shard; stacks only if each has as many batches."""
  return np.stack(
    [
      epochs_of(packed, epochs=epochs, shard=(index, shards), **drawn)
      for index in range(shards)
    ]
  )


@pytest.mark.parametrize('length', [None, 4])
@settings(max_examples=20)
@given(arguments_of())
def test_every_example_once_an_epoch_in_equally_many_batches(
  folders, length, drawn
):
  first, end = drawn['first'], drawn['end']
  drawn['buffer_bytes'] *= 3 if length else 1
  found = shards_of(opened(folders[length]), epochs=2, length=length, **drawn)
  for epoch in range(2):
    told = found[:, epoch]
    real = np.sort(told[told >= 0])
    if drawn['pad_remainder']:
      assert real.tolist() == list(range(first, end))
    else:
      assert len(np.unique(real)) == told.size
      assert first <= real[0]
      assert real[-1] < end
      assert end - first - told.size < drawn['batch_size'] * drawn['shards']
  # Padding is only at the end of an epoch.
  flat = found.reshape(*found.shape[:2], -1)
  assert (np.diff((flat < 0).astype(int), axis=-1) >= 0).all()


@settings(max_examples=20)
@given(arguments_of())
def test_shards_in_order_make_the_batches_of_one_reader(packed, drawn):
  drawn['shuffle_seed'] = None
  side_by_side = np.concatenate(shards_of(packed, **drawn), axis=-1)
  drawn['batch_size'] *= drawn.pop('shards')
  whole = epochs_of(packed, **drawn)
  np.testing.assert_array_equal(side_by_side, whole)
  told = whole[whole >= 0]
  assert told.tolist() == list(range(told[0], told[0] + len(told)))
  assert told[0] == drawn['first']


@settings(max_examples=20)
@given(arguments_of(), st.data())
def test_resumed_anywhere_the_rest_is_the_same(packed, drawn, data):
  shards, size = drawn.pop('shards'), drawn.pop('batch_size')
  shard = data.draw(st.integers(0, shards - 1)), shards
  source = functools.partial(
    PackedBatches, packed, size, epochs=2, shard=shard, **drawn
  )
  whole = source()
  told = [numbers(batch) for batch in whole]
  at = data.draw(st.integers(0, len(told)))
  cut = source()
  for expected in told[:at]:
    np.testing.assert_array_equal(numbers(next(cut)), expected)
  state = json.loads(json.dumps(cut.get_state()))
  for _ in range((len(told) - at) // 2):
    next(cut)
  # One that knows nothing, one that has ended, and one that is elsewhere.
  for resumed in source(), whole, cut:
    resumed.set_state(state)
    assert resumed.get_state() == state
    rest = [numbers(batch) for batch in resumed]
    np.testing.assert_array_equal(rest, told[at:])
    resumed.close()


def test_an_order_is_of_its_seed_epoch_and_shard_alone(packed):
  def examples(seed, shard=(0, 1)):
    small = {'block': 16, 'buffer_bytes': 2 * 60 * 50, 'shard': shard}
    return epochs_of(packed, 10, 3, shuffle_seed=seed, **small)

  told = examples(7)
  np.testing.assert_array_equal(told, examples(7))
  others = [told[1], told[2], examples(8)[0], examples(7 + 2**40)[0]]
  for a, b in itertools.combinations([told[0], *others], 2):
    # Two random orders agree in one place, on average.
    assert (a == b).sum() < 8
  halves = examples(7, (0, 2)), examples(7, (1, 2))
  assert not np.intersect1d(halves[0][0], halves[1][0]).size


def test_an_order_stays_the_same_forever(packed):
  """A run resumes on another machine, or with another numpy, all the same."""
  small = {'block': 32, 'buffer_bytes': 2 * 60 * 100, 'shuffle_seed': 3}
  assert epochs_of(packed, 6, **small)[0, :2].tolist() == FIRST_BATCHES


FIRST_BATCHES = [[40, 233, 11, 277, 3, 42], [13, 34, 235, 238, 281, 286]]


def test_more_rows_than_i32_numbers(tmp_path):
  rows = 3_000_000_000
  local = np.array([0, rows - 1, 5, rows], np.uint32)
  facts = {
    'dense_features': 0,
    'examples': 4,
    **features_facts(features_of('ab')),
    'tables': [{'name': n, 'rows': rows} for n in 'ab'],
  }
  arrays = {
    'labels': np.zeros(4, np.uint8),
    'dense': np.zeros((4, 0), np.float32),
    'a': local,
    'b': local,
  }
  packed = open_packed(write_columns(tmp_path, arrays, facts))
  source = PackedBatches(packed, 4, epochs=1)
  (batch,) = source
  source.close()
  assert batch.lookups.dtype == np.int64
  assert batch.dense.shape == (4, 0)
  assert batch.lookups[:, 0].tolist() == [0, rows - 1, 5, -1]
  assert batch.lookups[:, 1].tolist() == [rows, 2 * rows - 1, rows + 5, -1]


def test_a_stream_goes_on_and_can_be_closed_twice(packed):
  source = PackedBatches(packed, 100, shuffle_seed=1, buffer_bytes=2 * 60 * 50)
  assert isinstance(source, BatchSource)
  assert source.batches_per_epoch == 3
  told = [numbers(batch) for batch in itertools.islice(source, 10)]
  assert len(np.unique(np.concatenate(told[6:9]))) == 300
  source.close()
  source.close()
  assert not [t for t in threading.enumerate() if t.name.startswith('slip')]
  assert next(source, None) is None
  assert source.get_state()['delivered'] == 10
  PackedBatches(packed, 100).close()  # before its first batch


def test_batches_keep_what_they_hold(packed):
  """Memory is used again for other examples, but never that of a batch."""
  source = PackedBatches(packed, 7, shuffle_seed=1, buffer_bytes=2 * 60 * 20)
  kept = [(b, numbers(b)) for b in itertools.islice(source, 200)]
  source.close()
  for batch, before in kept:
    np.testing.assert_array_equal(numbers(batch), before)


def test_no_more_than_two_groups_are_in_memory(packed, monkeypatch):
  rooms = []
  empty = packed_reader.Form.empty

  def counted(form, examples):
    rooms.append(examples)
    return empty(form, examples)

  monkeypatch.setattr(packed_reader.Form, 'empty', counted)
  source = PackedBatches(packed, 5, shuffle_seed=1, buffer_bytes=2 * 50 * 40)
  rooms.clear()
  list(itertools.islice(source, 300))
  source.close()
  large = [room for room in rooms if room not in (1, 5)]
  assert len(large) == 2
  assert max(large) < 100


def test_every_group_is_read_once(packed, monkeypatch):
  """What was read ahead is what comes next, from epoch to epoch."""
  keys = []
  original = packed_batches._read_group

  def counted(form, wanted, key, room):
    keys.append(key)
    return original(form, wanted, key, room)

  monkeypatch.setattr(packed_batches, '_read_group', counted)
  source = PackedBatches(packed, 30, epochs=3, buffer_bytes=2 * 36 * 100)
  list(source)
  source.close()
  assert keys == [(epoch, group) for epoch in range(3) for group in range(3)]


def damaged(tmp_path, name, change):
  folder = write_folder(tmp_path / 'damaged', columns_of(), ROWS)
  path = folder / name
  good = path.read_bytes()
  packed = open_packed(folder)
  source = PackedBatches(packed, 100, buffer_bytes=2 * 60 * 100)
  next(source)
  next(source)  # and the next group is read by now, or soon will be
  source.close()
  path.write_bytes(change(bytearray(good)))
  source = PackedBatches(packed, 10, buffer_bytes=2 * 60 * 100)
  with pytest.raises(UserError) as caught:
    list(itertools.islice(source, 40))
  at = source.get_state()['delivered']
  path.write_bytes(good)
  told = numbers(next(source))  # the disk is mended: nothing was lost
  source.close()
  assert told.tolist() == list(range(at * 10, at * 10 + 10))
  return str(caught.value), at


def test_a_file_cut_off_while_open(tmp_path):
  said, at = damaged(tmp_path, 'dense.float32', lambda data: data[:3000])
  assert 'of shape (300, 3) must have 3600 bytes, got 3000 bytes' in said
  assert 10 < at < 30


def test_a_row_that_its_table_lacks(tmp_path):
  def change(data):
    data[2 * 222 : 2 * 223] = (301).to_bytes(2, 'little')
    return data

  said, at = damaged(tmp_path, 't1.uint16', change)
  assert 'rows of table t1 must be in [0, 300]' in said
  assert 'got 301' in said
  assert 'example 222' in said
  assert 10 < at <= 22


def test_an_error_in_the_thread_keeps_its_traceback(tmp_path):
  folder = write_folder(tmp_path / 'gone', columns_of(), ROWS)
  source = PackedBatches(open_packed(folder), 10, buffer_bytes=2 * 60 * 50)
  next(source)
  (folder / 't2.uint32').unlink()
  with pytest.raises(UserError, match='must stay readable') as caught:
    list(source)
  source.close()
  assert '_run' in {entry.name for entry in caught.traceback}


def test_a_group_mixes_whole_blocks():
  """What two epochs of a large data set read, without any data."""
  each = order.Order(50, 10_050, 8, True, 1, 1, 3, block=64, group=700)
  epochs = []
  for epoch in range(2):
    seen = []
    for group in range(each.groups):
      begin, end = each.bounds(group)
      runs = list(order.runs(each, epoch, group))
      examples = np.concatenate([np.arange(*run) for run in runs])
      assert len(examples) == end - begin <= 700
      assert max(last - first for first, last in runs) <= 64
      # Whole blocks but for the ends of a group: each costs a seek.
      assert len(runs) <= (end - begin) // 64 + 3
      where = order.places(each, epoch, group)
      assert np.sort(where).tolist() == list(range(len(examples)))
      # Neighbours are torn apart.
      assert (np.abs(np.diff(where)) == 1).mean() < 0.02
      seen.append(examples)
      for place in (begin, end - 1):
        assert each.group_of(place) == group
    read = np.concatenate(seen)
    assert len(np.unique(read)) == each.examples == 3333
    epochs.append(read)
  # Each epoch has an order of its blocks, and a choice for this shard.
  assert len(np.intersect1d(*epochs)) < 2000


def test_every_order_is_equally_likely():
  counts = dict.fromkeys(itertools.permutations(range(4)), 0)
  for key in range(12_000):
    values = np.arange(4)
    order.shuffle(np.uint64(hashed(np.uint64(5), key)), values)
    counts[tuple(values.tolist())] += 1
  # 500 each; five standard deviations are 110.
  assert min(counts.values()) > 390
  assert max(counts.values()) < 610
