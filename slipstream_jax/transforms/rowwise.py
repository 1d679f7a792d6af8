"""Row-wise optimizers: optax chains over a batch's unique rows.

A leaf is `rows[U, D]`. Every optimizer is lazy: its state advances only for
rows that the batch touches, because only those are in the leaf. State with a
row axis is stored beside the row (see `row_state`). State has the leaf's
dtype, as that of optax has; what a step computes of it is f32 at least.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slipstream_jax.transforms.arguments import check_learning_rate

RowOptimizer = Callable[..., optax.GradientTransformation]


class ScaleByRowwiseAdagradState(NamedTuple):
  """State of `scale_by_rowwise_adagrad`."""

  sum_of_squares: optax.Updates
  """Per leaf [U], of its dtype: sum over steps of the row's mean square."""


def scale_by_rowwise_adagrad(
  initial_accumulator_value: jax.typing.ArrayLike = 0.0,
  eps: jax.typing.ArrayLike = 1e-8,
) -> optax.GradientTransformation:
  """Adagrad with one accumulator per row rather than per element.

  The accumulator sums the mean over D of the squared gradient, as in
  FBGEMM's EXACT_ROWWISE_ADAGRAD and in DLRM (arXiv 1906.00091, section 4):
  the state is one f32 per row, 1/D of Adagrad's.

  Args:
    initial_accumulator_value: of an untrained row.
    eps: added to the root of the accumulator.

  Returns:
    A transformation of leaves [U, D] (any [U, ...]).
  """

  def init(params: optax.Params) -> ScaleByRowwiseAdagradState:
    def start(rows: Any) -> jax.Array:
      # A sum over the rows' zeros is sharded over rows as they are.
      zero = jnp.zeros_like(rows).sum(axis=tuple(range(1, rows.ndim)))
      return zero + jnp.asarray(initial_accumulator_value, rows.dtype)

    return ScaleByRowwiseAdagradState(jax.tree.map(start, params))

  def update(
    updates: optax.Updates,
    state: ScaleByRowwiseAdagradState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, ScaleByRowwiseAdagradState]:
    del params
    # With this gradient in it: a row's first would be divided by eps alone.
    gradients = _wide(updates)
    sums = jax.tree.map(
      lambda g, s: s + _mean_square(g), gradients, _wide(state.sum_of_squares)
    )
    scaled = jax.tree.map(
      lambda g, s: g / _per_row(jnp.sqrt(s) + eps, g), gradients, sums
    )
    stored = _stored(sums, state.sum_of_squares)
    return _as(scaled, updates), ScaleByRowwiseAdagradState(stored)

  return optax.GradientTransformation(init, update)


class ScaleByLazyAdamState(NamedTuple):
  """State of `scale_by_lazy_adam`; every leaf has a row axis."""

  count: optax.Updates
  """Per leaf i32[U]: steps that touched the row."""
  mu: optax.Updates
  """Per leaf [U, D], of its dtype: mean of the gradients."""
  nu: optax.Updates
  """Per leaf [U, D], of its dtype: mean of their squares."""


def scale_by_lazy_adam(
  b1: jax.typing.ArrayLike = 0.9,
  b2: jax.typing.ArrayLike = 0.999,
  eps: jax.typing.ArrayLike = 1e-8,
) -> optax.GradientTransformation:
  """Adam (arXiv 1412.6980) whose moments advance only for touched rows.

  The bias correction counts a row's own steps: with the global count, a row
  first touched late would take steps sqrt(1 / (1 - b2)) times too long.

  Args:
    b1: decay of the mean of the gradients.
    b2: decay of the mean of their squares.
    eps: added to the root of the second moment.

  Returns:
    A transformation of leaves [U, D] (any [U, ...]).
  """

  def init(params: optax.Params) -> ScaleByLazyAdamState:
    return ScaleByLazyAdamState(
      jax.tree.map(lambda r: jnp.zeros(r.shape[0], jnp.int32), params),
      jax.tree.map(jnp.zeros_like, params),
      jax.tree.map(jnp.zeros_like, params),
    )

  def update(
    updates: optax.Updates,
    state: ScaleByLazyAdamState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, ScaleByLazyAdamState]:
    del params
    count = jax.tree.map(lambda c: c + 1, state.count)
    gradients = _wide(updates)
    mu = optax.tree.update_moment(gradients, _wide(state.mu), b1, 1)
    nu = optax.tree.update_moment(gradients, _wide(state.nu), b2, 2)

    def scaled(m: jax.Array, v: jax.Array, c: jax.Array) -> jax.Array:
      # At least 1, as this step is counted: nothing below divides by 0.
      steps = _per_row(c.astype(m.dtype), m)
      m_hat, v_hat = m / (1 - b1**steps), v / (1 - b2**steps)
      return m_hat / (jnp.sqrt(v_hat) + eps)

    return (
      _as(jax.tree.map(scaled, mu, nu, count), updates),
      ScaleByLazyAdamState(count, _stored(mu, state.mu), _stored(nu, state.nu)),
    )

  return optax.GradientTransformation(init, update)


