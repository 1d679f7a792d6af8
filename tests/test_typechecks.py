"""Types are checked at every call, however cheaply."""

from collections.abc import Iterator

from beartype import beartype
import jaxtyping
from jaxtyping import Float
import numpy as np
import pytest

from slipstream_jax.placement import bucket
from slipstream_jax.selection.hot import hot_rows
from tests import typechecks


def test_the_library_is_checked_with_arrays_and_without():
  assert bucket(3) >= 3
  with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'count'"):
    bucket('3')
  with pytest.raises(jaxtyping.TypeCheckError):
    hot_rows('rows', 10)


def test_without_checks_there_are_none():
  jaxtyping.config.update('jaxtyping_disable', True)
  try:
    with pytest.raises(TypeError, match='not supported'):
      bucket('3')
    assert len(inner_of(0)(np.ones(3), np.ones(1))) == 3
  finally:
    jaxtyping.config.update('jaxtyping_disable', False)


def inner_of(offset):
  @typechecks.jaxtyped(typechecker=beartype)
  def inner(
    x: Float[np.ndarray, ' n'], y: Float[np.ndarray, ' n']
  ) -> Float[np.ndarray, ' n']:
    return (x + y)[offset:]

  return inner


def test_functions_within_functions_share_their_checks_and_nothing_else():
  ones = np.ones(3)
  first = inner_of(0)
  checks = len(typechecks._CHECKS)
  second = inner_of(1)
  assert len(typechecks._CHECKS) == checks
  assert (first(ones, ones) == 2).all()
  with pytest.raises(jaxtyping.TypeCheckError, match='return value'):
    second(ones, ones)
  for function in (first, second):
    with pytest.raises(jaxtyping.TypeCheckError, match='parameters'):
      function(ones, np.ones(4))
    with pytest.raises(jaxtyping.TypeCheckError, match='parameters'):
      function(ones, 3)


@typechecks.jaxtyped(typechecker=beartype)
def halved(
  x: Float[np.ndarray, ' n'], wanted: int = 0
) -> Float[np.ndarray, ' n/2']:
  return x[::2] if wanted == 0 else x[:wanted]


def test_shapes_of_a_result_are_of_its_own_call():
  for size in (4, 6):
    assert len(halved(np.ones(size))) == size // 2
    with pytest.raises(jaxtyping.TypeCheckError, match='return value'):
      halved(np.ones(size), 1)
  with pytest.raises(TypeError, match='wanted_'):
    halved(np.ones(4), wanted_=1)


@typechecks.jaxtyped(typechecker=beartype)
def pieces(x: Float[np.ndarray, ' n']) -> Iterator[Float[np.ndarray, ' m']]:
  yield from np.split(x, 2)


def test_a_generator_is_checked_when_it_is_called():
  assert len([*pieces(np.ones(4))]) == 2
  with pytest.raises(jaxtyping.TypeCheckError, match='parameters'):
    pieces(4)


@typechecks.jaxtyped(typechecker=beartype)
def failing(x: Float[np.ndarray, ' n']) -> None:
  calls.append(len(x))
  raise ValueError('of its own')


calls = []


def test_a_function_is_called_once_and_its_errors_are_its_own():
  with pytest.raises(ValueError, match='of its own'):
    failing(np.ones(3))
  with pytest.raises(jaxtyping.TypeCheckError, match='parameters'):
    failing(3)
  assert calls == [3]
