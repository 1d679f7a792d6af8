"""Sources by name in a trainer: trained, resumed, scored and evaluated."""

import numpy as np
import pytest

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.batches import batches
from slipstream_jax.training.evaluate import evaluate, predict
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts, planned
from tests.support import small

SIZE = 32
COLUMNS = small.columns(200)


def ids(columns=COLUMNS):
  tables = small.tables()
  local = columns.lookups - tables.offsets[:-1]
  return {name: local[:, i] for i, name in enumerate(tables.features)}


def source(labels=COLUMNS.labels, **arguments):
  arguments = {'batch_size': SIZE, 'seed': 1} | arguments
  return batches(COLUMNS.dense, ids(), labels, **arguments)


def new_trainer():
  return make_parts(small.recipe(), 'streamed', small.DENSE)


def trained(batches, steps=9):
  """Losses, and the trainer."""
  trainer = new_trainer()
  with planned(trainer, batches) as ahead:
    losses = [record.loss for record in train(trainer, ahead, steps=steps)]
  return losses, trainer


def test_a_trainer_cannot_tell_where_batches_come_from():
  wanted, _ = trained(ColumnBatches(COLUMNS, SIZE, shuffle_seed=1))
  assert trained(source())[0] == wanted

  def pipeline():
    bound = ColumnBatches(COLUMNS, SIZE, shuffle_seed=1)
    for batch in bound:
      tables = small.tables()
      local = batch.lookups - tables.offsets[:-1]
      named = {name: local[:, i] for i, name in enumerate(tables.features)}
      yield named | {'dense': batch.dense, 'label': batch.labels}

  assert trained(batches(pipeline))[0] == wanted
  assert trained(batches(pipeline()))[0] == wanted


def test_passes_end_and_need_no_labels_to_be_predicted():
  _, trainer = trained(source())
  held_out = source(seed=None, epochs=1)
  metrics = evaluate(trainer, held_out)
  assert metrics.examples == 200
  assert evaluate(trainer, held_out) == metrics  # from the start again
  unlabelled = predict(trainer, source(None, seed=None, epochs=1))
  assert unlabelled.labels is None
  known = predict(trainer, held_out)
  np.testing.assert_array_equal(known.labels, COLUMNS.labels)
  np.testing.assert_array_equal(known.logits, unlabelled.logits)
  with pytest.raises(UserError, match=r'without labels .*evaluate, source'):
    evaluate(trainer, source(None, epochs=1))
  with (
    planned(trainer, source(None)) as ahead,
    pytest.raises(UserError, match='must have labels, to train on them'),
  ):
    next(ahead)
