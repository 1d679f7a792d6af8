"""A step whose towers have hosts of their own: DMT (arXiv 2403.00877), SPTT.

The tables of tower t are on the L devices of host t, so rows stay there. Slice
h * L + i of a batch is that of device i of host h:

1. `send`: each device gets the rows of its tower for the slices of all devices
   that have its number on their hosts. They come from its own host.
2. `towers`: it sums bags and computes its tower's vectors for these slices.
3. Vectors cross to the devices of their slices, in one exchange between hosts.
4. `after`: forward and backward from the vectors, over its own slice.
5. Gradients of vectors cross back.
6. `towers_back`: they become gradients of the tower's parameters, and of rows.
7. `add` and `update`, as in `parts`.

As there, the programs that compute have room for all G parts, so that their
results do not depend on L. Steps 2 and 6 both compute the tower's vectors.
"""

from collections.abc import Callable, Sequence
import functools
import operator
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.distributed.exchange import of_towers, parts_of_devices
from slipstream_jax.engine.mesh import (
  ALL,
  Devices,
  EACH,
  HOSTS,
  LANES,
  OF_HOST,
  SPLIT,
  WHOLE,
)
from slipstream_jax.engine.planner import PlannedBatch, Slices
from slipstream_jax.models.adapters import adapt
from slipstream_jax.models.dmt import after_towers, DMT, tower_name, vectors_of
from slipstream_jax.models.embedding import embed
from slipstream_jax.tables import TableSet
from slipstream_jax.training.parts import (
  add,
  Back,
  crossed,
  Inputs,
  loop,
  Parts,
  PartsStep,
  pass_over_part,
  Sums,
  tree_sum,
  with_room,
)
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.transforms.row_state import RowStateLayout
from slipstream_jax.types import Array, Batch


class TowerInputs(NamedTuple):
  """Inputs of a device for the vectors of its tower, beside rows."""

  number: Int[Array, ' G']
  """Number of the tower, for each part that the device computes of it."""
  weights: tuple[Array | None, ...]
  """Per group, weights of the lookups [G, b, K]. None: all are 1."""


