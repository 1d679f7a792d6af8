"""Cache eviction policies: priorities of rows that only a use changes."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.placement.base import check_hot
from slipstream_jax.types import HotRows, RowIds, Unique

HALF_LIFE = 1000
"""Steps after which the weight of a use has halved."""

# counts are scaled down before f32 overflows at 2**127
_REBASE = 60 * HALF_LIFE
_HOT = 1 << 30  # above all priorities of cold rows, slots + steps

Priorities = Int[np.ndarray, ' U']
"""Priorities of rows or slots, i32, at least 1. The lowest is evicted first."""

Counts = Float[np.ndarray, ' N']
"""Uses of each row that is in no slot, f32. The priority of a slot has the
count of its row. Later uses weigh more, which spares ageing the counts."""


class Uses(NamedTuple):
  """The new priorities of a batch's rows: given, or by count."""

  priorities: Priorities = np.empty(0, np.int32)
  counts: Counts = np.empty(0, np.float32)
  """Empty: priorities are given."""
  weight: np.float32 = np.float32(0)
  """Number that the batch adds to the count of each of its rows."""


class Eviction(NamedTuple):
  """An eviction policy: the priorities of rows, which change only with use."""

  start: Callable[[Counts, HotRows | None, RowIds], tuple[Any, Priorities]]
  """Returns the policy's memory and the priority of each slot, given zeros, the
  hot rows and the first rows in the slots, i64[C]. Priorities of empty slots
  are ignored."""
  used: Callable[[Any, Unique, int], Uses]
  """Returns the new priorities, given the memory, the batch and its number."""
  counts: bool = False
  """Whether priorities are by count. Others must not use the zeros."""
  renew: Callable[[Any, Priorities, int], Priorities | None] = (
    lambda memory, priorities, step: None
  )
  """Returns new priorities of all slots, or None to keep them, given the
  memory, the priorities and the number of the next batch."""
  reads_hot: bool = False
  """Whether `used` reads `Unique.hot`."""
  looks_ahead: bool = False
  """Whether rows of known batches are kept as long as others can be evicted."""


def _lru_start(
  counts: Counts, hot: HotRows | None, contents: RowIds
) -> tuple[int, Priorities]:
  slots = len(contents)
  # The most popular row comes first and is evicted last. Any use ranks higher.
  return slots, np.arange(slots, 0, -1, dtype=np.int32)


def _lru_used(slots: int, batch: Unique, step: int) -> Uses:
  return Uses(np.full(len(batch.rows), slots + 1 + step, np.int32))


def last(policy: Eviction, kept: Callable[[RowIds], np.ndarray]) -> Eviction:
  """Returns a policy that evicts some rows after all others.

  Args:
    policy: how others are evicted, not by count.
    kept: returns which rows i64[U] are evicted last, bool[U].
  """

  def used(memory: Any, batch: Unique, step: int) -> Uses:
    cold = policy.used(memory, batch, step).priorities
    return Uses(np.where(kept(batch.rows), np.int32(_HOT), cold))

  return policy._replace(used=used)


def _static_start(
  counts: Counts, hot: HotRows | None, contents: RowIds
) -> tuple[tuple[int, int], Priorities]:
  hot = check_hot(hot, 'eviction static ranks rows by their popularity')
  slots, cold = _lru_start(counts, hot, contents)
  num_hot = len(hot.rows)
  return (slots, num_hot), _static(hot.places(contents), num_hot, cold)


def _static(
  hot_index: Int[np.ndarray, ' U'], num_hot: int, cold: Priorities | int
) -> Priorities:
  # Hot rows are sorted by popularity, so their index is their rank.
  ranked = np.where(hot_index < num_hot, _HOT + num_hot - hot_index, cold)
  return ranked.astype(np.int32)


def _static_used(memory: tuple[int, int], batch: Unique, step: int) -> Uses:
  slots, num_hot = memory
  assert batch.hot is not None
  return Uses(_static(batch.hot, num_hot, slots + 1 + step))


def _by_count(counts: Float[np.ndarray, ' U']) -> Priorities:
  # Non-negative floats sort like their bits. 0 is for empty slots.
  return counts.view(np.int32) + 1


def _lfu_start(
  counts: Counts, hot: HotRows | None, contents: RowIds
) -> tuple[Counts, Priorities]:
  slots = len(contents)
  first = 2 - np.arange(slots) / slots  # above that of a row used once
  return counts, _by_count(first.astype(np.float32))


def _lfu_used(counts: Counts, batch: Unique, step: int) -> Uses:
  # Only ratios matter, so later uses weigh more and the N counts need no decay.
  weight = np.float32(2 ** (step % _REBASE / HALF_LIFE))
  return Uses(counts=counts, weight=weight)


def _lfu_renew(
  counts: Counts, priorities: Priorities, step: int
) -> Priorities | None:
  if step == 0 or step % _REBASE:
    return None
  scale = np.float32(2 ** (-_REBASE / HALF_LIFE))
  counts *= scale
  return _by_count((priorities - 1).view(np.float32) * scale)


_LFU = Eviction(_lfu_start, _lfu_used, counts=True, renew=_lfu_renew)

EVICTIONS: dict[str, Eviction] = {
  'static': Eviction(_static_start, _static_used, reads_hot=True),
  'lru': Eviction(_lru_start, _lru_used),
  'lfu': _LFU,
  'look_ahead': _LFU._replace(looks_ahead=True),
}
"""The policies by name.

`static` evicts cold rows first, then the least popular hot row. `lru` evicts
the least recently used row. `lfu` evicts the least used row, with ageing.
`look_ahead` evicts rows that no known batch uses, by `lfu`, then the row whose
next use is the latest.
"""
