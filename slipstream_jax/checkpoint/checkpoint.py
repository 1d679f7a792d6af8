"""Checkpoints of everything: dense state, rows, row state, data position.

Each is a base or an increment on the one before: row files, a file of all else,
and a manifest that is written last. So a run killed at any instant has its last
whole checkpoint. Rows that took no step are functions of the seed, and are
never saved. Training goes on while a checkpoint is written.
"""

import contextlib
import functools
import os
import time

from slipstream_jax.checkpoint import restoring, snapshot
from slipstream_jax.checkpoint.chain import Chain, Search, unreferenced
from slipstream_jax.checkpoint.facts import Facts, read_facts
from slipstream_jax.checkpoint.manifest import steps_in
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.checkpoint.policies import Saving
from slipstream_jax.checkpoint.restoring import Position
from slipstream_jax.checkpoint.row_snapshot import Budget, save_device_rows
from slipstream_jax.checkpoint.searching import (
  chain_before,
  reading,
  search_for,
)
from slipstream_jax.checkpoint.snapshot import Dense, tokens_of
from slipstream_jax.checkpoint.totals import Totals
from slipstream_jax.checkpoint.writing import (
  Keeping,
  ROOM,
  RULE,
  Writing,
  Written,
)
from slipstream_jax.data.interrupts import held
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.training.parts import TrainerParts

__all__ = ['Checkpoints', 'Position', 'Saving', 'Totals']

_READABLE = 'a folder of checkpoints must be readable'


