"""Who leaves a cache first: policies as priorities that change only by use."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.placement import cache_kernels as kernels
from slipstream_jax.placement.base import check_hot
from slipstream_jax.types import HotRows, RowIds, Unique

HALF_LIFE = 1000
"""Steps after which a use counts half."""

_REBASE = 60 * HALF_LIFE  # 2**60 later, counts are scaled down: f32 ends at 127
_HOT = 1 << 30  # above what a cold row gets: slots and steps together

Priorities = Int[np.ndarray, ' U']
"""Of rows or slots, i32, at least 1; the lowest leaves first."""


class Eviction(NamedTuple):
  """A policy: the priorities of rows, which only change when they are used."""

  start: Callable[[int, HotRows | None, RowIds], tuple[Any, Priorities]]
  """N, the hot rows and the first contents i64[C] to what the policy
  remembers, and to the priority of each slot; those of empty ones are
  ignored."""
  used: Callable[[Any, Unique, int], Priorities]
  """Memory, which it changes in place, a batch and its number to the
  priorities of the batch's rows from then on."""
  renew: Callable[[Any, RowIds, int], Priorities | None] = (
    lambda memory, contents, step: None
  )
  """Memory, contents and the number of the batch that comes next to new
  priorities of all slots; None: they stay."""
  looks_ahead: bool = False
  """Whether rows that a known batch will use stay as long as others can go."""


def _lru_start(
  num_rows: int, hot: HotRows | None, contents: RowIds
) -> tuple[int, Priorities]:
  slots = len(contents)
  # The most popular row comes first and leaves last; a use beats them all.
  return slots, np.arange(slots, 0, -1, dtype=np.int32)


def _lru_used(slots: int, batch: Unique, step: int) -> Priorities:
  return np.full(len(batch.rows), slots + 1 + step, np.int32)


def _static_start(
  num_rows: int, hot: HotRows | None, contents: RowIds
) -> tuple[tuple[int, int], Priorities]:
  hot = check_hot(hot, 'eviction static ranks rows by their popularity')
  slots, cold = _lru_start(num_rows, hot, contents)
  num_hot = len(hot.rows)
  return (slots, num_hot), _static(hot.places(contents), num_hot, cold)


def _static(
  hot_index: Int[np.ndarray, ' U'], num_hot: int, cold: Priorities | int
) -> Priorities:
  # Hot rows come most popular first, so their index is their rank.
  ranked = np.where(hot_index < num_hot, _HOT + num_hot - hot_index, cold)
  return ranked.astype(np.int32)


def _static_used(
  memory: tuple[int, int], batch: Unique, step: int
) -> Priorities:
  slots, num_hot = memory
  assert batch.hot is not None
  return _static(batch.hot, num_hot, slots + 1 + step)


Counts = Float[np.ndarray, ' N']
"""Uses of each row, f32, in or out of the cache: the later, the more one
counts, so that no count needs to age."""


def _lfu_start(
  num_rows: int, hot: HotRows | None, contents: RowIds
) -> tuple[Counts, Priorities]:
  counts, slots = np.zeros(num_rows, np.float32), len(contents)
  full = np.flatnonzero(contents >= 0)
  counts[contents[full]] = 2 - full / slots  # above a row used once
  return counts, _by_count(counts.take(contents))


def _lfu_used(counts: Counts, batch: Unique, step: int) -> Priorities:
  # Only ratios matter, so a use of today counts more where else all N counts
  # would have to be halved.
  now = np.float32(2 ** (step % _REBASE / HALF_LIFE))
  updated = np.empty(len(batch.rows), np.float32)
  kernels.add_use(counts, batch.rows, now, updated)
  return _by_count(updated)


def _lfu_renew(
  counts: Counts, contents: RowIds, step: int
) -> Priorities | None:
  if step == 0 or step % _REBASE:
    return None
  counts *= np.float32(2 ** (-_REBASE / HALF_LIFE))
  return _by_count(counts.take(contents))


def _by_count(counts: Float[np.ndarray, ' U']) -> Priorities:
  # Floats that are not negative sort as their bits do; 0 is of empty slots.
  return counts.view(np.int32) + 1


_LFU = Eviction(_lfu_start, _lfu_used, _lfu_renew)

EVICTIONS: dict[str, Eviction] = {
  'static': Eviction(_static_start, _static_used),
  'lru': Eviction(_lru_start, _lru_used),
  'lfu': _LFU,
  'look_ahead': _LFU._replace(looks_ahead=True),
}
"""The policies by name. First leaves, with `static`, a cold row, then the least
popular hot one; `lru`, the one unused for longest; `lfu`, the one used least,
where uses age; `look_ahead`, one that no known batch uses, by `lfu`, and then
the one whose next use is the latest."""
