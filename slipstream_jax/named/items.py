"""Where the batches of a stream come from: an iterator, or what makes some."""

import base64
from collections.abc import Callable, Iterable, Iterator
import inspect
from typing import Any, NamedTuple, NoReturn

from slipstream_jax.errors import UserError

Items = Iterable[Any] | Callable[[], Iterable[Any]]


class Opened(NamedTuple):
  """An iterator, of which an item may have been read already."""

  iterator: Iterator[Any]
  ours: bool
  """Whether nobody else has it."""
  pending: Any
  """That item, or None."""
  state: Any
  """Where the iterator was before it; None if it cannot tell."""
  again: Callable[[], Iterator[Any]] | None
  """Makes the iterator anew, from its start; None: there is no other."""


def open_items(items: Items) -> Opened:
  """An iterator of the items, and how to have another.

  Raises:
    UserError: a function that takes arguments.
  """
  if callable(items):
    _check_call(items)

  def again() -> Iterator[Any]:
    return iter(items() if callable(items) else items)

  iterator = again()
  ours = iterator is not items
  return Opened(
    iterator, ours, None, state_of(iterator), again if ours else None
  )


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
