"""Checkpoints of everything: dense state, rows, row state, data position.

Each checkpoint is a base or an increment on an earlier one. It consists of row
files, a few other files, and a manifest that is written last. So a killed run
always has its last whole checkpoint. Untrained rows are never saved, as they
are functions of the seed.
"""

import contextlib
import functools
import json
import os
import time
from typing import Any, NamedTuple

from slipstream_jax.checkpoint.chain import (
  Chain,
  chain_before,
  READABLE,
  Search,
  search_for,
  unreferenced,
)
from slipstream_jax.checkpoint.manifest import (
  file_name,
  KEPT,
  Manifest,
  publish,
  read_manifest,
  steps_in,
)
from slipstream_jax.checkpoint.places import NO_ROOM, open_place, user_errors
from slipstream_jax.checkpoint.policies import Saving
from slipstream_jax.checkpoint.restore import Position, restore
from slipstream_jax.checkpoint.row_file import LOST
from slipstream_jax.checkpoint.save import (
  identities,
  is_same,
  known_by,
  Maintenance,
  Start,
  start_after,
  token_of,
  Writer,
  WRITTEN_WHOLE,
)
from slipstream_jax.checkpoint.state import (
  dense_state,
  DenseState,
  Facts,
  read_facts,
  StoredPosition,
  WHOLE,
)
from slipstream_jax.data.interrupts import held
from slipstream_jax.engine.mesh import error_of, words_of
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.training.trainer_parts import TrainerParts

_OTHERS_S = 10.0
"""Seconds that the first process waits for the rows of others as it ends."""
__all__ = ['Checkpoints', 'Position', 'Saving', 'Totals']


class Totals(NamedTuple):
  """The cost of saving so far."""

  saved: int = 0
  """Checkpoints that were written."""
  bases: int = 0
  """How many of them are bases."""
  rows: int = 0
  """Rows in all checkpoints."""
  row_bytes: int = 0
  """Bytes of the row files."""
  other_bytes: int = 0
  """Bytes of new files besides rows and manifests."""
  seconds_waiting: float = 0.0
  """Seconds that training waited for copies, for the checkpoint before, and for
  room in `Saving.memory_bytes`."""

  def plus(self, waiting: float, newest: Manifest | None = None) -> 'Totals':
    """Adds seconds of waiting, and perhaps a checkpoint that was written."""
    totals = self._replace(seconds_waiting=self.seconds_waiting + waiting)
    if newest is None:
      return totals
    own = file_name('file', newest.step, '')  # others are of an earlier step
    others = sum(
      file.bytes for file in newest.files.values() if file.name.startswith(own)
    )
    rows = sum(facts.rows or 0 for facts in newest.rows.values())
    return totals._replace(
      saved=self.saved + 1,
      bases=self.bases + (newest.parent is None),
      rows=self.rows + rows,
      row_bytes=self.row_bytes + newest.bytes,
      other_bytes=self.other_bytes + others,
    )


