"""Queues that cut kept examples into batches."""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.data.numbered import signed
from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.selection.base import Selection
from slipstream_jax.types import Batch, HotRows, Lookups

_NONE = np.empty(0, np.int64)


Index = Int[np.ndarray, ' n'] | None
"""Positions of some examples of a batch. None: all of them, in their order."""


class _Part(NamedTuple):
  """Some examples of a batch, not copied yet."""

  batch: Batch
  which: Index

  @property
  def examples(self) -> int:
    """Number of examples."""
    column = self.batch.labels if self.which is None else self.which
    return len(column)

  def cut(self, size: int) -> tuple['_Part', '_Part']:
    """Returns the first examples, and the rest."""
    index = np.arange(self.examples) if self.which is None else self.which
    return self._replace(which=index[:size]), self._replace(which=index[size:])


def _gathered(parts: Sequence[_Part], size: int) -> Batch:
  """Copies the examples of some parts, and pads them as `pad_batch` does."""
  short = size - sum(part.examples for part in parts)
  if not short and len(parts) == 1 and parts[0].which is None:
    return parts[0].batch
  columns: list[Any] = []
  fields = zip(*(part.batch for part in parts), strict=True)
  for name, of_parts in zip(Batch._fields, fields, strict=True):
    if name in ('fresh', 'fresh_vectors') or of_parts[0] is None:
      columns.append(None)
      continue
    lookups = name == 'lookups'
    if lookups and short:
      of_parts = tuple(map(signed, of_parts))  # which can hold -1
    shape = size, *of_parts[0].shape[1:]
    out, at = np.empty(shape, np.result_type(*of_parts)), 0
    for part, column in zip(parts, of_parts, strict=True):
      here, at = out[at : at + part.examples], at + part.examples
      if part.which is None:
        here[...] = column
      else:  # other modes would copy twice, and a compiled loop is slower
        np.take(column, part.which, axis=0, out=here, mode='clip')
    out[at:] = -1 if lookups else 0
    columns.append(out)
  return Batch(*columns)


class _Cut(NamedTuple):
  """A batch whose examples are not copied yet."""

  parts: Sequence[_Part]
  size: int
  """Examples, with padding."""
  fresh: Int[np.ndarray, ' n'] | None
  fresh_vectors: Int[np.ndarray, ' n'] | None
  """These two are fields of the batch."""

  def batch(self) -> Batch:
    """Copies the examples into a batch."""
    return _gathered(self.parts, self.size)._replace(
      fresh=self.fresh, fresh_vectors=self.fresh_vectors
    )


class Rebatcher:
  """A queue that cuts examples into batches of one size, in their order.

  Each example is copied once, from its batch of the source into its own.

  Attributes:
    batch_size: B, of every batch that it returns.
    waiting: number of examples in the queue.
  """

  def __init__(
    self, batch_size: int, state: dict[str, Any] | None = None
  ) -> None:
    """Starts with the examples of a state from `get_state`, or empty."""
    self.batch_size = batch_size
    self._parts: list[_Part] = []
    self.waiting = 0
    # Reassigned rows, and for each the examples in the queue before it, and
    # its `fresh_vectors`.
    self._fresh = self._before = self._vectors = _NONE
    if state is not None:
      if state['queued']:
        self.put(Batch(**state['queued']))
      self._fresh = state['fresh']
      # Positions of batches that are not filled up did not have it.
      self._before = state.get('before', np.zeros(len(self._fresh), np.int64))
      self._vectors = state.get('vectors', np.full(len(self._fresh), -1))

  def put(self, examples: Batch, index: Index = None) -> None:
    """Appends those examples of a batch in their order, without a copy."""
    if examples.fresh is not None:
      here = np.full(len(examples.fresh), self.waiting)
      self._fresh = np.concatenate([self._fresh, examples.fresh])
      self._before = np.concatenate([self._before, here])
      own = examples.fresh_vectors
      own = np.full(len(here), -1) if own is None else own
      self._vectors = np.concatenate([self._vectors, own])
    part = _Part(examples, index)
    if part.examples:
      self._parts.append(part)
      self.waiting += part.examples

  def ready(self) -> bool:
    """Whether there is a full batch."""
    return self.waiting >= self.batch_size

  def take(self) -> Batch:
    """Returns the next batch, padded with examples of weight 0 if needed."""
    return self.cut()()

  def cut(self) -> Callable[[], Batch]:
    """Removes the next batch. Returns what copies it, in any thread."""
    return self._cut(self.batch_size).batch

  def _cut(self, size: int) -> _Cut:
    """Removes the first examples, and returns them as a batch of that size.

    Its `fresh` rows are those of every batch put whose first example it has,
    and of batches without examples before it.
    """
    parts, left = [], size
    while left and self._parts:
      part = self._parts.pop(0)
      if part.examples > left:
        part, rest = part.cut(left)
        self._parts.insert(0, rest)
      parts.append(part)
      left -= part.examples
    assert parts
    self.waiting -= size - left
    now = self._before < size
    fresh, self._fresh = self._fresh[now], self._fresh[~now]
    self._before = self._before[~now] - size
    vectors, self._vectors = self._vectors[now], self._vectors[~now]
    return _Cut(
      parts,
      size,
      fresh if len(fresh) else None,
      vectors if (vectors >= 0).any() else None,
    )

  def get_state(self) -> dict[str, Any]:
    """Returns all examples in the queue."""
    queued = None
    if self._parts:
      whole = _gathered(self._parts, self.waiting)
      whole = whole._replace(fresh=None, fresh_vectors=None)
      queued = {k: v for k, v in whole._asdict().items() if v is not None}
    own = {'fresh': self._fresh, 'before': self._before}
    return {'queued': queued, **own, 'vectors': self._vectors}


