"""Types checked at every call of the library, at a price that tests can pay.

The import hook of jaxtyping alone took two fifths of the time of all tests: it
makes the checks of a function within a function anew at each call of the outer
one, and binds shapes at each call of a function that takes and gives no array.
What is checked stays the same.
"""

import functools
import inspect
import re
import typing

from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
import jaxtyping

_CHECKS = {}
_jaxtyped = jaxtyping.jaxtyped


def checked(stub):
  """`beartype`, once for all stubs of a place that have the same signature.

  What jaxtyping gives it has no body, but all the annotations of a function.
  """
  signature = inspect.signature(stub)
  parameters = tuple(
    (p.name, p.kind, p.default is p.empty, _key(p.annotation))
    for p in signature.parameters.values()
  )
  returns = _key(signature.return_annotation)
  key = stub.__module__, stub.__qualname__, parameters, returns
  try:
    check = _CHECKS.get(key)
  except TypeError:  # an annotation that cannot be hashed
    return beartype(stub)
  if check is None:
    check = _CHECKS[key] = beartype(stub)
  return check


def _key(annotation):
  """Equal for equal annotations, though those of arrays are made anew."""
  if inspect.isclass(annotation) and hasattr(annotation, 'dim_str'):
    parts = annotation.__name__, annotation.dtypes, annotation.dim_str
    return (*map(str, parts), _key(annotation.array_type))
  if isinstance(annotation, list | tuple):
    return tuple(map(_key, annotation))
  arguments = typing.get_args(annotation)
  if not arguments:
    return annotation
  return typing.get_origin(annotation), _key(arguments)


def _is_plain(annotation):
  """Whether there is no array in it, nor a name that jaxtyping looks up."""
  if isinstance(annotation, str | typing.ForwardRef):
    return False
  if type(annotation).__module__.startswith('jaxtyping'):
    return False
  if isinstance(annotation, list | tuple):  # what a `Callable` takes
    return all(map(_is_plain, annotation))
  return all(map(_is_plain, typing.get_args(annotation)))


def _takes_no_array(function):
  return (
    inspect.isfunction(function)
    and '<locals>' not in function.__qualname__
    and not inspect.isgeneratorfunction(function)
    and all(map(_is_plain, inspect.get_annotations(function).values()))
  )


def jaxtyped(function=None, *, typechecker):
  """`jaxtyping.jaxtyped`, which leaves to beartype what has no shapes."""
  if function is None:
    return functools.partial(jaxtyped, typechecker=typechecker)
  if not _takes_no_array(function):
    return _jaxtyped(function, typechecker=typechecker)
  check = beartype(function)
  if check is function:  # nothing is annotated
    return function

  @functools.wraps(function)
  def either(*args, **kwargs):
    if jaxtyping.config.jaxtyping_disable:
      return function(*args, **kwargs)
    try:
      return check(*args, **kwargs)
    except BeartypeCallHintViolation as error:  # as jaxtyping says it
      said = re.sub(r'parameter (\w+)=', r"parameter '\1': ", str(error))
      raise jaxtyping.TypeCheckError(said) from error

  return either


def install(modules):
  """Checks the types of modules that are imported from now on."""
  jaxtyping.jaxtyped = jaxtyped
  jaxtyping.install_import_hook(modules, f'{__name__}.{checked.__name__}')
