"""Converts everything of a trainer but its rows to JSON and files, and back.

The dense state is an npz file with an array per leaf, named by the leaf's path.
An array whose dtype numpy lacks, such as bfloat16, is stored as unsigned
integers of the same bits. The manifest has the dtypes, shapes and checksums.
Checkpoints of version 7 have a zip of the files that orbax wrote instead.

A checkpoint has the facts that a trainer learns from its first source, so that
a trainer can be made again without the source, to predict or to read rows.
"""

from collections.abc import Iterator, Mapping
import io
import tempfile
from typing import Any, NamedTuple
import zipfile
import zlib

import jax
from jaxtyping import Int
import numpy as np

from slipstream_jax.checkpoint.manifest import Manifest, new_id, read_file
from slipstream_jax.checkpoint.places import Place
from slipstream_jax.checkpoint.row_file import LOST
from slipstream_jax.data.source import ColumnNames
from slipstream_jax.engine.buffers import to_device, to_host
from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.initializers import GivenRows, Uniform, VectorsById
from slipstream_jax.schedules.base import State
from slipstream_jax.tables import Table
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.vocabulary.growing import Cursor

VERSION = 8
"""Version of the contents, raised when a name or meaning changes."""
DENSE = 'dense'
"""Key of the file of the dense state."""
SCHEDULE = 'schedule'
"""Key of the file of the arrays in the batches' position, as in `pack`."""
HOT = 'hot'
"""Key of the file of the hot rows, i64, little-endian."""
HOT_CHECKSUM = 'choice of hot rows'
"""Key of the checksum of that file in `tables_of`."""
FIRST_ROWS = 'untrained rows of table'
"""Begins the keys of the initial rows in `tables_of`."""
WHOLE = 'a checkpoint must be whole to be restored'
_ARRAY = '__array__'


class StoredPosition(NamedTuple):
  """A position of batches, as a checkpoint stores it."""

  state: State
  """JSON, in which arrays are replaced by their numbers."""
  arrays: tuple[np.ndarray, ...]
  data: bytes
  """An npz file of the arrays."""
  checksum: int
  """CRC-32 of the file."""


class DenseState(NamedTuple):
  """Everything of a checkpoint but its rows."""

  step: int
  payload: dict[str, Any]
  """JSON for the manifest."""
  arrays: dict[str, Any]
  """A tree of numpy arrays. Read-only."""
  schedule: StoredPosition
  """Position of the batches."""
  hot: Int[np.ndarray, ' H'] | None
  """As in `Facts`."""
  id: str
  """Id of the manifest."""


def dense_state(
  trainer: TrainerParts,
  schedule_state: State,
  before: StoredPosition | None = None,
) -> DenseState:
  """Copies everything of a trainer but its rows. Waits for the last step.

  Raises:
    UserError: a step was interrupted, or a parameter is not finite.
  """
  trainer.check_consistent()
  step = int(to_host(trainer.state.step))
  check_finite('the model', trainer.state.variables, step)
  position = {'of': schedule_state, 'grown': trainer.grown}
  logits = [list(one) for one in trainer.probe.logits.all().items()]
  schedule = pack({**position, 'predicted': logits}, before)
  # Copies, as the next step replaces the arrays.
  arrays = jax.tree.map(lambda x: np.array(to_host(x)), arrays_of(trainer))
  facts, tables = facts_of(trainer), tables_of(trainer)
  payload = {
    'version': VERSION,
    'schedule_state': schedule.state['of'],
    'grown': schedule.state['grown'],
    'schedule': schedule.checksum,
    'window': trainer.probe.window,
    'losses': [(n, float(x)) for n, x in trainer.probe.losses.all().items()],
    'predicted': schedule.state['predicted'],
    'hot_here': trainer.engine.hot_here,
    'counters': trainer.counters_of_steps._asdict(),
    'shapes': shapes_of(trainer, arrays),
    'tables': tables,
    'seed': trainer.engine.untrained.seed,
    'checksums': checksums(arrays),
    'facts': facts._asdict()
    | {'hot': tables[HOT_CHECKSUM], 'names': facts.names._asdict()},
  }
  return DenseState(step, payload, arrays, schedule, facts.hot, new_id())


