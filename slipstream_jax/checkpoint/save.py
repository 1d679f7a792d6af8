"""Writes checkpoints while training continues.

A checkpoint has everything of one moment between two steps. The dense state,
the position of the batches and the counters are copied at once. Rows are not:
only the set of rows to save is fixed, and a row snapshot yields their values of
that moment while later steps change them.

One checkpoint is written at a time, by a thread of its own. Another thread
consolidates long chains. A run that ends does not wait for it. Unreferenced
files are deleted while neither of them writes.
"""

from collections.abc import Callable, Hashable, Iterator
import contextlib
import threading
import time
from typing import Any, NamedTuple

from jaxtyping import Int
import numpy as np

from slipstream_jax.checkpoint import dense
from slipstream_jax.checkpoint.chain import Chain, consolidate, next_on, prune
from slipstream_jax.checkpoint.manifest import (
  file_name,
  Manifest,
  new_id,
  publish,
  write_file,
)
from slipstream_jax.checkpoint.places import NO_ROOM, Place, user_errors
from slipstream_jax.checkpoint.policies import (
  CHECKPOINT_POLICIES,
  Saving,
  worth_consolidating,
)
from slipstream_jax.checkpoint.quantize import RAW
from slipstream_jax.checkpoint.row_file import (
  FileFacts,
  Leaf,
  leaves_of,
  Piece,
  ROWS,
  write_row_file,
)
from slipstream_jax.checkpoint.row_snapshot import (
  begin_snapshot,
  Budget,
  RowSnapshot,
)
from slipstream_jax.checkpoint.state import (
  arrays_of,
  bytes_of_hot,
  check_finite,
  checksums,
  copies_of,
  facts_of,
  HOT,
  HOT_CHECKSUM,
  pack,
  Packed,
  shapes_of,
  tables_of,
)
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.types import RowBlock

VERSION = 8
"""Version of the contents, raised when a name or meaning changes.

In version 7, orbax wrote the dense state."""
DENSE = 'dense'
"""Key of the file of the dense state."""
SCHEDULE = 'schedule'
"""Key of the file of the arrays in the batches' position, as in `pack`."""
WRITTEN_WHOLE = 'a checkpoint must be written whole'
_SAME = ('checksums', 'schedule_state', 'schedule')
"""Entries of the payload that differ between any two moments of a run."""


class _StoppedError(OSError):
  """Raised in a consolidation that is no longer needed."""


class DenseState(NamedTuple):
  """Everything of a checkpoint but its rows."""

  step: int
  payload: dict[str, Any]
  """JSON for the manifest."""
  arrays: dict[str, Any]
  """A tree of numpy arrays. Read-only."""
  schedule: Packed
  """Position of the batches."""
  hot: Int[np.ndarray, ' H'] | None
  """As in `Facts`."""
  id: str
  """Id of the manifest."""


class Snapshot(NamedTuple):
  """A checkpoint that is being written."""

  dense: DenseState
  parent: int | None
  """Step of the parent. None for a base."""
  rows: tuple[RowSnapshot, ...]
  """Snapshot of the rows of each group."""
  leaves: tuple[tuple[Leaf, ...], ...]
  """Leaves of the rows of each group."""


