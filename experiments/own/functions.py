"""Functions that a config names as 'my_package.my_module:function'."""

import importlib
import inspect
from typing import Any

from slipstream_jax.errors import UserError


def is_own(name: str | None) -> bool:
  """Whether a name is that of a function, and not of a member of a list."""
  return name is not None and ':' in name


def called(name: str, argument: Any, where: str) -> Any:
  """What the function of that name makes of the argument.

  What goes wrong within the function is its own, and raised as it is.

  Args:
    name: 'my_package.my_module:function'.
    argument: its only one.
    where: config key of the name.

  Raises:
    UserError: there is no such function, or it takes other arguments.
  """
  module_name, _, attribute = name.partition(':')
  try:
    module = importlib.import_module(module_name)
  except (ImportError, SyntaxError, ValueError, TypeError) as error:
    raise UserError(
      f'{where} must name a module that can be imported',
      got=f'{name!r}: {error}',
      where=where,
      hint='write my_package.my_module:function; modules are looked for in the '
      'current folder, beside the config file and on PYTHONPATH',
    ) from error
  function = getattr(module, attribute, None)
  if not callable(function):
    own = [
      n
      for n, value in vars(module).items()
      if callable(value) and getattr(value, '__module__', '') == module_name
    ]
    raise UserError(
      f'{where} must name a function of {module_name}',
      got=repr(attribute),
      where=where,
      hint=f'it has {", ".join(own) or "none"}',
    )
  try:
    inspect.signature(function).bind(argument)
  except TypeError as error:
    raise UserError(
      f'the function that {where} names must take one argument',
      got=f'{name!r}: {error}',
      where=where,
      hint='a model takes config.model, a data set the config',
    ) from error
  except ValueError:  # of builtins nobody knows
    pass
  return function(argument)
