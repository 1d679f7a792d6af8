"""Fixtures of the tests of the trainer."""

import jaxtyping
import pytest


@pytest.fixture
def as_users_run_it():
  """Without the types checked, which only our own tests turn on."""
  jaxtyping.config.update('jaxtyping_disable', True)
  yield
  jaxtyping.config.update('jaxtyping_disable', False)