def _wide(tree: Any) -> Any:
  """The leaves in f32 at least: half precision holds no 1 - 0.999."""
  return jax.tree.map(
    lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree
  )


def _as(tree: Any, like: Any) -> Any:
  """The leaves in the dtypes of those of `like`."""
  return jax.tree.map(lambda leaf, other: leaf.astype(other.dtype), tree, like)


def _stored(tree: Any, like: Any) -> Any:
  """As `_as`; what would overflow is the largest number: inf never moves."""

  def largest(leaf: jax.Array, other: jax.Array) -> jax.Array:
    if leaf.dtype == other.dtype:
      return leaf
    most = float(jnp.finfo(other.dtype).max)
    return jnp.clip(leaf, -most, most)

  return _as(jax.tree.map(largest, tree, like), like)


def _mean_square(gradient: jax.Array) -> jax.Array:
  """Of each row [U, ...]: [U]; 0 of rows without elements."""
  if not gradient.size:
    return jnp.zeros(len(gradient), gradient.dtype)
  return jnp.mean(gradient * gradient, axis=tuple(range(1, gradient.ndim)))


def _per_row(values: jax.Array, like: jax.Array) -> jax.Array:
  """Values [U] shaped to broadcast against `like` [U, ...]."""
  return values.reshape(values.shape + (1,) * (like.ndim - 1))


def sgd(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
  """Plain gradient descent on rows; no row state.

  Raises:
    UserError: the learning rate is negative, infinite or NaN.
  """
  check_learning_rate(learning_rate, 'sgd')
  return optax.chain(optax.scale_by_learning_rate(learning_rate))


def adagrad(
  learning_rate: optax.ScalarOrSchedule,
  initial_accumulator_value: jax.typing.ArrayLike = 0.1,
  eps: jax.typing.ArrayLike = 1e-7,
) -> optax.GradientTransformation:
  """Adagrad, one accumulator per element: row state f32[U, D].

  Raises:
    UserError: the learning rate is negative, infinite or NaN.
  """
  check_learning_rate(learning_rate, 'adagrad')
  return optax.chain(
    optax.scale_by_rss(initial_accumulator_value, eps),
    optax.scale_by_learning_rate(learning_rate),
  )


def rowwise_adagrad(
  learning_rate: optax.ScalarOrSchedule,
  initial_accumulator_value: jax.typing.ArrayLike = 0.0,
  eps: jax.typing.ArrayLike = 1e-8,
) -> optax.GradientTransformation:
  """Adagrad, one accumulator per row: row state f32[U].

  Raises:
    UserError: the learning rate is negative, infinite or NaN.
  """
  check_learning_rate(learning_rate, 'rowwise_adagrad')
  return optax.chain(
    scale_by_rowwise_adagrad(initial_accumulator_value, eps),
    optax.scale_by_learning_rate(learning_rate),
  )


def lazy_adam(
  learning_rate: optax.ScalarOrSchedule,
  b1: jax.typing.ArrayLike = 0.9,
  b2: jax.typing.ArrayLike = 0.999,
  eps: jax.typing.ArrayLike = 1e-8,
) -> optax.GradientTransformation:
  """Adam on touched rows: row state i32[U] and twice f32[U, D].

  Raises:
    UserError: the learning rate is negative, infinite or NaN.
  """
  check_learning_rate(learning_rate, 'lazy_adam')
  return optax.chain(
    scale_by_lazy_adam(b1, b2, eps),
    optax.scale_by_learning_rate(learning_rate),
  )


ROW_OPTIMIZERS: dict[str, RowOptimizer] = {
  'sgd': sgd,
  'adagrad': adagrad,
  'rowwise_adagrad': rowwise_adagrad,
  'lazy_adam': lazy_adam,
}
"""Every row optimizer by its name; all obey the laws in tests/laws."""
