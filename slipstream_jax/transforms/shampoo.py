"""Shampoo: preconditions matrices of gradients from both sides.

Adam scales each element of a gradient by its own history. Shampoo (Gupta et
al., arXiv 1802.09568) also knows how the rows, and how the columns, of a matrix
vary together. This is the form of distributed Shampoo (Shi et al., arXiv
2309.06497): axes are cut into blocks, roots are computed every few steps, and
the size of a block's step is that of another method (grafting). Several devices
share the blocks, and gather directions. What differs from the paper: each
device keeps the statistics and roots of all blocks, as it does all other state,
and eps is relative.
"""

from collections.abc import Callable, Sequence
import itertools
import math
import operator
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from slipstream_jax import host_roots
from slipstream_jax.errors import check_whole
from slipstream_jax.transforms.arguments import check_learning_rate

_Blocks = jax.Array
"""The blocks of a leaf, [N, b_1, ..., b_w], padded with zeros."""
_Factors = tuple[jax.Array, ...]
"""A matrix per block, for each axis: [N, b_1, b_1], ..., [N, b_w, b_w]."""
Axes = str | tuple[str, ...]


class ScaleByShampooState(NamedTuple):
  """State of `scale_by_shampoo`.

  Its floats are f32, or of the leaf's dtype if that is wider.
  """

  steps: jax.Array
  """Steps taken, i32[]."""
  mu: optax.Updates
  """Per leaf, of its shape: mean of the gradients, without bias correction."""
  statistics: optax.Updates
  """Per leaf, `_Factors`: sums or means of G G^T, over all axes but one."""
  roots: optax.Updates
  """Per leaf, `_Factors`: inverse roots of statistics, as of the last update of
  roots. Identities before the first."""
  begun: jax.Array
  """Step at which a thread last began to compute roots, i32[]."""
  graft: optax.OptState
  """State of the grafted method."""


