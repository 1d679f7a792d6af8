"""The order of stored examples: a pure function of seed, epoch and shard.

Examples are shuffled in two steps, so neither the data nor their order must fit
into memory. Blocks of consecutive examples are put in random order. Then groups
of that sequence, each as long as a buffer, are mixed example by example. Random
numbers are hashes, so an order is the same on every machine.

Shards: if examples are shuffled, each shard has its own range of the sequence
of blocks. In file order, batch t of all shards, side by side, is batch t of a
single reader with larger batches.
"""

from collections.abc import Iterator
import functools
from typing import NamedTuple, no_type_check

from jaxtyping import Int
import numpy as np

from slipstream_jax.data.numbered import check_batch_size, check_pad_remainder
from slipstream_jax.errors import check_seed, UserError
from slipstream_jax.hashing import hashed, kernel, unit


class Order(NamedTuple):
  """Which examples a shard reads, and in which order."""

  first: int
  end: int
  """Example after the last one."""
  batch_size: int
  pad: bool
  """Whether the last batch of an epoch is padded. Else it is left out."""
  seed: int | None
  """None for file order."""
  shard: int
  shards: int
  """Number of shards. All have as many batches."""
  block: int
  """Consecutive examples that stay together until they are mixed."""
  group: int
  """Most examples that are mixed with one another."""

  @property
  def batches(self) -> int:
    """Batches of an epoch, the same in every shard."""
    whole, rest = divmod(self.end - self.first, self.shards * self.batch_size)
    return whole + (1 if rest and self.pad else 0)

  @property
  def examples(self) -> int:
    """Examples of this shard's epoch, without padding."""
    whole = (self.end - self.first) // (self.shards * self.batch_size)
    if not self.pad:
      return whole * self.batch_size
    # All shards must take as many steps, so the last batch of a shard with few
    # examples may be only padding.
    if self.seed is not None:
      return self._begin(self.shard + 1) - self._begin(self.shard)
    rest = self.end - self.first - whole * self.shards * self.batch_size
    own = min(max(rest - self.shard * self.batch_size, 0), self.batch_size)
    return whole * self.batch_size + own

  @property
  def groups(self) -> int:
    """Groups of this shard's epoch."""
    return -(-self.examples // self.group)

  def bounds(self, group: int) -> tuple[int, int]:
    """Returns the range [begin, end) of a group among the epoch's examples."""
    # Lengths differ by at most one. A short last group would mix its batches
    # from few examples.
    return (
      group * self.examples // self.groups,
      (group + 1) * self.examples // self.groups,
    )

  def group_of(self, place: int) -> int:
    """Returns the group of the epoch's example number `place`."""
    return ((place + 1) * self.groups - 1) // self.examples

  def _begin(self, shard: int) -> int:
    """Returns a shard's first example in the sequence of blocks."""
    # Lengths differ by at most one, so each shard has enough for its batches.
    # A block at the border is read by two shards, each a part of it.
    return shard * (self.end - self.first) // self.shards


def check(order: Order, examples: int) -> None:
  """Raises a `UserError` if a data set of n examples has no such order."""
  check_batch_size(order.batch_size, 'PackedBatches, batch_size')
  check_pad_remainder(order.pad, 'PackedBatches')
  if order.seed is not None:
    check_seed(order.seed, 'PackedBatches, shuffle_seed')
  default = 'leave it at its default'
  shards = order.shards
  for good, argument, got, rule, hint in (
    (
      *(0 <= order.first < order.end <= examples, 'first and end'),
      f'[{order.first}, {order.end})',
      f'examples must be a range of those of the data set, [0, {examples})',
      "take one of the manifest's splits",
    ),
    (
      *(0 <= order.shard < shards, 'shard', (order.shard, shards)),
      'a shard must be (index, count) with an index in [0, count)',
      'number the shards from 0 on',
    ),
    (
      *(order.block >= 1, 'block', order.block),
      *('a block must hold at least one example', default),
    ),
    (
      *(order.group >= 1, 'buffer_bytes', 2 * order.group),
      *('a buffer must hold at least two examples', default),
    ),
    (
      # Not computed if the shards are invalid.
      *(shards < 1 or order.batches >= 1, 'batch_size'),
      order.end - order.first,
      f'{shards} shards need examples for a batch of {order.batch_size} each',
      'set a smaller batch size, or give more examples',
    ),
  ):
    if not good:
      where = f'PackedBatches, {argument}'
      raise UserError(rule, got=got, where=where, hint=hint)


def runs(order: Order, epoch: int, group: int) -> Iterator[tuple[int, int]]:
  """Yields a group's ranges of stored examples, none longer than a block."""
  begin, end = order.bounds(group)
  if order.seed is None:
    return _interleaved(order, begin, end)
  base = order._begin(order.shard)
  return _shuffled(order, epoch, base + begin, base + end)


def _interleaved(
  order: Order, begin: int, end: int
) -> Iterator[tuple[int, int]]:
  """Yields a shard's share of the examples in file order."""
  size = order.batch_size
  while begin < end:
    batch, within = divmod(begin, size)
    first = order.first + begin
    left = end - begin
    # The next examples in the file are another shard's, so a range ends with
    # its batch.
    if order.shards > 1:
      first = order.first + (batch * order.shards + order.shard) * size + within
      left = min(left, size - within)
    count = min(left, order.block)
    yield first, first + count
    begin += count


def _shuffled(
  order: Order, epoch: int, begin: int, end: int
) -> Iterator[tuple[int, int]]:
  """Yields the blocks, or parts of them, of a range of their sequence."""
  examples = order.end - order.first
  blocks, starts = _block_order(order.seed or 0, epoch, examples, order.block)
  # One block may be shorter, and may be anywhere, so starts are looked up.
  at = int(np.searchsorted(starts, begin, side='right')) - 1
  while begin < end:
    stop = min(end, int(starts[at + 1]))
    # Difference between a stored example and its place in the sequence.
    shift = order.first + int(blocks[at]) * order.block - int(starts[at])
    yield shift + begin, shift + stop
    begin, at = stop, at + 1


@functools.lru_cache(maxsize=4)  # an epoch, and the next one read ahead
def _block_order(
  seed: int, epoch: int, examples: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the blocks in order, i64[n], and their starts, i64[n + 1]."""
  number = -(-examples // block)
  blocks = np.arange(number)
  # The key does not depend on the shard, because all share one sequence.
  shuffle(_key(seed, epoch, 0), blocks)
  lengths = np.minimum(block, examples - blocks * block)
  return blocks, np.append(0, np.cumsum(lengths))


def places(order: Order, epoch: int, group: int) -> Int[np.ndarray, ' n']:
  """Returns the mixed place of each of a group's examples, i32[n]."""
  begin, end = order.bounds(group)
  mixed = np.arange(end - begin, dtype=np.int32)
  if order.seed is not None:
    shuffle(_key(order.seed, epoch, 1, order.shard, group), mixed)
  return mixed


def _key(*numbers: int) -> np.uint64:
  """Returns a hash of whole numbers from 0 on."""
  key = np.uint64(0)
  for number in numbers:
    # Compiled functions return Python's int.
    key = np.uint64(hashed(key, number))
  return key


@kernel
@no_type_check
def shuffle(key: np.uint64, values: np.ndarray) -> None:
  """Puts values in a random order that depends only on the key."""
  # Fisher and Yates: from the end, each is swapped with itself or one before.
  for last in range(len(values) - 1, 0, -1):
    # With 53 bits, no order is noticeably more likely than another.
    other = np.int64(unit(hashed(key, last)) * (last + 1))
    values[last], values[other] = values[other], values[last]
