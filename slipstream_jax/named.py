"""NamedTuples that users make: short texts, and errors for unknown fields."""

from collections.abc import Mapping
import functools
from typing import Any

from slipstream_jax.errors import UserError


def in_short(value: Any) -> str:
  """Returns a short text of a value, in one line.

  NamedTuples show the fields that are not the default. Arrays show dtype and
  shape, mappings their length, optimizers and functions their name.
  """
  array = getattr(value, 'array', value)
  if hasattr(array, 'shape') and hasattr(array, 'dtype'):
    return f'{array.dtype}{list(array.shape)}'
  if isinstance(value, Mapping):
    return f'{type(value).__name__} of {len(value)}'
  if callable(getattr(value, 'init', None)):
    return _name(value.init)  # an optimizer
  defaults = getattr(value, '_field_defaults', None)
  if isinstance(value, tuple) and defaults is not None:
    return _fields(value, defaults)
  return _name(value) if callable(value) else repr(value)


def _fields(record: Any, defaults: Mapping[str, Any]) -> str:
  if isinstance(getattr(record, 'name', None), str):
    return repr(record.name)  # as it is known to a user
  parts = [
    f'{name}={in_short(value)}' if name in defaults else in_short(value)
    for name, value in zip(record._fields, record, strict=True)
    if name not in defaults or not _is(value, defaults[name])
  ]
  return f'{type(record).__name__}({", ".join(parts)})'


def _is(value: Any, default: Any) -> bool:
  """Whether a value is the default. Arrays are not compared."""
  return value is default or (
    type(value) is type(default) and bool(value == default)
  )


def _name(function: Any) -> str:
  """Returns the name of a function, or of the one that made it."""
  name = getattr(function, '__qualname__', type(function).__name__)
  return name.partition('.<locals>')[0]


def refuse_others(of: type, hints: Mapping[str, str]) -> None:
  """Has a NamedTuple refuse unknown names of fields in one sentence.

  Args:
    of: the class.
    hints: what to do, by names that other libraries use.
  """
  new, fields = of.__new__, getattr(of, '_fields', ())

  @functools.wraps(new)
  def checked(cls: type, *values: Any, **by_name: Any) -> Any:
    for name in by_name:
      if name not in fields:
        raise UserError(
          f'{of.__name__} takes {", ".join(fields)}',
          got=repr(name),
          where=f'{of.__name__}, {name}',
          hint=hints.get(name, 'use one of these names'),
        )
    return new(cls, *values, **by_name)

  setattr(of, '__new__', staticmethod(checked))  # noqa: B010
