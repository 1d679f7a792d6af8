"""Sources whose batch is a function of its number: they resume anywhere.

A count alone would continue any source anywhere: other examples would be left
out, or trained twice, and nobody would know. So a position is a count of
batches and a checksum of what decides which examples are in which batch.
"""

from collections.abc import Callable, Iterable, Iterator
import functools
import json
from typing import Any, Protocol, runtime_checkable
import zlib

from jaxtyping import Int
import numpy as np

from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.types import Batch

_SAMPLED = 1 << 10  # examples that tell one data set from another


@runtime_checkable
class Column(Protocol):
  """The values of all examples, such as an array, as a checksum reads them."""

  @property
  def dtype(self) -> np.dtype:
    """Type of the values."""
    ...

  @property
  def shape(self) -> tuple[int, ...]:
    """[n, ...]."""
    ...

  def __len__(self) -> int: ...

  def __getitem__(self, rows: Any) -> np.ndarray: ...


class Numbered:
  """Batches made by a function of their number; a `BatchSource`.

  Attributes:
    batch_at: the function, from 0, 1, ... to a batch.
  """

  def __init__(
    self,
    batch_at: Callable[[int], Batch],
    batches: int | None,
    order: object,
    columns: Iterable[Column] = (),
    *,
    reads: str,
  ) -> None:
    """Batches number 0, 1, ... of `batch_at`.

    Args:
      batch_at: asked for one number after the other, but after `set_state`;
        for the same one again if it raised.
      batches: how many there are; None is endless.
      order: what decides which examples are in which batch; JSON, or numpy's
        numbers. A position is refused by a source of another order.
      columns: arrays [n, ...] of the examples, where `order` does not tell them
        apart; 1,024 of each are compared.
      reads: the examples in words, for the error of a refused position.
    """
    self.batch_at, self._batches, self._reads = batch_at, batches, reads
    self._order, self._delivered = order, 0
    self.recheck(columns)

  def recheck(self, columns: Iterable[Column]) -> None:
    """Takes other columns to tell the examples of positions apart."""
    self._columns = tuple(columns)
    self.__dict__.pop('_checksum', None)

  # Made when it is first asked for: a source that nobody saves needs none.
  @functools.cached_property
  def _checksum(self) -> int:
    return checksum(self._order, self._columns)

  @property
  def endless(self) -> bool:
    """Whether the batches never end."""
    return self._batches is None

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    if self._batches is not None and self._delivered >= self._batches:
      raise StopIteration
    # Counted afterwards: one that raised is asked for again.
    batch = self.batch_at(self._delivered)
    self._delivered += 1
    return batch

  def get_state(self) -> dict[str, int]:
    """Batches delivered since the start, and a checksum of their order."""
    return {'delivered': self._delivered, 'order': self._checksum}

  def set_state(self, state: dict[str, int]) -> None:
    """Continues after the batches that `state` counts.

    Raises:
      UserError: it is of other data or of another order, in which other
        examples would be left.
    """
    delivered = state.get('delivered')
    if state.get('order') != self._checksum or not is_whole(delivered, 0):
      raise UserError(
        'a resumed run must read the same examples in the same order',
        got=self._reads,
        where='set_state, state',
        hint='use the data, seed and batch size that the run was started with',
      )
    self._delivered = int(state['delivered'])

  def close(self) -> None:
    """Nothing to give back."""


def check_batch_size(batch_size: object, where: str) -> None:
  """Looks at B.

  Raises:
    UserError: it is no whole number of at least 1.
  """
  if not is_whole(batch_size, 1):
    raise UserError(
      'a batch must hold at least one example, a whole number of them',
      got=repr(batch_size),
      where=where,
      hint='set it, e.g. to 1024',
    )


def batches_of(epochs: int | None, per_epoch: int, where: str) -> int | None:
  """Batches of so many passes over the examples; None is endless.

  Raises:
    UserError: `epochs` is neither None nor a whole number of at least 1.
  """
  if epochs is None:
    return None
  if not is_whole(epochs, 1):
    raise UserError(
      'epochs must be a whole number of at least 1, or None for no end',
      got=repr(epochs),
      where=f'{where}, epochs',
      hint='give the passes to make over the examples',
    )
  return epochs * per_epoch


def batches_per_epoch(
  examples: int, batch_size: int, pad: bool, where: str
) -> int:
  """Batches of one pass, the last of which is filled up, or left out.

  Raises:
    UserError: there are too few examples for one.
  """
  check_batch_size(batch_size, where)
  whole, rest = divmod(examples, batch_size)
  batches = whole + (1 if rest and pad else 0)
  if batches < 1:
    raise UserError(
      f'a batch of {batch_size} needs at least as many examples',
      got=examples,
      where=where,
      hint='set a smaller batch size or give more examples',
    )
  return batches


def order_of_epochs(
  examples: int, seed: int | None
) -> Callable[[int], Int[np.ndarray, ' n']]:
  """The order of each epoch, i64[n], shuffled by (seed, epoch) if it can be."""

  # Epochs follow one another, so one order is enough to keep.
  @functools.lru_cache(maxsize=1)
  def order_of(epoch: int) -> Int[np.ndarray, ' n']:
    order = np.arange(examples)
    if seed is not None:
      np.random.default_rng((seed, epoch)).shuffle(order)
    return order

  return order_of


def checksum(order: object, columns: Iterable[Column] = ()) -> int:
  """CRC-32 of a description and of 1,024 examples' values, evenly spaced.

  Args:
    order: as in `Numbered`.
    columns: arrays [n, ...] of the examples.
  """
  # JSON, as it says the same on every machine and in every process. Tuples
  # and lists are one to it; numpy's numbers it must be helped with.
  crc = zlib.crc32(json.dumps(order, default=lambda x: x.item()).encode())
  for column in columns:
    form = f'{column.dtype.str} {column.shape}'.encode()
    last = len(column) - 1
    # From the first to the last: other data, or the same in another order,
    # would hardly agree in all of these, and so few are soon read.
    some = np.linspace(0, last, min(last + 1, _SAMPLED)).astype(np.int64)
    crc = zlib.crc32(column[some].tobytes(), zlib.crc32(form, crc))
  return crc
