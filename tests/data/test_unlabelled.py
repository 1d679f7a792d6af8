"""Examples without labels: predicted, but neither trained on nor evaluated."""

import numpy as np
import pytest

from slipstream_jax.data.admission import admit, CheckedSource, ExampleShape
from slipstream_jax.data.numbered import pad_batch
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.batches import batches
from slipstream_jax.tables import Table, TableSet
from slipstream_jax.training import metrics
from slipstream_jax.training.metrics import Predictions

TABLES = TableSet({'user': Table(5)})
SHAPE = ExampleShape(TABLES, 1)


def source(**arguments):
  dense, ids = [[0.5], [1.5], [2.5]], {'user': [4, 0, 2]}
  return batches(dense, ids, batch_size=2, epochs=1, **arguments)


def test_they_are_admitted_to_be_predicted_alone():
  for batch in source().bind(TABLES):
    assert batch.labels is None
    admitted = admit(batch, SHAPE, labelled=False)
    assert admitted.labels is None
    np.testing.assert_array_equal(admitted.lookups, batch.lookups)
    assert admitted.lookups is not batch.lookups
    with pytest.raises(UserError, match='must have labels'):
      admit(batch, SHAPE)
    bad = batch._replace(lookups=np.full((2, 1), 5))
    with pytest.raises(UserError, match=r'must be in \[0, 5\)'):
      admit(bad, SHAPE, labelled=False)
    bad = batch._replace(weights=np.full(2, -1.0))
    with pytest.raises(UserError, match='weights must be finite'):
      admit(bad, SHAPE, labelled=False)
  none = batch._replace(
    dense=batch.dense[:0], lookups=batch.lookups[:0], weights=batch.weights[:0]
  )
  with pytest.raises(UserError, match='B of at least 1'):
    admit(none, SHAPE, labelled=False)
  assert pad_batch(none, 3).labels is None


def test_a_trainer_binds_examples_by_name():
  admitted = list(CheckedSource(source(label=[0, 1, 1]), SHAPE))
  bound = list(source(label=[0, 1, 1]).bind(TABLES))
  assert len(admitted) == len(bound) == 2
  for ours, theirs in zip(admitted, bound, strict=True):
    np.testing.assert_array_equal(ours.lookups, theirs.lookups)
    np.testing.assert_array_equal(ours.labels, theirs.labels)
  with pytest.raises(UserError, match=r"user', example 1\)"):
    CheckedSource(batches(None, {'user': [0, 7]}, [0, 1], batch_size=1), SHAPE)


def test_metrics_want_labels():
  logits = np.zeros(3, np.float32)
  known = Predictions(logits, logits)
  merged = metrics.merge([known, Predictions(None, logits)])
  assert merged.labels is None
  assert len(merged.logits) == 6
  assert len(metrics.merge([known, known]).labels) == 6
  with pytest.raises(UserError, match='examples without labels'):
    metrics.compute(merged)
