"""Types checked at every call of the library, at a price that tests can pay.

The import hook of jaxtyping alone took two fifths of the time of all tests: it
makes the checks of a function within a function anew at each call of the outer
one, names the arguments of every call, and checks them again with the result.
What is checked stays the same. Where a check fails, jaxtyping itself says so.
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
_shapes = _jaxtyped('context')


def jaxtyped(function=None, *, typechecker):
  """`jaxtyping.jaxtyped`, in less time."""
  if function is None:
    return functools.partial(jaxtyped, typechecker=typechecker)
  if not inspect.isfunction(function):  # a class or a property
    return _jaxtyped(function, typechecker=typechecker)
  if _takes_no_array(function):
    return _by_beartype(function)
  return _by_halves(function, typechecker)


def _takes_no_array(function):
  return (
    '<locals>' not in function.__qualname__
    and not inspect.isgeneratorfunction(function)
    and all(map(_is_plain, inspect.get_annotations(function).values()))
  )


def _is_plain(annotation):
  """Whether there is no array in it, nor a name that jaxtyping looks up."""
  if isinstance(annotation, str | typing.ForwardRef):
    return False
  if type(annotation).__module__.startswith('jaxtyping'):
    return False
  if isinstance(annotation, list | tuple):  # what a `Callable` takes
    return all(map(_is_plain, annotation))
  return all(map(_is_plain, typing.get_args(annotation)))


def _by_beartype(function):
  """Without shapes."""
  check = beartype(function)
  if check is function:  # nothing is annotated
    return function

  @functools.wraps(function)
  def either(*args, **kwargs):
    if jaxtyping.config.jaxtyping_disable:
      return function(*args, **kwargs)
    try:
      return check(*args, **kwargs)
    except BeartypeCallHintViolation as error:
      raise _as_jaxtyping_says_it(error) from error

  return either


def _by_halves(function, typechecker):
  """What is taken, then what is given, with the same shapes."""
  check_taken, check_given = _halves(function)

  @functools.wraps(function)
  def either(*args, **kwargs):
    if jaxtyping.config.jaxtyping_disable:
      return function(*args, **kwargs)
    with _shapes:
      try:
        check_taken(*args, **kwargs)
        taken = True
      except Exception:
        taken = False
      if taken:
        result = function(*args, **kwargs)
        try:
          check_given(result)
          return result
        except BeartypeCallHintViolation as error:
          flaw = error
    if not taken:
      return _jaxtyped(function, typechecker=typechecker)(*args, **kwargs)
    again = functools.wraps(function)(lambda *_, **__: result)
    _jaxtyped(again, typechecker=typechecker)(*args, **kwargs)
    raise _as_jaxtyping_says_it(flaw) from flaw

  return either


def _halves(function):
  """Two checks, once for all functions of a place that have one signature."""
  signature = inspect.signature(function)
  parameters = tuple(
    (p.name, p.kind, p.default is p.empty, _key(p.annotation))
    for p in signature.parameters.values()
  )
  returns = _key(signature.return_annotation)
  key = function.__module__, function.__qualname__, parameters, returns
  try:
    halves = _CHECKS.get(key)
  except TypeError:  # an annotation that cannot be hashed
    return _new_halves(function)
  if halves is None:
    halves = _CHECKS[key] = _new_halves(function)
  return halves


def _new_halves(function):
  stubs = []  # without a body, one of them with the result as a parameter
  _jaxtyped(function, typechecker=lambda stub: stubs.append(stub) or stub)
  taken, whole = sorted(
    stubs, key=lambda s: len(inspect.signature(s).parameters)
  )

  def given(result):
    pass

  returns = whole.__annotations__.get('return', typing.Any)
  given.__annotations__ = {'result': returns}
  return beartype(taken), beartype(given)


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


def _as_jaxtyping_says_it(error):
  said = re.sub(r'parameter (\w+)=', r"parameter '\1': ", str(error))
  return jaxtyping.TypeCheckError(said)


def install(modules):
  """Checks the types of modules that are imported from now on."""
  jaxtyping.jaxtyped = jaxtyped
  jaxtyping.install_import_hook(modules, 'beartype.beartype')
