"""Several devices as one: their mesh, and programs that run on all of them.

An array is either whole on each device, or split by its first axis: into a part
for each device, or into a part for each lane. Each of R replicas has all lanes,
so R devices have equal parts of a lane. A program sees the part of its device.
It is compiled once for all devices, and dispatched once.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import itertools
import json
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxlib.mlir.passmanager import PassManager
from jaxtyping import Int
import numpy as np

from slipstream_jax.engine import apply
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.errors import UserError
from slipstream_jax.placement import bucket
from slipstream_jax.store.records import aligned
from slipstream_jax.types import RowBlock

REPLICAS, HOSTS, OF_HOST = 'replicas', 'hosts', 'of_host'
"""Names of the mesh's axes. Device r * M + m has lane m of replica r. A lane is
one of those of a host, if rows cross between hosts otherwise than within."""
LANES = HOSTS, OF_HOST
ALL = REPLICAS, HOSTS, OF_HOST
SPLIT, EACH, WHOLE = Spec(LANES), Spec(ALL), Spec()
"""How an array is on the devices: split by its first axis into a part for each
lane, or for each device, or whole on each."""


@jax.tree_util.register_pytree_node_class
class Packed:
  """A tree of arrays, split by their first axis, that are on devices as one.

  Each array takes its time to be put there. A program gets the tree by
  `unpacked`.
  """

  def __init__(self, words: Any, form: Any, kinds: tuple[Any, ...]) -> None:
    """Takes i32[W, n], the tree's form, and shape and dtype of each array.

    They have elements of 4 bytes. Shapes are those on one device.
    """
    self.words, self.form, self.kinds = words, form, kinds

  def tree_flatten(self) -> tuple[Any, Any]:
    """Has programs compiled for each form and all shapes."""
    return (self.words,), (self.form, self.kinds)

  @classmethod
  def tree_unflatten(cls, of: Any, children: Any) -> 'Packed':
    """Inverse of `tree_flatten`."""
    return cls(*children, *of)

  def unpacked(self) -> Any:
    """Returns the arrays of one device."""
    start, leaves = 0, []
    for shape, dtype in self.kinds:
      end = start + math.prod(shape)
      words = self.words[0, start:end]
      leaves.append(lax.bitcast_convert_type(words, dtype).reshape(shape))
      start = end
    return jax.tree.unflatten(self.form, leaves)


_CALLS = {
  'jit': 'jaxpr',
  'pjit': 'jaxpr',
  'closed_call': 'call_jaxpr',
  'custom_jvp_call': 'call_jaxpr',
  'custom_vjp_call': 'call_jaxpr',
}
"""Where calls have their function, by the name of the primitive."""


class Devices(NamedTuple):
  """The devices that train, each of which has a lane of every group's rows."""

  mesh: Mesh

  @property
  def size(self) -> int:
    """W, the number of devices."""
    return int(self.mesh.size)

  @property
  def replicas(self) -> int:
    """R, the number of devices that have the same lane."""
    return int(self.mesh.devices.shape[0])

  @property
  def lanes(self) -> int:
    """M, the number of lanes. W is R * M."""
    return self.size // self.replicas

  @property
  def hosts(self) -> int:
    """H, the number of hosts of a replica, or 1 if it is all the same."""
    return int(self.mesh.devices.shape[1])

  @property
  def own(self) -> tuple[int, ...]:
    """The lanes that this process has."""
    return _numbers(self.mesh)[0]

  @property
  def first(self) -> tuple[int, ...]:
    """The lanes that this process has and writes into checkpoints."""
    return tuple(one for one in _numbers(self.mesh)[1] if one < self.lanes)

  @property
  def alone(self) -> bool:
    """Whether this process has all devices."""
    return len(_numbers(self.mesh)[1]) == self.size

  @property
  def has_all(self) -> bool:
    """Whether this process has all lanes."""
    return len(self.own) == self.lanes

  def agreed(self, number: int) -> set[int]:
    """Returns the numbers u32 that the processes give. Each must call it."""
    if self.alone:
      return {number}
    return {*self._of_all(np.full(1, number, np.uint32)).tolist()}

  def _of_all(self, own: np.ndarray) -> np.ndarray:
    """Returns the arrays of all devices' processes, one after another."""
    count = len(_numbers(self.mesh)[1])
    (of_own,) = self._put([[own]] * count, EACH)
    program = _cached(_of_each, self, (EACH,), WHOLE, ())
    everywhere: np.ndarray = to_host(on_first(program(of_own)))
    return everywhere

  @property
  def process(self) -> int:
    """Number of this process. The first one, 0, writes and speaks."""
    return int(jax.process_index())

  @property
  def processes(self) -> int:
    """Number of processes that have some of the devices."""
    return len({device.process_index for device in self.mesh.devices.flat})

  def exchanged(self, own: bytes) -> list[bytes]:
    """Returns the bytes that each process gives. Each must call it."""
    if self.alone:
      return [own]
    size = bucket(max(self.agreed(len(own))))
    padded = len(own).to_bytes(4, 'little') + own + bytes(size - len(own))
    of_all = self._of_all(np.frombuffer(padded, np.uint8))
    texts: dict[int, bytes] = {}
    of_devices = of_all.reshape(self.size, len(padded))
    for device, text in zip(self.mesh.devices.flat, of_devices, strict=True):
      length = int.from_bytes(text[:4].tobytes(), 'little')
      texts[device.process_index] = text[4 : 4 + length].tobytes()
    return [texts[process] for process in sorted(texts)]

  def from_first(self, call: Callable[[], Any]) -> Any:
    """Returns what the first process computes, JSON, in each.

    Each must call it. What the first one raises ends all of them.
    """
    error, own = None, b''
    if not self.process:
      try:
        own = json.dumps({'value': call()}).encode()
      except Exception as caught:
        error, own = caught, json.dumps(words_of(caught)).encode()
    said = json.loads(self.exchanged(own)[0])
    if error is None and 'value' not in said:
      error = error_of(said)
    if error is not None:
      raise error
    return said['value']

  def split(self, tree: Any, how: Spec = SPLIT) -> Any:
    """Puts numpy arrays on the devices, split by their first axis.

    The arrays must not be written again. Every process has the same.
    """
    leaves, form = jax.tree.flatten(tree)
    count, own = self._parts(how)
    sizes = [len(leaf) // count for leaf in leaves]
    parts = [
      [
        leaf[number * size : (number + 1) * size]
        for leaf, size in zip(leaves, sizes, strict=True)
      ]
      for number in own
    ]
    return jax.tree.unflatten(form, self._put(parts, how))

  def packed(self, tree: Any, how: Spec = SPLIT) -> Packed:
    """Puts numpy arrays on the devices as one. See `split` and `Packed`."""
    leaves, form = jax.tree.flatten(tree)
    count, numbers = self._parts(how)
    kinds = tuple(
      ((len(leaf) // count, *leaf.shape[1:]), leaf.dtype) for leaf in leaves
    )
    sizes = [math.prod(shape) for shape, _ in kinds]
    # Each part begins where XLA's CPU backend need not copy it.
    words = aligned((len(numbers), -(-sum(sizes) // 16) * 16), np.int32)
    for number, own in zip(numbers, words, strict=True):
      start = 0
      for leaf, (shape, _), size in zip(leaves, kinds, sizes, strict=True):
        part = leaf[number * shape[0] : (number + 1) * shape[0]]
        own[start : start + size].view(leaf.dtype).reshape(shape)[...] = part
        start += size
    (on_all,) = self._put([[one[None]] for one in words], how)
    return Packed(on_all, form, kinds)

  def _parts(self, how: Spec) -> tuple[int, tuple[int, ...]]:
    """Returns the number of a split array's parts, and those of this process.

    Of a whole array, it has one for each of its devices.
    """
    lanes, devices = _numbers(self.mesh)
    return (self.lanes, lanes) if how == SPLIT else (self.size, devices)

  def whole(self, tree: Any) -> Any:
    """Puts arrays on each device, which must not be written again."""
    leaves, form = jax.tree.flatten(tree)
    copies = [leaves] * len(self._parts(WHOLE)[1])
    return jax.tree.unflatten(form, self._put(copies, WHOLE))

  def settled(self, tree: Any) -> Any:
    """Puts those arrays on each device that are on one alone."""
    leaves, form = jax.tree.flatten(tree)
    alone = [not isinstance(x.sharding, NamedSharding) for x in leaves]
    moved = iter(self.whole([*itertools.compress(leaves, alone)]))
    all_there = [
      next(moved) if one else leaf
      for leaf, one in zip(leaves, alone, strict=True)
    ]
    return jax.tree.unflatten(form, all_there)

  def is_split(self, leaf: jax.Array) -> bool:
    """Whether an array is split into a part for each lane."""
    split = NamedSharding(self.mesh, SPLIT)
    return leaf.sharding.is_equivalent_to(split, leaf.ndim)

  def joined(self, blocks: Sequence[Any]) -> Any:
    """Puts a tree of numpy arrays for each own lane, as one tree of arrays."""
    leaves, forms = zip(*map(jax.tree.flatten, blocks), strict=True)
    return jax.tree.unflatten(forms[0], self._put(leaves, SPLIT))

  def _put(self, of_own: Sequence[Sequence[Any]], how: Spec) -> list[Any]:
    """Puts an equally long list of arrays for each own lane or device."""
    own, sharding = self._parts(how)[1], NamedSharding(self.mesh, how)
    # Allowed, as this transfer is meant, which a guard does not see.
    with jax.transfer_guard_host_to_device('allow'):
      return [
        _joined(dict(zip(own, parts, strict=True)), sharding)
        for parts in zip(*of_own, strict=True)
      ]

  def run(
    self,
    function: Callable[..., Any],
    *arguments: Any,
    donate: tuple[int, ...] = (),
    whole: tuple[int, ...] = (),
    results: Any = SPLIT,
  ) -> Any:
    """Runs a function on all devices.

    Args:
      function: of the module that calls it, as it is kept.
      *arguments: arrays with a part for each lane.
      donate: which arguments may be overwritten.
      whole: which arguments are whole on each device instead.
      results: the same for results, a tree of `SPLIT` and `WHOLE`.
    """
    specs = tuple(
      WHOLE if number in whole else SPLIT for number in range(len(arguments))
    )
    return _cached(function, self, specs, results, donate)(*arguments)

  def compiled(
    self,
    function: Callable[..., Any],
    arguments: tuple[Spec, ...],
    results: Any,
    donate: tuple[int, ...] = (),
  ) -> Any:
    """Returns a program of all devices, given how its arguments are there."""
    mapped = jax.shard_map(
      _without_calls(function),
      mesh=self.mesh,
      in_specs=arguments,
      out_specs=results,
      check_vma=False,
    )
    return Program(jax.jit(mapped, donate_argnums=donate))


@functools.cache
def _numbers(mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the numbers of this process's lanes and devices."""
  mine = jax.process_index()
  of_process = enumerate(device.process_index for device in mesh.devices.flat)
  devices = tuple(i for i, process in of_process if process == mine)
  lanes = {i % (mesh.size // len(mesh.devices)) for i in devices}
  return tuple(sorted(lanes)), devices


def _joined(parts: dict[int, Any], sharding: NamedSharding) -> jax.Array:
  """Puts arrays by the number of their lane or device, as one of all."""
  one, split = next(iter(parts.values())), sharding.spec != WHOLE
  shape, size = one.shape, 1
  if split:
    size = max(1, shape[0])
    mesh = sharding.mesh
    replicas = mesh.shape[REPLICAS] if sharding.spec == SPLIT else 1
    count = mesh.size // replicas
    shape = count * shape[0], *shape[1:]
  if isinstance(one, jax.Array):
    devices = [sharding.mesh.devices.flat[number] for number in parts]
    put = jax.device_put([*parts.values()], devices)
    return jax.make_array_from_single_device_arrays(shape, sharding, put)

  def part(index: Any) -> np.ndarray:
    return np.asarray(parts[(index[0].start or 0) // size] if split else one)

  # A call of `device_put` for each device takes the host much longer.
  return jax.make_array_from_callback(shape, sharding, part)


class Program:
  """A program of all devices, compiled equally for any number of them.

  XLA inlines calls and merges equal expressions in a program of several
  devices, before it simplifies it, but not in a program of one. So a function
  would be compiled in two ways, which differ in last bits. Here both is done
  before XLA sees the function.
  """

  def __init__(self, function: Any) -> None:
    """Takes a jitted function."""
    self._function = function
    self.compiled: dict[Any, Any] = {}

  def __call__(self, *arguments: Any) -> Any:
    """Runs the program, which is compiled once for each set of shapes."""
    leaves, form = jax.tree.flatten(arguments)
    key = form, *((leaf.shape, leaf.dtype) for leaf in leaves)
    program = self.compiled.get(key)
    if program is None:
      lowered = self._function.lower(*arguments)
      module = lowered.compiler_ir('stablehlo')  # what `compile` will read
      with module.context:
        PassManager.parse('builtin.module(cse)').run(module.operation)
      program = self.compiled[key] = lowered.compile()
    return program(*arguments)


def _without_calls(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the function without calls of jitted functions within it."""

  def flat(*arguments: Any) -> Any:
    trace = jax.make_jaxpr(function, return_shape=True)
    closed, shapes = trace(*arguments)
    leaves = _results(closed, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

  # By which profiles name the program.
  of: Any = getattr(function, 'func', function)
  flat.__name__ = of.__name__
  return flat


def _flattened(closed: ClosedJaxpr) -> ClosedJaxpr:
  def results(*arguments: Any) -> list[Any]:
    return _results(closed, arguments)

  flat: ClosedJaxpr = jax.make_jaxpr(results)(*closed.in_avals)
  return flat


def _results(closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
  """Returns the results of a traced function, with all calls inlined."""
  jaxpr, values = closed.jaxpr, dict[Any, Any]()

  def read(one: Any) -> Any:
    return one.val if isinstance(one, Literal) else values[one]

  values.update(zip(jaxpr.constvars, closed.consts, strict=True))
  values.update(zip(jaxpr.invars, arguments, strict=True))
  for equation in jaxpr.eqns:
    inputs = [*map(read, equation.invars)]
    primitive, params = equation.primitive, equation.params
    if primitive.name in _CALLS:
      outputs = _results(params[_CALLS[primitive.name]], inputs)
    else:
      # Bodies of loops and branches may have calls, too.
      params = jax.tree.map(
        lambda one: _flattened(one) if isinstance(one, ClosedJaxpr) else one,
        params,
        is_leaf=lambda one: not isinstance(one, tuple | list | dict),
      )
      params = primitive.get_bind_params(params)
      outputs = primitive.bind(*inputs, **params)
      if not primitive.multiple_results:
        outputs = [outputs]
    values.update(zip(equation.outvars, outputs, strict=True))
  return [*map(read, jaxpr.outvars)]


@functools.lru_cache(maxsize=256)
def _cached(function: Callable[..., Any], devices: Devices, *how: Any) -> Any:
  return devices.compiled(function, *how)


def devices_of(count: int, replicas: int = 1, hosts: int = 1) -> Devices:
  """Returns the first devices. Several processes take all that they have.

  Args:
    count: W.
    replicas: R, which divides W.
    hosts: H, which divides W / R.

  Raises:
    UserError: there are fewer, or several processes have more.
  """
  there = jax.devices()
  if jax.process_count() > 1 and len(there) != count:
    raise UserError(
      f'{jax.process_count()} processes train on all of their {len(there)}'
      ' devices',
      got=count,
      where='Trainer, devices',
      hint='give that number',
    )
  if len(there) < count:
    raise UserError(
      f'devices must be at most the {len(there)} that JAX has here',
      got=count,
      where='Trainer, devices',
      hint='ask for fewer; on a CPU the variable XLA_FLAGS='
      f'--xla_force_host_platform_device_count={count} makes as many',
    )
  of_all = np.array(there[:count]).reshape(replicas, hosts, -1)
  return Devices(Mesh(of_all, ALL))


def on_first(tree: Any) -> Any:
  """Returns arrays that are whole on each device as they are on the first."""
  return jax.tree.map(
    lambda leaf: (
      leaf.addressable_data(0)
      if isinstance(leaf, jax.Array) and len(leaf.devices()) > 1
      else leaf
    ),
    tree,
  )


def shards(tree: Any) -> Iterator[tuple[int, Any]]:
  """Yields the number of each of this process's lanes, and its split arrays.

  They are numpy arrays that nobody may write, of one replica.
  """
  leaves, form = jax.tree.flatten(tree)

  def of_lanes(leaf: Any) -> dict[int, Any]:
    return {
      (one.index[0].start or 0) // max(1, len(one.data)): one.data
      for one in leaf.addressable_shards
    }

  parts = [of_lanes(leaf) for leaf in leaves]
  for lane in sorted(parts[0]):
    of_lane = [one[lane] for one in parts]
    arrays = to_host(of_lane)
    yield lane, jax.tree.unflatten(form, arrays)


def words_of(error: BaseException) -> dict[str, str]:
  """Returns the arguments of a `UserError` that tells others of an error."""
  if isinstance(error, UserError):
    words = {'rule': error.rule, 'got': str(error.got), 'where': error.where}
    return words | {'hint': error.hint}
  return {
    'rule': 'the processes of a run must all go on',
    'got': f'{type(error).__name__}: {error}',
    'where': f'process {jax.process_index()}',
    'hint': 'see what that one says',
  }


def error_of(words: dict[str, str]) -> UserError:
  """Inverse of `words_of`."""
  got, where, hint = words['got'], words['where'], words['hint']
  return UserError(words['rule'], got=got, where=where, hint=hint)


def _of_each(own: jax.Array) -> jax.Array:
  """Returns the parts of all devices on each of them."""
  everywhere: jax.Array = lax.all_gather(own, ALL, tiled=True)
  return everywhere


def in_order(block: RowBlock, places: Int[jax.Array, ' P']) -> RowBlock:
  """Returns rows at places of all lanes' blocks, on each. Zeros if past."""

  def of_lanes(leaf: jax.Array) -> jax.Array:
    everywhere = lax.all_gather(leaf, LANES, tiled=True)
    return everywhere.at[places].get(mode='fill', fill_value=0)

  whole: RowBlock = jax.tree.map(of_lanes, block)
  return whole


def gather(block: RowBlock, slots: Int[jax.Array, ' P']) -> RowBlock:
  """Returns rows at slots of all lanes, on each device. Zeros if past."""
  at = _own(block, slots)

  def from_all(leaf: jax.Array) -> jax.Array:
    own = leaf.at[at].get(mode='fill', fill_value=0)
    # As integers, because a sum of floats would lose the sign of -0.0.
    words = jnp.dtype(f'u{own.dtype.itemsize}')
    bits = own.astype(words)
    if own.dtype != bool:
      bits = lax.bitcast_convert_type(own, words)
    total = lax.psum(bits, LANES)
    if own.dtype == bool:
      return total.astype(bool)
    return lax.bitcast_convert_type(total, own.dtype)

  whole: RowBlock = jax.tree.map(from_all, block)
  return whole


def write(
  block: RowBlock, slots: Int[jax.Array, ' P'], new: RowBlock
) -> RowBlock:
  """Writes rows, which are whole on each device, at slots of all lanes."""
  return apply.write_slots(block, _own(block, slots), new)


def _own(block: RowBlock, slots: jax.Array) -> jax.Array:
  """Returns the slots as the device has them, past its last if it has not."""
  size = len(block.rows)
  own = slots - lax.axis_index(LANES) * size
  # Unique also outside, as the programs promise to XLA.
  outside = size + jnp.arange(len(slots), dtype=own.dtype)
  return jnp.where((own >= 0) & (own < size), own, outside)
