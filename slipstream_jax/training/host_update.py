"""Steps that update rows on the host, as the papers' baselines do.

A parameter server sends rows and receives their gradients (XDL). Hybrid DLRM
pools on the host, sends embeddings and receives their gradients. Rows and their
state never leave the host. Both use the functions that the fused step consists
of, jitted for the CPU, so any optimizer can train rows there.
"""

import functools
from typing import Any, NamedTuple

import jax
from jaxtyping import Bool, Float, Int
import numpy as np

from slipstream_jax.engine.buffers import from_cpu, to_cpu, to_device
from slipstream_jax.tables import TableSet
from slipstream_jax.training.forward import GroupRows, Inverses, pool
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.training.step import Blocks, gradients, Masks, update_rows
from slipstream_jax.transforms.row_state import RowStateLayout
from slipstream_jax.types import Array, Batch


class HostUpdate(NamedTuple):
  """The jitted functions of such a step."""

  gradients: Any
  """`step.gradients`, on the default device. Donates nothing."""
  update_rows: Any
  """`step.update_rows`, on the CPU."""
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
    """Takes one step, as `step.step`, but donates nothing.

    State is on the device, masks of frozen rows on either. Everything else is
    on the host, also the new blocks and masks.
    """
    blocks, inverses = to_cpu(blocks, owned=True), to_cpu(inverses)
    rows = tuple(block.rows for block in blocks)
    sent: Any = rows, inverses
    if self.pool is not None:
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
  """Returns the functions for what crosses the link.

  Args:
    recipe: model, tables and optimizers.
    layouts: per group, the layout of row state.
    rows: 'parameter_server' or 'pooled'.
  """
  pooled = rows == 'pooled'
  return HostUpdate(
    jax.jit(functools.partial(gradients, recipe, pooled=pooled)),
    jax.jit(functools.partial(update_rows, recipe, layouts)),
    jax.jit(functools.partial(pool, recipe.tables)) if pooled else None,
    jax.jit(functools.partial(_spread, recipe.tables)) if pooled else None,
  )


def _spread(
  tables: TableSet,
  rows: GroupRows,
  inverses: Inverses,
  weights: Float[jax.Array, 'B ...'] | None,
  gradients: dict[str, jax.Array],
) -> Any:
  rows = tuple(leaf.astype(np.float32) for leaf in rows)
  _, back = jax.vjp(lambda x: pool(tables, x, inverses, weights)[0], rows)
  return back(gradients)[0]
