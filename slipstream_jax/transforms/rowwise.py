"""Row-wise optimizers: optax chains over a batch's unique rows.

A leaf is `rows[U, D]`. Every optimizer is lazy: its state advances only for
rows that the batch touches, because only those are in the leaf. State with a
row axis is stored beside the row (see `row_state`). It has the leaf's dtype, as
in optax. Steps compute in f32 or wider.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, UInt32
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
  """Scales by Adagrad with one accumulator per row instead of per element.

  The accumulator sums the mean over D of the squared gradient, as in FBGEMM's
  EXACT_ROWWISE_ADAGRAD and in DLRM (arXiv 1906.00091, section 4).

  Args:
    initial_accumulator_value: of an untrained row.
    eps: added to the root of the accumulator.

  Returns:
    A transformation of leaves [U, D] (any [U, ...]).
  """

  def init(params: optax.Params) -> ScaleByRowwiseAdagradState:
    def start(rows: Any) -> jax.Array:
      # A sum over the rows' zeros is sharded like the rows.
      zero = jnp.zeros_like(rows).sum(axis=tuple(range(1, rows.ndim)))
      return zero + jnp.asarray(initial_accumulator_value, rows.dtype)

    return ScaleByRowwiseAdagradState(jax.tree.map(start, params))

  def update(
    updates: optax.Updates,
    state: ScaleByRowwiseAdagradState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, ScaleByRowwiseAdagradState]:
    del params
    # Includes this gradient, as a row's first would be divided by eps alone.
    gradients = _to_f32(updates)
    sums = jax.tree.map(
      lambda g, s: s + _mean_square(g), gradients, _to_f32(state.sum_of_squares)
    )
    scaled = jax.tree.map(
      lambda g, s: g / _per_row(jnp.sqrt(s) + eps, g), gradients, sums
    )
    stored = _to_storage(sums, state.sum_of_squares)
    return _cast(scaled, updates), ScaleByRowwiseAdagradState(stored)

  return optax.GradientTransformation(init, update)


class ScaleByLazyAdamState(NamedTuple):
  """State of `scale_by_lazy_adam`. Every leaf has a row axis."""

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
  """Scales by Adam (arXiv 1412.6980), with moments that skip untouched rows.

  The bias correction counts a row's own steps. With the global count, a row
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
    gradients = _to_f32(updates)
    mu = optax.tree.update_moment(gradients, _to_f32(state.mu), b1, 1)
    nu = optax.tree.update_moment(gradients, _to_f32(state.nu), b2, 2)

    def scaled(m: jax.Array, v: jax.Array, c: jax.Array) -> jax.Array:
      # At least 1, as this step is counted, so nothing divides by 0.
      steps = _per_row(c.astype(m.dtype), m)
      m_hat, v_hat = m / (1 - b1**steps), v / (1 - b2**steps)
      return m_hat / (jnp.sqrt(v_hat) + eps)

    return (
      _cast(jax.tree.map(scaled, mu, nu, count), updates),
      ScaleByLazyAdamState(
        count, _to_storage(mu, state.mu), _to_storage(nu, state.nu)
      ),
    )

  return optax.GradientTransformation(init, update)


def _to_f32(tree: Any) -> Any:
  """Widens the leaves to f32 or more, as half precision cannot hold 0.999."""
  return jax.tree.map(
    lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree
  )


def _cast(tree: Any, like: Any) -> Any:
  """Casts the leaves to the dtypes of those of `like`."""
  return jax.tree.map(lambda leaf, other: leaf.astype(other.dtype), tree, like)


def _to_storage(tree: Any, like: Any) -> Any:
  """Casts as `_cast`, with overflow clipped, as inf would freeze the row."""

  def cast(leaf: jax.Array, other: jax.Array) -> jax.Array:
    if leaf.dtype != other.dtype:
      most = float(jnp.finfo(other.dtype).max)
      leaf = jnp.clip(leaf, -most, most)
    return leaf.astype(other.dtype)

  return jax.tree.map(cast, tree, like)


def _mean_square(gradient: jax.Array) -> jax.Array:
  """Returns the mean square of each row [U, ...]: [U]. 0 without elements."""
  if not gradient.size:
    return jnp.zeros(len(gradient), gradient.dtype)
  return jnp.mean(gradient * gradient, axis=tuple(range(1, gradient.ndim)))


