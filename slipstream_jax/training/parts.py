"""A step over parts of its batch, on one device or several, with equal bits.

A batch is cut into G parts, and each of W devices computes the parts of its
slice one after another. What a part computes, and the order in which results of
parts are added, does not depend on W:

1. `send`: each device sends rows of its lane to the slices that look them up.
2. `part`: forward and backward over one part, by one program.
3. `add`: gradients are added as a binary tree over parts. Those of rows return
   to their lanes in between.
4. `update`: dense parameters, equally on each device, and the lane's rows.

The host cuts the parts. In one program with the forward pass, XLA would fuse
the cutting with sums of gradients and so change their order. A program that
only adds has one result whatever XLA fuses.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from slipstream_jax.engine.lane_rows import block_places
from slipstream_jax.engine.mesh import AXIS, Devices, SPLIT, WHOLE
from slipstream_jax.engine.planner import PlannedBatch
from slipstream_jax.training.divided import check_examples
from slipstream_jax.training.forward import mean_of, pass_of
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.training.step import (
  Blocks,
  mean_weight,
  RowNumbers,
  RowWeights,
  update_dense,
  update_rows,
)
from slipstream_jax.training.watch import Masks
from slipstream_jax.transforms.row_state import RowStateLayout
from slipstream_jax.types import Batch


class Sums(NamedTuple):
  """What parts add to a step, apart from the gradients of rows."""

  dense: Any
  """Gradients of the model's parameters."""
  loss: Float[jax.Array, '...']
  """sum(weight * loss)."""
  weight: Float[jax.Array, '...']
  """sum(weight)."""
  some: Int[jax.Array, '...']
  """Examples that have a weight."""


class Inputs(NamedTuple):
  """A step's arrays, split over the devices."""

  wanted: tuple[jax.Array, ...]
  """Per group, as in `Exchange`, like the next three."""
  picked: tuple[jax.Array, ...]
  returned: tuple[jax.Array, ...]
  summed: tuple[jax.Array, ...]
  parts: tuple[tuple[Any, ...], ...]
  """For each part that a device computes: the places of lookups per group, the
  examples, and the number of the part."""
  row_weights: RowWeights
  """Per group, as in `PlannedBatch`, each lane's rows padded."""
  numbers: RowNumbers
  """Per group of half precision, the rows' numbers in the group."""
  none: Masks
  """Per group, a mask of no row."""


class PartsStep:
  """The programs of a step over parts."""

  def __init__(
    self,
    recipe: Recipe,
    layouts: tuple[RowStateLayout, ...],
    devices: Devices,
    parts: int,
  ) -> None:
    """Compiles nothing yet."""
    self.devices, self.parts = devices, parts
    self.groups = recipe.tables.groups
    run = devices.compiled
    self._send = run(_send, (SPLIT, SPLIT, SPLIT), SPLIT)
    self._part = run(
      functools.partial(_part, recipe, parts),
      (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT, SPLIT, SPLIT),
      SPLIT,
    )
    self._add = run(_add, (SPLIT, SPLIT, SPLIT, SPLIT), (WHOLE, SPLIT))
    self._update = run(
      functools.partial(_update, recipe, layouts),
      (WHOLE, SPLIT, WHOLE, SPLIT, WHOLE, SPLIT, SPLIT, SPLIT),
      (WHOLE, SPLIT, WHOLE, SPLIT),
      donate=(0, 1),
    )

  def inputs(self, item: PlannedBatch, batch: Batch) -> Inputs:
    """Puts a planned batch on the devices, without fields for the host."""
    return Inputs(*self.devices.split(self._on_host(item, batch)))

  def _on_host(self, item: PlannedBatch, batch: Batch) -> Any:
    lanes, rounds = self.devices.lanes, self.parts // self.devices.lanes

    def cut(column: np.ndarray, part: int) -> np.ndarray:
      """Returns the examples of the part with this number in each slice."""
      size = len(column) // self.parts
      shape = lanes, rounds, size, *column.shape[1:]
      own = column.reshape(shape)[:, part]
      return own.reshape(lanes * size, *column.shape[1:])

    check_examples(self.parts, len(batch.labels))
    exchanges, parts = item.exchanges, []
    numbers = np.arange(self.parts, dtype=np.int32)
    places = [
      one.inverse.reshape(-1, one.inverse.shape[2]) for one in exchanges
    ]
    for part in range(rounds):
      inverses = tuple(cut(one, part) for one in places)
      columns = batch.map(functools.partial(cut, part=part))
      parts.append((inverses, columns, cut(numbers, part)))
    weights, rows = [], []
    for group, plan, own, one in zip(
      self.groups, item.plans, item.row_weights, exchanges, strict=True
    ):
      assert plan.lanes is not None
      at = block_places(plan.lanes, lanes * one.size)
      weight, known = np.ones(lanes * one.size, np.float32), None
      weight[at] = own[: len(at)]
      weights.append(weight)
      if group.dtype != 'float32':
        known = np.zeros(lanes * one.size, np.uint32)
        known[at] = plan.rows
      rows.append(known)
    return (
      tuple(one.wanted for one in exchanges),
      tuple(one.picked for one in exchanges),
      tuple(one.returned for one in exchanges),
      tuple(one.summed for one in exchanges),
      tuple(parts),
      tuple(weights),
      tuple(rows),
      tuple(np.zeros(lanes * one.size, bool) for one in exchanges),
    )

  def __call__(
    self,
    state: TrainState,
    blocks: Blocks,
    inputs: Inputs,
    batches_seen: Float[jax.Array, ''],
    frozen: Masks | None,
  ) -> tuple[TrainState, Blocks, Float[jax.Array, ''], Masks]:
    """Takes a step, as the function `step`. Donates state and blocks."""
    rows = tuple(block.rows for block in blocks)
    sent = self._send(rows, inputs.wanted, inputs.picked)
    of_parts = [
      self._part(state.params, state.step, state.rng, own, *part)
      for own, part in zip(sent, inputs.parts, strict=True)
    ]
    sums, of_rows = zip(*of_parts, strict=True)
    total, gradients = self._add(sums, of_rows, inputs.returned, inputs.summed)
    result: tuple[TrainState, Blocks, jax.Array, Masks] = self._update(
      state,
      blocks,
      total,
      gradients,
      batches_seen,
      inputs.row_weights,
      inputs.none if frozen is None else frozen,
      inputs.numbers,
    )
    return result


