"""A trainer as what a checkpoint can hold: JSON, bytes and arrays in pieces.

Tables are saved in pieces: a whole one would be buffered whole. All that is
saved has a checksum, and what a step must leave finite is looked at.
"""

from collections.abc import Iterable, Iterator, Mapping
import io
import json
from typing import Any
import zlib

import jax
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.stream.buffers import to_host
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.types import RowBlock
from slipstream_jax.vocabulary.line import Mark

Checksums = dict[str, int]
"""CRC-32 of the bytes of each array, by its path in the tree."""

_ARRAY = '__array__'
_PIECE_BYTES = 1 << 27


def pack(state: State) -> tuple[State, np.ndarray]:
  """The state with arrays replaced by their numbers, and them as u8[n].

  Marks of vocabularies, by which they are known in memory, become states.
  """
  arrays: list[np.ndarray] = []
  states = dict[Mark, Any]()

  def walk(value: Any) -> Any:
    if isinstance(value, Mark):
      if value not in states:
        states[value] = walk(value.get_state())
      return states[value]
    if isinstance(value, Mapping):
      return {key: walk(inner) for key, inner in value.items()}
    if isinstance(value, list):
      return [walk(inner) for inner in value]
    if isinstance(value, np.ndarray):
      arrays.append(value)
      return {_ARRAY: len(arrays) - 1}
    return value.item() if isinstance(value, np.generic) else value

  packed = walk(state)
  file = io.BytesIO()
  np.savez(file, *arrays)
  return packed, np.frombuffer(file.getvalue(), np.uint8)


def unpack(packed: State, data: np.ndarray) -> State:
  """The inverse of `pack`."""
  arrays = np.load(io.BytesIO(data.tobytes()), allow_pickle=False)

  def walk(value: Any) -> Any:
    if isinstance(value, list):
      return [walk(inner) for inner in value]
    if not isinstance(value, dict):
      return value
    if _ARRAY in value:
      return arrays[f'arr_{value[_ARRAY]}']
    return {key: walk(inner) for key, inner in value.items()}

  return {key: walk(value) for key, value in packed.items()}


def arrays_of(
  trainer: TrainerParts, schedule: np.ndarray, *, read: bool = True
) -> dict[str, Any]:
  """All arrays of a checkpoint.

  Args:
    trainer: whose state and rows to take.
    schedule: u8[n], that of `pack`.
    read: whether rows are read back; else they are of any values, as only
      their shapes are asked for. Those of a torn trainer cannot be read.
  """
  groups = trainer.engine.groups
  blocks = [
    group.read_back() if read else group.rows.like() for group in groups
  ]
  return {
    'schedule': schedule,
    'state': jax.tree.map(_unless_empty, trainer.state),
    'tables': {
      name: {
        part: {f'{at.start:012d}': leaf[at] for at in _pieces(leaf)}
        for part, leaf in parts.items()
      }
      for name, parts in _by_table(trainer, blocks).items()
    },
  }


def _by_table(
  trainer: TrainerParts, blocks: Iterable[RowBlock]
) -> dict[str, dict[str, np.ndarray]]:
  """Of each table its rows [R, D] and, by leaf, their state [R, ...]: views.

  By number, not by name, which a path in a checkpoint may not have.
  """
  tables = trainer.recipe.tables
  numbers = {name: i for i, name in enumerate(tables.tables)}
  parts = {}
  for group, block in zip(tables.groups, blocks, strict=True):
    start = 0
    for name in group.tables:
      end = start + tables.tables[name].rows
      states = {f'state_{i}': x[start:end] for i, x in enumerate(block.state)}
      own = {'rows': block.rows[start:end], **states}
      parts[f'table_{numbers[name]}'] = own
      start = end
  return parts


def _unless_empty(leaf: Any) -> Any:
  """None in place of an array of no element, which orbax cannot save."""
  return leaf if leaf.size else None


