"""Row files: what is written is read, in pieces, and nothing else."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.checkpoint.row_file import (
  check_row_file,
  facts_in,
  Leaf,
  leaves_in,
  leaves_of,
  Piece,
  read_row_file,
  write_row_file,
)
from slipstream_jax.errors import UserError
from tests.checkpoint import small


@given(
  data=st.data(),
  kind=st.sampled_from([*small.SHAPES]),
  rows=small.ROWS,
  size=st.sampled_from([1, 50, 300, 1 << 20]),
)
def test_what_is_written_is_read(tmp_path_factory, data, kind, rows, size):
  place = open_place(tmp_path_factory.mktemp('place'))
  given_pieces = [
    small.piece(kind, part) for part in data.draw(small.cut(rows))
  ]
  leaves = small.leaves(kind)
  with small.pieces_of(size):
    facts = write_row_file(place, 'a', leaves, given_pieces)
  assert (facts.rows, facts.bytes) == (len(rows), place.size('a'))
  assert leaves_in(place, 'a') == leaves
  assert facts_in(place, 'a') == facts
  check_row_file(place, facts)
  pieces = list(read_row_file(place, facts))
  read = np.concatenate([np.int64([]), *(piece.rows for piece in pieces)])
  np.testing.assert_array_equal(read, np.int64(rows))
  assert small.table_of(pieces) == small.expected(kind, rows)
  for part in pieces:
    for name, array in small.values(kind, part.rows).items():
      assert part.values[name].dtype == array.dtype
      assert part.values[name].flags.aligned
      assert part.values[name].flags.writeable


def test_a_file_without_its_end_has_no_facts(tmp_path):
  place = open_place(tmp_path)
  write_row_file(place, 'a', small.leaves('rows'), [small.piece('rows', [3])])
  for size in (1, place.size('a') - 1):
    place.write('b', [place.read('a', 1 << 20)[:size]])
    with pytest.raises(UserError, match='must be as it was written'):
      facts_in(place, 'b')
  with pytest.raises(FileNotFoundError):
    facts_in(place, 'c')


@given(rows=small.ROWS, size=st.sampled_from([1, 50, 1 << 20]))
def test_a_file_does_not_depend_on_how_rows_come(tmp_path_factory, rows, size):
  place = open_place(tmp_path_factory.mktemp('place'))
  leaves = small.leaves('rows')
  with small.pieces_of(size):
    one = write_row_file(place, 'a', leaves, [small.piece('rows', rows)])
    each = [small.piece('rows', [row]) for row in rows]
    many = write_row_file(place, 'b', leaves, each)
  assert one._replace(name='b') == many
  assert place.read('a', one.bytes) == place.read('b', one.bytes)


@pytest.mark.parametrize(
  'rows', [[0], [2**63 - 1], [0, 2**63 - 1], [5, 6, 5 + 2**33]]
)
def test_rows_of_any_size_and_distance(rows, tmp_path):
  place = open_place(tmp_path)
  facts = small.write(place, 'a', 'rows', rows)
  [(read, _)] = read_row_file(place, facts)
  assert read.tolist() == rows


def test_gaps_are_narrow(tmp_path):
  place = open_place(tmp_path)
  rows = np.arange(10_000) * 7
  data = {'rows': np.zeros((10_000, 0), np.float32)}
  facts = write_row_file(
    place, 'a', leaves_of(data), [Piece(rows.astype(np.int64), data)]
  )
  assert facts.bytes < 10_200


def test_memory_is_a_few_pieces_whatever_the_file(tmp_path):
  place = open_place(tmp_path)
  data = {'rows': np.ones((5_000, 16), np.float32)}

  def pieces():
    for start in range(0, 1_000_000, 5_000):
      yield Piece(np.arange(start, start + 5_000), data)

  tracemalloc.start()
  try:
    facts = write_row_file(place, 'a', leaves_of(data), pieces())
    for _ in read_row_file(place, facts):
      pass
    _, most = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert facts.bytes > 64_000_000
  assert most < 12_000_000


def ones(rows, shape=(4,), dtype='f4'):
  return Piece(np.array(rows), {'rows': np.ones((len(rows), *shape), dtype)})


@pytest.mark.parametrize(
  ('pieces', 'said'),
  [
    ([ones([3, 3])], 'ascend'),
    ([ones([3, 2])], 'ascend'),
    ([ones([-1])], 'ascend'),
    ([ones([2**63 - 1, 0])], 'ascend'),
    ([ones([1, 7]), ones([7])], 'ascend'),
    ([ones(np.int32([1]))], 'int64'),
    ([ones([1, 2], (3,))], r'leaf rows must be float32\['),
    ([ones([1, 2], dtype='f8')], r'leaf rows must be float32\['),
    (
      [ones([1])._replace(rows=np.array([1, 2]))],
      r'leaf rows must be float32\[',
    ),
    ([Piece(np.array([1]), {})], r'leaf rows .* got None'),
  ],
)
def test_what_is_no_piece_is_refused(pieces, said, tmp_path):
  place = open_place(tmp_path)
  with small.pieces_of(1), pytest.raises(UserError, match=said):
    write_row_file(place, 'a', small.leaves('rows'), pieces)
  assert place.names() == []


@pytest.mark.parametrize(
  'leaf',
  [
    Leaf('rows', 'object', (3,)),
    Leaf('rows', 'float32', (1 << 40,)),
    Leaf('r' * 70_000, 'float32', (1,)),
    Leaf('rows', 'float32', (0, 1 << 40)),
    Leaf('rows', 'float32', (-1,)),
    Leaf('rows', 'float32', (1,) * 9),
    Leaf('rows', 'float32', (3,), 'zip'),
    Leaf('rows', 'int32', (3,), 'int8'),
    Leaf('rows', 'float32', (3, 3), 'int8'),
  ],
  ids=range(9),
)
def test_leaves_are_numbers(tmp_path, leaf):
  with pytest.raises(UserError, match='a row file holds numbers'):
    write_row_file(open_place(tmp_path), 'a', (leaf,), [])


def test_a_name_stands_for_one_leaf(tmp_path):
  leaf = Leaf('rows', 'float32', (3,))
  with pytest.raises(UserError, match='two leaves of one name'):
    write_row_file(open_place(tmp_path), 'a', (leaf, leaf), [])
