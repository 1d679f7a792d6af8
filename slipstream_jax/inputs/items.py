"""Where the batches of a stream come from: an iterator, or what makes some."""

import base64
from collections.abc import Callable, Iterable, Iterator
import inspect
import itertools
from typing import Any, NoReturn

from slipstream_jax.errors import UserError

Items = Iterable[Any] | Callable[[], Iterable[Any]]


class Reader:
  """Reads the items of a stream one at a time.

  Attributes:
    ours: whether nobody else has the iterator.
    again: makes the iterator anew, from its start; None: there is no other.
    position: the iterator's state before the waiting item, as JSON; None if it
      has no state.
    waiting: items that were read and not taken yet.
    error: what the iterator raised when it was last asked, in words.
  """

  def __init__(self, items: Items) -> None:
    """Opens an iterator of the items and reads none.

    Raises:
      UserError: a function that takes arguments.
    """
    if callable(items):
      _check_call(items)

    def again() -> Iterator[Any]:
      return iter(items() if callable(items) else items)

    self._iterator: Any = again()
    self.ours = self._iterator is not items
    self.again = again if self.ours else None
    self.position = state_of(self._iterator)
    self.waiting: list[Any] = []
    self.error: str | None = None
    self._after: list[Any] = []  # the position behind the waiting item

  @property
  def kind(self) -> str:
    """The type of the iterator."""
    return type(self._iterator).__name__

  @property
  def one_way(self) -> bool:
    """Whether what it gave cannot be had again."""
    return self.again is None and self.position is None

  def peek(self) -> list[Any]:
    """The next item alone, the same one until `take`; empty at the end.

    Raises:
      UserError: the iterator raised an error before and gives no more items.
    """
    if not self.waiting:
      if self.error is not None and self.position is not None:
        self.set_state(self.position)
      try:
        # In C, so that no Ctrl-C comes between an item and the list.
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
    """Goes past the item that `peek` gave."""
    self.waiting.pop(0)
    self.position = self._after.pop()

  def check_settable(self, position: Any) -> None:
    """Checks that the iterator can be set to a position of its own.

    Raises:
      UserError: it cannot.
    """
    if position is None or not hasattr(self._iterator, 'set_state'):
      raise UserError(
        'only a source that can be set to a position can be continued',
        got=self.kind,
        where='set_state, state',
        hint="give an iterator with grain's get_state and set_state, or arrays",
      )

  def set_state(self, position: Any) -> None:
    """Sets the iterator to a position of its own.

    Raises:
      UserError: it cannot be set to a position.
    """
    self.check_settable(position)
    self._iterator.set_state(from_json(position))
    self._begin(self._iterator, position)

  def restart(self, iterator: Iterator[Any], position: Any) -> None:
    """Goes on with an iterator from `again` in the place of the old one."""
    old = self._iterator
    self._begin(iterator, position)
    getattr(old, 'close', lambda: None)()

  def _begin(self, iterator: Any, position: Any) -> None:
    self._iterator, self.position, self.error = iterator, position, None
    self.waiting.clear()
    self._after.clear()

  def close(self) -> None:
    """Closes the iterator, unless somebody else has it."""
    if self.ours:
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
  except ValueError:  # of builtins nobody knows
    pass


def skip_items(iterator: Iterator[Any], count: int) -> Any:
  """The last of so many items, at least one.

  Raises:
    UserError: there are fewer.
  """
  item = None
  for number in range(count):
    item = next(iterator, None)
    if item is None:
      refuse_others(f'an end after {number} of {count} batches')
  return item


def refuse_others(got: str) -> NoReturn:
  """Says that what was read before is not what is read now.

  Raises:
    UserError: always.
  """
  raise UserError(
    'what makes the batches must give the same ones again',
    got=got,
    where='set_state, state',
    hint='draw from a generator of a fixed seed that is made in it',
  )


def state_of(iterator: Any) -> Any:
  """Where an iterator is, as JSON; None if it cannot tell."""
  if not (hasattr(iterator, 'get_state') and hasattr(iterator, 'set_state')):
    return None
  state = iterator.get_state()
  if isinstance(state, bytes):  # as grain's DataLoader has it
    return {'base64': base64.b64encode(state).decode()}
  return {'json': state}


def from_json(position: dict[str, Any]) -> Any:
  """The inverse of `state_of`."""
  if 'base64' in position:
    return base64.b64decode(position['base64'])
  return position['json']
