"""Two towers for retrieval: a vector of the user, and one of the item.

In training an example's logit is the log odds of its own item against the items
of all other examples of the batch. So the logistic loss of a label of 1 is the
softmax over the batch:

  log(1 + exp(-logit)) = -log(exp(s_ii) / sum_j exp(s_ij))

with scores s_ij [B, B] of user i and item j. Popular items are in more batches,
and would be pushed away more often. The log-Q correction (Yi et al., RecSys
2019) subtracts the logarithm of the item's share of the examples from each
s_ij. The sum then estimates the one over all items.
"""

from collections.abc import Sequence
import inspect
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from slipstream_jax.errors import choose, UserError
from slipstream_jax.models.adapters import (
  adapt,
  Inputs,
  ModelState,
  Params,
  PureModel,
)
from slipstream_jax.models.layers import MLP, split_off
from slipstream_jax.types import DenseFeatures, Embeddings

Vectors = Float[jax.Array, 'B E']
SIDES = 'users', 'items'


class TwoTower(nn.Module):
  """Retrieval model: the score is the cosine of two vectors, by a temperature.

  Train it on positive examples alone, with labels of 1. Examples of weight 0,
  such as padding, are never negatives. Predictions are scores, which rank items
  for a user and are no log odds of a click.

  Attributes:
    items: features of the item. All others are of the user.
    widths: layer widths of each tower. The last one is that of the vectors.
    temperature: divides the cosines, from -1 to 1.
    log_q: the dense feature, by name or number of its column, that has the
      logarithm of how often the example's item occurs, up to a constant. Only
      training reads it. All other dense features are of the user. None: scores
      are not corrected.
  """

  items: Sequence[str] = ('item',)
  widths: Sequence[int] = (64, 32)
  temperature: float = 0.1
  log_q: str | int | None = None

  over_batch = True
  """Whether the loss of an example depends on the whole batch."""

  def setup(self) -> None:
    """Names the towers."""
    self.user = MLP(self.widths, activate_last=False)
    self.item = MLP(self.widths, activate_last=False)

  def __call__(
    self,
    dense: DenseFeatures,
    embeddings: Embeddings,
    *,
    train: bool = False,
    weights: Float[jax.Array, ' B'] | None = None,
    side: str | None = None,
  ) -> Float[jax.Array, ' B'] | Vectors:
    """Computes scores f32[B], or log odds in training.

    Args:
      dense: dense features f32[B, I], or by name.
      embeddings: f32[B, D] by feature name.
      train: whether to compute log odds against the batch.
      weights: each example's weight in the loss, f32[B]. None: all 1.
      side: 'users' or 'items' returns the vectors of that side, f32[B, E] of
        length 1.

    Raises:
      UserError: the examples are sequences, a feature does not exist, or one
        side has none.
    """
    of_user, log_q = split_off(dense, self.log_q, 1, 'TwoTower, log_q')
    names = [name for name in embeddings if name not in self.items]
    users = _of_length_1(self.user(self._joined(embeddings, names, of_user)))
    items = _of_length_1(self.item(self._joined(embeddings, self.items)))
    if side is not None:
      return users if side == 'users' else items
    if not train:
      return (users * items).sum(axis=1) / self.temperature
    return against_batch(users @ items.T / self.temperature, log_q, weights)

  def _joined(
    self,
    embeddings: Embeddings,
    names: Sequence[str],
    dense: jax.Array | None = None,
  ) -> Float[jax.Array, 'B W']:
    """Returns the embeddings and dense features of one side as one array."""
    where = 'TwoTower, items'
    for name in names:
      choose(embeddings, name, where)
    rows = [embeddings[name] for name in names]
    if not rows or any(one.ndim != 2 for one in rows):
      raise UserError(
        'each tower needs one pooled embedding or more, [B, D]',
        got=[list(one.shape[1:]) for one in rows] or 'none',
        where=where,
        hint="name the items' features alone, with another combiner than"
        " 'none'",
      )
    return jnp.concatenate(rows if dense is None else [*rows, dense], axis=1)


def against_batch(
  scores: Float[jax.Array, 'B B'],
  log_q: Float[jax.Array, 'B 1'] | None,
  weights: Float[jax.Array, ' B'] | None,
) -> Float[jax.Array, ' B']:
  """Computes the log odds of each example's own item against all others.

  Args:
    scores: of user i and the item of example j.
    log_q: logarithm of how often each example's item occurs, up to a constant.
      None: scores are not corrected.
    weights: each example's weight in the loss. None: all 1.
  """
  if log_q is not None:
    scores = scores - log_q.T
  others = ~jnp.eye(len(scores), dtype=bool)
  if weights is not None:
    others &= (weights > 0)[None]
  # Not infinite: an example without negatives has a loss and gradient of 0.
  rest = jax.nn.logsumexp(jnp.where(others, scores, -1e30), axis=1)
  return jnp.diagonal(scores) - rest


def _of_length_1(vectors: Vectors) -> Vectors:
  # The root of 0 has no gradient.
  squares = (vectors * vectors).sum(axis=1, keepdims=True)
  return vectors * jax.lax.rsqrt(squares + 1e-12)


def is_over_batch(model: Any) -> bool:
  """Whether the loss of an example depends on the others of its batch.

  It does for a `TwoTower`, for a sequence model of next items, and for any
  model with such an attribute.
  """
  return bool(getattr(model, 'over_batch', False))


def item_features(model: Any, features: Sequence[str]) -> tuple[str, ...]:
  """Returns the features of an item, of all features of a model of two sides.

  Those of a sequence model are all of them, at the last step.
  """
  return tuple(getattr(model, 'items', features))


def has_sides(model: Any) -> bool:
  """Whether a model has vectors of users and items.

  Its loss is over the batch, and its call takes `side`, 'users' or 'items',
  for which it returns their vectors [B, E].
  """
  if not (is_over_batch(model) and callable(model)):
    return False
  return 'side' in inspect.signature(type(model).__call__).parameters


def side_of(model: Any, side: str) -> PureModel:
  """Returns the vectors of one side of a model of users and items, as a model.

  Raises:
    UserError: the model has no such vectors, or there is no such side.
  """
  where = 'Trainer.vectors'
  choose(dict.fromkeys(SIDES), side, f'{where}, side')
  if not has_sides(model):
    raise UserError(
      'only a two-tower model, or a sequence model of next items, has vectors'
      ' of users and items',
      got=type(model).__name__,
      where=where,
      hint='train slip.TwoTower, or slip.SASRec(next_item=True, top=())',
    )
  whole = adapt(model)

  def apply(
    params: Params, state: ModelState, inputs: Inputs
  ) -> tuple[Any, ModelState]:
    named = {**inputs.keywords, 'side': side}
    return whole.apply(params, state, inputs._replace(keywords=named))

  return whole._replace(apply=apply)
