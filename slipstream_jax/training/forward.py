"""The forward pass from rows of all groups to a loss, and its gradients."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.models.adapters import adapt, Inputs
from slipstream_jax.models.bags import Unsummed
from slipstream_jax.models.embedding import embed
from slipstream_jax.models.losses import check_logits, example_losses
from slipstream_jax.tables import TableSet
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.types import Batch, RealLookups

# An underscore: the size differs from group to group.
GroupRows = tuple[Float[jax.Array, '_P _D'] | Unsummed, ...]
"""Per group, a batch's unique rows."""

Inverses = tuple[Int[jax.Array, 'B _K'], ...]
"""Per group, the index into its rows of each of its K_g lookups; -1 is
padding."""


class Gradients(NamedTuple):
  """Gradients of a batch, before any optimizer."""

  dense: Any
  """Gradients of the model's parameters."""
  rows: Any
  """Gradients of each group's rows, summed over duplicate lookups, or of the
  embeddings."""
  loss: Float[jax.Array, '']
  """Loss to report: sum(weight * loss) / sum(weight)."""
  model_state: dict[str, Any]
  """The model's state after the pass."""


def forward(
  recipe: Recipe,
  params: Any,
  state: dict[str, Any],
  rows: Any,
  inverses: Any,
  dense: Float[jax.Array, 'B I'],
  lookup_weights: Float[jax.Array, 'B ...'] | None = None,
  weights: Float[jax.Array, ' B'] | None = None,
  rng: jax.Array | None = None,
  pooled: bool = False,
  portable: bool = False,
) -> tuple[Float[jax.Array, 'B ...'], dict[str, Any]]:
  """Returns logits, f32[B] or f32[B, T], and the model's new state.

  Logits are [B] of a model that returns [B, 1].

  Args:
    recipe: model and tables.
    params: the model's parameters.
    state: the model's state.
    rows: per group, rows [P, D].
    inverses: per group, the index into them of each lookup, [B, K_g].
    dense: dense features.
    lookup_weights: as in `Batch`.
    weights: of the examples, if the pass trains.
    rng: the step's key, if the pass trains.
    pooled: whether `rows` and `inverses` are the results of `pool` instead.
    portable: as in `embed`.
  """
  model, real = adapt(recipe.model), inverses
  if pooled:
    # In the order of the features, because jit sorts names.
    embeddings = {name: rows[name] for name in recipe.tables.features}
    real = {name: inverses[name] for name in recipe.tables.features}
  else:
    # XLA may round weighted lookups otherwise than the kernels. So predictions
    # take the program that is exported.
    portable |= weights is None and lookup_weights is not None
    embeddings, real = pool(
      recipe.tables, rows, inverses, lookup_weights, portable
    )
  keywords = {
    'train': weights is not None,
    'weights': jnp.ones(len(dense)) if weights is None else weights,
    'real': real,
    'rng': rng,
  }
  inputs = Inputs(named_dense(recipe, dense), embeddings, keywords)
  logits, changed = model.apply(params, state, inputs)
  check_logits(model.name, logits, len(dense))
  _check_state(model.name, state, changed)
  # A model of one logit may return it on an axis of its own.
  return logits[:, 0] if logits.shape[1:] == (1,) else logits, changed


def mean_loss(
  recipe: Recipe,
  params: Any,
  state: dict[str, Any],
  rows: GroupRows,
  inverses: Inverses,
  batch: Batch,
) -> Float[jax.Array, '']:
  """Returns the weighted mean loss of a batch, without training on it."""
  logits, _ = forward(
    recipe, params, state, rows, inverses, batch.dense, batch.lookup_weights
  )
  losses = example_losses(
    recipe.loss, recipe.loss_weights, logits, batch.labels
  )
  return (batch.weights * losses).sum() / jnp.maximum(batch.weights.sum(), 1e-9)


def named_dense(
  recipe: Recipe, dense: Float[jax.Array, 'B I']
) -> jax.Array | dict[str, jax.Array]:
  """Returns dense features as the model takes them, by name if they have names.

  Raises:
    UserError: the widths of the names do not add up to the columns.
  """
  if recipe.dense_columns is None:
    return dense
  columns = recipe.dense_columns
  widths = [1 if width is None else width for width in columns.values()]
  if sum(widths) != dense.shape[1]:
    raise UserError(
      f'the widths of dense features must add up to the {dense.shape[1]}'
      ' columns that there are',
      got=sum(widths),
      where='Recipe.dense_columns',
      hint='give the width of each, None for one number per example',
    )
  ends = np.cumsum(widths).tolist()
  return {
    name: dense[:, end - 1]
    if columns[name] is None
    else dense[:, end - w : end]
    for name, w, end in zip(columns, widths, ends, strict=True)
  }