class SingleBatchQueue(Rebatcher):
  """A queue that returns the kept examples of each batch by themselves.

  It holds those of one batch at most.
  """

  _padded = 0

  def put(
    self, examples: Batch, index: Index = None, size: int | None = None
  ) -> None:
    """Puts those examples of a batch, to be padded to a size. None: not."""
    super().put(examples, index)
    self._padded = self.waiting if size is None else size

  def ready(self) -> bool:
    """Whether there is a batch."""
    return self.waiting > 0

  def cut(self) -> Callable[[], Batch]:
    """Removes the batch, with the fresh rows of batches without examples."""
    return self._cut(self._padded).batch


class PopularFirstQueue(Rebatcher):
  """A queue of batches in order, with popular examples first in each."""

  def __init__(
    self, hot: HotRows, batch_size: int, state: dict[str, Any] | None = None
  ) -> None:
    """Starts with the examples of a state from `get_state`, or empty."""
    super().__init__(batch_size, state)
    self._hot = hot

  def cut(self) -> Callable[[], Batch]:
    """Removes the next batch, with its padding last."""
    return functools.partial(self._in_order, super().cut())

  def _in_order(self, copy: Callable[[], Batch]) -> Batch:
    batch = copy()
    kind = np.where(is_popular(batch, self._hot), 0, 1)
    kind[batch.weights == 0] = 2
    order = np.argsort(kind, kind='stable')
    return batch.map(lambda column: column.take(order, axis=0))