def pack(state: State, before: StoredPosition | None = None) -> StoredPosition:
  """Converts a state to JSON and a file of its arrays.

  The file of an earlier result is reused if the arrays are the same objects. A
  schedule gives one state, of tens of MB, for hundreds of batches.
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
  data = _npz({f'arr_{i}': array for i, array in enumerate(arrays)})
  return StoredPosition(packed, tuple(arrays), data, zlib.crc32(data))


def _npz(arrays: Mapping[str, Any]) -> bytes:
  file = io.BytesIO()
  np.savez(file, **arrays)
  return file.getvalue()


def unpack(packed: State, data: bytes) -> State:
  """Returns the state that `pack` converted to this JSON and file."""
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
  """Returns the trainer's state as a tree of plain arrays.

  Empty arrays become None, and random keys become their data.
  """

  def plain(leaf: Any) -> Any:
    if not leaf.size:
      return None
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf

  return {'state': jax.tree.map(plain, trainer.whole_state)}


def _is_key(leaf: Any) -> bool:
  return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def state_of(trainer: TrainerParts, saved: Any) -> Any:
  """Returns the state that `arrays_of` gave, for a trainer of the same form."""

  def restored(own: Any, leaf: Any) -> Any:
    if leaf is None:
      return own
    if _is_key(own):
      return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(own))
    return leaf

  return jax.tree.map(restored, trainer.whole_state, saved)


class _Stream(io.RawIOBase):
  """Collects what is written until it is taken. It cannot be rewound."""

  def __init__(self) -> None:
    self._pieces: list[bytes] = []

  def writable(self) -> bool:
    return True

  def write(self, data: Any) -> int:
    self._pieces.append(bytes(data))
    return len(self._pieces[-1])

  def take(self) -> list[bytes]:
    pieces, self._pieces = self._pieces, []
    return pieces


def dense_file(arrays: Any) -> Iterator[bytes]:
  """Yields the content of the dense state's file, of a tree of arrays.

  It takes as much memory as the largest array.
  """
  stream = _Stream()
  with zipfile.ZipFile(stream, 'w') as archive:
    for name, array in named(arrays):
      if array.dtype.isbuiltin != 1:
        array = array.view(f'u{array.itemsize}')
      with archive.open(f'{name}.npy', 'w', force_zip64=True) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)
      yield from stream.take()
  yield from stream.take()


def read_dense(data: bytes, like: Any, where: str) -> Any:
  """Returns the arrays of a file of the dense state, on the device.

  Raises:
    UserError: they do not have the dtypes and shapes of `like`.
  """
  leaves, form = named(like), jax.tree.structure(like)
  try:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
      arrays = [
        file[name].view(own.dtype).reshape(own.shape) for name, own in leaves
      ]
  except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
    raise _other(f'{type(error).__name__}: {error}', where) from error
  return to_device(jax.tree.unflatten(form, arrays), owned=True)


def read_orbax(data: bytes, like: Any, where: str) -> Any:
  """Does what `read_dense` does for a file that orbax wrote."""
  try:
    import orbax.checkpoint as ocp
  except ImportError as error:
    raise UserError(
      'orbax must be installed to restore a checkpoint of version 7',
      got=str(error),
      where=where,
      hint='pip install orbax-checkpoint',
    ) from error
  with tempfile.TemporaryDirectory(prefix='slipstream-') as folder:
    try:
      with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(folder)
      args = ocp.checkpoint_utils.construct_restore_args(like)
      restore = ocp.args.PyTreeRestore(like, restore_args=args)
      handler = ocp.PyTreeCheckpointHandler(use_compression=False)
      with ocp.Checkpointer(handler) as checkpointer:
        return checkpointer.restore(folder, args=restore)
    except Exception as error:  # of any kind, some of them many lines long
      message = ' '.join(str(error).split())[:300] or type(error).__name__
      raise _other(f'"{message}"', where) from error


def _other(got: str, where: str) -> UserError:
  return UserError(WHOLE, got=got, where=where, hint=LOST)


def shapes_of(trainer: TrainerParts, arrays: dict[str, Any]) -> dict[str, str]:
  """Returns dtype and shape of each array by path, and of each row state."""
  shapes = {
    name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in named(arrays)
  }
  untrained = trainer.engine.untrained.row_states
  for group, states in enumerate(untrained):
    of_rows = [f'{leaf.dtype}{list(leaf.shape)}' for leaf in states]
    shapes[f'state of a row of group {group}'] = ', '.join(of_rows)
  return shapes


def named(arrays: Any) -> list[tuple[str, Any]]:
  """Returns the leaves of a tree, each with its path as a text."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
  return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def tables_of(trainer: TrainerParts) -> dict[str, Any]:
  """Returns as JSON what shapes do not tell of tables, features and rows.

  These are names and order, initial rows and row states, the checksum of the
  hot rows, and the windows of `skip_stale`.
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
  chosen = {HOT_CHECKSUM: hot and zlib.crc32(bytes_of_hot(hot.rows))}
  of_windows = {
    f'skip_stale of group {i}': [*windows]
    for i, windows in enumerate(trainer.windows)
    if windows is not None
  }
  # Last, as the entries before say more clearly what differs.
  first_rows = {
    f'{FIRST_ROWS} {i}': _name_of(table)
    for i, table in enumerate(tables.tables.values())
  }
  first_states = {
    f'untrained state of group {i}': [_checksum(leaf) for leaf in states]
    for i, states in enumerate(trainer.engine.untrained.row_states)
  }
  facts = of_tables | of_features | chosen | of_windows
  return facts | first_rows | first_states


def _name_of(table: Table) -> str:
  """Returns what names the rows of a table that no checkpoint has."""
  how = table.initializer
  if callable(how):
    return 'of a function'  # a checkpoint has them all
  if isinstance(how, GivenRows | VectorsById):
    return f'{how!r}, checksum {how.checksum}'
  return repr(how or Uniform(table.vocabulary_size**-0.5))


def checksums(arrays: Any) -> dict[str, int]:
  """Returns the CRC-32 of each leaf of a tree of arrays, by its path."""
  return {name: _checksum(leaf) for name, leaf in named(arrays)}


def _checksum(leaf: Any) -> int:
  array = np.ascontiguousarray(to_host(leaf))
  # Viewed as bytes, since bfloat16 has no buffer.
  return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def check_finite(what: str, arrays: Any, step: int) -> None:
  """Checks that all values of a tree of trained arrays are finite."""
  for name, leaf in named(arrays):
    floating = jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    if floating and not np.isfinite(to_host(leaf)).all():
      raise UserError(
        f'what is saved of {what} must be finite',
        got=f'NaN or infinity in {name}',
        where=f'step {step}',
        hint='lower the learning rates or look for bad values in the data',
      )


class Facts(NamedTuple):
  """What a trainer learned from its first source."""

  dense_features: int
  """I, columns of `Batch.dense`."""
  dense_columns: dict[str, int | None] | None
  """As in `Recipe`."""
  hot: Int[np.ndarray, ' H'] | None
  """Global rows of the hot rows, i64, if some were chosen."""
  watched: bool
  """Whether rows were being compared."""
  names: ColumnNames = ColumnNames()
  """Of dense features and labels. Empty in checkpoints written before names
  were saved."""


def facts_of(parts: TrainerParts) -> Facts:
  """Returns the facts of a trainer."""
  hot, columns = parts.engine.hot, parts.recipe.dense_columns
  return Facts(
    parts.shape.dense_features,
    None if columns is None else dict(columns),
    None if hot is None else hot.rows,
    parts.state.watch is not None,
    parts.names,
  )


def names_from(values: Mapping[str, Any]) -> ColumnNames:
  """Returns the names in the JSON of facts. Earlier versions have none."""
  if 'names' not in values:
    return ColumnNames(values.get('dense_columns'))
  return ColumnNames(**values['names'])


def bytes_of_hot(hot: Int[np.ndarray, ' H']) -> bytes:
  """Returns the content of the file of the hot rows."""
  return hot.astype('<i8').tobytes()


def read_facts(place: Place, manifest: Manifest) -> Facts:
  """Reads the facts of a checkpoint, or raises UserError or OSError."""
  try:
    values = dict(manifest.payload['facts'])
    crc, hot = values['hot'], manifest.files.get(HOT)
    if hot is not None:
      data = read_file(place, hot)
      values['hot'] = np.frombuffer(data, '<i8').astype(np.int64)
    values['names'] = names_from(values)
    facts = Facts(**values)
    valid = (
      crc == (None if hot is None else hot.crc)
      and is_whole(facts.dense_features, 0)
      and all(map(_are_columns, (facts.dense_columns, *facts.names)))
      and isinstance(facts.watched, bool)
    )
    flaw = None if valid else ' '.join(f'{facts}'.split())  # in one line
  except UserError:
    raise
  except (ValueError, KeyError, TypeError) as error:
    flaw = f'{type(error).__name__}: {error}'
  if flaw is not None:
    raise UserError(
      'a trainer is made anew from what its checkpoint says of it',
      got=flaw,
      where=place.url,
      hint=LOST,
    )
  return facts


def _are_columns(columns: object) -> bool:
  return columns is None or (
    isinstance(columns, dict)
    and all(width is None or is_whole(width, 1) for width in columns.values())
  )
