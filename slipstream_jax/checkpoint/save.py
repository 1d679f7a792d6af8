"""Writes checkpoints while training continues.

A checkpoint has everything of one moment between two steps. The dense state,
the position of the batches and the counters are copied at once. Rows are not:
only the set of rows to save is fixed, and a row snapshot yields their values of
that moment while later steps change them.

One checkpoint is written at a time, by a thread of its own. Another thread
consolidates long chains. Unreferenced files are deleted while neither writes.

Of several processes, each writes its rows. The first one decides what is
written, and publishes the checkpoint once it finds the files of all.
"""

from collections.abc import Hashable, Iterator
import contextlib
import threading
from typing import NamedTuple
import zlib

import numpy as np

from slipstream_jax.checkpoint.chain import Chain, consolidate, next_on, prune
from slipstream_jax.checkpoint.manifest import (
  file_name,
  Manifest,
  publish,
  row_key,
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
  facts_in,
  FileFacts,
  leaves_of,
  Piece,
  ROWS,
  write_row_file,
)
from slipstream_jax.checkpoint.row_snapshot import (
  begin_snapshot,
  Budget,
  RowSnapshot,
  save_device_rows,
)
from slipstream_jax.checkpoint.state import (
  bytes_of_hot,
  check_finite,
  DENSE,
  dense_file,
  DenseState,
  HOT,
  SCHEDULE,
)
from slipstream_jax.errors import UserError
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import RowBlock

WRITTEN_WHOLE = 'a checkpoint must be written whole'
_SAME = ('checksums', 'schedule_state', 'schedule')
"""Entries of the payload that differ between any two moments of a run."""


_LOOKS_S = 0.05, 1.0
"""Seconds from one look for the files of other processes to the next: at first,
and at most."""


class _StoppedError(OSError):
  """Raised in a consolidation that is no longer needed."""


def token_of(url: str, link: Manifest) -> Hashable:
  """Returns the token by which dirty rows know a checkpoint."""
  return url, link.step, link.identity


def is_same(
  trainer: TrainerParts, state: DenseState, url: str, newest: Manifest
) -> bool:
  """Whether the newest checkpoint of a place equals what would be saved."""
  if any(newest.payload.get(key) != state.payload[key] for key in _SAME):
    return False
  token = token_of(url, newest)
  return all(
    group.dirty.knows(token) and not group.dirty.count(token)
    for group in trainer.engine.groups
  )


class Start(NamedTuple):
  """Beginning of a checkpoint, on which several processes agree."""

  chain: Chain
  """The chain that it follows. Only the first process has it."""
  parent: Manifest | None
  """The checkpoint that it builds on. Another process knows its step and its
  id. None: it is a base."""
  id: str
  """Id of its manifest."""

  @property
  def kind(self) -> str:
    """One of `manifest.KINDS`."""
    return 'base' if self.parent is None else 'increment'


def start_after(
  trainer: TrainerParts, chain: Chain, url: str, policy: str, own_id: str
) -> Start:
  """Returns a start on the policy's parent if the changes since are known."""
  step = CHECKPOINT_POLICIES[policy](chain)
  for link in chain:
    if link.step == step and all(
      group.dirty.knows(token_of(url, link)) for group in trainer.engine.groups
    ):
      return Start(chain, link, own_id)
  return Start(chain, None, own_id)


def identities(chain: Chain) -> list[tuple[int, int]]:
  """Returns step and identity of each link, as other processes get them."""
  return [(link.step, link.identity) for link in chain]


def known_by(identities: list[tuple[int, int]]) -> Chain:
  """Inverse of `identities`. The links have no files."""
  return tuple(
    Manifest(step, None, {}, {}, {}, id=f'{identity:032x}')
    for step, identity in identities
  )


def values_of(block: RowBlock) -> dict[str, np.ndarray]:
  """Returns the arrays [n, ...] of some rows, by the names of their leaves."""
  states = {f'state_{i}': leaf for i, leaf in enumerate(block.state)}
  return {ROWS: block.rows, **states}


def block_of(values: dict[str, np.ndarray]) -> RowBlock:
  """Inverse of `values_of`."""
  states = (values[f'state_{i}'] for i in range(len(values) - 1))
  return RowBlock(values[ROWS], tuple(states))


