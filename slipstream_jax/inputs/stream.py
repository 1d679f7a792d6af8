"""Batches that come from an iterator of dicts: a pipeline, or a generator."""

import base64
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
import copy
import inspect
import itertools
from typing import Any, NamedTuple

import numpy as np

from slipstream_jax.data.interrupts import held
from slipstream_jax.data.numbered import check_batch_size, checksum, pad_batch
from slipstream_jax.data.source import BatchSource, ColumnNames, Widths
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.arrays import Form, form_of, UnboundExamples, WHERE
from slipstream_jax.inputs.bind import (
  Examples,
  examples_of,
  Growth,
  IdRules,
  RawColumn,
  Replace,
  words_of,
)
from slipstream_jax.inputs.fields import (
  check_names,
  completed,
  Fields,
  NamedColumns,
  Numbers,
  read_features,
  read_numbers,
)
from slipstream_jax.tables import TableSet
from slipstream_jax.types import Batch
from slipstream_jax.vocabulary.growing import Cursor
from slipstream_jax.vocabulary.growing import Position as VocabularyState

Items = Iterable[Any] | Callable[[], Iterable[Any]]
Unused = tuple[list[Any], list[Any], str | None]
"""Batches and then items of a one-way iterator that were read and not trained,
and the error that it raised after them."""


class Reader:
  """Reads the items of a stream one at a time.

  Attributes:
    again: makes the iterator again, from its start. None: the user holds the
      iterator.
    position: the iterator's state before the waiting item, as JSON. None if it
      has no state.
    waiting: items that were read and not taken yet.
    error: the last error of the iterator, in words.
  """

  def __init__(self, items: Items) -> None:
    """Opens an iterator of the items and reads none.

    Raises:
      UserError: `items` is a function that takes arguments.
    """

    def again() -> Iterator[Any]:
      return iter(items() if callable(items) else items)

    if callable(items):
      _check_call(items)
    self._iterator: Any = again()
    self.again = None if self._iterator is items else again
    self.position = state_of(self._iterator)
    self.waiting: list[Any] = []
    self.error: str | None = None
    self._after: list[Any] = []  # the position after the waiting item

  @property
  def one_way(self) -> bool:
    """Whether items cannot be read a second time."""
    return self.again is None and self.position is None

  def peek(self) -> list[Any]:
    """Returns a list of the next item, or an empty list at the end.

    The item stays the same until `take`. Raises a `UserError` if the iterator
    has ended because of an error.
    """
    if not self.waiting:
      if self.error is not None and self.position is not None:
        self.set_state(self.position)
      try:
        # In C, so that Ctrl-C cannot lose an item.
        self.waiting.extend(itertools.islice(self._iterator, 1))
      except BaseException as error:
        self.error = f'{type(error).__name__}: {error}'
        raise
      if not self.waiting and self.error is not None:
        raise UserError(
          'an iterator that raised an error must give its next item',
          got=f'an end, after {self.error}',
          where='batches, data',
          hint='give a function that makes the iterator, so that it can be'
          ' read anew',
        )
      self.error = None
    if self.waiting and not self._after:
      self._after.append(state_of(self._iterator))
    return self.waiting[:1]

  def take(self) -> None:
    """Removes the item that `peek` returned."""
    self.waiting.pop(0)
    self.position = self._after.pop()

  def check_settable(self, position: Any) -> None:
    """Raises a `UserError` if the iterator cannot be set to a position."""
    if position is None or not hasattr(self._iterator, 'set_state'):
      raise UserError(
        'only a source that can be set to a position can be continued',
        got=type(self._iterator).__name__,
        where='set_state, state',
        hint="give an iterator with grain's get_state and set_state, or arrays",
      )

  def set_state(self, position: Any) -> None:
    """Sets the iterator to a position that `check_settable` has checked."""
    self._iterator.set_state(from_json(position))
    self.begin(self._iterator, position)

  def begin(self, iterator: Any, position: Any) -> None:
    """Continues with an iterator at this position, and closes another one."""
    old, self._iterator = self._iterator, iterator
    self.position, self.error = position, None
    self.waiting.clear()
    self._after.clear()
    if old is not iterator:
      getattr(old, 'close', lambda: None)()

  def close(self) -> None:
    """Closes the iterator, unless the user holds it."""
    if self.again is not None:
      getattr(self._iterator, 'close', lambda: None)()