def pool(
  tables: TableSet,
  rows: GroupRows,
  inverses: Inverses,
  lookup_weights: Float[jax.Array, 'B ...'] | None,
  portable: bool = False,
) -> tuple[dict[str, jax.Array], RealLookups]:
  """Returns embeddings and masks of real lookups by name, in features' order.

  The arguments are those of `forward`.
  """
  if lookup_weights is not None:
    lookup_weights = lookup_weights.reshape(len(lookup_weights), -1)
  embeddings: dict[str, jax.Array] = {}
  real: dict[str, jax.Array] = {}
  for group, block, inverse in zip(tables.groups, rows, inverses, strict=True):
    weights = lookup_weights
    # A single group has all columns.
    if weights is not None and len(group.columns) < tables.num_columns:
      weights = weights[:, np.array(group.columns)]
    features = {name: tables.features[name] for name in group.features}
    block = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), block)
    embeddings |= embed(block, inverse, features, weights, portable)
    for name, (start, end) in zip(group.features, group.spans, strict=True):
      real[name] = inverse[:, start:end] >= 0
  in_order = {name: embeddings[name] for name in tables.features}
  return in_order, {name: real[name] for name in tables.features}


def passes(
  recipe: Recipe,
  params: Any,
  state: dict[str, Any],
  rows: Any,
  inverses: Any,
  batch: Batch,
  rng: jax.Array,
  pooled: bool = False,
) -> Gradients:
  """Returns the gradients of sum(weight * loss) / B.

  Takes one pass per microbatch, or a single one if `pooled`. The arguments are
  those of `forward`.
  """
  examples = len(batch.labels)
  count = 1 if pooled else recipe.microbatches
  _check_parts(count, examples)
  one_pass = functools.partial(
    pass_of, recipe, params, examples=examples, pooled=pooled
  )
  inputs = rows, inverses, batch
  if count == 1:
    sums, weight = one_pass(state, *inputs, rng)
  else:
    sums, weight = _summed(one_pass, count, state, inputs, rng)
  return sums._replace(loss=mean_of(sums.loss, weight))


def mean_of(
  loss: Float[jax.Array, ''], weight: Float[jax.Array, '']
) -> Float[jax.Array, '']:
  """Returns the loss to report, from sum(weight * loss) and sum(weight)."""
  # The mean over the examples that the kept ones represent. Padding and random
  # dropping do not change it.
  return loss / jnp.maximum(weight, 1e-9)


def pass_of(
  recipe: Recipe,
  params: Any,
  state: dict[str, Any],
  rows: Any,
  inverses: Any,
  batch: Batch,
  rng: jax.Array,
  examples: int,
  pooled: bool = False,
) -> tuple[Gradients, Float[jax.Array, '']]:
  """Returns gradients with the loss sum(weight * loss), and sum(weight).

  The arguments are those of `forward`, and of all passes the number of
  examples, B.
  """

  def loss(params: Any, rows: Any) -> tuple[jax.Array, Any]:
    logits, model_state = forward(
      recipe,
      params,
      state,
      rows,
      inverses,
      batch.dense,
      batch.lookup_weights,
      batch.weights,
      rng,
      pooled,
    )
    # The offset is added only here: the model and the loss do not know it,
    # and predictions leave it out.
    if batch.offset is not None:
      logits = logits + batch.offset
    losses = batch.weights * example_losses(
      recipe.loss, recipe.loss_weights, logits, batch.labels
    )
    # Divided by B, a constant. The sum of the weights is random: dividing by
    # it would bias the gradients, and a batch of mostly padding would take a
    # full step.
    return losses.sum() / examples, (losses.sum(), model_state)

  # With respect to the rows, not the tables: the gradient is as small as the
  # batch, and sums duplicate lookups of a row.
  (_, (total, model_state)), (dense, of_rows) = jax.value_and_grad(
    loss, (0, 1), has_aux=True
  )(params, rows)
  return Gradients(dense, of_rows, total, model_state), batch.weights.sum()


def _summed(
  one_pass: Callable[..., tuple[Gradients, jax.Array]],
  count: int,
  state: dict[str, Any],
  inputs: Any,
  rng: jax.Array,
) -> tuple[Gradients, Float[jax.Array, '']]:
  """Sums the passes over equal parts of a batch, taken in order.

  `inputs` are its rows, and its places and columns [B, ...].
  """
  rows, *examples = inputs
  parts = jax.tree.map(
    lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), tuple(examples)
  )

  def step(carry: Any, part: Any) -> tuple[Any, None]:
    state, sums = carry
    number, (inverses, batch) = part
    gradients, weight = one_pass(
      state, rows, inverses, batch, jax.random.fold_in(rng, number)
    )
    new = (gradients._replace(model_state={}), weight)
    return (gradients.model_state, jax.tree.map(jnp.add, sums, new)), None

  first = jax.tree.map(lambda x: x[0], parts)
  gradients, weight = jax.eval_shape(lambda: one_pass(state, rows, *first, rng))
  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype),
    (gradients._replace(model_state={}), weight),
  )
  (state, (sums, total)), _ = jax.lax.scan(
    step, (state, zeros), (jnp.arange(count), parts)
  )
  return sums._replace(model_state=state), total


def _check_parts(count: Any, examples: int) -> None:
  if not is_whole(count, 1) or examples % count:
    raise UserError(
      'microbatches must be a whole number that divides the batch of'
      f' {examples} examples',
      got=count,
      where='Trainer, microbatches',
      hint='take a divisor, or batches of another size',
    )


def _check_state(
  name: str, state: dict[str, Any], changed: dict[str, Any]
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
      where=name,
      hint='let each step replace the values; sow, for one, adds to them',
    )