class Writer:
  """Writes one checkpoint in a thread of its own.

  Attributes:
    trainer: whose rows are written.
    budget: bounds the copies of rows that are not written yet.
    error: why the checkpoint was not written, or None.
    chain: chain of the checkpoint once it is written.
    thread: writes.
    rows_end: set when this process's rows are written, or cannot be.
    failed: set when other processes could not write theirs.
  """

  def __init__(
    self,
    place: Place,
    trainer: TrainerParts,
    state: DenseState,
    start: Start,
    saving: Saving,
    maintenance: 'Maintenance',
  ) -> None:
    """Starts the thread. Call `copy_device_rows` before the next step.

    Which rows are written is fixed. Changes are now counted from here, too. The
    thread ends the write that the first process has begun.
    """
    self.trainer, self.budget = trainer, Budget(saving.memory_bytes)
    self.error: BaseException | None = None
    self.chain: Chain | None = None
    self.rows_end, self.failed = threading.Event(), threading.Event()
    self._place, self._state, self._start = place, state, start
    self._codec, self._maintenance = saving.codec, maintenance
    devices, parent = trainer.engine.devices, start.parent
    self._owner = 0 if devices is None else devices.process
    self._owners = 1 if devices is None else devices.processes
    since = None if parent is None else token_of(place.url, parent)
    own = Manifest(state.step, None, {}, {}, {}, id=start.id)
    self._rows: list[RowSnapshot] = []
    try:
      for group in trainer.engine.groups:
        bits = group.own_bits(group.dirty.bits(since))
        self._rows.append(begin_snapshot(group, bits, self.budget))
        group.dirty.begin(token_of(place.url, own))
      self.thread = threading.Thread(target=self._run, name='slipstream-saving')
      self.thread.start()
    except BaseException:
      self.give_up()
      raise

  def copy_device_rows(self) -> None:
    """Copies the rows of the device. May wait until others are written."""
    try:
      for group, rows in zip(
        self.trainer.engine.groups, self._rows, strict=True
      ):
        save_device_rows(group, rows)
      self.budget.seconds = 0.0  # the caller counts these
    except BaseException:
      self.give_up()
      raise

  def _run(self) -> None:
    try:
      with user_errors(self._place.url, WRITTEN_WHOLE, NO_ROOM):
        rows = self._write_rows()
        self.rows_end.set()
        if not self._owner:
          self.chain = self._publish(rows | self._rows_of_others())
    except BaseException as error:  # raised by `Checkpoints.wait`
      self.error = error
    finally:
      self.give_up()
      self.rows_end.set()
      if self._owners == 1:  # else others may be writing still
        self._maintenance.end(self.chain)

  def _write_rows(self) -> dict[str, FileFacts]:
    """Writes the rows of this process, a file for each group."""
    rows, groups = {}, self.trainer.engine.groups
    for number, snapshot in enumerate(self._rows):
      key, name = self._names(number, self._owner)
      leaves = leaves_of(values_of(groups[number].none), self._codec)
      pieces = _pieces(snapshot, number, self._state.step)
      facts = write_row_file(self._place, name, leaves, pieces)
      rows[key] = facts._replace(owner=self._owner)
    return rows

  def _names(self, group: int, owner: int) -> tuple[str, str]:
    """Returns key and name of a row file.

    Of several processes, files of a killed run never have equal names, or the
    first one could take them for new ones.
    """
    key = row_key(str(group), owner)
    unique = f'{self._start.id[:16]}-' if self._owners > 1 else ''
    name = file_name(self._start.kind, self._state.step, f'{unique}{key}.rows')
    return key, name

  def _rows_of_others(self) -> dict[str, FileFacts]:
    """Waits for the row files of the other processes."""
    rows, pause = {}, _LOOKS_S[0]
    for owner in range(1, self._owners):
      for number in range(len(self._rows)):
        key, name = self._names(number, owner)
        while key not in rows:
          last_look = self.failed.is_set()
          try:
            rows[key] = facts_in(self._place, name)._replace(owner=owner)
          except FileNotFoundError as error:
            if last_look:
              raise UserError(
                WRITTEN_WHOLE,
                got=f'no rows of process {owner}',
                where=f'{self._place.url}/{name}',
                hint='see why that process wrote none',
              ) from error
            self.failed.wait(pause)
            pause = min(2 * pause, _LOOKS_S[1])
    return rows

  def _publish(self, rows: dict[str, FileFacts]) -> Chain:
    state, parent = self._state, self._start.parent
    chain = next_on(
      self._start.chain,
      None if parent is None else parent.step,
      step=state.step,
      rows=rows,
      files=self._files(),
      payload=state.payload,
      codec=self._codec,
      id=self._start.id,
    )
    publish(self._place, chain[-1])
    return chain

  def _files(self) -> dict[str, FileFacts]:
    """Writes files besides rows. Reuses equal ones of the last checkpoint."""
    state = self._state
    chain = self._start.chain
    before = chain[-1].files if chain else {}
    contents = {SCHEDULE: ('npz', state.schedule.data)}
    if state.hot is not None:
      contents[HOT] = 'rows', bytes_of_hot(state.hot)
    name = file_name('file', state.step, f'{DENSE}.npz')
    files = {DENSE: write_file(self._place, name, dense_file(state.arrays))}
    for key, (ending, data) in contents.items():
      file, facts = before.get(key), (len(data), zlib.crc32(data))
      if file is None or (file.bytes, file.crc) != facts:
        name = file_name('file', state.step, f'{key}.{ending}')
        file = write_file(self._place, name, [data])
      files[key] = file
    return files

  def give_up(self) -> None:
    """Ends all waits for rows to be read, as no more will be."""
    for rows in self._rows:
      rows.close()
    self.budget.close()


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

  def end(self, chain: Chain | None = None) -> None:
    """Called after a write, with the chain of a new checkpoint.

    Deletes unreferenced files if it was the last write.
    """
    with self._lock:
      self._writers -= 1
      if not self._writers:
        with contextlib.suppress(OSError):  # tried again after the next write
          prune(self._place, self._saving.keep)
    if chain is not None:
      self.consider(chain)

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