def dense_state(
  trainer: TrainerParts, schedule_state: State, before: Packed | None = None
) -> DenseState:
  """Copies everything but the rows. Waits for the last step.

  Args:
    trainer: to copy.
    schedule_state: position of its batches.
    before: as of `pack`.

  Raises:
    UserError: a step was interrupted, or a parameter is not finite.
  """
  trainer.check_whole()
  step = int(to_host(trainer.state.step))
  check_finite('the model', trainer.state.variables, step)
  schedule = pack({'of': schedule_state, 'grown': trainer.grown}, before)
  arrays = copies_of(arrays_of(trainer))
  facts, tables = facts_of(trainer), tables_of(trainer)
  payload = {
    'version': VERSION,
    'schedule_state': schedule.state['of'],
    'grown': schedule.state['grown'],
    'schedule': schedule.checksum,
    'window': trainer.probe.window,
    'losses': list(trainer.probe.losses.items()),
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


def token_of(url: str, link: Manifest) -> Hashable:
  """Returns the token by which dirty rows know a checkpoint."""
  return url, link.step, link.identity


def is_same(
  trainer: TrainerParts, state: DenseState, url: str, newest: Manifest
) -> bool:
  """Whether the newest checkpoint equals what the trainer would save.

  Args:
    trainer: has the rows.
    state: everything else.
    url: of the checkpoint's place.
    newest: its manifest.
  """
  if any(newest.payload.get(key) != state.payload[key] for key in _SAME):
    return False
  token = token_of(url, newest)
  return all(
    group.dirty.knows(token) and not group.dirty.count(token)
    for group in trainer.engine.groups
  )


def begin(
  trainer: TrainerParts,
  state: DenseState,
  chain: Chain,
  url: str,
  policy: str,
  codec: str,
  budget: Budget,
) -> Snapshot:
  """Fixes which rows are saved. They can be read from here on.

  `save_device_rows` of each group must follow before the next step.

  Args:
    trainer: has the rows. Changes are now also counted from this checkpoint.
    state: everything else.
    chain: of the newest checkpoint in the place. Empty if there is none.
    url: of the place.
    policy: of `CHECKPOINT_POLICIES`.
    codec: of the rows.
    budget: bounds the copies of rows.
  """
  parent = _parent(trainer, chain, url, policy)
  since = None if parent is None else token_of(url, parent)
  own = Manifest(state.step, None, {}, {}, {}, id=state.id)
  rows, leaves = list[RowSnapshot](), []
  try:
    for group in trainer.engine.groups:
      rows.append(begin_snapshot(group, group.dirty.bits(since), budget))
      group.dirty.begin(token_of(url, own))
      leaves.append(leaves_of(values_of(group.none), codec))
  except BaseException:  # nobody will read the rows
    for snapshot in rows:
      snapshot.close()
    raise
  step = None if parent is None else parent.step
  return Snapshot(state, step, tuple(rows), tuple(leaves))


def _parent(
  trainer: TrainerParts, chain: Chain, url: str, policy: str
) -> Manifest | None:
  """Returns the policy's parent if the changes since then are known."""
  step = CHECKPOINT_POLICIES[policy](chain)
  for link in chain:
    if link.step == step and all(
      group.dirty.knows(token_of(url, link)) for group in trainer.engine.groups
    ):
      return link
  return None


def values_of(block: RowBlock) -> dict[str, np.ndarray]:
  """Returns the arrays [n, ...] of some rows, by the names of their leaves."""
  states = {f'state_{i}': leaf for i, leaf in enumerate(block.state)}
  return {ROWS: block.rows, **states}


def block_of(values: dict[str, np.ndarray]) -> RowBlock:
  """Inverse of `values_of`."""
  states = (values[f'state_{i}'] for i in range(len(values) - 1))
  return RowBlock(values[ROWS], tuple(states))


class Writer:
  """Thread that writes one checkpoint.

  Attributes:
    error: why the checkpoint was not written, or None.
    chain: chain of the checkpoint once it is written.
    seconds: how long the thread took.
  """

  def __init__(
    self,
    place: Place,
    snapshot: Snapshot,
    chain: Chain,
    codec: str,
    budget: Budget,
    done: Callable[[Chain | None], None],
  ) -> None:
    """Starts the thread.

    Args:
      place: where to write.
      snapshot: what to write.
      chain: of the checkpoint before.
      codec: of the rows.
      budget: of the row snapshots.
      done: called by the thread at its end, with the chain if it is written.
    """
    self.error: BaseException | None = None
    self.chain: Chain | None = None
    self.seconds = 0.0
    self._place, self._snapshot, self._before = place, snapshot, chain
    self._codec, self._budget, self._done = codec, budget, done
    self._thread = threading.Thread(target=self._run, name='slipstream-saving')
    self._thread.start()

  def _run(self) -> None:
    started = time.perf_counter()
    try:
      with user_errors(self._place.url, WRITTEN_WHOLE, NO_ROOM):
        self.chain = self._write()
    except BaseException as error:  # raised by `Checkpoints.wait`
      self.error = error
    finally:
      self.give_up()
      self.seconds = time.perf_counter() - started
      self._done(self.chain)

  def _write(self) -> Chain:
    place, snapshot = self._place, self._snapshot
    step, rows = snapshot.dense.step, {}
    kind = 'base' if snapshot.parent is None else 'increment'
    groups = zip(snapshot.rows, snapshot.leaves, strict=True)
    for number, (of_group, leaves) in enumerate(groups):
      name = file_name(kind, step, f'{number}.rows')
      pieces = _pieces(of_group, number, step)
      rows[str(number)] = write_row_file(place, name, leaves, pieces)
    chain = next_on(
      self._before,
      snapshot.parent,
      step=step,
      rows=rows,
      files=self._files(),
      payload=snapshot.dense.payload,
      codec=self._codec,
      id=snapshot.dense.id,
    )
    publish(place, chain[-1])
    return chain

  def _files(self) -> dict[str, FileFacts]:
    """Writes files besides rows. Reuses equal ones of the last checkpoint."""
    state = self._snapshot.dense
    before = self._before[-1].files if self._before else {}

    def kept(key: str, ending: str, data: bytes, crc: int) -> FileFacts:
      file = before.get(key)
      if file is None or (file.bytes, file.crc) != (len(data), crc):
        name = file_name('file', state.step, f'{key}.{ending}')
        file = write_file(self._place, name, [data])
      return file

    name = file_name('file', state.step, f'{DENSE}.npz')
    files = {DENSE: write_file(self._place, name, dense.packed(state.arrays))}
    schedule = state.schedule
    files[SCHEDULE] = kept(SCHEDULE, 'npz', schedule.data, schedule.checksum)
    if state.hot is not None:
      crc = state.payload['facts']['hot']
      files[HOT] = kept(HOT, 'rows', bytes_of_hot(state.hot), crc)
    return files

  def give_up(self) -> None:
    """Ends all waits for rows to be read, as no more will be."""
    for rows in self._snapshot.rows:
      rows.close()
    self._budget.close()

  def wait(self) -> None:
    """Waits for the end of the thread."""
    self._thread.join()


def _pieces(rows: RowSnapshot, group: int, step: int) -> Iterator[Piece]:
  for numbers, block in rows.pieces():
    check_finite('the tables', {f'group {group}': block.rows}, step)
    yield Piece(numbers, values_of(block))


class Maintenance:
  """Consolidates chains and deletes unreferenced files in the background.

  Attributes:
    error: why the last consolidation failed, or None.
    bases: number of chains that became a base.
    nbytes: bytes of these bases.
  """

  def __init__(self, place: Place, saving: Saving) -> None:
    """Maintains a place that a single run writes to."""
    self._place, self._saving = place, saving
    self._lock, self._writers = threading.Lock(), 0
    self._stop = threading.Event()
    self._thread: threading.Thread | None = None
    self._base: Manifest | None = None
    self._damaged: Manifest | None = None
    self.error: Exception | None = None
    self.bases = self.nbytes = 0

  def begin(self) -> None:
    """Called before a write. Nothing is deleted until it ends."""
    with self._lock:
      self._writers += 1

  def end(self) -> None:
    """Called after a write. Deletes unreferenced files if it was the last."""
    with self._lock:
      self._writers -= 1
      if not self._writers:
        with contextlib.suppress(OSError):  # tried again after the next write
          prune(self._place, self._saving.keep)

  def consider(self, chain: Chain) -> None:
    """Consolidates a chain in the background if that is worth it."""
    ratio, chain = self._saving.consolidate, self.current(chain)
    idle = self._thread is None or not self._thread.is_alive()
    if not (ratio and idle and self._saving.codec == RAW):
      return
    if worth_consolidating(chain, ratio) and not self._stop.is_set():
      self._thread = threading.Thread(
        target=self._consolidate, args=(chain,), name='slipstream-consolidating'
      )
      self._thread.start()

  def _consolidate(self, chain: Chain) -> None:
    self.begin()
    try:
      self._base = base = consolidate(self._place, chain, self._check_stop)
      self.bases, self.nbytes = self.bases + 1, self.nbytes + base.bytes
    except (OSError, UserError) as error:
      # The run continues: the chain can still be restored if it is readable.
      if not self._stop.is_set():
        self.error = error
      if isinstance(error, UserError | FileNotFoundError):
        self._damaged = chain[0]
    finally:
      self.end()

  def _check_stop(self) -> None:
    if self._stop.is_set():
      raise _StoppedError('a run has ended')

  def current(self, chain: Chain) -> Chain:
    """Returns the chain on the base that replaced its first links, if any."""
    base = self._base
    if base is None or base.step not in [link.step for link in chain]:
      return chain
    return (base, *(link for link in chain if link.step > base.step))

  def is_damaged(self, chain: Chain) -> bool:
    """Whether a consolidation found the chain damaged."""
    base = self._damaged
    return base is not None and bool(chain) and chain[0] == base

  def wait(self) -> bool:
    """Waits for the consolidation. Returns whether there was one."""
    thread, self._thread = self._thread, None
    if thread is not None:
      thread.join()
    return thread is not None

  def close(self) -> None:
    """Stops consolidating. The chain stays as it was."""
    self._stop.set()
    self.wait()
