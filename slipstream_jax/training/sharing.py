"""What equal arguments share for as long as somebody holds it."""

import atexit
from collections.abc import Callable, Hashable, MutableMapping
import dataclasses
import functools
from typing import Any, TypeVar
import weakref

import numpy as np

from slipstream_jax.errors import UserError

_A = TypeVar('_A')
_T = TypeVar('_T')

SHARED: list[MutableMapping[Hashable, Any]] = []
"""What is shared now, per function."""


@atexit.register
def _let_go() -> None:
  """Else a key is hashed to be removed, when what hashes it may be gone."""
  for results in SHARED:
    results.clear()


def shared(make: Callable[[_A], _T]) -> Callable[[_A], _T]:
  """`functools.cache` of one argument, whose fields may be lists, too.

  The result of an argument is that of any equal one, until nobody holds it any
  more: nothing keeps a model or its compiled step alive but those who use it. A
  model of `sizes=[64, 32]` cannot be hashed, though it never changes: what it
  holds is then compared instead.

  Raises:
    UserError: the call itself does, if the argument can be neither hashed nor
      compared.
  """
  place = len(SHARED)
  SHARED.append(weakref.WeakValueDictionary())

  @functools.wraps(make)
  def find(argument: _A) -> _T:
    key = _key(argument, type(argument).__name__)
    result = SHARED[place].get(key)
    if result is None:
      result = SHARED[place][key] = make(argument)
    kept: _T = result
    return kept

  return find


def _key(value: Any, where: str) -> Hashable:
  """What is equal for equal values, and can be hashed."""
  try:
    hash(value)
  except TypeError:
    return (type(value), _parts(value, where))
  return value


def _parts(value: Any, where: str) -> Hashable:
  """The key of a value that cannot be hashed, but for its type."""
  if isinstance(value, list | tuple):
    names = getattr(value, '_fields', range(len(value)))
    pairs = zip(names, value, strict=True)
    return tuple(_key(item, f'{where}.{name}') for name, item in pairs)
  if isinstance(value, dict):
    items = value.items()
    return frozenset((k, _key(item, f'{where}.{k}')) for k, item in items)
  if isinstance(value, set):
    return frozenset(value)
  if isinstance(value, np.ndarray):
    return (value.dtype.str, value.shape, value.tobytes())
  if dataclasses.is_dataclass(value):
    fields = [f.name for f in dataclasses.fields(value) if f.compare]
    return tuple(
      _key(getattr(value, name, None), f'{where}.{name}') for name in fields
    )
  raise UserError(
    'a recipe must be made of values that can be compared, so that equal '
    'ones share a compiled step',
    got=f'a {type(value).__name__}',
    where=where,
    hint='give a tuple, or a value that can be hashed',
  )
