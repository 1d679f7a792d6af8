"""Functions of one training step, and the state before the first one."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32
import numpy as np
import optax

from slipstream_jax.engine.buffers import (
  from_cpu,
  to_cpu,
  to_device,
  to_host,
)
from slipstream_jax.errors import running_optimizer, UserError
from slipstream_jax.models.adapters import adapt, Inputs
from slipstream_jax.tables import TableSet
from slipstream_jax.training import fused
from slipstream_jax.training.forward import (
  Inverses,
  named_dense,
  passes,
  pool,
)
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.training.watch import Masks
from slipstream_jax.transforms.row_state import join, RowStateLayout, split
from slipstream_jax.transforms.rowwise import stochastic_round
from slipstream_jax.transforms.skip import touched_rows
from slipstream_jax.types import Array, Batch, RowBlock, Rows

Blocks = tuple[RowBlock, ...]
"""Per group, a batch's unique rows with their row state, [P, ...]."""
RowGlobals = tuple[tuple[jax.Array, ...], ...]
"""Per group, leaves of the row optimizer's state without a row axis."""
RowWeights = tuple[Float[jax.Array, ' _P'], ...]
RowNumbers = tuple[UInt32[jax.Array, ' _P'] | None, ...]

DENSE = 'Trainer, dense_optimizer'
"""Name of the dense optimizer's argument in errors."""


def step(
  recipe: Recipe,
  layouts: tuple[RowStateLayout, ...],
  state: TrainState,
  blocks: Blocks,
  inverses: Inverses,
  batch: Batch,
  batches_seen: Float[jax.Array, ''],
  row_weights: RowWeights,
  frozen: Masks,
) -> tuple[TrainState, Blocks, Float[jax.Array, ''], Masks]:
  """Takes a step: `gradients`, then `update_rows`.

  The arguments are those of `Compiled.update`, and per group the layouts of row
  state, and which rows must keep their bits.

  Returns:
    The next state, the changed rows, the loss to report, and per group which
    rows it touched.
  """
  rows = fused.rows(recipe, blocks, inverses)
  new_state, row_grads, loss = gradients(
    recipe, state, rows, inverses, batch, batches_seen
  )
  row_grads = fused.with_bags(recipe, row_grads, inverses)
  good = None
  if recipe.skips_bad_steps:
    good = is_finite(loss, new_state.params, row_grads)
    frozen = tuple(mask | ~good for mask in frozen)
  new_blocks, row_globals, touched = update_rows(
    recipe,
    layouts,
    blocks,
    row_grads,
    state.row_globals,
    row_weights,
    frozen,
    batches_seen,
    loss,
    state.step,
  )
  new_state = new_state._replace(row_globals=row_globals)
  if good is not None:
    changed = new_state, loss, touched
    new_state, loss, touched = unless_bad(good, state, *changed)
  return new_state, new_blocks, loss, touched


def unless_bad(
  good: Bool[jax.Array, ''],
  state: TrainState,
  new_state: TrainState,
  loss: Float[jax.Array, ''],
  touched: Masks,
) -> tuple[TrainState, Float[jax.Array, ''], Masks]:
  """Returns a step's results, of which a bad one has changed nothing.

  Its loss is not finite. Its rows must have been frozen before.
  """
  # Steps are counted in any case, so that later steps draw the same numbers.
  new_state = jax.tree.map(
    lambda new, old: jnp.where(good, new, old),
    new_state,
    state._replace(step=new_state.step),
  )
  loss = jnp.where(good | ~jnp.isfinite(loss), loss, jnp.nan)
  return new_state, loss, tuple(mask & good for mask in touched)


def is_finite(loss: Float[jax.Array, ''], *changes: Any) -> Bool[jax.Array, '']:
  """Whether the loss and every element of these trees are finite."""
  good = jnp.isfinite(loss)
  for leaf in jax.tree.leaves(changes):
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      good &= jnp.isfinite(leaf).all()
  return good


