"""A step over parts of its batch, on one device or several, with equal bits.

A batch is cut into G parts, and each of W devices computes the parts of its
slice one after another. What a part computes, and the order in which results of
parts are added, does not depend on W:

1. `send`: each device sends rows of its lane to the slices that look them up,
   of its replica alone if there are several.
2. `pass`: forward and backward over one part after another, in a loop.
3. `add`: gradients are added as a binary tree over parts. Those of rows return
   to their lanes in between. The parts of a replica are neighbours, so the sums
   of replicas are the last ones of the tree.
4. `update`: dense parameters, equally on each device, and the lane's rows.

XLA may fuse the cutting of a part with sums of its gradients, and so change
their order. So the second program is one and the same for any W. Its arrays
have room for all G parts on each device, and how many a device has is an
argument. A program that only adds has one result whatever XLA fuses.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import operator
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32
import numpy as np

from slipstream_jax.engine.buffers import to_host
from slipstream_jax.engine.lane_rows import block_places
from slipstream_jax.engine.mesh import (
  ALL,
  Devices,
  EACH,
  HOSTS,
  OF_HOST,
  on_first,
  Packed,
  REPLICAS,
  SPLIT,
  WHOLE,
)
from slipstream_jax.engine.planner import PlannedBatch, Slices
from slipstream_jax.hashing import GOLDEN
from slipstream_jax.training.divided import check_examples
from slipstream_jax.training.forward import mean_of, pass_of
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.training.step import (
  Blocks,
  is_finite,
  mean_weight,
  row_bits,
  RowNumbers,
  RowWeights,
  unless_bad,
  update_dense,
  update_rows,
)
from slipstream_jax.training.watch import Masks
from slipstream_jax.transforms.row_state import RowStateLayout
from slipstream_jax.transforms.rowwise import stochastic_round
from slipstream_jax.types import Array, Batch


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


class Parts(NamedTuple):
  """Parts of one device. The first axis of each array counts them."""

  inverses: tuple[Array, ...]
  """Per group, the places of the lookups as in `Exchange`, [G, b, K]."""
  batch: Batch
  """The examples, each array [G, b, ...]."""
  numbers: Int[Array, ' G']
  """Number of each part in the batch."""


class There(NamedTuple):
  """Places of a group's rows on their way from lanes to parts.

  Those without a docstring are as in `Exchange`, also in `Back`.
  """

  wanted: Array
  picked: Array
  to_hosts: Array | None


class Back(NamedTuple):
  """Places of a group's gradients on their way from parts to lanes."""

  returned: Array
  summed: Array
  from_hosts: Array | None
  received: Array | None
  """Numbers of the rows that the slice receives. None: it gets them in f32."""
  held: Array | None
  """The same of the rows that the device gets for its host."""


class Inputs(NamedTuple):
  """A step's arrays, with a part for each device."""

  there: tuple[There, ...]
  """Per group, like the next ones but for the parts."""
  back: tuple[Back, ...]
  parts: Parts
  """Places of lookups, examples and numbers of the device's parts."""
  row_weights: tuple[Array, ...]
  """Weights of rows as in `PlannedBatch`, each lane's padded."""
  numbers: tuple[Array | None, ...]
  """Numbers of the lane's rows, where draws need them."""
  tower: Any = None
  """`TowerInputs` of the device, where towers have hosts of their own."""