def scale_by_shampoo(
  b1: jax.typing.ArrayLike = 0.9,
  b2: jax.typing.ArrayLike = 0.999,
  eps: jax.typing.ArrayLike = 1e-6,
  every: int = 50,
  block_size: int = 128,
  graft: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Scales by inverse roots of the second moments of rows and of columns.

  Neighbouring axes of a leaf are merged while their product is at most
  `block_size`. Longer axes are cut into blocks of nearly equal size. For each
  block G of order w, and each of its axes, L sums the products of G with itself
  over the other axes. The direction is the mean of the gradients, multiplied
  along each axis by L^(-1/(2w)). It gets the norm of the grafted method's
  direction of the same block.

  From step `every`, 2 `every`, ... on, a thread of the host computes roots, by
  LAPACK in float64. The statistics rest meanwhile. The roots are taken
  `every // 5` steps later, and waited for if need be, so numbers depend on no
  timing. Steps before the first roots are those of the grafted method. Bias
  corrections would cancel with the norm, so there are none.

  Within `jax.shard_map`, `update` takes the mesh axes over which parameters and
  gradients are equal as `axis_name`. Each device then computes the roots and
  directions of some blocks, which are gathered. Bits do not depend on how many
  devices there are. They may differ from those without `axis_name`.

  `every` and `block_size` are static arguments for `inject_hyperparams`.

  Args:
    b1: decay of the mean of the gradients.
    b2: decay of the statistics. 1: they are sums.
    eps: share of the largest eigenvalue that is added to all eigenvalues. It
      bounds what directions without gradients are multiplied by.
    every: steps from one computation of the roots to the next.
    block_size: most elements of an axis of a block. The time of a root grows
      with its cube.
    graft: the method that gives each block's step its size, such as
      `optax.scale_by_rss()`, which is Adagrad. None: `optax.scale_by_adam(b1)`.

  Returns:
    A transformation of leaves of any shape.

  Raises:
    UserError: `every` or `block_size` is no whole number of at least 1.
  """
  check_whole(every, 1, 'shampoo, every', 'such as 50')
  check_whole(block_size, 1, 'shampoo, block_size', 'such as 128')
  grafted = optax.scale_by_adam(b1) if graft is None else graft
  lag = every // 5

  def init(params: optax.Params) -> ScaleByShampooState:
    return _initial(params, block_size, grafted)

  def update(
    updates: optax.Updates,
    state: ScaleByShampooState,
    params: optax.Params | None = None,
    *,
    axis_name: Axes | None = None,
    **extra: Any,
  ) -> tuple[optax.Updates, ScaleByShampooState]:
    del params, extra
    wide = jax.tree.map(lambda g: jnp.asarray(g, _wide(g.dtype)), updates)
    steps = optax.safe_increment(state.steps)
    since = steps % every
    rests = (steps > every) & (since > 0) & (since <= lag)
    shares = _shares(wide, block_size, axis_name)
    statistics = lax.cond(
      rests,
      lambda: state.statistics,
      lambda: _add(wide, state.statistics, b2, block_size),
    )
    begun = lax.cond(
      (since == 0) & (lag > 0),
      lambda: _begin_roots(shares, statistics, eps, steps),
      lambda: state.begun,
    )
    roots = lax.cond(
      (steps >= every) & (since == lag),
      lambda: _roots(shares, statistics, eps),
      lambda: state.roots,
    )
    mu = optax.tree.update_moment(wide, state.mu, b1, 1)
    target, graft_state = grafted.update(wide, state.graft)
    directions = jax.tree.map(
      lambda own, like: jnp.where(steps < every + lag, like, own),
      _directions(mu, target, roots, block_size, shares),
      target,
    )
    new = ScaleByShampooState(steps, mu, statistics, roots, begun, graft_state)
    return jax.tree.map(
      lambda d, g: d.astype(g.dtype), directions, updates
    ), new

  return optax.GradientTransformationExtraArgs(init, update)


def shampoo(
  learning_rate: optax.ScalarOrSchedule,
  b1: jax.typing.ArrayLike = 0.9,
  b2: jax.typing.ArrayLike = 0.999,
  eps: jax.typing.ArrayLike = 1e-6,
  every: int = 50,
  block_size: int = 128,
  graft: optax.GradientTransformation | None = None,
  weight_decay: jax.typing.ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
  """Returns Shampoo, an optimizer for a model's parameters.

  >>> import slipstream_jax as slip
  >>> optimizer = slip.shampoo(1e-3, every=50)

  The learning rate is that of the grafted method, which is Adam by default.
  Adagrad is grafted by `b1=0.0, b2=1.0, graft=optax.scale_by_rss()`.

  Args:
    learning_rate: of the grafted method, or its schedule.
    b1: as in `scale_by_shampoo`, like the next five.
    b2: decay of the statistics.
    eps: share of the largest eigenvalue that is added to all.
    every: steps from one computation of the roots to the next.
    block_size: most elements of an axis of a block.
    graft: the method that gives each block's step its size.
    weight_decay: share of a parameter, times the learning rate, that a step
      takes away (decoupled, arXiv 1711.05101).

  Raises:
    UserError: the learning rate is negative, infinite or NaN, or as
      `scale_by_shampoo`.
  """
  check_learning_rate(learning_rate, 'shampoo')
  return optax.chain(
    scale_by_shampoo(b1, b2, eps, every, block_size, graft),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


def _initial(
  params: optax.Params, size: int, grafted: optax.GradientTransformation
) -> ScaleByShampooState:
  """Returns the state before the first step."""
  wide = jax.tree.map(lambda p: jnp.zeros(p.shape, _wide(p.dtype)), params)

  def factors(leaf: Any, start: Callable[..., jax.Array]) -> _Factors:
    blocks, sizes, _ = _grid(leaf.shape, size)
    number = math.prod(blocks)
    return tuple(
      jnp.broadcast_to(start(n, dtype=leaf.dtype), (number, n, n))
      for n in sizes
    )

  def zero(n: int, dtype: Any) -> jax.Array:
    return jnp.zeros((n, n), dtype)

  return ScaleByShampooState(
    jnp.zeros((), jnp.int32),
    wide,
    jax.tree.map(lambda leaf: factors(leaf, zero), wide),
    jax.tree.map(lambda leaf: factors(leaf, jnp.eye), wide),
    jnp.zeros((), jnp.int32),
    grafted.init(wide),
  )


def _add(
  gradients: Any, statistics: Any, b2: jax.typing.ArrayLike, size: int
) -> Any:
  """Returns statistics that have taken in gradients."""
  decay = jnp.asarray(b2)
  weight = jnp.where(decay == 1, 1, 1 - decay)

  def add(gradient: jax.Array, before: _Factors) -> _Factors:
    products = _products(_cut(gradient, size))
    return tuple(
      decay.astype(s.dtype) * s + weight.astype(s.dtype) * product
      for s, product in zip(before, products, strict=True)
    )

  return jax.tree.map(add, gradients, statistics)


def _wide(dtype: Any) -> Any:
  """Returns f32, or a wider dtype."""
  return jnp.promote_types(dtype, jnp.float32)


def _merged(shape: Sequence[int], size: int) -> list[int]:
  """Merges neighbouring axes while their product is at most `size`."""
  merged: list[int] = []
  for n in shape:
    if merged and merged[-1] * n <= size:
      merged[-1] *= n
    elif n != 1 or not merged:
      merged.append(n)
  return merged or [1]


def _grid(
  shape: Sequence[int], size: int
) -> tuple[list[int], list[int], list[int]]:
  """Returns per merged axis its blocks, their length, and the axis' length."""
  axes = _merged(shape, size)
  blocks = [-(-n // size) for n in axes]
  sizes = [-(-n // max(k, 1)) for n, k in zip(axes, blocks, strict=True)]
  return blocks, sizes, axes


def _cut(leaf: jax.Array, size: int) -> _Blocks:
  """Cuts a leaf into blocks."""
  blocks, sizes, axes = _grid(leaf.shape, size)
  triples = list(zip(blocks, sizes, axes, strict=True))
  leaf = leaf.reshape(axes)
  leaf = jnp.pad(leaf, [(0, k * b - n) for k, b, n in triples])
  leaf = leaf.reshape([*itertools.chain(*((k, b) for k, b, _ in triples))])
  order = len(axes)
  leaf = leaf.transpose([*range(0, 2 * order, 2), *range(1, 2 * order, 2)])
  return leaf.reshape([math.prod(blocks), *sizes])


def _join(cut: _Blocks, shape: Sequence[int], size: int) -> jax.Array:
  """Returns the leaf that `_cut` cut."""
  blocks, sizes, axes = _grid(shape, size)
  order = len(axes)
  leaf = cut.reshape([*blocks, *sizes])
  pairs = ((i, order + i) for i in range(order))
  leaf = leaf.transpose([*itertools.chain(*pairs)])
  leaf = leaf.reshape([k * b for k, b in zip(blocks, sizes, strict=True)])
  return leaf[tuple(slice(n) for n in axes)].reshape(shape)


def _products(blocks: _Blocks) -> _Factors:
  """Returns per axis the products of each block with itself."""
  factors = []
  for axis in range(1, blocks.ndim):
    rows = jnp.moveaxis(blocks, axis, 1)
    rows = rows.reshape(*rows.shape[:2], math.prod(rows.shape[2:]))
    factors.append(rows @ rows.mT)
  return tuple(factors)


def _grafted(blocks: _Blocks, like: _Blocks, roots: _Factors) -> _Blocks:
  """Multiplies blocks by their roots, and gives them the norms of others."""
  result = blocks
  for axis, root in enumerate(roots, 1):
    # The first and the last axis, all that a matrix has, need no transposition.
    if axis == 1:
      shape = *blocks.shape[:2], math.prod(blocks.shape[2:])
      result = (root @ result.reshape(shape)).reshape(blocks.shape)
    else:
      rows = jnp.moveaxis(result, axis, -1)
      shape = len(rows), math.prod(rows.shape[1:-1]), rows.shape[-1]
      turned = (rows.reshape(shape) @ root).reshape(rows.shape)
      result = jnp.moveaxis(turned, -1, axis)
  within = tuple(range(1, blocks.ndim))
  # A largest element of 1, so that no square is too small for a float.
  most = jnp.max(jnp.abs(result), axis=within, keepdims=True, initial=0)
  result = result / jnp.where(most == 0, 1, most)
  norm, wanted = (
    jnp.sqrt(jnp.sum(x * x, axis=within, keepdims=True)) for x in (result, like)
  )
  # Without a direction, as of a block whose mean is 0, take the other one.
  scaled = result * (wanted / jnp.where(norm == 0, 1, norm))
  return jnp.where(norm == 0, like, scaled)


class _Shares(NamedTuple):
  """The blocks of each leaf that a device computes."""

  tree: Any
  """Structure of the parameters."""
  axis: Axes | None
  """Mesh axis of the W devices, or axes. None: there is one."""
  numbers: tuple[np.ndarray, ...]
  """Per leaf, the numbers of each device's blocks, i32[W, N], padded."""
  counts: np.ndarray
  """Number of these blocks, i32[W, leaves]."""

  def own(self) -> tuple[list[jax.Array], jax.Array]:
    """Returns per leaf the numbers of this device, padded, and how many."""
    at = 0 if self.axis is None else lax.axis_index(self.axis)
    numbers = [jnp.asarray(own)[at] for own in self.numbers]
    return numbers, jnp.asarray(self.counts)[at]

  def taken(self, factors: Any) -> list[_Factors]:
    """Returns per leaf the factors of this device's blocks, padded."""
    leaves = self.tree.flatten_up_to(factors)
    if self.axis is None:
      return leaves
    most, (numbers, _) = self.counts.max(0), self.own()
    return [
      tuple(one[own[:end]] for one in leaf)
      for leaf, own, end in zip(leaves, numbers, most, strict=True)
    ]

  def gathered(self, leaves: list[Any]) -> Any:
    """Returns the blocks of all devices, of a tree of arrays for each leaf.

    An array's first axis counts the blocks of this device, padded.
    """
    if self.axis is not None:
      most = self.counts.max(0).tolist()
      own = [
        jax.tree.map(lambda x, end=end: x[:end], leaf)
        for leaf, end in zip(leaves, most, strict=True)
      ]
      leaves = [
        jax.tree.map(operator.itemgetter(self._places(number)), leaf)
        for number, leaf in enumerate(
          lax.all_gather(own, self.axis, tiled=True)
        )
      ]
    return jax.tree.unflatten(self.tree, leaves)

  def _places(self, leaf: int) -> np.ndarray:
    """Returns where each block of a leaf is among those of all devices."""
    counts = self.counts[:, leaf]
    places = np.empty(counts.sum(), np.int32)
    for device, count in enumerate(counts.tolist()):
      own = self.numbers[leaf][device, :count]
      places[own] = device * counts.max() + np.arange(count)
    return places


def _directions(
  mu: Any, target: Any, roots: Any, size: int, shares: _Shares
) -> Any:
  """Returns the direction of each leaf, computed by all devices."""
  blocks, like = (
    jax.tree.map(lambda leaf: _cut(leaf, size), tree) for tree in (mu, target)
  )
  if shares.axis is None:
    turned = jax.tree.map(_grafted, blocks, like, roots)
  else:
    leaves = zip(
      *map(shares.tree.flatten_up_to, (blocks, like, roots)), strict=True
    )
    turned = shares.gathered([*map(_one_by_one, *shares.own(), leaves)])
  return jax.tree.map(lambda new, m: _join(new, m.shape, size), turned, mu)


def _one_by_one(own: jax.Array, count: jax.Array, leaf: Any) -> _Blocks:
  """Returns the directions of the first `count` of a device's own blocks.

  One after another in a loop, with room for all. So the program does not depend
  on how many blocks the device has.
  """

  def turn(place: Any, turned: _Blocks) -> _Blocks:
    one = jax.tree.map(
      lambda x: lax.dynamic_slice_in_dim(x, own[place], 1), leaf
    )
    return lax.dynamic_update_slice_in_dim(turned, _grafted(*one), place, 0)

  room = jnp.zeros_like(leaf[0])
  return lax.fori_loop(0, count, turn, room) if len(room) else room


def _shares(leaves: Any, size: int, axis: Axes | None) -> _Shares:
  """Shares the blocks among devices: the costliest first, each to the freest.

  The cost is that of the roots.
  """
  flat, tree = jax.tree.flatten(leaves)
  devices = 1 if axis is None else lax.axis_size(axis)
  blocks = []
  for leaf, (counts, sizes, _) in enumerate(
    _grid(leaf.shape, size) for leaf in flat
  ):
    cost = sum(n**3 for n in sizes)
    blocks += [(cost, leaf, number) for number in range(math.prod(counts))]
  in_all = np.bincount([leaf for _, leaf, _ in blocks], minlength=len(flat))
  numbers = tuple(np.zeros((devices, n), np.int32) for n in in_all)
  count = np.zeros((devices, len(flat)), np.int32)
  load = np.zeros(devices)
  for cost, leaf, number in sorted(blocks, key=lambda block: -block[0]):
    freest = int(load.argmin())
    load[freest] += cost
    numbers[leaf][freest, count[freest, leaf]] = number
    count[freest, leaf] += 1
  return _Shares(tree, axis, numbers, count)


def _roots(shares: _Shares, statistics: Any, eps: jax.typing.ArrayLike) -> Any:
  """Returns the inverse roots of all statistics, computed by the host.

  XLA's own batched eigh takes long on a CPU, or never ends.
  """
  own = shares.taken(statistics)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), own)
  count = shares.own()[1]
  return shares.gathered(
    jax.pure_callback(host_roots.roots, shapes, own, count, jnp.asarray(eps))
  )


def _begin_roots(
  shares: _Shares,
  statistics: Any,
  eps: jax.typing.ArrayLike,
  step: jax.Array,
) -> jax.Array:
  """Lets a thread begin with what `_roots` will ask for. Returns the step.

  A callback with an effect would make each dispatch of a step slower, so this
  one has a result.
  """

  def begin(step: Any, *job: Any) -> Any:
    host_roots.begin(*job)
    return step

  own, count = shares.taken(statistics), shares.own()[1]
  shape = jax.ShapeDtypeStruct((), step.dtype)
  return jax.pure_callback(begin, shape, step, own, count, jnp.asarray(eps))
