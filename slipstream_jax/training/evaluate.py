"""Scores a pass of held-out batches; changes no row and counts no transfer."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from slipstream_jax.data.admission import admit
from slipstream_jax.data.interrupts import held
from slipstream_jax.data.source import BatchSource, bound_in_order, Source
from slipstream_jax.engine.buffers import to_device, to_host
from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.training import metrics
from slipstream_jax.training.forward import GroupRows
from slipstream_jax.training.grown import still
from slipstream_jax.training.metrics import Metrics, Predictions
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.types import Array, Batch


def predict(
  trainer: TrainerParts, source: Source, max_batches: int | None = None
) -> Predictions:
  """Labels and logits of the source's examples; closes the source.

  Both are f32[n], or f32[n, T] of a model with T heads. Labels are None where
  an example has none. Results come in the order of the examples: those by name
  are read in the order in which they were given, even if training shuffles
  them. Batches come in their own order.

  Args:
    trainer: scores them; it is not changed, and takes no step meanwhile.
    source: batches, or examples by name; those of weight 0 are padding and
      left out.
    max_batches: the most to score; None: all, which is refused if the source
      says that it is `endless`.

  Raises:
    UserError: a batch that the trainer could not train on, or a pass that
      would not end.
  """
  return trainer.turns.run(lambda: _predict(trainer, source, max_batches))


def _predict(
  trainer: TrainerParts, source: Source, max_batches: int | None
) -> Predictions:
  trainer.check_whole()
  replace = still(trainer.grown)
  bound = bound_in_order(source, trainer.shape.tables, replace)
  with contextlib.closing(bound) as batches:
    _check_end(batches, max_batches)
    trainer.arrange(batches)
    some = itertools.islice(batches, max_batches)
    return metrics.merge([predict_batch(trainer, batch) for batch in some])


def predict_batch(trainer: TrainerParts, batch: Batch) -> Predictions:
  """The same of the examples of one batch.

  Raises:
    UserError: a batch that the trainer could not train on.
  """
  with held():
    logits, batch = trainer.turns.run(lambda: _logits(trainer, batch))
  labels, real = batch.labels, batch.weights > 0
  if labels is not None:
    _check_heads(logits.shape, labels.shape)
    labels = labels[real]
  return Predictions(labels, to_host(logits)[real])


def _logits(trainer: TrainerParts, batch: Batch) -> tuple[Array, Batch]:
  trainer.check_whole()
  engine = trainer.engine
  batch = admit(batch, trainer.shape, labelled=False)
  plans = engine.plan(batch.lookups)
  # Loaded and never stored: the turn stays, so batches planned still hold.
  rows = tuple(block.rows for block in engine.load(plans))
  inverses = tuple(plan.inverse for plan in plans)
  inputs = to_device((inverses, batch.dense, batch.lookup_weights))
  return trainer.predict(trainer.state, rows, *inputs), batch


def largest_element(trainer: TrainerParts, batch: Batch) -> float:
  """The largest absolute value in the rows that a batch looks up.

  Args:
    trainer: whose rows; it is not changed.
    batch: any that it could train on.

  Raises:
    UserError: one that it could not.
  """
  return trainer.turns.run(lambda: _largest_element(trainer, batch))


def _largest_element(trainer: TrainerParts, batch: Batch) -> float:
  trainer.check_whole()
  batch = admit(batch, trainer.shape, labelled=False)
  blocks = trainer.engine.load(trainer.engine.plan(batch.lookups))
  return float(to_host(_largest(tuple(block.rows for block in blocks))))


@jax.jit
def _largest(rows: GroupRows) -> Float[jax.Array, '']:
  of_groups = [jnp.abs(block.astype(jnp.float32)).max() for block in rows]
  return jnp.stack(of_groups).max()


def evaluate(
  trainer: TrainerParts, source: Source, max_batches: int | None = None
) -> Metrics:
  """Metrics of the trainer's predictions on one pass of `source`.

  Args:
    trainer: as in `predict`.
    source: as in `predict`, with labels, and at least one example that is no
      padding.
    max_batches: as in `predict`.

  Raises:
    UserError: as `predict`, or there is no example to score, or no label.
  """
  return metrics.compute(predict(trainer, source, max_batches))


def _check_heads(logits: tuple[int, ...], labels: tuple[int, ...]) -> None:
  if logits != labels:
    raise UserError(
      f'there must be as many labels as logits, {list(logits)}',
      got=list(labels),
      where='Batch.labels',
      hint='give labels [B] for one head, [B, T] for T heads',
    )


def _check_end(source: BatchSource, max_batches: int | None) -> None:
  if max_batches is None and source.endless:
    raise UserError(
      'a pass over a source must end',
      got=f'{type(source).__name__} without an end, and no max_batches',
      where='evaluate, max_batches',
      hint='give max_batches, or a source of one epoch (epochs=1)',
    )
  if max_batches is not None and not is_whole(max_batches, 1, 1 << 62):
    raise UserError(
      'max_batches must be a whole number of at least 1, or None for all',
      got=repr(max_batches),
      where='evaluate, max_batches',
      hint='give the batches to score',
    )
