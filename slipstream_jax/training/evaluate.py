"""Scoring of held-out examples, which changes no row and counts no transfer."""

from collections.abc import Callable, Generator, Mapping, Sequence
import contextlib
import itertools
from typing import Any

from jaxtyping import Float
import numpy as np

from slipstream_jax.data.admission import admit
from slipstream_jax.data.interrupts import held
from slipstream_jax.data.source import BatchSource, bound_in_order, Source
from slipstream_jax.engine.buffers import to_device, to_host
from slipstream_jax.engine.engine import Plans
from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.inputs.bind import Replace
from slipstream_jax.training import metrics
from slipstream_jax.training.loss_kinds import LossKind
from slipstream_jax.training.metrics import Metric, Metrics, Predictions
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import Array, Batch
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.growing import (
  frozen_at,
  GrowingVocabulary,
  Position,
)


def evaluate(
  trainer: TrainerParts,
  source: Source,
  max_batches: int | None = None,
  chosen: Sequence[Metric] | None = None,
) -> Metrics:
  """Returns metrics of the trainer's predictions on one pass of `source`.

  Args:
    trainer: as in `predict`, like the next two.
    source: see there.
    max_batches: see there.
    chosen: metrics. None: those that fit the loss.

  Raises:
    UserError: as `predict`, or there is no example to score, or no label, or
      nothing says which metrics fit the loss.
  """
  of_heads = [chosen] if chosen is not None else _fitting(trainer.kinds)

  def tallied() -> Metrics:
    tally = metrics.Tally(of_heads)
    with contextlib.closing(_scored(trainer, source, max_batches)) as parts:
      for part in parts:
        if chosen is None:
          _check_known(part, trainer.kinds)
        tally.add(part)
    return tally.metrics()

  return trainer.turns.run(tallied)


def _fitting(kinds: Sequence[LossKind]) -> list[Sequence[Metric]]:
  """Returns the metrics of each head that fit its loss."""
  of_numbers = (kind == 'numbers' for kind in kinds)
  return [metrics.NUMBERS if one else metrics.CLICKS for one in of_numbers]


def _check_known(part: Predictions, kinds: Sequence[LossKind]) -> None:
  """Checks that labels of an unknown loss look like clicks."""
  if 'unknown' not in kinds or part.labels is None:
    return
  bad = (part.labels < 0) | (part.labels > 1)
  bad &= np.array([kind == 'unknown' for kind in kinds])
  if bad.any():
    raise UserError(
      'metrics must be given for a loss of other labels than clicks',
      got=f'the label {part.labels[bad][0]}',
      where='Trainer, metrics',
      hint='give some, such as metrics=[slip.rmse]',
    )


def predict(
  trainer: TrainerParts, source: Source, max_batches: int | None = None
) -> Predictions:
  """Returns labels and logits of the source's examples, and closes the source.

  Both are f32[n], or f32[n, T] of a model with T heads. Labels are None where
  an example has none. Examples by name are read in their own order, even if
  training shuffles them. Batches come in the source's order.

  Args:
    trainer: scores the examples. It does not change, and takes no step
      meanwhile.
    source: batches, or examples by name. Examples of weight 0 are padding and
      left out.
    max_batches: the most batches to score. None: all, which is refused if the
      source is `endless`.

  Raises:
    UserError: a batch that the trainer could not train on, or a pass that
      would not end.
  """
  return trainer.turns.run(
    lambda: metrics.merge([*_scored(trainer, source, max_batches)])
  )


def probabilities(
  trainer: TrainerParts, source: Source, max_batches: int | None = None
) -> Float[np.ndarray, '...']:
  """Returns probabilities of clicks, f32[n] or f32[n, T], as `predict`.

  Raises:
    UserError: as `predict`, or a loss that is not of clicks.
  """
  if set(trainer.kinds) != {'clicks'}:
    raise UserError(
      'probabilities come from logits of clicks, and the loss is of others',
      got=f'a loss of {", ".join(trainer.kinds)}',
      where='Trainer.predict, probabilities',
      hint='leave it out, and convert the results yourself',
    )
  logits = predict(trainer, source, max_batches).logits
  return metrics.probabilities(logits.astype(np.float64)).astype(np.float32)


