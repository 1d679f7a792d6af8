"""Scores a pass of held-out batches; changes no row and counts no transfer."""

import itertools

from slipstream_jax.data.batches import BatchSource, check_batch
from slipstream_jax.stream.buffers import to_device, to_host
from slipstream_jax.train import metrics
from slipstream_jax.train.metrics import Metrics, Predictions
from slipstream_jax.train.trainer import Trainer


def predict(
  trainer: Trainer, source: BatchSource, max_batches: int | None = None
) -> Predictions:
  """Labels and logits f32[n] of the source's inputs; closes the source.

  Inputs of weight 0 are padding and left out. `max_batches` ends the pass
  early.
  """
  trainer.check_whole()
  parts = []
  engine = trainer.engine
  try:
    for batch in itertools.islice(source, max_batches):
      check_batch(batch, trainer.shape)
      plan = engine.plan(batch.lookups)
      rows = engine.load(plan).rows
      inverse, dense = to_device((plan.inverse, batch.dense))
      logits = trainer.predict(trainer.state.variables, rows, inverse, dense)
      real = batch.weights > 0
      parts.append(Predictions(batch.labels[real], to_host(logits)[real]))
  finally:
    source.close()
  return metrics.merge(parts)


def evaluate(
  trainer: Trainer, source: BatchSource, max_batches: int | None = None
) -> Metrics:
  """Metrics of the trainer's predictions on one pass of `source`."""
  return metrics.compute(predict(trainer, source, max_batches))