class WorkingSetQueue:
  """A queue that regroups W batches' worth of examples at a time.

  The examples of the first `learn` batches keep their order.

  Attributes:
    longest: most examples that one of its two queues has held.
  """

  def __init__(
    self,
    working_set: int,
    learn: int,
    hot: HotRows,
    batch_size: int,
    state: dict[str, Any] | None = None,
  ) -> None:
    """Starts with the examples of a state from `get_state`, or empty."""
    self.batch_size, self._hot, self._set = batch_size, hot, working_set
    queued = (None, None) if state is None else state['queued']
    self._queues = [Rebatcher(batch_size, one) for one in queued]
    # Examples put since the last set, and the full batches of that set that
    # are due: popular ones, then others.
    self._gathered: int = 0 if state is None else state['gathered']
    self._learning = learn if state is None else state.get('learning', 0)
    self._due: list[int] = [0, 0] if state is None else list(state['due'])
    self.longest = 0

  @property
  def waiting(self) -> int:
    """Number of examples in the queue."""
    return sum(queue.waiting for queue in self._queues)

  def put(self, examples: Batch, index: Index = None) -> None:
    """Appends up to B examples of a batch.

    Raises:
      UserError: rows were reassigned to other ids.
    """
    popular, most = is_popular(examples, self._hot), self._set - 1
    if self._learning:  # all as if they were not popular, each batch at once
      popular, most = np.zeros_like(popular), 0
      self._learning -= 1
    kept = np.zeros(len(popular), bool)
    kept[slice(None) if index is None else index] = True
    kinds = kept & popular, kept & ~popular
    for queue, which in zip(self._queues, kinds, strict=True):
      queue.put(examples, positions(examples, which))
      self.longest = max(self.longest, queue.waiting)
    self._gathered += int(np.count_nonzero(kept))
    # The next B examples might be more than W batches' worth.
    if self._gathered > most * self.batch_size:
      self._gathered = 0
      self._due = [q.waiting // self.batch_size for q in self._queues]

  def ready(self) -> bool:
    """Whether full batches of the last working set are left."""
    return any(self._due)

  def take(self) -> Batch:
    """Returns the next batch of the set, or of all examples at the end."""
    return self.cut()()

  def cut(self) -> Callable[[], Batch]:
    """Removes the next batch. Returns what copies it, in any thread."""
    if not self.ready():
      return self._queues[0 if self._queues[0].waiting else 1].cut()
    kind = 0 if self._due[0] else 1
    self._due[kind] -= 1
    return self._queues[kind].cut()

  def get_state(self) -> dict[str, Any]:
    """Returns all examples, and how many batches are due."""
    return {
      'queued': [queue.get_state() for queue in self._queues],
      'gathered': self._gathered,
      'learning': self._learning,
      'due': list(self._due),
    }


Queue = Rebatcher | WorkingSetQueue
"""Examples that wait to be cut into batches, in an order of its own."""


SIZES = 8
"""Number of sizes of batches that are not filled up again. A program is
compiled for each size that occurs."""


def padded_size(
  kept: int, seen: int, batch_size: int, corrected: bool, multiple: int = 1
) -> tuple[int, float]:
  """Returns the size and scale of a batch of one source batch's kept examples.

  The size is a multiple of B / `SIZES`. A step divides the sum of its losses by
  the size of the batch, so the weights must be scaled. If the kept examples
  represent the dropped ones, the sum is divided by `batch_size`, else by the
  number of kept examples. A batch of which all is kept does not change.

  Args:
    kept: number of examples that are kept.
    seen: number of examples, none of them padding.
    batch_size: B, of the source.
    corrected: whether the kept examples represent the dropped ones.
    multiple: divides the size. A divisor of `batch_size`.

  Returns:
    The size, and `ScheduledBatch.scale`.
  """
  if kept in (0, seen):
    return batch_size if kept else 0, 1.0
  eighths = -(-SIZES * kept // batch_size)
  size = -(-batch_size * eighths // (SIZES * multiple)) * multiple
  return size, size / batch_size * (1 if corrected else seen / kept)


def real_examples(batch: Batch) -> Batch:
  """Returns the examples that are not padding."""
  real = batch.weights > 0
  return batch if real.all() else batch.map(lambda column: column[real])


def is_popular(batch: Batch, hot: HotRows) -> Bool[np.ndarray, ' B']:
  """Returns which examples look up hot rows only."""
  return only_hot(hot, batch.lookups)


def only_hot(hot: HotRows, lookups: Lookups) -> Bool[np.ndarray, ' n']:
  """Returns which examples look up only hot rows."""
  return hot_pattern(hot, lookups, len(lookups))


def hot_pattern(
  hot: HotRows, lookups: Lookups, examples: int
) -> Bool[np.ndarray, ' examples']:
  """Returns which examples look up only hot rows, repeated to a number."""
  lists = lookups.reshape(len(lookups), math.prod(lookups.shape[1:]))
  out = np.empty(examples, np.bool_)
  _only_hot(lists, hot.place, len(hot.rows), out)
  return out


@kernel
@no_type_check
def _only_hot(
  lists: np.ndarray, place: np.ndarray, cold: int, out: np.ndarray
) -> None:
  for i in range(min(len(lists), len(out))):
    out[i] = True
    for k in range(lists.shape[1]):
      row = lists[i, k]
      if row >= 0 and place[row] == cold:
        out[i] = False
        break
  for i in range(len(lists), len(out)):
    out[i] = out[i - len(lists)]


def positions(batch: Batch, which: Bool[np.ndarray, ' B']) -> Index:
  """Returns the positions of some examples, in a batch without reassigned rows.

  Raises:
    UserError: it has such rows.
  """
  if batch.fresh is not None and len(batch.fresh):
    raise UserError(
      'examples change places only where rows keep their ids',
      got=f'{len(batch.fresh)} rows that got another one',
      where='Batch.fresh',
      hint='train in the order of the source, or map ids by a vocabulary that'
      ' does not grow',
    )
  return np.flatnonzero(which)


def corrected(batch: Batch, selection: Selection) -> tuple[Batch, Index]:
  """Multiplies weights and adds offsets. Returns which examples are kept."""
  weights = batch.weights * selection.weight
  batch = batch._replace(weights=weights)
  if selection.offset is not None:
    own = batch.offset
    added = selection.offset if own is None else own + selection.offset
    batch = batch._replace(offset=added)
  index = np.flatnonzero(selection.keep)
  return batch, None if len(index) == len(selection.keep) else index