def _take(rows: jax.Array, at: jax.Array) -> jax.Array:
  """Returns rows at places. Past the last row, they are 0."""
  return rows.at[at].get(mode='fill', fill_value=0)


def _send(
  rows: tuple[jax.Array, ...],
  wanted: tuple[jax.Array, ...],
  picked: tuple[jax.Array, ...],
) -> tuple[tuple[jax.Array, ...], ...]:
  """Returns for each part of the device's slice, per group, the part's rows."""
  groups = []
  for own, at, of_parts in zip(rows, wanted, picked, strict=True):
    got = lax.all_to_all(_take(own, at[0]), AXIS, 0, 0)
    got = got.reshape(-1, own.shape[1])
    groups.append([_take(got, places) for places in of_parts])
  return tuple(zip(*groups, strict=True))


def _part(
  recipe: Recipe,
  parts: int,
  params: Any,
  step: Int[jax.Array, ''],
  rng: jax.Array,
  rows: tuple[jax.Array, ...],
  inverses: tuple[jax.Array, ...],
  batch: Batch,
  number: Int[jax.Array, '1'],
) -> tuple[Sums, tuple[jax.Array, ...]]:
  """Returns what a part adds to the step, and the gradients of its rows."""
  key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
  gradients, weight = pass_of(
    recipe,
    params,
    {},
    tuple(own.astype(jnp.float32) for own in rows),
    inverses,
    batch,
    jax.random.fold_in(key, number[0]),
    len(batch.labels) * parts,
  )
  some = (batch.weights > 0).sum()
  sums = Sums(gradients.dense, gradients.loss, weight, some)
  return jax.tree.map(lambda x: x[None], sums), gradients.rows


def _tree(parts: Sequence[Any]) -> Any:
  """Adds trees of arrays in pairs, and the sums in pairs."""
  while len(parts) > 1:
    pairs = zip(parts[::2], parts[1::2], strict=True)
    parts = [jax.tree.map(jnp.add, *pair) for pair in pairs]
  return parts[0]


def _of_slices(own: Any) -> list[Any]:
  """Returns a tree of arrays as each device has it.

  Those of a dtype are sent as one, since each exchange takes its time.
  """
  leaves, form = jax.tree.flatten(own)
  lanes = lax.axis_size(AXIS)
  of_slices: list[list[Any]] = [[None] * len(leaves) for _ in range(lanes)]
  for dtype in {leaf.dtype: None for leaf in leaves}:
    some = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
    ends = np.cumsum([leaves[i].size for i in some])[:-1]
    joined = jnp.concatenate([leaves[i].reshape(-1) for i in some])
    for slice_, row in zip(
      of_slices, lax.all_gather(joined, AXIS), strict=True
    ):
      for i, values in zip(some, jnp.split(row, ends), strict=True):
        slice_[i] = values.reshape(leaves[i].shape)
  return [jax.tree.unflatten(form, one) for one in of_slices]


def _add(
  sums: tuple[Sums, ...],
  rows: tuple[tuple[jax.Array, ...], ...],
  returned: tuple[jax.Array, ...],
  summed: tuple[jax.Array, ...],
) -> tuple[Sums, tuple[jax.Array, ...]]:
  """Returns the sums of all parts, and the gradients of the lane's rows."""
  lanes = lax.axis_size(AXIS)
  total = _tree(_of_slices(jax.tree.map(lambda x: x[0], _tree(sums))))
  gradients = []
  for of_parts, to_slice, to_lane in zip(
    zip(*rows, strict=True), returned, summed, strict=True
  ):
    # A row that a part does not look up has a gradient of 0 there.
    of_slice = _tree(
      [_take(*one) for one in zip(of_parts, to_slice, strict=True)]
    )
    dim = of_slice.shape[1]
    got = lax.all_to_all(of_slice.reshape(lanes, -1, dim), AXIS, 0, 0)
    gradients.append(
      _tree([_take(*one) for one in zip(got, to_lane[0], strict=True)])
    )
  return total, tuple(gradients)


def _update(
  recipe: Recipe,
  layouts: tuple[RowStateLayout, ...],
  state: TrainState,
  blocks: Blocks,
  sums: Sums,
  row_grads: tuple[jax.Array, ...],
  batches_seen: Float[jax.Array, ''],
  row_weights: RowWeights,
  frozen: tuple[Bool[jax.Array, ' _P'], ...],
  numbers: RowNumbers,
) -> tuple[TrainState, Blocks, Float[jax.Array, ''], Masks]:
  """Updates the parameters, and the rows of the device's lane."""
  loss = mean_of(sums.loss, sums.weight)
  weight = mean_weight(sums.weight, sums.some)
  new = update_dense(recipe, state, sums.dense, batches_seen, weight, loss)
  rows, row_globals, touched = update_rows(
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
    numbers,
  )
  return new._replace(row_globals=row_globals), rows, loss, touched
