"""Writes checkpoints, in threads of their own.

One checkpoint is written at a time. A chain that has grown long is consolidated
beside that, by another thread, which a run that ends does not wait for. What no
checkpoint needs is removed while neither of them writes.
"""

from collections.abc import Callable, Iterator
import contextlib
import threading
import time
from typing import NamedTuple

from slipstream_jax.checkpoint import dense, facts
from slipstream_jax.checkpoint.chain import Chain, consolidate, next_on, prune
from slipstream_jax.checkpoint.manifest import (
  file_name,
  Manifest,
  publish,
  write_file,
)
from slipstream_jax.checkpoint.packing import check_finite, Packed
from slipstream_jax.checkpoint.places import Place
from slipstream_jax.checkpoint.policies import Saving, worth_consolidating
from slipstream_jax.checkpoint.quantize import RAW
from slipstream_jax.checkpoint.row_file import FileFacts, Piece, write_row_file
from slipstream_jax.checkpoint.row_snapshot import Budget, RowSnapshot
from slipstream_jax.checkpoint.snapshot import Snapshot, values_of
from slipstream_jax.errors import UserError

DENSE = 'dense'
"""The file of model, optimizer and all else on the device but rows."""
SCHEDULE = 'schedule'
"""The file of the arrays of where the batches stand, as of `pack`."""
RULE = 'a checkpoint must be written whole'
"""What a disk that is full breaks."""
ROOM = 'look whether its disk is full or read-only; what was there still is'
"""What to do about it."""


class _Stopped(OSError):
  """Nobody waits for a consolidation any more."""


class Written(NamedTuple):
  """A schedule in a file of a checkpoint."""

  packed: Packed
  file: FileFacts

  def is_in(self, files: dict[str, FileFacts], packed: Packed) -> bool:
    """Whether a checkpoint has it, and it is of these very arrays."""
    return files.get(SCHEDULE) == self.file and packed.data is self.packed.data


class Writing:
  """One checkpoint on its way to a place.

  Attributes:
    error: why it was not written; None: it was, or is not yet.
    chain: it, once it is there.
    schedule: what it has for its schedule then.
    seconds: that it took.
  """

  def __init__(
    self,
    place: Place,
    snapshot: Snapshot,
    chain: Chain,
    codec: str,
    budget: Budget,
    schedule: Written | None,
    done: Callable[[Chain | None], None],
  ) -> None:
    """Starts.

    Args:
      place: where to.
      snapshot: what.
      chain: of the checkpoint before.
      codec: of its rows.
      budget: of the drains.
      schedule: what the checkpoint before has for its schedule.
      done: called in its thread at the end, with its chain if that is there.
    """
    self.error: BaseException | None = None
    self.chain: Chain | None = None
    self.seconds = 0.0
    self._place, self._snapshot, self._before = place, snapshot, chain
    self._codec, self._budget, self._done = codec, budget, done
    self.schedule = schedule
    self._thread = threading.Thread(target=self._run, name='slipstream-saving')
    self._thread.start()

  def _run(self) -> None:
    started = time.perf_counter()
    try:
      self.chain = self._write()
    except UserError as error:
      self.error = error
    except OSError as error:
      self.error = _unwritten(error, self._place.url)
    except BaseException as error:  # raised again by whoever waits
      self.error = error
    finally:
      self.give_up()
      self.seconds = time.perf_counter() - started
      self._done(self.chain)

  def _write(self) -> Chain:
    place, snapshot = self._place, self._snapshot
    step, rows = snapshot.dense.step, {}
    kind = 'base' if snapshot.parent is None else 'increment'
    groups = zip(snapshot.drains, snapshot.leaves, strict=True)
    for number, (drain, leaves) in enumerate(groups):
      name = file_name(kind, step, f'{number}.rows')
      pieces = _pieces(drain, number, step)
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
    """Those beside the rows; what a file of before has is not written again."""
    place, of = self._place, self._snapshot.dense
    name = file_name('file', of.step, 'dense.zip')
    packed = dense.packed(of.arrays, place.url)
    files = {DENSE: write_file(place, name, packed)}
    before = self._before[-1].files if self._before else {}
    schedule = self.schedule
    if schedule is None or not schedule.is_in(before, of.schedule):
      name = file_name('file', of.step, 'schedule.npz')
      file = write_file(place, name, [of.schedule.data])
      schedule = Written(of.schedule, file)
    self.schedule, files[SCHEDULE] = schedule, schedule.file
    if of.hot is not None:
      hot = before.get(facts.HOT)
      if hot is None or not facts.is_saved(of.hot, hot):
        name = file_name('file', of.step, 'hot.rows')
        hot = write_file(place, name, [facts.bytes_of(of.hot)])
      files[facts.HOT] = hot
    return files

  def give_up(self) -> None:
    """Lets whoever waits for rows to be taken go on; none will be."""
    for drain in self._snapshot.drains:
      drain.close()
    self._budget.close()

  def wait(self) -> None:
    """Returns when it is through."""
    self._thread.join()


