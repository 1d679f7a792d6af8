"""Preparation on small data: many pieces, and many places to stop at."""

import pytest

from slipstream_jax.packed import prepare, ranking
from tests.support.raw_example import CHUNK


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
  monkeypatch.setattr(ranking, 'PIECE', 64)
  monkeypatch.setattr(ranking, '_SMALLEST', 8)
  monkeypatch.setattr(prepare, 'SAVED_EXAMPLES', 3 * CHUNK)
