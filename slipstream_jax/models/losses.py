"""Computes the loss of each example, summed over its heads."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError

LossFn = Callable[
  [Float[jax.Array, ' B'], Float[jax.Array, ' B']], Float[jax.Array, ' B']
]
"""Maps logits and labels to the loss of each example."""


def check_losses(loss: object, where: str) -> None:
  """Checks that a loss is a function or a sequence of functions.

  Raises:
    UserError: it is something else, e.g. a name.
  """
  losses = loss if isinstance(loss, tuple | list) and loss else (loss,)
  if not all(map(callable, losses)):
    raise UserError(
      'a loss must be a function of logits and labels, or one for each head',
      got=repr(loss),
      where=where,
      hint='give one of optax, such as optax.sigmoid_binary_cross_entropy or'
      ' optax.squared_error',
    )


def example_losses(
  loss: LossFn | Sequence[LossFn],
  loss_weights: Sequence[float] | None,
  logits: jax.Array,
  labels: jax.Array,
) -> Float[jax.Array, ' B']:
  """Computes the loss of each example.

  Args:
    loss: the loss of each head, or one for all.
    loss_weights: the weight of each head. None: all 1.
    logits: f32[B], or f32[B, T] for T heads.
    labels: of the same shape.

  Raises:
    UserError: the numbers of logits, losses, weights and labels differ, or a
      loss does not return one value per example.
  """
  if logits.shape != labels.shape:
    raise UserError(
      f'the model must return one logit per label, {list(labels.shape)}',
      got=list(logits.shape),
      where='Trainer, model',
      hint='return [B] for labels [B], and [B, T] for T heads',
    )
  if callable(loss) and loss_weights is None and labels.ndim == 1:
    return _loss(loss, logits, labels)
  logits, labels = (x.reshape(len(x), -1) for x in (logits, labels))
  heads = labels.shape[1]
  losses = [loss] * heads if callable(loss) else loss
  weights = [1.0] * heads if loss_weights is None else loss_weights
  if len(losses) != heads:
    raise _wrong_number('losses', 'Trainer, loss', losses, heads)
  if len(weights) != heads:
    raise _wrong_number('weights', 'Recipe.loss_weights', weights, heads)
  parts = [
    weight * _loss(loss, logits[:, head], labels[:, head])
    for head, (loss, weight) in enumerate(zip(losses, weights, strict=True))
  ]
  return sum(parts[1:], parts[0])


def _wrong_number(
  what: str, where: str, given: Sequence[Any], heads: int
) -> UserError:
  return UserError(
    f'there must be as many {what} as labels per example, {heads}',
    got=f'a sequence of {len(given)}',
    where=where,
    hint='give one for all heads, or one for each',
  )


def _loss(
  loss: LossFn, logits: jax.Array, labels: jax.Array
) -> Float[jax.Array, ' B']:
  losses = loss(logits, labels)
  if shape_of(losses) != [len(labels)]:
    # [B, 1] would broadcast to [B, B], and a mean would ignore the weights.
    raise UserError(
      f'the loss must return one value per example, [{len(labels)}]',
      got=shape_of(losses),
      where='Trainer, loss',
      hint='return the loss of each example, before any mean over them',
    )
  return losses


def check_logits(name: str, logits: Any, examples: int) -> None:
  """Checks the shape of the logits of `examples` examples.

  Raises:
    UserError: they are no such array.
  """
  shape = shape_of(logits)
  if isinstance(shape, str) or len(shape) > 2 or shape[:1] != [examples]:
    raise UserError(
      f'the model must return one logit per example, [{examples}], or'
      f' [{examples}, T] of T heads',
      got=shape,
      where=name,
      hint='return one array, without an axis of its own for one head',
    )


def shape_of(value: Any) -> list[int] | str:
  """Returns the shape of an array, or the type of another value."""
  is_array = isinstance(value, jax.Array | np.ndarray)
  return list(value.shape) if is_array else f'a {type(value).__name__}'