def _check_call(make: Callable[[], object]) -> None:
  try:
    inspect.signature(make).bind()
  except TypeError as error:
    raise UserError(
      'a function that makes an iterator must take no arguments',
      got=f'{make!r}: {error}',
      where='batches, data',
      hint='bind what it needs, as functools.partial does',
    ) from error
  except ValueError:  # builtins have no signature
    pass


def state_of(iterator: Any) -> Any:
  """Returns the state of an iterator as JSON, or None if it has no state."""
  if not (hasattr(iterator, 'get_state') and hasattr(iterator, 'set_state')):
    return None
  state = iterator.get_state()
  if isinstance(state, bytes):  # as grain's DataLoader has it
    return {'base64': base64.b64encode(state).decode()}
  return {'json': state}


def from_json(position: dict[str, Any]) -> Any:
  """Returns the state of an iterator from the result of `state_of`."""
  coded = position.get('base64')
  return position['json'] if coded is None else base64.b64decode(coded)


class StreamExamples(UnboundExamples):
  """Batches by name from an iterator."""

  def __init__(
    self, items: Items, fields: Fields, rules: IdRules, batch_size: int | None
  ) -> None:
    """Takes an iterator and reads nothing yet.

    A list or a function makes an iterator for each `bind`. Without a batch size
    B, it is the number of examples of the first batch.

    Raises:
      UserError: the batch size is out of range.
    """
    super().__init__(rules, None)
    if batch_size is not None:
      check_batch_size(batch_size, f'{WHERE}, batch_size')
    self._items, self._fields, self._batch_size = items, fields, batch_size
    self._form: Form | None = None
    self._reader: Reader | None = None

  @property
  def form(self) -> Form:
    """Facts about the examples that a model needs. Reads the first batch.

    Raises:
      UserError: there is no batch, or it is invalid.
    """
    if self._form is None:
      reader = self._opened()
      try:
        item = reader.peek()
      except BaseException:
        if reader.again is not None:
          self._reader = None  # so that it is opened again
        raise
      if not item:
        raise UserError(
          'there must be a batch',
          got='an iterator that has ended',
          where=WHERE,
          hint='give a list, or a function that makes the iterator anew',
        )
      where = f'{WHERE}, batch 0'
      given = self._fields.sort(item[0], where)
      self._form = form_of(read_numbers(given, where)[0])
    return self._form

  @property
  def begins_again(self) -> bool:
    """Whether each `bind` begins an iterator of its own."""
    items: Any = self._items
    return callable(items) or iter(items) is not items

  @property
  def in_use(self) -> bool:
    """Whether it has read more of an iterator than it has delivered."""
    reader = self._reader
    if reader is None or not reader.one_way:
      return False
    return reader.waiting != [] or reader.error is not None

  def _opened(self) -> Reader:
    if self._reader is None:
      self._reader = Reader(self._items)
    return self._reader

  def bind(
    self, tables: TableSet, replace: Replace | None = None
  ) -> 'StreamBatches':
    """Returns the batches in global rows. Each is checked when it is read.

    An iterator continues where it is. A list or a function begins again.

    Raises:
      UserError: a vocabulary belongs to no feature and no table.
    """
    rules, growing = words_of(self._rules, tables, replace, WHERE)
    reader = self._opened()
    if reader.again is not None:
      self._reader = None  # else all share the one iterator that there is
    growth, size = Growth(growing, tables), self._batch_size
    return StreamBatches(reader, self._fields, rules, tables, size, growth)


class _ReadBatch(NamedTuple):
  """A batch that was read."""

  batch: Batch
  """Lookups of growing vocabularies are places in `raw` instead of rows."""
  raw: Mapping[str, RawColumn]
  """Ids of growing vocabularies, by feature."""
  size: int
  """B, to which it is padded."""
  last: int | None
  """Its checksum, if the iterator is made anew but has no state."""


