"""Embeds features: looks up rows, pools bags, and names the results."""

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
  """Looks up rows and pools bags.

  Args:
    rows: the batch's unique rows, f32[U, D].
    inverse: place in `rows` of each lookup, i32, `max_length` columns for each
      feature. Padding is -1 and adds nothing, whatever its weight.
    features: the features of those columns, in their order.
    weights: weight of each lookup of a `weighted` feature, f32, finite. None:
      all weigh 1.

  Returns:
    f32[B, D] by feature, or f32[B, L, D] with combiner 'none', where each row
    is multiplied by its weight. A mean is sum(w e) / sum(w), and sqrtn is
    sum(w e) / sqrt(sum(w^2)). If the divisor is 0, as in an empty bag, the
    embedding is 0 and has no gradient.
  """
  real = inverse >= 0
  # The host computed `inverse` for these rows, so no place is out of bounds.
  # Padding reads row 0. The mask also removes its gradient.
  embeddings = rows.at[jnp.maximum(inverse, 0)].get(mode='promise_in_bounds')
  embeddings = jnp.where(
    real[..., None], embeddings, jnp.zeros((), embeddings.dtype)
  )

  def kind(name: str) -> tuple[bool, int, bool]:
    feature = features[name]
    return feature.combiner == 'none', feature.max_length, feature.weighted

  # Adjacent features of one kind are pooled as one array.
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
  """Returns the embeddings of adjacent features of one length and kind."""
  examples, _, dim = embeddings.shape
  count, length = len(features), features[0].max_length
  if weights is not None:
    weights = jnp.where(real, weights, jnp.zeros((), weights.dtype))
  if features[0].combiner == 'none':
    if weights is not None:
      embeddings = embeddings * weights[..., None]
    return list(_cut(embeddings, (length,) * count))
  bags = embeddings.reshape(examples, count, length, dim)
  combiners = [feature.combiner for feature in features]
  shares = real.astype(jnp.float32)
  if weights is not None:
    shares = _relative(weights.reshape(examples, count, length), combiners)
    bags = bags * shares[..., None]
  pooled = bags.sum(axis=2) if length > 1 else bags[:, :, 0]
  # The mean of one embedding that weighs 1 is that embedding.
  if {*combiners} != {'sum'} and (weights is not None or length > 1):
    shares = shares.reshape(examples, count, length)
    divisor = _divisors(shares, combiners)[..., None]
    pooled = jnp.where(divisor == 0, 0, pooled / _or_one(divisor))
  return [x.reshape(examples, dim) for x in _cut(pooled, (1,) * count)]


def _is(combiner: str, combiners: Sequence[str], axes: int) -> np.ndarray:
  """Returns which features F have this combiner, bool[1, F, ...]."""
  is_it = np.array([one == combiner for one in combiners])
  return is_it.reshape(1, -1, *[1] * (axes - 2))


def _relative(
  weights: Float[jax.Array, 'B F L'], combiners: Sequence[str]
) -> Float[jax.Array, 'B F L']:
  """Divides weights by the size of their bag's largest, unless it is a sum.

  Squares of small weights then do not vanish, and those of large ones do not
  overflow.
  """
  largest = jnp.abs(weights).max(axis=2, keepdims=True)
  # Only its power of two, as dividing by that rounds nothing.
  bits = jax.lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
  size = _or_one(jax.lax.bitcast_convert_type(bits, jnp.float32))
  return jnp.where(_is('sum', combiners, 3), weights, weights / size)


def _divisors(
  shares: Float[jax.Array, 'B F L'], combiners: Sequence[str]
) -> Float[jax.Array, 'B F']:
  """Returns the divisor of each bag's weighted sum. 0 makes it 0."""
  length = jnp.sqrt((shares * shares).sum(axis=2))
  divisor = jnp.where(_is('mean', combiners, 2), shares.sum(axis=2), length)
  return jnp.where(_is('sum', combiners, 2), jnp.ones((), jnp.float32), divisor)


def _or_one(divisor: jax.Array) -> jax.Array:
  return jnp.where(divisor == 0, jnp.ones((), divisor.dtype), divisor)


# The derived gradient would pad each part with zeros and add all of them. In
# this form XLA sees that cutting and joining cancel, so both cost nothing where
# a model stacks its features.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _cut(
  whole: Float[jax.Array, 'B K D'], widths: tuple[int, ...]
) -> tuple[jax.Array, ...]:
  """Cuts K columns into parts [B, width, D]."""
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
  """Stacks features in their order: f32[B, F, D], or f32[B, F, L, D].

  Raises:
    UserError: their shapes differ. `where` is the name of the model.
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
