"""Shampoo: preconditions matrices of gradients from both sides.

Adam scales each element of a gradient by its own history. Shampoo (Gupta et
al., arXiv 1802.09568) also knows how the rows, and how the columns, of a matrix
vary together. This is the form of distributed Shampoo (Shi et al., arXiv
2309.06497): axes are cut into blocks, roots are computed every few steps, and
the size of a block's step is that of another method (grafting). What differs
from the paper: a device computes all blocks, and eps is relative.
"""

from collections.abc import Callable, Sequence
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slipstream_jax.errors import check_whole
from slipstream_jax.transforms.arguments import check_learning_rate

_Blocks = jax.Array
"""The blocks of a leaf, [N, b_1, ..., b_w], padded with zeros."""
_Factors = tuple[jax.Array, ...]
"""A matrix per block, for each axis: [N, b_1, b_1], ..., [N, b_w, b_w]."""


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
  graft: optax.OptState
  """State of the grafted method."""


def scale_by_shampoo(
  b1: jax.typing.ArrayLike = 0.9,
  b2: jax.typing.ArrayLike = 0.999,
  eps: jax.typing.ArrayLike = 1e-6,
  every: int = 50,
  block_size: int = 128,
  graft: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
  """Scales by inverse roots of the second moments of rows and of columns.

  Neighbouring axes of a leaf are merged while their product is at most
  `block_size`. Longer axes are cut into blocks of nearly equal size. For each
  block G of order w, and each of its axes, L sums the products of G with itself
  over the other axes. The direction is the mean of the gradients, multiplied
  along each axis by L^(-1/(2w)). It gets the norm of the grafted method's
  direction of the same block.

  Roots are computed at steps `every`, 2 `every`, ..., on the host, by LAPACK in
  float64. Steps before the first of them are those of the grafted method. The
  step waits for the roots, so they depend on no timing. Bias corrections would
  cancel with the norm, so there are none.

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

  def init(params: optax.Params) -> ScaleByShampooState:
    wide = jax.tree.map(lambda p: jnp.zeros(p.shape, _wide(p.dtype)), params)

    def factors(leaf: Any, start: Callable[..., jax.Array]) -> _Factors:
      blocks, sizes, _ = _grid(leaf.shape, block_size)
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
      grafted.init(wide),
    )

  def update(
    updates: optax.Updates,
    state: ScaleByShampooState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, ScaleByShampooState]:
    del params
    wide = jax.tree.map(lambda g: g.astype(_wide(g.dtype)), updates)
    steps = optax.safe_increment(state.steps)
    mu = optax.tree.update_moment(wide, state.mu, b1, 1)
    decay = jnp.asarray(b2)
    weight = jnp.where(decay == 1, 1, 1 - decay)

    def add(gradient: jax.Array, statistics: _Factors) -> _Factors:
      products = _products(_cut(gradient, block_size))
      return tuple(
        decay.astype(s.dtype) * s + weight.astype(s.dtype) * product
        for s, product in zip(statistics, products, strict=True)
      )

    statistics = jax.tree.map(add, wide, state.statistics)
    roots = jax.lax.cond(
      steps % every == 0,
      lambda: _roots(wide, statistics, eps),
      lambda: state.roots,
    )
    target, graft_state = grafted.update(wide, state.graft)

    def direction(m: jax.Array, like: jax.Array, own: _Factors) -> jax.Array:
      blocks = _grafted(_cut(m, block_size), _cut(like, block_size), own)
      return jnp.where(steps < every, like, _join(blocks, m.shape, block_size))

    directions = jax.tree.map(direction, mu, target, roots)
    new = ScaleByShampooState(steps, mu, statistics, roots, graft_state)
    return jax.tree.map(
      lambda d, g: d.astype(g.dtype), directions, updates
    ), new

  return optax.GradientTransformation(init, update)


def shampoo(
  learning_rate: optax.ScalarOrSchedule,
  b1: jax.typing.ArrayLike = 0.9,
  b2: jax.typing.ArrayLike = 0.999,
  eps: jax.typing.ArrayLike = 1e-6,
  every: int = 50,
  block_size: int = 128,
  graft: optax.GradientTransformation | None = None,
  weight_decay: jax.typing.ArrayLike = 0.0,
) -> optax.GradientTransformation:
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


def inverse_root(matrix: np.ndarray, order: int, eps: float) -> np.ndarray:
  """Returns (A / a + eps I)^(-1/order) of symmetric A [..., n, n], in float64.

  `a` is the largest eigenvalue of each matrix. The root of a matrix of zeros is
  the identity. That of one with elements that are not finite is NaN.
  """
  matrix = np.asarray(matrix, np.float64)
  finite = np.isfinite(matrix).all((-2, -1))
  values, vectors = np.linalg.eigh(np.where(finite[..., None, None], matrix, 0))
  largest = values[..., -1:]
  values = np.maximum(values, 0) / np.where(largest > 0, largest, 1)
  # A matrix of zeros, whose eigenvalues become 1.
  values = np.where(largest > 0, values + eps, 1)
  root = (vectors * values[..., None, :] ** (-1 / order)) @ np.swapaxes(
    vectors, -1, -2
  )
  return np.where(finite[..., None, None], root, np.nan)


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
    rows = jnp.moveaxis(result, axis, 1)
    flat = rows.reshape(*rows.shape[:2], math.prod(rows.shape[2:]))
    result = jnp.moveaxis((root @ flat).reshape(rows.shape), 1, axis)
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


def _roots(like: Any, statistics: Any, eps: jax.typing.ArrayLike) -> Any:
  """Returns the inverse roots of the statistics of leaves `like`, by the host.

  XLA's own batched eigh takes long on a CPU, or never ends.
  """
  leaves, tree = jax.tree.flatten(statistics)
  orders = jax.tree.leaves(
    jax.tree.map(lambda _, own: (2 * len(own),) * len(own), like, statistics)
  )

  def on_host(eps: Any, *matrices: Any) -> list[np.ndarray]:
    ridge = float(np.asarray(eps))
    return [
      inverse_root(np.asarray(matrix), order, ridge).astype(matrix.dtype)
      for matrix, order in zip(matrices, orders, strict=True)
    ]

  shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
  results = jax.pure_callback(on_host, shapes, jnp.asarray(eps), *leaves)
  return jax.tree.unflatten(tree, results)