class StreamBatches(BatchSource):
  """Batches of an iterator of dicts or frames.

  Batches with fewer examples than the others are padded with examples of weight
  0.
  """

  def __init__(
    self,
    reader: Reader,
    fields: Fields,
    rules: IdRules,
    tables: TableSet,
    batch_size: int | None,
    growth: Growth,
  ) -> None:
    """Takes the reader of an iterator, and rules with words by feature."""
    self._reader, self._growth = reader, growth
    self._fields, self._rules, self._tables = fields, rules, tables
    self._batch_size, self._delivered = batch_size, 0
    self._last: int | None = None
    # Batches of a one-way iterator that are not trained yet, because they are
    # read ahead of training. The last `_ahead` are to be delivered again.
    self._kept = collections.deque[_ReadBatch]()
    self._ahead, self._keeps = 0, False
    self._known = ColumnNames()  # names in the order of the columns
    self._closed = False

  @property
  def is_lent(self) -> bool:
    """Whether the user holds the iterator."""
    return self._reader.again is None

  @property
  def _where(self) -> str:
    return f'{WHERE}, batch {self._delivered}'

  def arrange(self, known: ColumnNames, widths: Widths) -> ColumnNames:
    """Puts columns in the order of a trainer's names.

    Reads a batch if there are names to learn. Later batches are checked when
    they are read.
    """
    if None in known and not self._closed:
      for item in self._reader.peek():
        numbers = self._numbers(item)[0]
        known = completed(known, numbers.names, widths)
        numbers.arranged(known, self._where)
    self._known = known
    return known

  def set_vocabularies(
    self, trained: Mapping[str, VocabularyState]
  ) -> dict[str, Cursor]:
    """Sets growing vocabularies to the state in which training has them."""
    return self._growth.set_vocabularies(trained)

  def __next__(self) -> Batch:
    if self._closed:
      raise StopIteration
    if self._reader.error is not None and self._reader.again is not None:
      # A generator that raised an error has ended, so make another one.
      self._read_again(self.get_state())
    read = self._kept[-self._ahead] if self._ahead else self._read()
    # A bad batch stays, so that it is not left out silently.
    with held():  # vocabularies and position change together
      batch = read.batch
      if read.raw:  # `grow` writes into the lookups
        batch = batch._replace(lookups=batch.lookups.copy())
      batch = pad_batch(self._growth.grow(batch, read.raw), read.size)
      if not self._ahead:
        self._reader.take()
      self._last, self._batch_size = read.last, read.size
      # Counted first, so that `keep_from` in another thread never sees a batch
      # too many, and drops one that is not trained yet.
      self._delivered += 1
      if self._ahead:
        self._ahead -= 1
      elif self._keeps:
        self._kept.append(read)
    return batch

  def _read(self) -> _ReadBatch:
    item = self._reader.peek()
    if not item:
      raise StopIteration
    examples, size = self._examples(item[0])
    raw, last = examples.raw, None
    if self._keeps:
      raw = copy.deepcopy(raw)  # the iterator may use its arrays again
    if self._reader.again is not None and self._reader.position is None:
      last = checksum(None, examples.arrays())
    batch = examples.take(np.arange(examples.size))
    return _ReadBatch(batch, raw, size, last)

  def _examples(self, item: Any) -> tuple[Examples, int]:
    """Converts an item to examples, and returns B, their batch size."""
    where, tables = self._where, self._tables
    numbers, given, count = self._numbers(item)
    check_names(given, tables, where)
    known = completed(self._known, numbers.names)
    numbers = numbers.arranged(known, where)
    lists, count = read_features(given, [*tables.features], count, where)
    size = count if self._batch_size is None else self._batch_size
    if not 0 < count <= size:
      raise UserError(
        f'a batch must have 1 to {size} examples'
        if size
        else 'a batch must have examples',
        got=count,
        where=where,
        hint='give batches of one size, of which the last may be smaller',
      )
    rules = self._rules
    examples = examples_of(numbers, lists, count, tables, rules, where)
    self._known = known
    return examples, size

  def _numbers(self, item: Any) -> tuple[Numbers, NamedColumns, int | None]:
    given = self._fields.sort(item, self._where)
    numbers, count = read_numbers(given, self._where)
    return numbers, given, count

  def get_state(self) -> dict[str, Any]:
    """Returns the number of batches delivered, and the iterator's state."""
    return self._position() | self._growth.get_state()

  def _position(self) -> dict[str, Any]:
    return {
      'delivered': self._delivered,
      'source': self._reader.position,
      # A resumed source pads a smaller last batch to this size.
      'batch_size': self._batch_size,
      'last': self._last,
    }

  def _count(self, state: dict[str, Any]) -> None:
    self._delivered, self._last = int(state['delivered']), state.get('last')
    self._batch_size = state.get('batch_size', self._batch_size)

  def check_can_go_back(self) -> None:
    """Raises a `UserError` if the next batches can only be read once."""
    if self._reader.one_way:
      self._reader.check_settable(None)

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues after the batches that `state` counts.

    An iterator without a state is read again, if it can be made anew.

    Raises:
      UserError: it can do neither, or gives other batches.
    """
    reader, position = self._reader, state.get('source')
    stateless = position is None and reader.position is None
    if all(state.get(name) == own for name, own in self._position().items()):
      self._growth.set_state(state)
    elif stateless and reader.again is not None:
      self._read_again(state)
    elif not (stateless and self._go_back(state)):
      reader.check_settable(position)
      self._growth.set_state(state)
      reader.set_state(position)
      self._count(state)

  def _read_again(self, state: dict[str, Any]) -> None:
    """Makes the iterator anew, and reads the batches that `state` counts."""
    reader, count = self._reader, int(state['delivered'])
    assert reader.again is not None
    iterator: Any = reader.again()
    position, item = state.get('source'), None
    if position is not None:
      iterator.set_state(from_json(position))
    elif count:
      for number in range(count):
        item = next(iterator, None)
        if item is None:
          got = f'an end after {number} of {count} batches'
          break
      else:
        got = f'another batch {count - 1}'
        examples, _ = self._examples(item)
        if checksum(None, examples.arrays()) == state.get('last'):
          got = ''
      if got:
        raise UserError(
          'the iterator must give the same batches again',
          got=got,
          where='set_state, state',
          hint='draw from a generator of a fixed seed that is made in it',
        )
    self._growth.set_state(state)
    reader.begin(iterator, position)
    self._count(state)

  def _go_back(self, state: dict[str, Any]) -> bool:
    """Goes back to a position, if all batches after it were kept."""
    back = self._delivered - int(state['delivered'])
    if not 0 <= back <= len(self._kept) - self._ahead:
      return False
    self._growth.set_state(state)
    self._ahead += back
    self._count(state)
    return True

  def keep_from(self, state: dict[str, Any]) -> None:
    """Keeps the batches after a position if they cannot be read again."""
    self._keeps = self._reader.one_way
    trained = int(state['delivered'])
    while len(self._kept) - self._ahead > self._delivered - trained:
      self._kept.popleft()

  def unused(self) -> Unused | None:
    """Returns batches and items to train. None if they can be read again."""
    reader = self._reader
    if not reader.one_way:
      return None
    batches = [*self._kept][len(self._kept) - self._ahead :]
    return batches, [*reader.waiting], reader.error

  def put_back(self, unused: Unused, state: dict[str, Any]) -> None:
    """Continues from a position with what was read of the iterator before."""
    reader, (batches, items, error) = self._reader, unused
    # The kept batches must be the last ones, so the next ones are kept as well.
    self._keeps = reader.one_way
    self._kept.extend(batches)
    self._ahead += len(batches)
    if not reader.waiting:
      reader.waiting.extend(items)
      reader.error = error
    self._count(state)

  def close(self) -> None:
    """Ends the batches, and closes the iterator unless the user holds it."""
    self._closed = True
    self._growth.close()
    self._reader.close()
