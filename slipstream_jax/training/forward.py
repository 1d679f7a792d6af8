"""The forward pass: rows of all groups to embeddings by name to logits."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.models.embedding import embed
from slipstream_jax.table_set import TableSet
from slipstream_jax.training.recipe import model_keywords, Recipe
from slipstream_jax.types import RealLookups

GroupRows = tuple[Float[jax.Array, 'P D'], ...]
"""Per group, a batch's unique rows."""

Inverses = tuple[Int[jax.Array, 'B K'], ...]
"""Per group, place in its rows of each of its K_g lookups; -1 = padding."""


def make_forward(recipe: Recipe) -> Callable[..., Any]:
  """The forward pass; with the examples' weights in the loss, in training.

  It returns logits f32[B] and the model's state after the pass.
  """
  model, keywords = recipe.model, model_keywords(recipe.model)

  def forward(
    variables: dict[str, Any],
    rows: GroupRows,
    inverses: Inverses,
    dense: Float[jax.Array, 'B I'],
    lookup_weights: Float[jax.Array, 'B ...'] | None = None,
    weights: Float[jax.Array, ' B'] | None = None,
  ) -> tuple[Float[jax.Array, ' B'], dict[str, Any]]:
    embeddings, real = by_name(recipe.tables, rows, inverses, lookup_weights)
    state = {name: variables[name] for name in variables if name != 'params'}
    train = weights is not None
    if weights is None:
      weights = jnp.ones(len(dense), jnp.float32)
    wanted = keywords(train, weights, real)
    mutable = list(state) if train else []
    logits, changed = model.apply(
      variables, dense, embeddings, mutable=mutable, **wanted
    )
    changed = {**state, **changed}
    _check_logits(model, logits, len(dense))
    _check_state(model, state, changed)
    return logits, changed

  return forward


def by_name(
  tables: TableSet,
  rows: GroupRows,
  inverses: Inverses,
  lookup_weights: Float[jax.Array, 'B ...'] | None,
) -> tuple[dict[str, jax.Array], RealLookups]:
  """Embeddings, and which lookups are real, by name in the features' order."""
  if lookup_weights is not None:
    lookup_weights = lookup_weights.reshape(len(lookup_weights), -1)
  embeddings: dict[str, jax.Array] = {}
  real: dict[str, jax.Array] = {}
  for group, block, inverse in zip(tables.groups, rows, inverses, strict=True):
    weights = lookup_weights
    # Of one group there is no column to leave out.
    if weights is not None and len(group.columns) < tables.num_columns:
      weights = weights[:, np.array(group.columns)]
    features = {name: tables.features[name] for name in group.features}
    block = block.astype(jnp.float32)
    embeddings |= embed(block, inverse, features, weights)
    for name, (start, end) in zip(group.features, group.spans, strict=True):
      real[name] = inverse[:, start:end] >= 0
  in_order = {name: embeddings[name] for name in tables.features}
  return in_order, {name: real[name] for name in tables.features}


def _check_logits(model: nn.Module, logits: Any, examples: int) -> None:
  if shape_of(logits) != [examples]:
    # [B, 1] would broadcast against the labels to [B, B], and train on that.
    raise UserError(
      f'the model must return one logit per example, [{examples}]',
      got=shape_of(logits),
      where=type(model).__name__,
      hint='return an array without a last axis, e.g. x[:, 0]',
    )


def shape_of(value: Any) -> list[int] | str:
  """The shape of an array, or what it is instead."""
  is_array = isinstance(value, jax.Array | np.ndarray)
  return list(value.shape) if is_array else f'a {type(value).__name__}'


def _check_state(
  model: nn.Module, state: dict[str, Any], changed: dict[str, Any]
) -> None:
  before, after = (
    jax.tree.map(lambda x: f'{jnp.result_type(x)}{list(jnp.shape(x))}', tree)
    for tree in (state, changed)
  )
  if before != after:
    # It would compile every step anew, and fit no checkpoint.
    raise UserError(
      f'the model must keep the shapes of its state, {before}',
      got=after,
      where=type(model).__name__,
      hint='let each step replace the values; sow, for one, adds to them',
    )