def gradients(
  recipe: Recipe,
  state: TrainState,
  rows: Any,
  inverses: Any,
  batch: Batch,
  batches_seen: Float[jax.Array, ''],
  pooled: bool = False,
) -> tuple[TrainState, Any, Float[jax.Array, '']]:
  """Takes a step without its rows: forward, backward and the dense update.

  The arguments are those of `step` and `forward`.

  Returns:
    The next state with unchanged `row_globals`, the gradients of the rows, or
    of the embeddings if `pooled`, and the loss to report.
  """
  key = jax.random.wrap_key_data(state.rng)
  dense_grads, row_grads, loss, model_state = passes(
    recipe,
    state.params,
    state.model_state,
    # Half precision is for storage only: optimizers see f32 and add to f32.
    jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rows),
    inverses,
    batch,
    jax.random.fold_in(key, state.step),
    pooled,
  )
  new_state = update_dense(
    recipe,
    state._replace(model_state=model_state),
    dense_grads,
    batches_seen,
    _mean_weight(batch.weights),
    loss,
  )
  return new_state, row_grads, loss


def update_dense(
  recipe: Recipe,
  state: TrainState,
  gradients: Any,
  batches_seen: Float[jax.Array, ''],
  example_weight: Float[jax.Array, ''],
  loss: Float[jax.Array, ''],
  **extra: Any,
) -> TrainState:
  """Updates the parameters. Returns the next state, with its rows unchanged.

  `extra` are more arguments for the optimizer.
  """
  optimizer = optax.with_extra_args_support(recipe.dense_optimizer)
  with running_optimizer(DENSE):
    updates, dense_state = optimizer.update(
      gradients,
      state.dense_state,
      state.params,
      batches_seen=batches_seen,
      example_weight=example_weight,
      value=loss,
      **extra,
    )
  params = optax.apply_updates(state.params, updates)
  return TrainState(
    state.step + 1,
    params,
    state.model_state,
    dense_state,
    state.row_globals,
    state.rng,
  )


def _mean_weight(weights: Float[jax.Array, ' B']) -> Float[jax.Array, '']:
  """Returns the mean weight of the examples that have one; 1 if none has."""
  return mean_weight(weights.sum(), (weights > 0).sum())


def mean_weight(
  weight: Float[jax.Array, ''], some: Int[jax.Array, '']
) -> Float[jax.Array, '']:
  """Returns the mean weight of so many examples; 1 if there are none."""
  return jnp.where(some > 0, weight / jnp.maximum(some, 1), 1)


def update_rows(
  recipe: Recipe,
  layouts: tuple[RowStateLayout, ...],
  blocks: Blocks,
  gradients: tuple[fused.Gradient, ...],
  row_globals: RowGlobals,
  row_weights: RowWeights,
  frozen: Masks,
  batches_seen: Float[jax.Array, ''],
  loss: Float[jax.Array, ''],
  step: Int[jax.Array, ''],
  numbers: RowNumbers | None = None,
) -> tuple[Blocks, RowGlobals, Masks]:
  """Updates the rows of all groups from their gradients.

  The arguments are those of `step`, beside the gradients of the rows. If given,
  draws of half precision depend on the numbers of the rows in their group, in
  place of their places in the batch.

  Returns:
    Per group the new block, the new `row_globals`, and which rows it touched.
  """
  of_groups = zip(
    recipe.tables.groups,
    layouts,
    blocks,
    gradients,
    row_globals,
    row_weights,
    frozen,
    strict=True,
  )
  results = []
  for number, (group, layout, block, grads, leaves, weights, mask) in enumerate(
    of_groups
  ):
    optimizer = recipe.optimizer_of(group)
    arguments = {
      'batches_seen': batches_seen,
      'example_weight': weights,
      'value': loss,
    }
    state = join(layout, block.state, leaves)
    by_chain = functools.partial(
      _update_by_chain,
      optimizer,
      layout,
      block,
      state,
      mask,
      arguments,
      functools.partial(
        _rounded,
        step=step,
        group=number,
        numbers=None if numbers is None else numbers[number],
      ),
    )
    known = fused.known(optimizer, block)
    if known is None:
      results.append(by_chain(grads))
    else:
      results.append(fused.update(known, block, state, grads, mask, by_chain))
  new_blocks, row_globals, touched = zip(*results, strict=True)
  return new_blocks, row_globals, touched


