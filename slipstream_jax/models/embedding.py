"""From rows to what a model sees of its features: lookup, pooling, names."""

from collections.abc import Mapping, Sequence
import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.tables import Feature
from slipstream_jax.types import Embeddings, Rows


def embed(
  rows: Rows,
  inverse: Int[jax.Array, 'B K'],
  features: Mapping[str, Feature],
  weights: Float[jax.Array, 'B K'] | None = None,
) -> dict[str, jax.Array]:
  """Looks rows up, and pools what is to be pooled.

  Args:
    rows: the batch's unique rows, f32[U, D].
    inverse: place in `rows` of each lookup, i32, `max_length` columns for each
      feature; -1 = padding, which adds nothing, whatever its weight is.
    features: of those columns, in their order.
    weights: of each lookup, f32, finite; read where a feature is `weighted`.
      None: all weigh 1.

  Returns:
    By feature f32[B, D]; or f32[B, L, D] with pooling 'none', where each row is
    multiplied by its weight. A mean is sum(w e) / sum(w), sqrtn is sum(w e) /
    sqrt(sum(w^2)); where the divisor is 0, as in an empty bag, the embedding
    is 0 and its rows learn nothing from it. The gradient sums what duplicate
    lookups send to a row.
  """
  real = inverse >= 0
  # The host made `inverse` of these rows, so no place is out of bounds. Padding
  # reads row 0, and the mask keeps its gradient from there, too.
  embeddings = rows.at[jnp.maximum(inverse, 0)].get(mode='promise_in_bounds')
  embeddings = jnp.where(
    real[..., None], embeddings, jnp.zeros((), embeddings.dtype)
  )

  def kind(name: str) -> tuple[bool, int, bool]:
    feature = features[name]
    return feature.combiner == 'none', feature.max_length, feature.weighted

  # Features of one kind that lie side by side are pooled as one array.
  runs = [list(names) for _, names in itertools.groupby(features, kind)]
  widths = [len(names) * features[names[0]].max_length for names in runs]
  ends = np.cumsum(widths).tolist()
  by_name: dict[str, jax.Array] = {}
  parts = zip(runs, _cut(embeddings, tuple(widths)), widths, ends, strict=True)
  for names, part, width, end in parts:
    run = [features[name] for name in names]
    at = (slice(None), slice(end - width, end))
    own = None if weights is None or not run[0].weighted else weights[at]
    by_name |= zip(names, _pooled(run, part, real[at], own), strict=True)
  return by_name


def _pooled(
  features: Sequence[Feature],
  embeddings: Float[jax.Array, 'B K D'],
  real: Bool[jax.Array, 'B K'],
  weights: Float[jax.Array, 'B K'] | None,
) -> list[jax.Array]:
  """What the model gets of features side by side, of one length and kind."""
  examples, _, dim = embeddings.shape
  count, length = len(features), features[0].max_length
  if weights is not None:
    weights = jnp.where(real, weights, jnp.zeros((), weights.dtype))
  if features[0].combiner == 'none':
    if weights is not None:
      embeddings = embeddings * weights[..., None]
    return list(_cut(embeddings, (length,) * count))
  bags = embeddings.reshape(examples, count, length, dim)
  poolings = [feature.combiner for feature in features]
  shares = real.astype(jnp.float32)
  if weights is not None:
    shares = _relative(weights.reshape(examples, count, length), poolings)
    bags = bags * shares[..., None]
  pooled = bags.sum(axis=2) if length > 1 else bags[:, :, 0]
  # The mean of one embedding that weighs 1 is that embedding.
  if {*poolings} != {'sum'} and (weights is not None or length > 1):
    shares = shares.reshape(examples, count, length)
    divisor = _divisors(shares, poolings)[..., None]
    pooled = jnp.where(divisor == 0, 0, pooled / _or_one(divisor))
  return [x.reshape(examples, dim) for x in _cut(pooled, (1,) * count)]


def _is(pooling: str, poolings: Sequence[str], axes: int) -> np.ndarray:
  """Which features F have this pooling, bool[1, F, ...]."""
  is_it = np.array([one == pooling for one in poolings])
  return is_it.reshape(1, -1, *[1] * (axes - 2))


def _relative(
  weights: Float[jax.Array, 'B F L'], poolings: Sequence[str]
) -> Float[jax.Array, 'B F L']:
  """Weights over the size of their bag's largest, where scale plays no part.

  So that of small weights no square is lost, and of large ones none overflows.
  """
  largest = jnp.abs(weights).max(axis=2, keepdims=True)
  # Its power of two alone: to divide by that rounds nothing.
  bits = jax.lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
  size = _or_one(jax.lax.bitcast_convert_type(bits, jnp.float32))
  return jnp.where(_is('sum', poolings, 3), weights, weights / size)


def _divisors(
  shares: Float[jax.Array, 'B F L'], poolings: Sequence[str]
) -> Float[jax.Array, 'B F']:
  """What a bag's weighted sum is divided by; 0 where it shall be 0."""
  length = jnp.sqrt((shares * shares).sum(axis=2))
  divisor = jnp.where(_is('mean', poolings, 2), shares.sum(axis=2), length)
  return jnp.where(_is('sum', poolings, 2), jnp.ones((), jnp.float32), divisor)


def _or_one(divisor: jax.Array) -> jax.Array:
  return jnp.where(divisor == 0, jnp.ones((), divisor.dtype), divisor)


# As derived, the gradient would pad each part with zeros and add them all. In
# this form XLA finds that what is cut and joined again is the whole: where a
# model stacks its features, neither costs anything.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _cut(
  whole: Float[jax.Array, 'B K D'], widths: tuple[int, ...]
) -> tuple[jax.Array, ...]:
  """Parts [B, width, D] of all K columns."""
  ends = np.cumsum(widths).tolist()
  return tuple(
    jax.lax.slice_in_dim(whole, end - width, end, axis=1)
    for width, end in zip(widths, ends, strict=True)
  )


def _cut_forward(
  whole: jax.Array, widths: tuple[int, ...]
) -> tuple[tuple[jax.Array, ...], None]:
  return _cut(whole, widths), None


def _cut_backward(
  widths: tuple[int, ...], _: None, gradients: tuple[jax.Array, ...]
) -> tuple[jax.Array]:
  return (jnp.concatenate(gradients, axis=1),)


_cut.defvjp(_cut_forward, _cut_backward)


def stacked(embeddings: Embeddings, where: str) -> jax.Array:
  """Features of one shape as one array, in their order.

  Args:
    embeddings: by feature name, at least one.
    where: the model, for its errors.

  Returns:
    f32[B, F, D]; of sequences f32[B, F, L, D].

  Raises:
    UserError: they are not of one shape.
  """
  (name, first), *others = embeddings.items()
  for other, x in others:
    if x.shape != first.shape:
      raise UserError(
        f'the model needs embeddings of one shape, {list(first.shape[1:])} as'
        f' feature {name!r} has it',
        got=f'{list(x.shape[1:])} of feature {other!r}',
        where=f'{where}, embeddings',
        hint='give their tables one dim, or take a model that treats them each'
        ' by name',
      )
  return jnp.stack(list(embeddings.values()), axis=1)
