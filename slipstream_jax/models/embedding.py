"""Embeds features: looks up rows, pools bags, and names the results."""

from collections.abc import Mapping, Sequence
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.models.bags import bag_sums, cut, Unsummed
from slipstream_jax.tables import Feature
from slipstream_jax.types import Embeddings, Rows


def embed(
  rows: Rows | Unsummed,
  inverse: Int[jax.Array, 'B K'],
  features: Mapping[str, Feature],
  weights: Float[jax.Array, 'B K'] | None = None,
  portable: bool = False,
) -> dict[str, jax.Array]:
  """Looks up rows and pools bags.

  Args:
    rows: the batch's unique rows, f32[U, D], as in `bag_sums`.
    inverse: place in `rows` of each lookup, i32, `max_length` columns for each
      feature. Padding is -1 and adds nothing, whatever its weight.
    features: the features of those columns, in their order.
    weights: weight of each lookup of a `weighted` feature, f32, finite. None:
      all weigh 1.
    portable: as in `bag_sums`.

  Returns:
    f32[B, D] by feature, or f32[B, L, D] with combiner 'none', where each row
    is multiplied by its weight. A mean is sum(w e) / sum(w), and sqrtn is
    sum(w e) / sqrt(sum(w^2)). If the divisor is 0, as in an empty bag, the
    embedding is 0 and has no gradient.
  """

  def kind(name: str) -> tuple[bool, int, bool]:
    feature = features[name]
    return feature.combiner == 'none', feature.max_length, feature.weighted

  # Adjacent features of one kind are pooled as one array.
  runs = [list(names) for _, names in itertools.groupby(features, kind)]
  shares, is_weighted, start = [], [], 0
  for names in runs:
    run = [features[name] for name in names]
    end = start + len(run) * run[0].max_length
    own = (
      weights[:, start:end] if run[0].weighted and weights is not None else None
    )
    is_weighted.append(own is not None)
    shares.append(_shares(run, inverse[:, start:end] >= 0, own))
    start = end
  lengths = bag_lengths(list(features.values()))
  whole = None
  if any(is_weighted):
    whole = jnp.concatenate([x.reshape(len(x), -1) for x in shares], axis=1)
  sums = bag_sums(rows, inverse, lengths, whole, portable)
  by_name: dict[str, jax.Array] = {}
  parts = cut(sums, tuple(x.shape[1] for x in shares))
  of_runs = zip(runs, parts, shares, is_weighted, strict=True)
  for names, part, counts, own_weights in of_runs:
    run = [features[name] for name in names]
    pooled = _pooled(run, part, counts, own_weights)
    by_name |= zip(names, pooled, strict=True)
  return by_name


def bag_lengths(features: Sequence[Feature]) -> tuple[int, ...]:
  """Returns the columns of each bag. Without a combiner each lookup is one."""
  return tuple(
    length
    for feature in features
    for length in (
      (1,) * feature.max_length
      if feature.combiner == 'none'
      else (feature.max_length,)
    )
  )


def _shares(
  features: Sequence[Feature],
  real: Bool[jax.Array, 'B _K'],
  weights: Float[jax.Array, 'B _K'] | None,
) -> Float[jax.Array, 'B _G _L']:
  """Returns what each lookup counts for in its bag's sum, before division.

  Without a combiner each lookup is a bag.
  """
  shares = real.astype(jnp.float32)
  if weights is not None:
    shares = jnp.where(real, weights, jnp.zeros((), weights.dtype))
  if features[0].combiner == 'none':
    return shares[..., None]
  shares = shares.reshape(len(shares), len(features), features[0].max_length)
  if weights is not None:
    shares = _relative(shares, [feature.combiner for feature in features])
  return shares


def _pooled(
  features: Sequence[Feature],
  sums: Float[jax.Array, 'B _G D'],
  shares: Float[jax.Array, 'B _G _L'],
  weighted: bool,
) -> list[jax.Array]:
  """Returns the embeddings of adjacent features of one length and kind."""
  examples, _, dim = sums.shape
  count, length = len(features), features[0].max_length
  if features[0].combiner == 'none':
    return list(cut(sums, (length,) * count))
  combiners = [feature.combiner for feature in features]
  # The mean of one embedding that weighs 1 is that embedding.
  if {*combiners} != {'sum'} and (weighted or length > 1):
    divisor = _divisors(shares, combiners)[..., None]
    # Not a division, which XLA replaces by this in some programs alone.
    sums = jnp.where(divisor == 0, 0, sums * (1 / _or_one(divisor)))
  return [x.reshape(examples, dim) for x in cut(sums, (1,) * count)]


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


def padded(
  embeddings: Embeddings, dim: int, weighted: bool, where: str
) -> dict[str, jax.Array]:
  """Returns embeddings f32[..., dim], with zeros where they were narrower.

  Args:
    embeddings: by feature name, f32[..., d] with d of at most `dim`.
    dim: width of the results.
    weighted: whether the last element is a weight of its own. It stays last.
    where: name of the model.

  Raises:
    UserError: one is wider.
  """
  wide = {}
  for name, x in embeddings.items():
    *shape, width = x.shape
    if width > dim:
      raise UserError(
        f'embeddings to pad must have a dim of at most {dim}',
        got=f'{width} of feature {name!r}',
        where=f'{where}, embeddings',
        hint='give its table a smaller dim, or let bottom end in a wider layer',
      )
    zeros = jnp.zeros((*shape, dim - width), x.dtype)
    own = width - weighted
    parts = [x[..., :own], zeros, x[..., own:]]
    wide[name] = jnp.concatenate(parts, axis=-1)
  return wide