def _per_row(values: jax.Array, like: jax.Array) -> jax.Array:
  """Reshapes values [U] to broadcast against `like` [U, ...]."""
  return values.reshape(values.shape + (1,) * (like.ndim - 1))


class KnownUpdate:
  """Update of a chain of rows f32[U, D] that a kernel may compute instead.

  Attributes:
    learning_rate: of the chain's last transformation.
    eps: what row-wise Adagrad, the only one before it, adds to the root. None:
      there is none before it.
  """

  def __init__(
    self,
    update: Callable[..., Any],
    learning_rate: optax.ScalarOrSchedule,
    eps: jax.typing.ArrayLike | None = None,
  ) -> None:
    """Wraps the chain's update."""
    self._update, self.learning_rate, self.eps = update, learning_rate, eps

  def __call__(self, *args: Any, **extra_args: Any) -> Any:
    """Runs the chain's update."""
    return self._update(*args, **extra_args)

  def scale(self, state: optax.OptState) -> tuple[jax.Array, optax.OptState]:
    """Returns minus the learning rate, f32[], and its schedule's next state."""
    factor, state = optax.scale_by_learning_rate(self.learning_rate).update(
      jnp.ones((), jnp.float32), state
    )
    return jnp.asarray(factor), state


def stochastic_round(
  values: Float[jax.Array, '...'],
  dtype: jax.typing.DTypeLike,
  bits: UInt32[jax.Array, '...'],
) -> Float[jax.Array, '...']:
  """Rounds f32 values at random to a neighbour in a narrower float dtype.

  The expected result is the value, up to the 24 bits of the draw. Rounding to
  nearest would lose every update below half the distance between two numbers of
  the dtype (Gupta et al., arXiv 1502.02551, and for embedding tables Zhang et
  al., arXiv 1805.08691). Values of the dtype are returned for any bits.

  Args:
    values: f32, any shape. Values that overflow the dtype become infinite.
    dtype: bfloat16 or float16.
    bits: random u32 of the same shape.
  """
  nearest = values.astype(dtype)
  back = nearest.astype(jnp.float32)
  beyond = jnp.where(back < values, jnp.inf, -jnp.inf).astype(dtype)
  other = jnp.nextafter(nearest, beyond)
  gap = jnp.abs(other.astype(jnp.float32) - back)
  # At most 1/2. 0 if exact. NaN after an overflow, which compares as false.
  chance = jnp.abs(values - back) / gap
  # f32 holds 24 bits exactly. More would make draws uneven.
  draw = (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
  return jnp.where(draw < chance, other, nearest)


def sgd(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
  """Returns plain gradient descent on rows, without row state.

  Raises:
    UserError: the learning rate is negative, infinite or NaN.
  """
  check_learning_rate(learning_rate, 'sgd')
  chain = optax.chain(optax.scale_by_learning_rate(learning_rate))
  return chain._replace(update=KnownUpdate(chain.update, learning_rate))


def adagrad(
  learning_rate: optax.ScalarOrSchedule,
  initial_accumulator_value: jax.typing.ArrayLike = 0.1,
  eps: jax.typing.ArrayLike = 1e-7,
) -> optax.GradientTransformation:
  """Returns Adagrad with one accumulator per element: row state f32[U, D].

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
  """Returns Adagrad with one accumulator per row: row state f32[U].

  Raises:
    UserError: the learning rate is negative, infinite or NaN.
  """
  check_learning_rate(learning_rate, 'rowwise_adagrad')
  chain = optax.chain(
    scale_by_rowwise_adagrad(initial_accumulator_value, eps),
    optax.scale_by_learning_rate(learning_rate),
  )
  return chain._replace(update=KnownUpdate(chain.update, learning_rate, eps))


def lazy_adam(
  learning_rate: optax.ScalarOrSchedule,
  b1: jax.typing.ArrayLike = 0.9,
  b2: jax.typing.ArrayLike = 0.999,
  eps: jax.typing.ArrayLike = 1e-8,
) -> optax.GradientTransformation:
  """Returns Adam on touched rows: row state i32[U] and twice f32[U, D].

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
"""The row optimizers by name. The laws in tests/laws hold for all of them."""
