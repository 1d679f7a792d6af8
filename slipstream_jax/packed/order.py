"""The order of stored examples: a pure function of seed, epoch and shard.

Examples are shuffled in two steps, so that neither the data nor their order
ever has to fit memory: blocks of consecutive examples are put in random order,
and groups of that sequence, as long as a buffer, are mixed example by example.
One epoch gives every example once. Random numbers are hashes, so an order stays
the same on every machine and under every version of numpy.

Shards: where examples are shuffled, each has its own stretch of the sequence of
blocks, so that it reads little but its own. In file order, batch t of all
shards, side by side, is batch t of a single reader with larger batches.
"""

from collections.abc import Iterator
import functools
from typing import NamedTuple, no_type_check

from jaxtyping import Int
import numpy as np

from slipstream_jax.data.numbered import check_batch_size
from slipstream_jax.errors import check_seed, UserError
from slipstream_jax.hashing import hashed, kernel, unit


class Order(NamedTuple):
  """Which examples a shard reads, in which order."""

  first: int
  """The first example."""
  end: int
  """The example after the last one."""
  batch_size: int
  """B."""
  pad: bool
  """Whether the last batch of an epoch is padded rather than left out."""
  seed: int | None
  """None is file order."""
  shard: int
  """Which of the `shards`."""
  shards: int
  """How many share the examples; each gets as many batches."""
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
    """Examples of this shard's epoch; padding is not counted."""
    whole = (self.end - self.first) // (self.shards * self.batch_size)
    if not self.pad:
      return whole * self.batch_size
    # A shard of one example fewer may have none left for its last batch. That
    # is then all padding, as shards must take equally many steps.
    if self.seed is not None:
      return self._stretch(self.shard + 1) - self._stretch(self.shard)
    rest = self.end - self.first - whole * self.shards * self.batch_size
    own = min(max(rest - self.shard * self.batch_size, 0), self.batch_size)
    return whole * self.batch_size + own

  @property
  def groups(self) -> int:
    """Groups of this shard's epoch."""
    return -(-self.examples // self.group)

  def bounds(self, group: int) -> tuple[int, int]:
    """Where a group begins and ends among the epoch's examples."""
    # As long as one another, but for one example: were the last one a short
    # rest, its batches would be mixed of few examples.
    return (
      group * self.examples // self.groups,
      (group + 1) * self.examples // self.groups,
    )

  def _stretch(self, shard: int) -> int:
    """Where a shard begins, counting examples in the sequence of blocks."""
    # Stretches differ by one example at most, so none is too short for the
    # whole batches of an epoch. One may end inside of a block, of which two
    # shards then read a part each.
    return shard * (self.end - self.first) // self.shards


def check(order: Order, examples: int) -> None:
  """Looks at an order before it is used on a data set of `examples` examples.

  Raises:
    UserError: an argument is out of range, or a shard has not one batch.
  """
  check_batch_size(order.batch_size, 'PackedBatches, batch_size')
  if order.seed is not None:
    check_seed(order.seed, 'PackedBatches, shuffle_seed')
  for good, rule, got, argument, hint in (
    (
      0 <= order.first < order.end <= examples,
      f'examples must be a range of those of the data set, [0, {examples})',
      f'[{order.first}, {order.end})',
      'first and end',
      "take one of the manifest's splits",
    ),
    (
      0 <= order.shard < order.shards,
      'a shard must be (index, count) with an index in [0, count)',
      (order.shard, order.shards),
      'shard',
      'number the shards from 0 on',
    ),
    (
      order.block >= 1,
      'a block must hold at least one example',
      order.block,
      'block',
      'leave it at its default',
    ),
    (
      order.group >= 1,
      'a buffer must hold at least two examples',
      2 * order.group,
      'buffer_bytes',
      'leave it at its default',
    ),
  ):
    if not good:
      where = f'PackedBatches, {argument}'
      raise UserError(rule, got=got, where=where, hint=hint)
  if order.batches < 1:
    raise UserError(
      f'{order.shards} shards need examples for a batch of'
      f' {order.batch_size} each',
      got=order.end - order.first,
      where='PackedBatches, batch_size',
      hint='set a smaller batch size, or give more examples',
    )


def group_of(order: Order, place: int) -> int:
  """The group of the epoch's example number `place`, below `order.examples`."""
  # As `bounds` rounds down, a group may begin one place earlier than this says.
  guess = place * order.groups // order.examples
  return guess if place < order.bounds(guess)[1] else guess + 1


def runs(order: Order, epoch: int, group: int) -> Iterator[tuple[int, int]]:
  """Stored examples of a group: ranges [first, end) of at most a block each."""
  begin, end = order.bounds(group)
  if order.seed is None:
    return _interleaved(order, begin, end)
  base = order._stretch(order.shard)
  return _shuffled(order, epoch, base + begin, base + end)


def _interleaved(
  order: Order, begin: int, end: int
) -> Iterator[tuple[int, int]]:
  """Each shard's share of the batches of all, one after the other."""
  size = order.batch_size
  while begin < end:
    batch, within = divmod(begin, size)
    first = order.first + begin
    left = end - begin
    # What follows in the file is the next shard's, so a run ends with a batch.
    if order.shards > 1:
      first = order.first + (batch * order.shards + order.shard) * size + within
      left = min(left, size - within)
    count = min(left, order.block)
    yield first, first + count
    begin += count


def _shuffled(
  order: Order, epoch: int, begin: int, end: int
) -> Iterator[tuple[int, int]]:
  """The blocks, or parts of them, between two places of their sequence."""
  examples = order.end - order.first
  blocks, starts = _block_order(order.seed or 0, epoch, examples, order.block)
  # The last block may be a short one and stands anywhere, so that begins are
  # looked up rather than multiplied.
  at = int(np.searchsorted(starts, begin, side='right')) - 1
  while begin < end:
    stop = min(end, int(starts[at + 1]))
    # From a place in the sequence to the example stored there.
    shift = order.first + int(blocks[at]) * order.block - int(starts[at])
    yield shift + begin, shift + stop
    begin, at = stop, at + 1


@functools.lru_cache(maxsize=4)  # an epoch, and the next one read ahead
def _block_order(
  seed: int, epoch: int, examples: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
  """Blocks in their order i64[n], and where each begins: i64[n + 1]."""
  number = -(-examples // block)
  blocks = np.arange(number)
  # The shard is not in the key: all must agree on what they share out.
  shuffle(_key(seed, epoch, 0), blocks)
  lengths = np.minimum(block, examples - blocks * block)
  return blocks, np.append(0, np.cumsum(lengths))


def places(order: Order, epoch: int, group: int) -> Int[np.ndarray, ' n']:
  """Where each of a group's examples goes when they are mixed, i32[n]."""
  begin, end = order.bounds(group)
  mixed = np.arange(end - begin, dtype=np.int32)
  if order.seed is not None:
    shuffle(_key(order.seed, epoch, 1, order.shard, group), mixed)
  return mixed


def _key(*numbers: int) -> np.uint64:
  """A hash of whole numbers from 0 on."""
  key = np.uint64(0)
  for number in numbers:
    # Compiled functions give back Python's int.
    key = np.uint64(hashed(key, number))
  return key


@kernel
@no_type_check
def shuffle(key: np.uint64, values: np.ndarray) -> None:
  """Puts values in a random order that depends on the key alone."""
  # Fisher and Yates: from the end, each changes places with one up to it.
  for last in range(len(values) - 1, 0, -1):
    # Of 53 bits: no order is noticeably more likely than another.
    other = np.int64(unit(hashed(key, last)) * (last + 1))
    values[last], values[other] = values[other], values[last]
