"""Steps whose rows are looked up, or pooled, and updated on the host.

The baselines of the papers: a parameter server sends rows and gets their
gradients back (XDL); hybrid DLRM pools on the host, and sends embeddings and
gets theirs. Rows and their state never leave it. Both run the programs that the
fused step is made of, jitted for the CPU: any chain trains rows there.
"""

from typing import Any, NamedTuple

import jax
from jaxtyping import Bool, Float, Int
import numpy as np

from slipstream_jax.engine.buffers import from_cpu, to_cpu, to_device
from slipstream_jax.training.forward import Inverses, pool
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.training.step import (
  Blocks,
  make_gradients,
  make_row_update,
  Masks,
)
from slipstream_jax.transforms.row_state import RowStateLayout
from slipstream_jax.types import Array, Batch


class HostRows(NamedTuple):
  """The programs of such a step."""

  gradients: Any
  """Jitted `make_gradients`, on the default device; it donates nothing."""
  update_rows: Any
  """Jitted `make_row_update`, where its arguments are: on the CPU."""
  pool: Any
  """Rows, inverses and weights to embeddings and real lookups; None: rows
  cross the link, not embeddings."""
  spread: Any
  """The gradients of the embeddings to those of the rows; None likewise."""

  def step(
    self,
    state: TrainState,
    blocks: Blocks,
    inverses: tuple[Int[np.ndarray, 'B _K'], ...],
    batch: Batch,
    batches_seen: np.float32,
    row_weights: tuple[Float[np.ndarray, ' _P'], ...],
    still: tuple[Bool[Array, ' _P'], ...],
  ) -> tuple[TrainState, Blocks, Float[jax.Array, ''], Masks]:
    """One step; as `make_step`, but nothing is donated.

    Args:
      state: on the device.
      blocks: the batch's unique rows, of the host, on which the new ones are.
      inverses: of the host.
      batch: of the host; its lookups are not read.
      batches_seen: how many the source has delivered so far.
      row_weights: of the host.
      still: on either side.
    """
    blocks, inverses = to_cpu(blocks, owned=True), to_cpu(inverses)
    rows = tuple(block.rows for block in blocks)
    sent: Any = rows, inverses
    if self.pool is not None:
      weights = to_cpu(batch.lookup_weights)
      sent = self.pool(rows, inverses, weights)
      batch = batch._replace(lookup_weights=None)  # they are in what is sent
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
      *to_cpu((state.row_globals, row_weights, still, batches_seen)),
      loss_here,
      step,
    )
    return (
      new_state._replace(row_globals=from_cpu(row_globals)),
      new_blocks,
      loss,
      touched,
    )


def host_rows(
  recipe: Recipe, layouts: tuple[RowStateLayout, ...], rows: str
) -> HostRows:
  """The programs of a recipe, of the groups' row state layouts.

  Args:
    recipe: model, tables and optimizers.
    layouts: of the row state.
    rows: what crosses the link: 'parameter_server' or 'pooled'.
  """
  pooled = rows == 'pooled'
  gradients = jax.jit(make_gradients(recipe, pooled=pooled))
  update_rows = jax.jit(make_row_update(recipe, layouts))
  if not pooled:
    return HostRows(gradients, update_rows, None, None)
  tables = recipe.tables

  def embeddings(
    rows: tuple[jax.Array, ...],
    inverses: Inverses,
    weights: Float[jax.Array, 'B ...'] | None,
  ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    by_name, real = pool(tables, rows, inverses, weights)
    return by_name, dict(real)

  def spread(
    rows: tuple[jax.Array, ...],
    inverses: Inverses,
    weights: Float[jax.Array, 'B ...'] | None,
    gradients: dict[str, jax.Array],
  ) -> tuple[jax.Array, ...]:
    rows = tuple(leaf.astype(np.float32) for leaf in rows)
    _, back = jax.vjp(lambda x: pool(tables, x, inverses, weights)[0], rows)
    (of_rows,) = back(gradients)
    result: tuple[jax.Array, ...] = of_rows
    return result

  return HostRows(gradients, update_rows, jax.jit(embeddings), jax.jit(spread))