class Checkpoints:
  """The checkpoints of one run.

  Attributes:
    totals: what saving has cost so far.
    keeping: consolidates in the background, and knows why it could not.
  """

  def __init__(
    self, folder: str | os.PathLike[str], saving: Saving | None = None
  ) -> None:
    """Opens `folder`, which need not exist, and is made by the first `save`.

    Args:
      folder: a path, or a URL that fsspec can open.
      saving: how to save; None: as `Saving` has it.

    Raises:
      UserError: nothing here opens such a URL, or settings that are none.
    """
    self._saving = Saving() if saving is None else saving
    self._saving.check()
    self._place = open_place(folder)
    self.keeping = Keeping(self._place, self._saving)
    self._writing: Writing | None = None
    self._trainer: TrainerParts | None = None
    self._budget, self._counted = Budget(self._saving.memory_bytes), 0.0
    self._chain: Chain = ()
    self._search: tuple[tuple[int | None, bool], Search] | None = None
    self._schedule: Written | None = None
    self.totals = Totals()

  def save(
    self,
    trainer: TrainerParts,
    schedule_state: State,
    *,
    wait: bool = True,
    soon: bool = False,
  ) -> int:
    """Saves everything as it is now.

    One checkpoint is written at a time: this waits for the one before. Saving
    again what was just saved does nothing.

    Args:
      trainer: whose state, rows and counters to save.
      schedule_state: `get_state()` of the batches it trains.
      wait: whether it returns when all is on disk. Else training can go on at
        once; what fails is raised by the next `save`, `wait` or `close`.
      soon: whether there is little time: an increment, whatever the policy.

    Returns:
      The steps taken, by which the checkpoint is known.

    Raises:
      UserError: the trainer is torn, a parameter or row is not finite, the
        folder holds another checkpoint of this step or a later one, or it
        cannot be written; what was saved before is then still there.
    """
    with held():  # a Ctrl-C waits; what is written then is whole
      self.wait()
      started = time.perf_counter()
      before = None if self._schedule is None else self._schedule.packed
      dense = snapshot.dense_of(trainer, schedule_state, before)
      self.keeping.begin()  # what it comes after is not removed meanwhile
      try:
        chain = self._chain_before(trainer, dense)
        if chain is not None:
          policy = self._saving.policy_for(chain, soon)
          self._begin(trainer, dense, chain, policy)
          self._counted = self._budget.seconds
          self.totals = self.totals.waited(time.perf_counter() - started)
      finally:
        if self._writing is None:  # else it is who ends it
          self.keeping.end()
      if wait:
        self.wait()
    return dense.step

  def _begin(
    self, trainer: TrainerParts, dense: Dense, chain: Chain, policy: str
  ) -> None:
    saving, url = self._saving, self._place.url
    self._search = None
    self._budget = budget = Budget(saving.memory_bytes)
    taken = snapshot.begin(
      trainer, dense, chain, url, policy, saving.codec, budget
    )
    self._trainer = trainer
    before, done = self._schedule, self._written
    try:
      self._writing = Writing(
        self._place, taken, chain, saving.codec, budget, before, done
      )
    except BaseException:  # no thread: nobody would take the rows
      for drain in taken.drains:
        drain.close()
      raise
    try:
      for group, drain in zip(trainer.engine.groups, taken.drains, strict=True):
        save_device_rows(group, drain)
    except BaseException:
      self._writing.give_up()
      raise

  def _written(self, chain: Chain | None) -> None:
    """In the thread that writes, at its end."""
    self.keeping.end()
    if chain is not None:
      self.keeping.consider(chain)

  def _chain_before(self, trainer: TrainerParts, dense: Dense) -> Chain | None:
    """What the checkpoint comes after; None if it is there already.

    Raises:
      UserError: another one is there that can be restored.
    """
    url = self._place.url
    is_same = functools.partial(snapshot.is_same, trainer, dense, url)
    known = self.keeping.current(self._chain)
    with reading(url, RULE, ROOM):
      chain = chain_before(self._place, known, dense.step, is_same)
    # All rows are at hand: nothing need be put on what is of no use.
    return () if chain and self.keeping.is_damaged(chain) else chain

  def wait(self) -> None:
    """Returns once nothing is being written; training waited so long.

    Raises:
      UserError: the last checkpoint could not be written.
    """
    writing, self._writing = self._writing, None
    if writing is None:
      return
    trainer, self._trainer = self._trainer, None
    assert trainer is not None
    started = time.perf_counter()
    try:
      writing.wait()
    except BaseException:
      self._writing, self._trainer = writing, trainer
      raise
    waited = time.perf_counter() - started
    waited += self._budget.seconds - self._counted
    newest = None if writing.chain is None else writing.chain[-1]
    totals = self.totals.waited(waited)
    self.totals = totals.wrote(writing.seconds, newest)
    if writing.chain is not None:
      self._chain, self._schedule = writing.chain, writing.schedule
    # One that failed is nothing to count changes from.
    known = tokens_of(self._place.url, (*self._chain[:1], *self._chain[-1:]))
    for group in trainer.engine.groups:
      group.dirty.keep(known)
    if writing.error is not None:
      self._tell(writing.error)

  def _tell(self, error: BaseException) -> None:
    tell = self._saving.on_error
    # What is not finite stays so: going on would not help.
    if tell and isinstance(error, UserError) and 'finite' not in error.rule:
      return tell(error)
    raise error

  def restore(
    self,
    trainer: TrainerParts,
    *,
    exact: bool = True,
    step: int | None = None,
    or_older: bool = False,
  ) -> Position:
    """Puts a checkpoint into the trainer: the newest, or that of a step.

    Args:
      trainer: made as that of the run.
      exact: whether to refuse rows that are quantized: from those no run goes
        on to the same bits.
      step: of the checkpoint; None: the newest.
      or_older: whether the newest whole checkpoint may stand for a damaged one.
        `Position.skipped` then says why.

    Returns:
      Where training stood; its `schedule_state` is for `set_state` of the
      batches.

    Raises:
      UserError: there is no such checkpoint, it is of another model or tables,
        or it is not what was saved; the trainer is then as it was. Of a
        damaged one the sentence names the newest step that is whole.
    """
    unwritten = self._given_up()
    if self.keeping.wait():  # what it has replaced is no more
      self._search = None
    search, url = self._searched(step, or_older), self._place.url
    chain = search.chains[0]
    with reading(url):
      position = restoring.restore(trainer, self._place, chain, exact)
    self._chain = chain
    skipped = [f'step {step}: {why}' for step, why in search.skipped]
    return position._replace(skipped=(*unwritten, *skipped))

  def _given_up(self) -> list[str]:
    """Why the last one was not written, once nobody needs it any more."""
    try:
      self.wait()
    except UserError as error:
      return [f'the last: {error}']
    return []

  def facts(self, step: int | None = None) -> Facts:
    """What the trainer of a checkpoint was made of.

    Args:
      step: of the checkpoint; None: the newest.

    Raises:
      UserError: there is none, or it is not what was saved.
    """
    chain = self._searched(step).chains[0]
    with reading(self._place.url):
      return read_facts(self._place, chain[-1])

  @property
  def step(self) -> int | None:
    """The step of what was last written or restored here; None: nothing was."""
    return self._chain[-1].step if self._chain else None

  def newest(self) -> int | None:
    """The step of the newest checkpoint, also of one that others saved.

    It waits for one that is being written.

    Raises:
      UserError: the folder cannot be read.
    """
    if self._writing is not None:
      self._writing.wait()
    with reading(self._place.url, _READABLE):
      return max(steps_in(self._place), default=None)

  def _searched(self, step: int | None, or_older: bool = False) -> Search:
    """What can be restored; read once, and again when more was saved."""
    asked = step, or_older
    if self._search is None or self._search[0] != asked:
      search = search_for(self._place, step, or_older=or_older)
      self._search = asked, search
    return self._search[1]

  def remove(self) -> None:
    """Removes all checkpoints, as far as the place allows; ends the threads."""
    self.close()
    self._search, self._chain = None, ()
    with contextlib.suppress(OSError):
      self._place.sweep()
      for name in unreferenced((), self._place.names()):
        self._place.delete(name)
      if '://' not in self._place.url:
        os.rmdir(self._place.url)

  def close(self) -> None:
    """Ends the threads, once what is being written is; may be called again.

    Raises:
      UserError: the last checkpoint could not be written.
    """
    try:
      self.wait()
    finally:
      self.keeping.close()