def vectors(
  trainer: TrainerParts,
  source: Source,
  side: str,
  max_batches: int | None = None,
) -> Float[np.ndarray, 'n E']:
  """Returns what a two-tower model has of a side, as `predict`.

  Args:
    trainer: as in `predict`.
    source: examples whose users, or items, are wanted.
    side: 'users' or 'items'.
    max_batches: as in `predict`.

  Raises:
    UserError: as `predict`, or the model has no such vectors.
  """
  program = trainer.programs.side(side)
  return trainer.turns.run(
    lambda: (
      metrics.merge([*_scored(trainer, source, max_batches, program)]).logits
    )
  )


def _scored(
  trainer: TrainerParts,
  source: Source,
  max_batches: int | None,
  program: Callable[..., Any] | None = None,
) -> Generator[Predictions]:
  """Yields labels and logits of each batch. Call it in the trainer's turn.

  Another `program` than the model's gives its results, without labels.
  """
  trainer.check_consistent()
  frozen = frozen_vocabularies(trainer.grown)
  bound = bound_in_order(source, trainer.shape.tables, frozen)
  with contextlib.closing(bound) as batches:
    _check_end(batches, max_batches)
    trainer.arrange(batches)
    for batch in itertools.islice(batches, max_batches):
      yield predict_batch(trainer, batch, program)


def frozen_vocabularies(grown: Mapping[str, Position]) -> Replace:
  """Returns what replaces growing vocabularies for scoring.

  Ids have the rows that training has given them so far, and get no others.
  `grown` has by table its growing vocabulary as trained.
  """

  def frozen(table: str, vocabulary: GrowingVocabulary) -> Vocabulary:
    if table in grown:
      return frozen_at(grown[table])
    return vocabulary.frozen()

  return frozen


def predict_batch(
  trainer: TrainerParts,
  batch: Batch,
  program: Callable[..., Any] | None = None,
) -> Predictions:
  """Returns labels and logits of the examples of one batch, as `_scored`."""
  with held():
    logits, batch = trainer.turns.run(lambda: _logits(trainer, batch, program))
  if program is not None:
    batch = batch._replace(labels=None)
  labels, real = batch.labels, batch.weights > 0
  if labels is not None:
    if logits.shape != labels.shape:
      raise UserError(
        f'there must be as many labels as logits, {list(logits.shape)}',
        got=list(labels.shape),
        where='Batch.labels',
        hint='give labels [B] for one head, [B, T] for T heads',
      )
    labels = labels[real]
  return Predictions(labels, to_host(logits)[real])


def _logits(
  trainer: TrainerParts, batch: Batch, program: Callable[..., Any] | None
) -> tuple[Array, Batch]:
  """Returns logits of the admitted batch, and the batch."""
  trainer.check_consistent()
  batch = admit(batch, trainer.shape, labelled=False)
  plans = trainer.engine.plan(batch.lookups)
  return logits_of(trainer, batch, plans, program), batch


def logits_of(
  trainer: TrainerParts,
  batch: Batch,
  plans: Plans,
  program: Callable[..., Any] | None = None,
) -> Array:
  """Returns logits of an admitted batch, given its `Engine.plan`."""
  program = program or trainer.programs.forward
  rows = tuple(block.rows for block in trainer.engine.load(plans))
  inverses = tuple(plan.inverse for plan in plans)
  examples = inverses, batch.dense, batch.lookup_weights
  state, devices = trainer.state, trainer.engine.devices
  if devices is not None:
    assert trainer.over is not None
    step = trainer.programs.over(devices, trainer.over)
    return step.scores(program, state, rows, examples)
  inputs = to_device(examples)
  logits, _ = program(state.params, state.model_state, rows, *inputs)
  return logits


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