def _update_by_chain(
  optimizer: optax.GradientTransformation,
  layout: RowStateLayout,
  block: RowBlock,
  state: optax.OptState,
  frozen: Bool[jax.Array, ' _P'],
  arguments: dict[str, jax.Array],
  rounded: Callable[..., Rows],
  gradient: Float[jax.Array, '_P _D'],
) -> tuple[RowBlock, tuple[jax.Array, ...], Bool[jax.Array, ' _P']]:
  """Updates a group's rows by its optimizer. Returns as `update_rows`."""
  before = block.rows.astype(jnp.float32)
  updates, state = optax.with_extra_args_support(optimizer).update(
    gradient, state, before, **arguments
  )
  own, row_globals = split(layout, state)
  rows = optax.apply_updates(before, updates)
  if block.rows.dtype != rows.dtype:
    rows = rounded(rows, block.rows.dtype)
  # Updates tell which rows were touched. Rounding to half precision may leave a
  # touched row as it was.
  new_block = _keep(frozen, block, RowBlock(rows, own))
  return new_block, row_globals, touched_rows(updates)


def _keep(frozen: Bool[jax.Array, ' P'], old: RowBlock, new: RowBlock) -> Any:
  """Returns the new block with the bits of the old one for frozen rows."""

  # An update of zero would not do: it would still change row state, and
  # -0.0 + 0.0 has other bits.
  def keep(old: jax.Array, new: jax.Array) -> jax.Array:
    mask = frozen.reshape(len(new), *[1] * (new.ndim - 1))
    return jnp.where(mask, old, new)

  return jax.tree.map(keep, old, new)


def _rounded(
  rows: Rows,
  dtype: np.dtype,
  step: Int[jax.Array, ''],
  group: int,
  numbers: UInt32[jax.Array, ' _P'] | None,
) -> Rows:
  """Rounds rows f32[P, D] to half precision at random."""
  # The key is constant: a draw depends only on the step, the group and the
  # row's place in the batch. These are the same under every placement and after
  # a restore, so a checkpoint needs no key.
  key = jax.random.fold_in(jax.random.key(group), step)
  if numbers is None:
    bits = jax.random.bits(key, rows.shape, jnp.uint32)
  else:
    bits = row_bits(key, numbers, rows.shape[1:])
  return stochastic_round(rows, dtype, bits)


def row_bits(
  key: jax.Array, numbers: UInt32[jax.Array, ' P'], shape: tuple[int, ...]
) -> UInt32[jax.Array, 'P ...']:
  """Returns random bits for each row, which depend on its number alone."""

  def of_row(number: jax.Array) -> jax.Array:
    return jax.random.bits(jax.random.fold_in(key, number), shape, jnp.uint32)

  return jax.vmap(of_row)(numbers)


def initial_state(
  recipe: Recipe,
  layouts: tuple[RowStateLayout, ...],
  dense_features: int,
  data: UInt32[jax.Array, ' words'],
) -> TrainState:
  """Returns the state before the first step, from the data of a random key.

  Raises:
    UserError: the model needs dense features, and there are none.
  """
  key = jax.random.wrap_key_data(data)
  params, model_state = _init_model(recipe, dense_features, key)
  row_states = [
    recipe.optimizer_of(group).init(jnp.zeros((1, group.dim), jnp.float32))
    for group in recipe.tables.groups
  ]
  with running_optimizer(DENSE):
    dense_state = recipe.dense_optimizer.init(params)
  return TrainState(
    jnp.zeros((), jnp.int32),
    params,
    model_state,
    dense_state,
    tuple(split(*pair)[1] for pair in zip(layouts, row_states, strict=True)),
    data,
  )