class TowersStep(PartsStep):
  """The programs of a step whose towers have hosts of their own."""

  def __init__(
    self,
    model: DMT,
    recipe: Recipe,
    layouts: tuple[RowStateLayout, ...],
    devices: Devices,
    over: Slices,
  ) -> None:
    """Compiles nothing yet. See `PartsStep`."""
    super().__init__(recipe, layouts, devices, over)
    assert over.towers is not None
    self.over, run = over, devices.compiled
    self.columns = recipe.tables.num_columns
    features = over.towers.features
    towers = [
      functools.partial(_tower, model, recipe.tables, features, number)
      for number in range(over.hosts)
    ]
    after = recipe._replace(model=adapt(after_towers(model)))
    self.tower_rounds = devices.whole(
      np.int32(over.parts * over.hosts // devices.size)
    )
    count = over.parts
    own = WHOLE, WHOLE, EACH, EACH, EACH
    self._towers = run(functools.partial(_vectors, count, towers), own, EACH)
    self._cross = run(functools.partial(_cross, count), (EACH,), EACH)
    self._after = run(
      functools.partial(_after, after, count, features),
      (WHOLE, WHOLE, WHOLE, WHOLE, EACH, EACH),
      EACH,
    )
    self._cross_back = run(functools.partial(_cross_back, count), (EACH,), EACH)
    self._towers_back = run(
      functools.partial(_vectors_back, count, towers), (*own, EACH), EACH
    )
    self._add_towers = run(
      functools.partial(_add_towers, self.narrow),
      (EACH, EACH, EACH, EACH, EACH, WHOLE),
      (WHOLE, SPLIT),
    )

  def on_host(self, item: PlannedBatch, batch: Batch) -> Inputs:
    """Returns a step's arrays. See `PartsStep`."""
    over, weights = self.over, batch.lookup_weights
    inputs = super().on_host(item, batch._replace(lookup_weights=None))
    order = parts_of_devices(over.devices, over.hosts, over.parts).reshape(-1)
    tower = np.repeat(np.arange(over.hosts, dtype=np.int32), over.parts)
    of_groups: list[Array | None] = [None] * len(self.groups)
    if weights is not None:
      flat = np.asarray(weights).reshape(over.parts, -1, self.columns)
      for number, group in enumerate(self.groups):
        columns = over.columns_of(group)
        assert columns is not None
        own = of_towers(flat[..., [*group.columns]], columns, 0)
        of_groups[number] = own[tower, order]
    return inputs._replace(tower=TowerInputs(tower, tuple(of_groups)))

  def gradients(
    self,
    state: TrainState,
    rows: tuple[jax.Array, ...],
    own: Parts,
    inputs: Inputs,
  ) -> tuple[Sums, tuple[jax.Array, ...]]:
    """Returns the sums of all parts, and the gradients of the lanes' rows."""
    params = _own(self.over.hosts, state.params)
    of_tower = self.tower_rounds, rows, own.inverses, self._room(inputs.tower)
    sums, of_vectors = self._after(
      state.params,
      state.step,
      state.rng,
      self.rounds,
      self.vectors(params, *of_tower),
      own._replace(inverses=()),
    )
    of_params, of_rows = self._towers_back(
      params, *of_tower, self._cross_back(of_vectors)
    )
    added: tuple[Sums, tuple[jax.Array, ...]]
    numbers = inputs.numbers if self.narrow else ()
    added = self._add_towers(
      sums, of_params, of_rows, inputs.back, numbers, state.step
    )
    return added

  def vectors(
    self, params: Any, *of_tower: Any
  ) -> Float[jax.Array, 'WG T b M E']:
    """Returns the vectors of all towers for each device's slice.

    There is room for G parts on each device.

    Args:
      params: of the towers.
      *of_tower: the number of a device's parts, and of each part the rows, the
        places of lookups in them, and `TowerInputs`.
    """
    vectors: jax.Array = self._cross(self._towers(params, *of_tower))
    return vectors


_Tower = Callable[..., jax.Array]
"""`_tower` of one tower."""


def _own(towers: int, params: Any) -> Any:
  """Returns the parameters of the towers."""
  names = map(tower_name, range(towers))
  return {name: params[name] for name in names if name in params}


def _tower(
  model: DMT,
  tables: TableSet,
  towers: Sequence[Sequence[str]],
  number: int,
  params: Any,
  rows: tuple[jax.Array, ...],
  inverses: tuple[jax.Array, ...],
  weights: tuple[jax.Array | None, ...],
) -> Float[jax.Array, 'b M E']:
  """Returns the vectors of a tower, padded to as many as any tower has.

  Rows, their places and the weights of lookups are per group.
  """
  embeddings: dict[str, jax.Array] = {}
  for group, block, inverse, own in zip(
    tables.groups, rows, inverses, weights, strict=True
  ):
    features = {
      name: tables.features[name]
      for name in group.features
      if name in towers[number]
    }
    size = sum(one.max_length for one in features.values())
    if size:
      own = None if own is None else own[:, :size]
      embeddings |= embed(block, inverse[:, :size], features, own)
  tokens = jnp.stack([embeddings[name] for name in towers[number]], axis=1)
  vectors = vectors_of(model, number, params, tokens)
  room = max(map(len, towers)) - vectors.shape[1]
  return jnp.pad(vectors, [(0, 0), (0, room), (0, 0)])


def _of_part(
  towers: Sequence[_Tower], tower: TowerInputs
) -> Callable[..., jax.Array]:
  """Returns the device's tower as a function of parameters, rows, places."""

  def vectors(params: Any, rows: Any, inverses: Any) -> jax.Array:
    in_f32 = tuple(one.astype(jnp.float32) for one in rows)
    result: jax.Array = lax.switch(
      tower.number, towers, params, in_f32, inverses, tower.weights
    )
    return result

  return vectors


def _vectors(
  parts: int,
  towers: Sequence[_Tower],
  params: Any,
  rounds: Int[jax.Array, ''],
  rows: tuple[jax.Array, ...],
  inverses: tuple[jax.Array, ...],
  tower: TowerInputs,
) -> Float[jax.Array, 'G b M E']:
  """Returns the vectors of the first `rounds` parts."""

  def of_part(number: Any) -> jax.Array:
    own, *at = jax.tree.map(lambda x: x[number], (tower, rows, inverses))
    return _of_part(towers, own)(params, *at)

  vectors: jax.Array = loop(parts, rounds, of_part)
  return vectors


def _vectors_back(
  parts: int,
  towers: Sequence[_Tower],
  params: Any,
  rounds: Int[jax.Array, ''],
  rows: tuple[jax.Array, ...],
  inverses: tuple[jax.Array, ...],
  tower: TowerInputs,
  gradients: Float[jax.Array, 'G b M E'],
) -> tuple[Any, tuple[jax.Array, ...]]:
  """Returns per part the gradients of all towers' parameters, and of rows."""

  def of_part(number: Any) -> Any:
    own, of_rows, at, gradient = jax.tree.map(
      lambda x: x[number], (tower, rows, inverses, gradients)
    )
    in_f32 = tuple(one.astype(jnp.float32) for one in of_rows)
    vectors = _of_part(towers, own)
    _, back = jax.vjp(lambda p, r: vectors(p, r, at), params, in_f32)
    return back(gradient)

  results: tuple[Any, tuple[jax.Array, ...]]
  results = loop(parts, rounds, of_part)
  return results


def _cross(parts: int, vectors: jax.Array) -> jax.Array:
  """Sends each slice the vectors of all towers, [G, T, b, M, E] with room."""
  hosts = lax.axis_size(HOSTS)
  own = parts // lax.axis_size(ALL)
  sent = vectors[: hosts * own].reshape(hosts, own, *vectors.shape[1:])
  got = lax.all_to_all(sent, HOSTS, 0, 0)
  roomy: jax.Array = with_room(parts, jnp.swapaxes(got, 0, 1))
  return roomy


def _cross_back(parts: int, gradients: jax.Array) -> jax.Array:
  """Inverse of `_cross`."""
  own = parts // lax.axis_size(ALL)
  sent = jnp.swapaxes(gradients[:own], 0, 1)
  got = lax.all_to_all(sent, HOSTS, 0, 0)
  got = got.reshape(-1, *got.shape[2:])
  roomy: jax.Array = with_room(parts, got)
  return roomy


def _after(
  recipe: Recipe,
  parts: int,
  towers: Sequence[Sequence[str]],
  params: Any,
  step: Int[jax.Array, ''],
  rng: jax.Array,
  rounds: Int[jax.Array, ''],
  vectors: Float[jax.Array, 'G T b M E'],
  own: Parts,
) -> tuple[Sums, Float[jax.Array, 'G T b M E']]:
  """Returns what the first `rounds` parts add, and gradients of vectors."""

  def of_part(number: Any) -> tuple[Sums, jax.Array]:
    some, at = jax.tree.map(lambda x: x[number], (vectors, own))
    by_name = {
      name: some[tower, :, place]
      for tower, features in enumerate(towers)
      for place, name in enumerate(features)
    }
    # Masks of real lookups are for models of sequences.
    at = at._replace(inverses=dict.fromkeys(by_name))
    sums, back = pass_over_part(
      recipe, parts, params, step, rng, by_name, at, pooled=True
    )
    none = jnp.zeros_like(some[0, :, 0])
    return sums, jnp.stack(
      [
        jnp.stack(
          [back[name] for name in features]
          + [none] * (some.shape[2] - len(features)),
          axis=1,
        )
        for features in towers
      ]
    )

  results: tuple[Sums, jax.Array] = loop(parts, rounds, of_part)
  return results


def _add_towers(
  narrow: bool,
  sums: Sums,
  of_params: Any,
  rows: tuple[jax.Array, ...],
  back: tuple[Back, ...],
  *others: Any,
) -> tuple[Sums, tuple[jax.Array, ...]]:
  """Returns the sums of all parts, and the gradients of the lane's rows."""
  hosts = lax.axis_size(HOSTS)
  total, gradients = add(narrow, hosts, sums, rows, back, *others)
  own = len(back[0].returned) // hosts

  def part(number: int) -> Any:
    return jax.tree.map(operator.itemgetter(number), of_params)

  if not of_params:
    return total, gradients
  of_slices = [
    tree_sum([part(host * own + i) for i in range(own)])
    for host in range(hosts)
  ]
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_slices)
  gathered = crossed(stacked, lambda one: lax.all_gather(one, LANES))
  of_host, dense = lax.axis_size(OF_HOST), {**total.dense}
  for tower in range(hosts):
    name = tower_name(tower)
    # Those of slice h * L + i are on device i of the tower's host.
    of_all = [
      jax.tree.map(
        operator.itemgetter((tower * of_host + i, host)), gathered[name]
      )
      for host in range(hosts)
      for i in range(of_host)
    ]
    dense[name] = tree_sum(of_all)
  return total._replace(dense=dense), gradients