class Checkpoints:
  """The checkpoints of one run.

  Attributes:
    totals: the cost of saving so far.
    maintenance: consolidates chains in the background.
  """

  def __init__(
    self, folder: str | os.PathLike[str], saving: Saving | None = None
  ) -> None:
    """Opens a folder, which the first `save` creates if it does not exist.

    Args:
      folder: a path, or a URL that fsspec can open.
      saving: settings. None: the defaults of `Saving`.

    Raises:
      UserError: fsspec cannot open the URL, or a setting is invalid.
    """
    self._saving = Saving() if saving is None else saving
    self._saving.check()
    self._place = open_place(folder)
    self.maintenance = Maintenance(self._place, self._saving)
    self._writer: Writer | None = None
    self._closing = False
    self._chain: Chain = ()
    self._search: tuple[tuple[int | None, bool], Search] | None = None
    self._schedule: StoredPosition | None = None
    self.totals = Totals()

  def save(
    self,
    trainer: TrainerParts,
    schedule_state: State,
    *,
    wait: bool = True,
    soon: bool = False,
    kept: bool = False,
  ) -> int:
    """Saves everything of this moment, once the checkpoint before is written.

    Saving the same moment again does nothing. Of several processes, all must
    call it, and each writes its rows.

    Args:
      trainer: its state, rows and counters are saved.
      schedule_state: `get_state()` of the batches that it trains.
      wait: whether to return when everything is on disk. Else training can
        continue at once, and the next `save`, `wait` or `close` raises what
        failed.
      soon: whether to write an increment, whatever the policy.
      kept: whether the checkpoint stays, whatever `Saving.keep`.

    Returns:
      The number of steps taken, which identifies the checkpoint.

    Raises:
      UserError: a step was interrupted, a parameter or row is not finite, the
        folder has another checkpoint of this step or a later one, or it cannot
        be written. Earlier checkpoints are unchanged.
    """
    with held():  # a Ctrl-C waits until the checkpoint is whole
      self.wait()
      started = time.perf_counter()
      state = dense_state(trainer, schedule_state, self._schedule)
      if kept:
        state.payload[KEPT] = True
      first = trainer.engine.is_first
      if first:
        self.maintenance.begin()  # or the parent could be deleted meanwhile
      try:
        start = self._agreed_start(trainer, state, soon)
        if start is not None:
          self._schedule, self._search = state.schedule, None
          self._writer = Writer(
            self._place, trainer, state, start, self._saving, self.maintenance
          )
          self._writer.copy_device_rows()
          self.totals = self.totals.plus(time.perf_counter() - started)
        elif kept and first:
          self._keep(state.step)
      finally:
        if first and self._writer is None:  # else its thread does it
          self.maintenance.end()
      if wait:
        self.wait()
    return state.step

  def _agreed_start(
    self, trainer: TrainerParts, state: DenseState, soon: bool
  ) -> Start | None:
    """Returns what a checkpoint begins from. None: it exists."""
    start: Start | None = None

    def decide() -> Any:
      nonlocal start
      chain = self._chain_before(trainer, state)
      if chain is None:
        return None
      policy = self._saving.policy_for(chain, soon)
      start = start_after(trainer, chain, self._place.url, policy, state.id)
      return start.id, identities((start.parent,) if start.parent else ())

    devices = trainer.engine.devices
    agreed = decide() if devices is None else devices.from_first(decide)
    if agreed is None or start is not None:
      return start
    own_id, parent = agreed
    return Start((), next(iter(known_by(parent)), None), own_id)

  def _keep(self, step: int) -> None:
    """Marks a checkpoint that exists as one that stays."""
    self.maintenance.wait()  # it may be writing the same manifest
    with user_errors(self._place.url, WRITTEN_WHOLE, NO_ROOM):
      manifest = read_manifest(self._place, step)
      payload = manifest.payload | {KEPT: True}
      publish(self._place, manifest._replace(payload=payload))

  def _chain_before(
    self, trainer: TrainerParts, state: DenseState
  ) -> Chain | None:
    """Returns the chain that the checkpoint follows. None if it exists."""
    url = self._place.url
    known = self.maintenance.current(self._chain)
    same = functools.partial(is_same, trainer, state, url)
    with user_errors(url, WRITTEN_WHOLE, NO_ROOM):
      chain = chain_before(self._place, known, state.step, same)
    # All rows are in memory, so a new base can replace a damaged chain.
    return () if chain and self.maintenance.is_damaged(chain) else chain

  def wait(self) -> None:
    """Waits until nothing is being written.

    Raises:
      UserError: the last checkpoint could not be written.
    """
    writer = self._writer
    if writer is None:
      return
    started = time.perf_counter()
    error = self._end_of(writer)
    self._writer = None
    waited = time.perf_counter() - started + writer.budget.seconds
    newest = None if writer.chain is None else writer.chain[-1]
    self.totals = self.totals.plus(waited, newest)
    # No increment builds on a failed checkpoint.
    ends = (*self._chain[:1], *self._chain[-1:])
    known = [token_of(self._place.url, link) for link in ends]
    for group in writer.trainer.engine.groups:
      group.dirty.keep(known)
    if error is not None:
      self._report(error)

  def _end_of(self, writer: Writer) -> BaseException | None:
    """Waits for a writer. Returns why there is no checkpoint, if so."""
    devices = writer.trainer.engine.devices
    alone = devices is None or devices.alone or self._closing
    if devices is not None and not alone:
      writer.rows_end.wait()
      # The first one must not wait for files that will never be there.
      if 1 in devices.agreed(int(writer.error is not None)):
        writer.failed.set()
    else:
      _join(writer)
    writer.thread.join()
    if writer.chain is not None:
      self._chain = writer.chain
    if devices is None or alone:
      return writer.error
    own = writer.error and words_of(writer.error)
    text = json.dumps([own, identities(self._chain)])
    texts = devices.exchanged(text.encode())
    errors, chains = zip(*map(json.loads, texts), strict=True)
    if devices.process:
      self._chain = known_by(chains[0])
    else:
      self.maintenance.end(writer.chain)
    # Those that failed themselves come before the one that waited for them.
    said = next(filter(None, errors[::-1]), None)
    return writer.error if said in (None, own) else error_of(said)

  def _report(self, error: BaseException) -> None:
    on_error = self._saving.on_error
    # Values that are not finite stay so. Continuing would not help.
    if (
      on_error is None
      or not isinstance(error, UserError)
      or 'finite' in error.rule
    ):
      raise error
    on_error(error)

  def restore(
    self,
    trainer: TrainerParts,
    *,
    exact: bool = True,
    step: int | None = None,
    or_older: bool = False,
  ) -> Position:
    """Restores the newest checkpoint, or that of a step, into a trainer.

    Args:
      trainer: with the model, tables and optimizers of the run.
      exact: whether to refuse quantized rows, which cannot resume a run.
      step: of the checkpoint. None: the newest.
      or_older: whether to restore the newest whole checkpoint if this one is
        damaged. `Position.skipped` then says why.

    Returns:
      The position of the run. Pass its `schedule_state` to `set_state` of the
      batches.

    Raises:
      UserError: the checkpoint does not exist, is damaged, or is of another
        model or other tables. The trainer is unchanged. If it is damaged, the
        error names the newest whole step.
    """
    skipped = []
    try:
      self.wait()
    except UserError as error:
      skipped.append(f'the last: {error}')
    if self.maintenance.wait():  # it may have replaced the chain
      self._search = None
    search, url = self._searched(step, or_older), self._place.url
    chain = search.chains[0]
    with user_errors(url, WHOLE, LOST):
      position = restore(trainer, self._place, chain, exact)
    self._chain = chain
    skipped += [f'step {step}: {why}' for step, why in search.skipped]
    return position._replace(skipped=tuple(skipped))

  def facts(self, step: int | None = None) -> Facts:
    """Returns the facts that the trainer of a checkpoint had learned.

    Args:
      step: of the checkpoint. None: the newest.

    Raises:
      UserError: the checkpoint does not exist or is damaged.
    """
    chain = self._searched(step).chains[0]
    with user_errors(self._place.url, WHOLE, LOST):
      return read_facts(self._place, chain[-1])

  @property
  def step(self) -> int | None:
    """Step of the checkpoint last written or restored here, or None."""
    return self._chain[-1].step if self._chain else None

  def newest(self) -> int | None:
    """Returns the newest step in the folder, also of another run's, or None.

    Raises:
      UserError: the folder cannot be read.
    """
    if self._writer is not None:
      _join(self._writer)
    with user_errors(self._place.url, READABLE, LOST):
      return max(steps_in(self._place), default=None)

  def _searched(self, step: int | None, or_older: bool = False) -> Search:
    """Searches for a checkpoint. Remembers the result until the next save."""
    key = step, or_older
    if self._search is None or self._search[0] != key:
      self._search = key, search_for(self._place, step, or_older=or_older)
    return self._search[1]

  def remove(self) -> None:
    """Removes all checkpoints, as far as the place allows. Ends the threads."""
    self.close()
    self._search, self._chain = None, ()
    with contextlib.suppress(OSError):
      self._place.sweep()
      for name in unreferenced((), self._place.names()):
        self._place.delete(name)
      if '://' not in self._place.url:
        os.rmdir(self._place.url)

  def close(self) -> None:
    """Ends the threads after the current write. Idempotent.

    Of several processes, some may call it after an error. So none waits long
    for others, and a checkpoint that lacks rows of theirs is not written.

    Raises:
      UserError: the last checkpoint could not be written.
    """
    self._closing = True
    try:
      self.wait()
    finally:
      self._closing = False
      self.maintenance.close()


def _join(writer: Writer) -> None:
  """Waits for this process's writer, and not long for rows of others."""
  writer.rows_end.wait()
  writer.thread.join(_OTHERS_S)
  writer.failed.set()
  writer.thread.join()
