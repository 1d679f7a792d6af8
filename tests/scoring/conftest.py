"""Scorers choose after few examples."""

from unittest import mock

import pytest

from slipstream_jax.scoring import best, pairs

TRIAL, KEPT, BAG = 25, 4, 2


@pytest.fixture(autouse=True, scope='package')
def _a_short_trial():
  few = mock.patch.multiple(pairs, TRIAL=TRIAL, KEPT=KEPT, BAG=BAG)
  with few, mock.patch.object(best, 'TRIAL', TRIAL):
    pairs._tried.cache_clear()
    yield
  pairs._tried.cache_clear()
