"""What a trainer is made of beside its arguments: known from its first source.

A checkpoint has it, so that a trainer can be made again without the source: to
predict, or to look at rows.
"""

from collections.abc import Mapping
import functools
from typing import Any, NamedTuple
import zlib

from jaxtyping import Int
import numpy as np

from slipstream_jax.checkpoint.manifest import Manifest
from slipstream_jax.checkpoint.places import Place
from slipstream_jax.checkpoint.row_file import FileFacts
from slipstream_jax.data.source import Known
from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.training.parts import TrainerParts

HOT = 'hot'
"""The file of the hot rows, i64, little-endian."""


class _Damaged(Exception):
  """Not what was written; the message says what."""


class Facts(NamedTuple):
  """What the first source told."""

  dense_features: int
  """I, columns of `Batch.dense`."""
  dense_columns: dict[str, int | None] | None
  """As in `Recipe`."""
  hot: Int[np.ndarray, ' H'] | None
  """Global rows of the hot rows, i64, if some were chosen."""
  watched: bool
  """Whether rows were being compared."""
  names: Known = Known()
  """Of dense features and labels, as the trainer learned them; a checkpoint of
  before has none."""


def facts_of(parts: TrainerParts) -> Facts:
  """What the parts were made of."""
  hot, columns = parts.engine.hot, parts.recipe.dense_columns
  return Facts(
    parts.shape.dense_features,
    None if columns is None else dict(columns),
    None if hot is None else hot.rows,
    parts.state.watch is not None,
    parts.names,
  )


def as_json(facts: Facts) -> dict[str, Any]:
  """The facts, of the hot rows but their checksum."""
  hot = None if facts.hot is None else checksum_of(facts.hot)
  return facts._asdict() | {'hot': hot, 'names': facts.names._asdict()}


def names_from(values: Mapping[str, Any]) -> Known:
  """Returns the names that facts hold, or what facts of before say of them."""
  if 'names' not in values:
    return Known(values.get('dense_columns'))
  return Known(**values['names'])


class _Itself:
  """An array, as a key: no other one, whatever it holds."""

  def __init__(self, array: np.ndarray) -> None:
    self.array = array

  def __hash__(self) -> int:
    return id(self.array)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Itself) and self.array is other.array


@functools.lru_cache(maxsize=1)
def _checksum(hot: _Itself) -> int:
  return zlib.crc32(bytes_of(hot.array))


def checksum_of(hot: Int[np.ndarray, ' H']) -> int:
  """The CRC-32 of the file of hot rows; of the last ones it is known."""
  # They are tens of MB, never written, and the same in all checkpoints.
  return _checksum(_Itself(hot))


def bytes_of(hot: Int[np.ndarray, ' H']) -> bytes:
  """What the file of the hot rows holds."""
  return hot.astype('<i8').tobytes()


def is_saved(hot: Int[np.ndarray, ' H'], saved: FileFacts | None) -> bool:
  """Whether a file of before has these hot rows."""
  if saved is None:
    return False
  return (saved.bytes, saved.crc) == (8 * len(hot), checksum_of(hot))


def read_facts(place: Place, manifest: Manifest) -> Facts:
  """The facts of a checkpoint.

  Raises:
    UserError: they are not those that were written.
    OSError: they cannot be read.
  """
  try:
    values = dict(manifest.payload['facts'])
    if values['hot'] is not None:
      values['hot'] = _read_hot(place, manifest.files[HOT], values['hot'])
    values['names'] = names_from(values)
    return _checked(Facts(**values))
  except (_Damaged, ValueError, KeyError, TypeError) as error:
    raise UserError(
      'a trainer is made anew from what its checkpoint says of it',
      got=f'{type(error).__name__}: {error}',
      where=place.url,
      hint='its disk lost or changed data: use a copy of it',
    ) from error


def _checked(facts: Facts) -> Facts:
  """The facts, if they are of the types that were written."""
  dense, columns, _, watched, known = facts
  names = all(map(_are_columns, (columns, *known)))
  if not (is_whole(dense, 0) and names and isinstance(watched, bool)):
    raise _Damaged(f'{facts}')
  return facts


def _are_columns(columns: object) -> bool:
  return columns is None or (
    isinstance(columns, dict)
    and all(width is None or is_whole(width, 1) for width in columns.values())
  )


def _read_hot(place: Place, file: FileFacts, crc: int) -> np.ndarray:
  data = place.read(file.name, file.bytes)
  if zlib.crc32(data) != crc or len(data) % 8:
    raise _Damaged(f'{file.name} is damaged')
  return np.frombuffer(data, '<i8').astype(np.int64)
