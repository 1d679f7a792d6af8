"""Types are checked at every call, however cheaply."""

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
  finally:
    jaxtyping.config.update('jaxtyping_disable', False)


def inner_of(offset):
  @typechecks.jaxtyped(typechecker=typechecks.checked)
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
