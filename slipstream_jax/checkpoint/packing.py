"""A trainer as what a checkpoint can hold, but for its rows: JSON and arrays.

What is here has checksums, and what a step must leave finite is looked at.
"""

from collections.abc import Mapping
import io
from typing import Any, NamedTuple
import zlib

import jax
import numpy as np

from slipstream_jax.checkpoint.facts import checksum_of
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.tables import Uniform
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.vocabulary.history import Cursor

Checksums = dict[str, int]
"""CRC-32 of the bytes of each array, by its path in the tree."""

_ARRAY = '__array__'


class Packed(NamedTuple):
  """A position of batches, as a checkpoint has it."""

  state: State
  """JSON: arrays are replaced by their numbers."""
  arrays: tuple[np.ndarray, ...]
  """These, by their numbers; nobody writes them."""
  data: bytes
  """The file of them."""
  checksum: int
  """CRC-32 of the file."""


def pack(state: State, before: Packed | None = None) -> Packed:
  """A state as JSON and a file of arrays.

  Cursors of growing vocabularies become states.

  Args:
    state: of JSON's types, of arrays and cursors.
    before: what may have the very same arrays, and so the same file. A schedule
      gives one state for hundreds of batches, of tens of MB.
  """
  arrays: list[np.ndarray] = []
  states = dict[Cursor, Any]()

  def walk(value: Any) -> Any:
    if isinstance(value, Cursor):
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
  if before is not None and len(arrays) == len(before.arrays):
    pairs = zip(arrays, before.arrays, strict=True)
    if all(one is other for one, other in pairs):
      return before._replace(state=packed)
  file = io.BytesIO()
  np.savez(file, *arrays)
  data = file.getvalue()
  return Packed(packed, tuple(arrays), data, zlib.crc32(data))


def unpack(packed: State, data: bytes) -> State:
  """The state of `pack`, of JSON and the file."""
  arrays = np.load(io.BytesIO(data), allow_pickle=False)

  def walk(value: Any) -> Any:
    if isinstance(value, list):
      return [walk(inner) for inner in value]
    if not isinstance(value, dict):
      return value
    if _ARRAY in value:
      return arrays[f'arr_{value[_ARRAY]}']
    return {key: walk(inner) for key, inner in value.items()}

  return {key: walk(value) for key, value in packed.items()}


def arrays_of(trainer: TrainerParts) -> dict[str, Any]:
  """What is not of rows, as arrays of the trainer's sides."""
  return {'state': jax.tree.map(_unless_empty, trainer.state)}


def copies_of(arrays: Any) -> Any:
  """The arrays as numpy's, which the next step does not write."""
  return jax.tree.map(lambda x: np.array(to_host(x)), arrays)


def _unless_empty(leaf: Any) -> Any:
  """None in place of an array of no element, which orbax cannot save."""
  return leaf if leaf.size else None


def state_of(trainer: TrainerParts, saved: Any) -> Any:
  """The state that was saved, with the trainer's own arrays of no element."""
  return jax.tree.map(
    lambda own, leaf: own if leaf is None else leaf, trainer.state, saved
  )


def shapes_of(trainer: TrainerParts, arrays: dict[str, Any]) -> dict[str, str]:
  """Dtype and shape of each array by its path, and of what a row consists."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
  shapes = {
    jax.tree_util.keystr(path): f'{leaf.dtype}{list(leaf.shape)}'
    for path, leaf in leaves
  }
  untrained = trainer.engine.untrained.row_states
  for group, states in enumerate(untrained):
    of_rows = [f'{leaf.dtype}{list(leaf.shape)}' for leaf in states]
    shapes[f'state of a row of group {group}'] = ', '.join(of_rows)
  return shapes


def tables_of(trainer: TrainerParts) -> dict[str, Any]:
  """Tables and features in order, as JSON: shapes do not tell orders apart.

  And what rows are before their first step, as those that took none are not
  saved; a checksum of the hot rows, which a schedule's position counts on; and
  when chains judge them, which is by the number of the step.
  """
  hot, tables = trainer.engine.hot, trainer.recipe.tables
  of_tables = {
    f'table {i}': [name, table.rows, table.embedding_dim, table.dtype]
    for i, (name, table) in enumerate(tables.tables.items())
  }
  of_features = {
    f'feature {i}': [name, *feature]
    for i, (name, feature) in enumerate(tables.features.items())
  }
  chosen = {'choice of hot rows': hot and checksum_of(hot.rows)}
  of_windows = {
    f'skip_stale of group {i}': [*windows]
    for i, windows in enumerate(trainer.windows)
    if windows is not None
  }
  # After all that says more of what is another one.
  first_rows = {
    f'untrained rows of table {i}': repr(
      table.initializer or Uniform(table.vocabulary_size**-0.5)
    )
    for i, table in enumerate(tables.tables.values())
  }
  first_states = {
    f'untrained state of group {i}': [_checksum(leaf) for leaf in states]
    for i, states in enumerate(trainer.engine.untrained.row_states)
  }
  parts = (of_tables, of_features, chosen, of_windows, first_rows, first_states)
  return {key: value for part in parts for key, value in part.items()}


def checksums(arrays: Any) -> Checksums:
  """The CRC-32 of each leaf of a tree of arrays, by its path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
  return {jax.tree_util.keystr(path): _checksum(leaf) for path, leaf in leaves}


def check_finite(what: str, arrays: Any, step: int) -> None:
  """Looks at what a step must leave finite; optimizers may begin at inf.

  Args:
    what: they are of, to name in the error.
    arrays: a tree of them.
    step: likewise.

  Raises:
    UserError: one is not.
  """
  leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
  for path, leaf in leaves:
    floating = jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    if floating and not np.isfinite(to_host(leaf)).all():
      raise UserError(
        f'what is saved of {what} must be finite',
        got=f'NaN or infinity in {jax.tree_util.keystr(path)}',
        where=f'step {step}',
        hint='lower the learning rates or look for bad values in the data',
      )


def _checksum(leaf: Any) -> int:
  """Of its bytes, on either side; bfloat16 is no buffer by itself."""
  array = np.ascontiguousarray(to_host(leaf))
  return zlib.crc32(array.reshape(-1).view(np.uint8).data)