def _unwritten(error: Exception, url: str) -> UserError:
  message = ' '.join(str(error).split()) or type(error).__name__
  return UserError(RULE, got=f'"{message}"', where=url, hint=ROOM)


def _pieces(drain: RowSnapshot, group: int, step: int) -> Iterator[Piece]:
  for rows, block in drain.pieces():
    check_finite('the tables', {f'group {group}': block.rows}, step)
    yield Piece(rows, values_of(block))


class Keeping:
  """What a place keeps: consolidates and removes, in the background.

  Attributes:
    error: why a chain was last not consolidated, and grows on; None: never.
    bases: how many chains were made one.
    nbytes: of these.
  """

  def __init__(self, place: Place, settings: Saving) -> None:
    """Of a place that one run writes to."""
    self._place, self._settings = place, settings
    self._lock, self._writers = threading.Lock(), 0
    self._stop = threading.Event()
    self._thread: threading.Thread | None = None
    self._base: Manifest | None = None
    self._damaged: Manifest | None = None
    self.error: Exception | None = None
    self.bases = self.nbytes = 0

  def begin(self) -> None:
    """Somebody writes from here on."""
    with self._lock:
      self._writers += 1

  def end(self) -> None:
    """Somebody has written; what nobody needs is removed, if nobody writes."""
    with self._lock:
      self._writers -= 1
      if not self._writers:
        with contextlib.suppress(OSError):  # another time
          prune(self._place, self._settings.keep)

  def consider(self, chain: Chain) -> None:
    """Consolidates a chain in the background, if that is worth it."""
    ratio, chain = self._settings.consolidate, self.current(chain)
    idle = self._thread is None or not self._thread.is_alive()
    if not (ratio and idle and self._settings.codec == RAW):
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
      # It fails alone: the chain can be restored as it is, if it can be read.
      if not self._stop.is_set():
        self.error = error
      if isinstance(error, UserError | FileNotFoundError):
        self._damaged = chain[0]
    finally:
      self.end()

  def _check_stop(self) -> None:
    if self._stop.is_set():
      raise _Stopped('a run has ended')

  def current(self, chain: Chain) -> Chain:
    """The chain on the base that it has by now."""
    base = self._base
    if base is None or base.step not in [link.step for link in chain]:
      return chain
    return (base, *(link for link in chain if link.step > base.step))

  def is_damaged(self, chain: Chain) -> bool:
    """Whether a chain is known to be of no use: nothing is to be put on it."""
    base = self._damaged
    return base is not None and bool(chain) and chain[0] == base

  def wait(self) -> bool:
    """Returns once nothing is being consolidated; whether anything was."""
    thread, self._thread = self._thread, None
    if thread is not None:
      thread.join()
    return thread is not None

  def close(self) -> None:
    """Stops consolidating; all is then as it was before that."""
    self._stop.set()
    self.wait()
