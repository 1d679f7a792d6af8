"""The scorer of pairs chooses among its pairs after few examples."""

from unittest import mock

import pytest

from slipstream_jax.scoring import pairs

TRIAL, KEPT, BAG = 25, 4, 2


@pytest.fixture(autouse=True, scope='package')
def _a_short_trial():
  with mock.patch.multiple(pairs, TRIAL=TRIAL, KEPT=KEPT, BAG=BAG):
    pairs._tried.cache_clear()
    yield
  pairs._tried.cache_clear()