def _init_model(
  recipe: Recipe, dense_features: int, key: jax.Array
) -> tuple[Any, dict[str, Any]]:
  """Returns initial parameters and state of the model, for one example."""
  tables = recipe.tables
  lengths = {name: one.max_length for name, one in tables.features.items()}
  embeddings = {
    name: jnp.zeros(
      (
        1,
        *((lengths[name],) if feature.combiner == 'none' else ()),
        tables.tables[feature.table].embedding_dim,
      ),
      jnp.float32,
    )
    for name, feature in tables.features.items()
  }
  keywords = {
    'train': False,
    'weights': jnp.ones(1, jnp.float32),
    'real': {name: jnp.ones((1, n), bool) for name, n in lengths.items()},
    'rng': None,
  }
  dense = named_dense(recipe, jnp.zeros((1, dense_features), jnp.float32))
  model = adapt(recipe.model)
  try:
    return model.init(key, Inputs(dense, embeddings, keywords))
  except ZeroDivisionError as error:  # flax raises it for an empty kernel
    if dense_features:
      raise
    raise UserError(
      'a model that uses dense features needs examples that have some',
      got='none',
      where=model.name,
      hint='give dense features, or take embeddings alone: the model gets'
      ' dense features only if it names them',
    ) from error


class HostUpdate(NamedTuple):
  """The jitted functions of a step that updates rows on the host.

  A parameter server sends rows and the model's parameters, and receives their
  gradients (XDL). Parameters are updated on the device, and come back in place
  of their gradients, which are as large. Hybrid DLRM pools on the host, sends
  embeddings and receives their gradients. Rows and their state never leave the
  host, and any optimizer can train them there.
  """

  gradients: Any
  """`gradients`, on the default device. Donates nothing."""
  update_rows: Any
  """`update_rows`, on the CPU."""
  pool: Any
  """`forward.pool`, on the CPU. None: rows are sent, not embeddings."""
  spread: Any
  """Gradients of the embeddings to gradients of the rows. None as in `pool`."""

  def step(
    self,
    state: TrainState,
    blocks: Blocks,
    inverses: tuple[Int[Array, 'B _K'], ...],
    batch: Batch,
    batches_seen: Float[Array, ''],
    row_weights: tuple[Float[Array, ' _P'], ...],
    frozen: tuple[Bool[Array, ' _P'], ...],
  ) -> tuple[TrainState, Blocks, Float[jax.Array, ''], Masks]:
    """Takes one step, as the function `step`, but donates nothing.

    State is on the device, masks of frozen rows on either. Everything else is
    on the host, also the new blocks and masks.
    """
    blocks, inverses = to_cpu(blocks, owned=True), to_cpu(inverses)
    rows = tuple(block.rows for block in blocks)
    sent: Any = rows, inverses
    if self.pool is None:
      state = state._replace(params=to_device(to_host(state.params)))
    else:
      weights = to_cpu(batch.lookup_weights)
      sent = self.pool(rows, inverses, weights)
      batch = batch._replace(lookup_weights=None)  # already applied in pooling
    on_device = to_device((batch, batches_seen))
    new_state, gradients, loss = self.gradients(
      state._replace(row_globals=()), *from_cpu(sent), *on_device
    )
    gradients, step, loss_here = to_cpu((gradients, state.step, loss))
    if self.pool is not None:
      gradients = self.spread(rows, inverses, weights, gradients)
    new_blocks, row_globals, touched = self.update_rows(
      blocks,
      gradients,
      *to_cpu((state.row_globals, row_weights, frozen, batches_seen)),
      loss_here,
      step,
    )
    new_state = new_state._replace(row_globals=from_cpu(row_globals))
    return new_state, new_blocks, loss, touched


def make_host_update(
  recipe: Recipe, layouts: tuple[RowStateLayout, ...], rows: str
) -> HostUpdate:
  """Returns the functions of 'parameter_server' or 'pooled', see `ROWS`."""
  pooled = rows == 'pooled'
  return HostUpdate(
    jax.jit(functools.partial(gradients, recipe, pooled=pooled)),
    jax.jit(functools.partial(update_rows, recipe, layouts)),
    jax.jit(functools.partial(pool, recipe.tables)) if pooled else None,
    jax.jit(functools.partial(_spread, recipe.tables)) if pooled else None,
  )


def _spread(
  tables: TableSet,
  rows: tuple[Float[jax.Array, '_P _D'], ...],
  inverses: Inverses,
  weights: Float[jax.Array, 'B ...'] | None,
  gradients: dict[str, jax.Array],
) -> Any:
  rows = tuple(leaf.astype(np.float32) for leaf in rows)
  _, back = jax.vjp(lambda x: pool(tables, x, inverses, weights)[0], rows)
  return back(gradients)[0]
