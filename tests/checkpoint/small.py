"""Small row files and checkpoints for tests, and what reads them plainly."""

import contextlib
import errno
import math
from unittest import mock

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import strategies as st
import ml_dtypes
import numpy as np

from slipstream_jax.checkpoint import row_file
from slipstream_jax.checkpoint.chain import next_on, read_rows
from slipstream_jax.checkpoint.manifest import (
  file_name,
  publish,
  write_file,
)
from slipstream_jax.checkpoint.row_file import leaves_of, Piece, write_row_file

SHAPES = {
  'rows': {'rows': ('float32', (4,))},
  'lazy_adam': {
    'rows': ('float32', (2,)),
    'state_0': ('int32', ()),
    'state_1': ('float32', (2,)),
  },
  'odd': {
    'rows': (ml_dtypes.bfloat16, (3,)),
    'state_0': ('bool', ()),
    'state_1': ('uint8', (1, 3)),
    'state_2': ('float64', (0,)),
  },
}
"""Dtype and shape of a row's entry, by leaf."""


def values(kind, rows, salt=0):
  """Bytes that depend on the row, the leaf and the salt alone, as arrays."""
  arrays, rows = {}, np.asarray(rows, np.uint64)
  for number, (name, (dtype, shape)) in enumerate(SHAPES[kind].items()):
    of_place = np.arange(math.prod(shape), dtype=np.uint64) * 7919
    of_file = 31 * number + 1009 * salt
    mixed = (rows[:, None] * 104729 + of_place[None] + of_file) >> 3
    modulus = 2 if np.dtype(dtype).kind == 'b' else 101
    entries = (mixed % modulus).astype(dtype)
    arrays[name] = entries.reshape(len(rows), *shape)
  return arrays


def piece(kind, rows, salt=0):
  """Rows with their values."""
  rows = np.asarray(rows, np.int64)
  return Piece(rows, values(kind, rows, salt))


def leaves(kind, codec='raw'):
  """Of `values`."""
  return leaves_of(values(kind, []), codec)


ROWS = st.lists(st.integers(0, 1 << 40), max_size=60, unique=True).map(sorted)
NEAR_ROWS = st.sets(st.integers(0, 40), max_size=30).map(sorted)


@st.composite
def cut(draw, rows):
  """Rows in lists of any lengths, in order."""
  ends = draw(st.lists(st.integers(0, len(rows)), max_size=4).map(sorted))
  starts = [0, *ends]
  return [rows[a:b] for a, b in zip(starts, [*ends, len(rows)], strict=True)]


@contextlib.contextmanager
def pieces_of(size):
  """Row files have pieces of about so many bytes."""
  with mock.patch.object(row_file, 'PIECE_BYTES', size):
    yield


def write(place, name, kind, rows, codec='raw', salt=0):
  """A row file of these rows; its facts."""
  return write_row_file(
    place, name, leaves(kind, codec), [piece(kind, rows, salt)]
  )


def table_of(pieces):
  """Bytes of each row's values by row; later pieces hold."""
  table = {}
  for rows, arrays in pieces:
    for i, row in enumerate(rows.tolist()):
      table[row] = {name: x[i].tobytes() for name, x in arrays.items()}
  return table


def expected(kind, rows, salt=0):
  """`table_of` what `values` gives."""
  return table_of([piece(kind, rows, salt)])


def save(place, chain, parent, step, rows, *, kind='lazy_adam', codec='raw'):
  """Publishes a checkpoint of one group, with the step as salt; its chain."""
  pieces = [piece(kind, rows, salt=step)]
  return save_pieces(place, chain, parent, step, pieces, kind, codec)


def save_pieces(place, chain, parent, step, pieces, kind, codec='raw'):
  """The same of any pieces."""
  of = 'base' if parent is None else 'increment'
  name, other = file_name(of, step, 'g'), file_name('file', step, 'dense')
  chain = next_on(
    chain,
    parent,
    step=step,
    rows={'g': write_row_file(place, name, leaves(kind, codec), pieces)},
    files={'dense': write_file(place, other, [b'dense', b'%d' % step])},
    payload={'step': step},
    codec=codec,
  )
  publish(place, chain[-1])
  return chain


def restored(place, chain):
  """`table_of` what a chain holds."""
  return table_of(read_rows(place, chain, 'g'))


class FullDisk(MemoryFileSystem):
  """Files at full://, where the next `failing` writes find no room."""

  protocol = 'full'
  failing = 0

  @classmethod
  def _strip_protocol(cls, path):
    path = path.replace('full://', 'memory://full/')
    return MemoryFileSystem._strip_protocol(path)

  def put_file(self, *arguments, **how):
    if FullDisk.failing:
      FullDisk.failing -= 1
      raise OSError(errno.ENOSPC, 'No space left on device')
    super().put_file(*arguments, **how)


fsspec.register_implementation('full', FullDisk)
