"""Makes equal recipes share what is compiled for them."""

from collections.abc import Callable, Hashable
import dataclasses
import functools
from typing import Any, ParamSpec, TypeVar

import numpy as np

from slipstream_jax.errors import UserError

Given = ParamSpec('Given')
Made = TypeVar('Made')


def shared(make: Callable[Given, Made]) -> Callable[Given, Made]:
  """`functools.cache`, for arguments whose fields may be lists, too.

  A model of `sizes=[64, 32]` cannot be hashed, though it never changes: what
  it holds is then compared instead.

  Raises:
    UserError: the call itself does, if an argument can be neither hashed nor
      compared.
  """
  made: dict[Hashable, Made] = {}

  @functools.wraps(make)
  def find(*args: Given.args, **keywords: Given.kwargs) -> Made:
    given = (*args, *keywords.items())
    key = tuple(_key(each, type(each).__name__) for each in given)
    if key not in made:
      made[key] = make(*args, **keywords)
    return made[key]

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
    mend='give a tuple, or a value that can be hashed',
  )