class PartsStep:
  """The programs of a step over parts."""

  def __init__(
    self,
    recipe: Recipe,
    layouts: tuple[RowStateLayout, ...],
    devices: Devices,
    over: Slices,
  ) -> None:
    """Compiles nothing yet."""
    self.devices, self.parts = devices, over.parts
    parts, self.narrow = over.parts, over.exchange != 'float32'
    towers = 1 if over.towers is None else over.hosts
    self.groups = recipe.tables.groups
    self.rounds = devices.whole(np.int32(parts // devices.size))
    run = devices.compiled
    self._send = run(
      functools.partial(_send, parts, self.narrow, towers),
      (SPLIT, EACH),
      (EACH, SPLIT, EACH),
    )
    self._pass = run(
      functools.partial(_pass, recipe, parts),
      (WHOLE, WHOLE, WHOLE, WHOLE, EACH, EACH),
      EACH,
    )
    self._add = run(
      functools.partial(add, self.narrow, towers),
      (EACH, EACH, EACH, EACH, WHOLE),
      (WHOLE, SPLIT),
    )
    self._update = run(
      functools.partial(_update, recipe, layouts),
      (WHOLE, SPLIT, WHOLE, SPLIT, WHOLE, EACH, SPLIT, EACH),
      (WHOLE, SPLIT, WHOLE, SPLIT),
      donate=(0, 1),
    )
    self._room = run(functools.partial(with_room, parts), (EACH,), EACH)
    self._score = functools.cache(
      lambda program: run(
        functools.partial(_score, program, parts),
        (WHOLE,) * 4 + (EACH,),
        EACH,
      )
    )
    self._collect = run(functools.partial(_collect, parts), (EACH,), WHOLE)

  def scores(
    self,
    program: Callable[..., Any],
    state: TrainState,
    rows: tuple[jax.Array, ...],
    examples: Any,
  ) -> np.ndarray:
    """Returns the logits of examples, [B, ...], which the devices share.

    Args:
      program: `forward` of a recipe.
      state: whose parameters predict.
      rows: per group the unique rows, whole on each device.
      examples: per group, the place of each lookup in them, the dense features
        and the weights of the lookups, or None. Arrays of numpy, [B, ...].
    """
    leaves = jax.tree.leaves(examples)
    count = len(leaves[0])
    size = -(-count // self.parts)

    def cut(column: np.ndarray) -> np.ndarray:
      # Examples of no lookups fill the last part.
      padded = np.full(
        (self.parts * size, *column.shape[1:]),
        -1 if column.dtype.kind == 'i' else 0,
        column.dtype,
      )
      padded[:count] = column
      return padded.reshape(self.parts, size, *column.shape[1:])

    own = self._room(self.devices.split(jax.tree.map(cut, examples), EACH))
    variables = self.devices.settled((state.params, state.model_state))
    parts = self._score(program)(*variables, rows, self.rounds, own)
    logits: np.ndarray = to_host(on_first(self._collect(parts)))
    return logits.reshape(-1, *logits.shape[2:])[:count]

  def inputs(self, item: PlannedBatch, batch: Batch) -> Packed:
    """Puts a planned batch, without fields for the host, on the devices.

    Returns:
      `Inputs`.
    """
    return self.devices.packed(self.on_host(item, batch), EACH)

  def on_host(self, item: PlannedBatch, batch: Batch) -> Inputs:
    """Returns the arrays of `inputs`, which are not on the devices yet."""
    lanes, replicas = self.devices.lanes, self.devices.replicas

    def of_all(values: np.ndarray) -> np.ndarray:
      return values if replicas == 1 else np.tile(values, replicas)

    def cut(column: np.ndarray) -> np.ndarray:
      size = len(column) // self.parts
      return column.reshape(self.parts, size, *column.shape[1:])

    check_examples(self.parts, len(batch.labels))
    exchanges = item.exchanges
    parts = Parts(
      tuple(one.inverse for one in exchanges),
      batch.map(cut),
      np.arange(self.parts, dtype=np.int32),
    )
    weights, rows, back = [], [], []
    for group, plan, own, one in zip(
      self.groups, item.plans, item.row_weights, exchanges, strict=True
    ):
      assert plan.lanes is not None
      at = block_places(plan.lanes, lanes * one.size)
      weight = np.ones(lanes * one.size, np.float32)
      known, received, held = None, None, None
      weight[at] = own[: len(at)]
      weights.append(of_all(weight))
      if group.dtype != 'float32' or self.narrow:
        known = np.zeros(lanes * one.size, np.uint32)
        known[at] = plan.rows
        known = of_all(known)
      if self.narrow:
        ways = plan.rows, plan.lanes
        received = one.rows(*ways, self.devices.hosts).astype(np.uint32)
        if one.to_hosts is not None:
          held = one.held(*ways).astype(np.uint32)
      rows.append(known)
      way = one.returned, one.summed, one.from_hosts
      back.append(Back(*way, received, held))
    return Inputs(
      tuple(There(one.wanted, one.picked, one.to_hosts) for one in exchanges),
      tuple(back),
      parts,
      tuple(weights),
      tuple(rows),
    )

  def __call__(
    self,
    state: TrainState,
    blocks: Blocks,
    packed: Packed,
    batches_seen: Float[jax.Array, ''],
    frozen: Masks | None,
  ) -> tuple[TrainState, Blocks, Float[jax.Array, ''], Masks]:
    """Takes a step, as the function `step`. Donates state and blocks."""
    rows = tuple(block.rows for block in blocks)
    (of_parts, own), none, inputs = self._send(rows, packed)
    total, gradients = self.gradients(state, of_parts, own, inputs)
    result: tuple[TrainState, Blocks, jax.Array, Masks] = self._update(
      state,
      blocks,
      total,
      gradients,
      batches_seen,
      inputs.row_weights,
      none if frozen is None else frozen,
      inputs.numbers,
    )
    return result

  def gradients(
    self,
    state: TrainState,
    rows: tuple[jax.Array, ...],
    own: Parts,
    inputs: Inputs,
  ) -> tuple[Sums, tuple[jax.Array, ...]]:
    """Returns the sums of all parts, and the gradients of the lanes' rows."""
    sums, of_rows = self._pass(
      state.params, state.step, state.rng, self.rounds, rows, own
    )
    added: tuple[Sums, tuple[jax.Array, ...]]
    numbers = inputs.numbers if self.narrow else ()
    added = self._add(sums, of_rows, inputs.back, numbers, state.step)
    return added


def _take(rows: jax.Array, at: jax.Array) -> jax.Array:
  """Returns rows at places. Past the last row, they are 0."""
  return rows.at[at].get(mode='fill', fill_value=0)


def _crossing(
  values: jax.Array, narrow: bool, send: Callable[[jax.Array], jax.Array]
) -> jax.Array:
  """Sends values between devices. If narrow, they are bfloat16s."""
  if not narrow:
    return send(values)
  # As integers, since XLA may replace bfloat16 by f32 where it computes so.
  bits = lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
  got = lax.bitcast_convert_type(send(bits), jnp.bfloat16)
  return got.astype(jnp.float32)


def _to_others(values: jax.Array, narrow: bool, towers: int) -> jax.Array:
  """Sends the n-th values to the n-th lane of the host, [T, L, ...].

  Where T hosts have a tower each, a device has values for T slices.
  """

  def send(one: jax.Array) -> jax.Array:
    got: jax.Array = lax.all_to_all(one, OF_HOST, 1, 1)
    return got

  of_hosts = values.reshape(towers, -1, *values.shape[1:])
  return _crossing(of_hosts, narrow, send)


def _to_hosts(values: jax.Array, narrow: bool) -> jax.Array:
  """Sends the n-th values to the device of this number on the n-th host."""

  def send(one: jax.Array) -> jax.Array:
    got: jax.Array = lax.all_to_all(one, HOSTS, 0, 0)
    return got

  return _crossing(values, narrow, send)


def _send(
  parts: int,
  narrow: bool,
  towers: int,
  rows: tuple[jax.Array, ...],
  packed: Packed,
) -> tuple[tuple[tuple[jax.Array, ...], Parts], Masks, Inputs]:
  """Returns per group the rows of the device's parts, and the parts.

  Both have room for G parts. Per group, it also returns a mask of no row of the
  lane, and what other programs need.
  """
  inputs, groups = packed.unpacked(), []
  for of_lane, way in zip(rows, inputs.there, strict=True):
    dim, rounds = of_lane.shape[1], narrow and of_lane.dtype == 'float32'
    if rounds:  # by this name, as XLA may drop a conversion there and back
      of_lane = lax.reduce_precision(of_lane, exponent_bits=8, mantissa_bits=7)
    if way.to_hosts is not None:
      of_lane = _to_hosts(_take(of_lane, way.to_hosts[0]), rounds)
      of_lane = of_lane.reshape(-1, dim)
    # From each lane of the host: [T, L Q, D], as each has T slices.
    got = _to_others(_take(of_lane, way.wanted[0]), rounds, towers)
    got = got.reshape(towers, -1, dim)
    at = way.picked.reshape(towers, -1, way.picked.shape[1])
    of_slices = [_take(*one) for one in zip(got, at, strict=True)]
    groups.append(jnp.concatenate(of_slices))
  roomy: tuple[tuple[jax.Array, ...], Parts]
  roomy = with_room(parts, (tuple(groups), inputs.parts))
  none = tuple(jnp.zeros(len(one), bool) for one in inputs.row_weights)
  later = inputs._replace(there=(), parts=())
  return roomy, none, later


def with_room(parts: int, own: Any) -> Any:
  """Returns arrays of the device's parts, with room for all G of them."""

  def roomy(values: jax.Array) -> jax.Array:
    room = lax.empty((parts, *values.shape[1:]), values.dtype)
    return lax.dynamic_update_slice_in_dim(room, values, 0, 0)

  return jax.tree.map(roomy, own)


def _pass(
  recipe: Recipe,
  parts: int,
  params: Any,
  step: Int[jax.Array, ''],
  rng: jax.Array,
  rounds: Int[jax.Array, ''],
  rows: tuple[jax.Array, ...],
  own: Parts,
) -> tuple[Sums, tuple[jax.Array, ...]]:
  """Returns what the first `rounds` parts add, each array [G, ...]."""

  def of_part(number: Any) -> tuple[Sums, tuple[jax.Array, ...]]:
    at = jax.tree.map(lambda x: x[number], (rows, own))
    return pass_over_part(recipe, parts, params, step, rng, *at)

  results: tuple[Sums, tuple[jax.Array, ...]] = loop(parts, rounds, of_part)
  return results


def loop(
  parts: int, rounds: Int[jax.Array, ''], of_part: Callable[[Any], Any]
) -> Any:
  """Returns the results of the first `rounds` parts, with room for G."""

  def put(number: Any, results: Any) -> Any:
    return jax.tree.map(
      lambda x, one: x.at[number].set(one), results, of_part(number)
    )

  room = jax.tree.map(
    lambda one: lax.empty((parts, *one.shape), one.dtype),
    jax.eval_shape(of_part, 0),
  )
  return lax.fori_loop(0, rounds, put, room)


def _score(
  program: Callable[..., Any],
  parts: int,
  params: Any,
  model_state: Any,
  rows: tuple[jax.Array, ...],
  rounds: Int[jax.Array, ''],
  own: Any,
) -> jax.Array:
  """Returns the logits of the first `rounds` parts, [G, b, ...]."""

  def of_part(number: Any) -> jax.Array:
    at = jax.tree.map(lambda x: x[number], own)
    logits: jax.Array = program(params, model_state, rows, *at)[0]
    return logits

  logits: jax.Array = loop(parts, rounds, of_part)
  return logits


def _collect(parts: int, logits: jax.Array) -> jax.Array:
  """Returns the logits of all devices' parts on each of them."""
  own = logits[: parts // lax.axis_size(ALL)]
  everywhere: jax.Array = lax.all_gather(own, ALL, tiled=True)
  return everywhere


def pass_over_part(
  recipe: Recipe,
  parts: int,
  params: Any,
  step: Int[jax.Array, ''],
  rng: jax.Array,
  rows: Any,
  own: Parts,
  pooled: bool = False,
) -> tuple[Sums, Any]:
  """Returns what a part adds to the step, and the gradients of its rows.

  They are of embeddings by name if these are given instead, `pooled`.
  """
  key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
  gradients, weight = pass_of(
    recipe,
    params,
    {},
    jax.tree.map(lambda one: one.astype(jnp.float32), rows),
    own.inverses,
    own.batch,
    jax.random.fold_in(key, own.numbers),
    len(own.batch.labels) * parts,
    pooled,
  )
  some = (own.batch.weights > 0).sum()
  sums = Sums(gradients.dense, gradients.loss, weight, some)
  return sums, gradients.rows


class Rounding(NamedTuple):
  """Rounds a group's gradients, and each sum of them but the last one.

  Whatever number of devices there is, those that one sends are among them.
  """

  group: int
  step: Int[jax.Array, '']
  numbers: UInt32[jax.Array, ' _U']
  """Numbers of the rows, which draws depend on."""
  trees: int
  """Number of devices that have as many sums."""
  first: Any
  """The number of the tree's last sum. Sum i is that of sums 2 i and 2 i + 1.
  """

  def __call__(self, sums: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Returns sums of equally many parts, f32[U, D], rounded to bfloat16."""
    size = len(sums)
    if size * self.trees == 1:
      return sums
    key = jax.random.fold_in(jax.random.key(self.group), self.step)
    key = jax.random.fold_in(key, 0)  # rows in half precision have the other
    bits = row_bits(key, self.numbers, sums[0].shape[1:])
    rounded = []
    for i, values in enumerate(sums):
      # Draws of a row's sums are spread evenly, so that errors partly cancel.
      shift = (self.first * size + i) * np.uint32(GOLDEN >> 32)
      one = stochastic_round(values, jnp.bfloat16, bits + shift)
      rounded.append(one.astype(jnp.float32))
    return rounded


def tree_sum(parts: Sequence[Any], rounded: Rounding | None = None) -> Any:
  """Adds trees of arrays in pairs, and the sums in pairs."""
  while len(parts) > 1:
    pairs = zip(parts[::2], parts[1::2], strict=True)
    parts = [jax.tree.map(jnp.add, *pair) for pair in pairs]
    if rounded is not None:
      parts = rounded(parts)
  return parts[0]


def crossed(own: Any, send: Callable[[jax.Array], jax.Array]) -> Any:
  """Sends a tree of arrays. Others may come back with axes before their own.

  Those of a dtype are sent as one, since each exchange takes its time.
  """
  leaves, form = jax.tree.flatten(own)
  results: list[Any] = [None] * len(leaves)
  for dtype in {leaf.dtype: None for leaf in leaves}:
    some = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
    ends = np.cumsum([leaves[i].size for i in some])[:-1]
    got = send(jnp.concatenate([leaves[i].reshape(-1) for i in some]))
    for i, values in zip(some, jnp.split(got, ends, axis=-1), strict=True):
      results[i] = values.reshape(*got.shape[:-1], *leaves[i].shape)
  return jax.tree.unflatten(form, results)


def _of_all(own: Sums) -> Sums:
  """Returns the sums of all slices: of a host's, of hosts, of replicas."""
  for axis in OF_HOST, HOSTS, REPLICAS:
    for send in _in_pairs(axis):
      own = jax.tree.map(jnp.add, own, crossed(own, send))
  return own


def _in_pairs(axis: str) -> Iterator[Callable[[jax.Array], jax.Array]]:
  """Yields what exchanges arrays in pairs of devices, then pairs of pairs."""
  size, distance = lax.axis_size(axis), 1
  while distance < size:
    pairs = [(number, number ^ distance) for number in range(size)]
    yield functools.partial(lax.ppermute, axis_name=axis, perm=pairs)
    distance *= 2


def add(
  narrow: bool,
  towers: int,
  sums: Sums,
  rows: tuple[jax.Array, ...],
  back: tuple[Back, ...],
  numbers: tuple[UInt32[jax.Array, ' _P'], ...],
  step: Int[jax.Array, ''],
) -> tuple[Sums, tuple[jax.Array, ...]]:
  """Returns the sums of all parts, and the gradients of the lane's rows."""
  own_parts = range(len(back[0].returned) // towers)
  of_parts = [
    jax.tree.map(operator.itemgetter(part), sums) for part in own_parts
  ]
  total = _of_all(tree_sum(of_parts))
  gradients = []
  for group, (own, way) in enumerate(zip(rows, back, strict=True)):
    rounding = None
    if narrow:
      rounding = _roundings(group, step, towers, numbers[group], way)
    gradients.append(_of_lane(own, way, towers, rounding))
  return total, tuple(gradients)


class _Roundings(NamedTuple):
  """Roundings of a group's gradients on their way."""

  of_slices: list[Rounding]
  of_host: Rounding
  """Rounding of what a host adds, or the lane if rows go to slices at once."""
  of_lane: Rounding


def _roundings(
  group: int,
  step: Int[jax.Array, ''],
  towers: int,
  numbers: UInt32[jax.Array, ' _P'],
  back: Back,
) -> _Roundings:
  slices, replicas = lax.axis_size(ALL), lax.axis_size(REPLICAS)
  of_lane = Rounding(
    group, step, numbers, replicas, _number(REPLICAS, replicas)
  )
  of_host = of_lane
  if back.held is not None:
    hosts, number = lax.axis_size((REPLICAS, HOSTS)), (REPLICAS, HOSTS)
    of_host = Rounding(group, step, back.held[0], hosts, _number(number, hosts))
  assert back.received is not None
  of_slices = [
    Rounding(group, step, one, slices, jnp.uint32(slices) + at)
    for one, at in zip(
      back.received.reshape(towers, -1), _slices(towers), strict=True
    )
  ]
  return _Roundings(of_slices, of_host, of_lane)


def _number(axis: Any, size: int) -> UInt32[jax.Array, '']:
  """Returns the number of a device's sum among the sums of a tree."""
  return jnp.uint32(size) + lax.axis_index(axis).astype(jnp.uint32)


def _slices(towers: int) -> list[UInt32[jax.Array, '']]:
  """Returns the numbers of the slices whose rows a device looks up."""
  if towers == 1:
    return [lax.axis_index(ALL).astype(jnp.uint32)]
  own, of_host = lax.axis_index(OF_HOST), lax.axis_size(OF_HOST)
  return [(host * of_host + own).astype(jnp.uint32) for host in range(towers)]


def _of_lane(
  own: jax.Array, back: Back, towers: int, rounding: _Roundings | None
) -> jax.Array:
  """Returns a group's gradients of the rows of the device's lane."""
  # A row that a part does not look up has a gradient of 0 there.
  sums, of_slice = [], len(back.returned) // towers
  for number in range(towers):
    some = range(number * of_slice, (number + 1) * of_slice)
    parts: Sequence[jax.Array] = [_take(own[i], back.returned[i]) for i in some]
    rounds = None if rounding is None else rounding.of_slices[number]
    sums.append(tree_sum(parts if rounds is None else rounds(parts), rounds))
  # The only slice's gradients are the last sum, which is not rounded.
  narrow = rounding is not None and lax.axis_size(ALL) > 1
  sent = jnp.stack(sums).reshape(len(back.summed[0]), -1, own.shape[-1])
  got = _to_others(sent, narrow, towers).reshape(sent.shape)
  slices = [_take(*one) for one in zip(got, back.summed[0], strict=True)]
  of_host, of_lane = (None, None) if rounding is None else rounding[1:]
  gradient = tree_sum(slices, of_host)
  if back.from_hosts is not None:
    sent = gradient.reshape(len(back.from_hosts[0]), -1, own.shape[-1])
    got = _to_hosts(sent, narrow)
    hosts = [_take(*one) for one in zip(got, back.from_hosts[0], strict=True)]
    gradient = tree_sum(hosts, of_lane)
  return _of_replicas(gradient, narrow, of_lane)


def _of_replicas(
  gradient: jax.Array, narrow: bool, rounding: Rounding | None
) -> jax.Array:
  """Returns the sum of a lane's gradients over all replicas."""
  for send in _in_pairs(REPLICAS):
    gradient = gradient + _crossing(gradient, narrow, send)
    if rounding is not None:
      rounding = rounding._replace(
        trees=rounding.trees // 2, first=rounding.first // 2
      )
      (gradient,) = rounding([gradient])
  return gradient


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
  new = update_dense(
    recipe, state, sums.dense, batches_seen, weight, loss, axis_name=ALL
  )
  good = None
  if recipe.skips_bad_steps:
    # Bad rows of one device end the step of all.
    own = is_finite(loss, new.params, row_grads)
    good = lax.pmin(own.astype(jnp.int32), ALL) > 0
    frozen = tuple(mask | ~good for mask in frozen)
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
  new = new._replace(row_globals=row_globals)
  if good is not None:
    new, loss, touched = unless_bad(good, state, new, loss, touched)
  return new, rows, loss, touched