def state_of(trainer: TrainerParts, saved: Any) -> Any:
  """The state that was saved, with the trainer's own arrays of no element."""
  return jax.tree.map(
    lambda own, leaf: own if leaf is None else leaf, trainer.state, saved
  )


def shapes_of(arrays: dict[str, Any]) -> dict[str, str]:
  """Dtype and shape of each array, by its path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
  return {
    jax.tree_util.keystr(path): f'{leaf.dtype}{list(leaf.shape)}'
    for path, leaf in leaves
  }


def tables_of(trainer: TrainerParts) -> dict[str, Any]:
  """Tables and features in order, as JSON: shapes do not tell orders apart.

  And a checksum of the hot rows, which a schedule's position counts on, and
  when chains judge them, which is by the number of the step.
  """
  hot, tables = trainer.engine.hot, trainer.recipe.tables
  of_tables = {
    f'table {i}': [name, table.rows, table.dim, table.dtype]
    for i, (name, table) in enumerate(tables.tables.items())
  }
  of_features = {
    f'feature {i}': [name, *feature]
    for i, (name, feature) in enumerate(tables.features.items())
  }
  chosen = {'choice of hot rows': hot and zlib.crc32(hot.rows.tobytes())}
  of_windows = {
    f'skip_stale of group {i}': [*windows]
    for i, windows in enumerate(trainer.windows)
    if windows is not None
  }
  return of_tables | of_features | chosen | of_windows


def fill(trainer: TrainerParts, saved: dict[str, Any]) -> None:
  """Replaces the trainer's rows, letting go of each piece once it is used."""
  blocks = [group.rows.like() for group in trainer.engine.groups]
  for name, parts in _by_table(trainer, blocks).items():
    for part, leaf in parts.items():
      for at in _pieces(leaf):
        leaf[at] = saved[name][part].pop(f'{at.start:012d}')
  trainer.engine.restore(blocks)


def _pieces(leaf: np.ndarray) -> Iterator[slice]:
  step = max(1, _PIECE_BYTES // leaf[0].nbytes)
  for start in range(0, len(leaf), step):
    yield slice(start, min(start + step, len(leaf)))


def checksums(arrays: Any) -> Checksums:
  """The CRC-32 of each leaf of a tree of arrays, by its path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
  return {
    jax.tree_util.keystr(path): zlib.crc32(_bytes(leaf))
    for path, leaf in leaves
  }


def json_checksum(value: Any) -> int:
  """The CRC-32 of plain JSON, however its keys are ordered."""
  return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def check_finite(
  trainer: TrainerParts, arrays: dict[str, Any], step: int
) -> None:
  """Looks at what a step must leave finite; optimizers may begin at inf.

  Args:
    trainer: whose variables to look at.
    arrays: from `arrays_of`, whose rows to look at.
    step: to name in the error.

  Raises:
    UserError: a parameter or row is not finite.
  """
  learned = trainer.state.variables, _rows_in(arrays)
  for what, part in zip(('the model', 'the tables'), learned, strict=True):
    at = _first_not_finite(part)
    if at is not None:
      raise UserError(
        f'what is saved of {what} must be finite',
        got=f'NaN or infinity in {at}',
        where=f'step {step}',
        hint='lower the learning rates or look for bad values in the data',
      )


def _rows_in(arrays: dict[str, Any]) -> dict[str, Any]:
  """Of all arrays of a checkpoint, the rows of the tables."""
  return {name: parts['rows'] for name, parts in arrays['tables'].items()}


def _first_not_finite(arrays: Any) -> str | None:
  """Path of the first leaf with a NaN or an infinity; None if all are well."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
  for path, leaf in leaves:
    floating = jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    if floating and not np.isfinite(to_host(leaf)).all():
      return jax.tree_util.keystr(path)
  return None


def _bytes(leaf: Any) -> memoryview:
  """The bytes of a leaf on either side; bfloat16 is no buffer by itself."""
  return np.ascontiguousarray(to_host(leaf)).reshape(-1).view(np.uint8).data
