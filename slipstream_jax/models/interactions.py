"""Interactions: what a model computes from the vectors of its features.

An interaction is a Flax module from tokens [B, M, D], one for each feature, to
vectors f32[B, K, E]. Where E is D the vectors are tokens again, so that layers
can be stacked. Tokens come in the dtype of matrix products, float32 or
bfloat16. Sums and parameters are f32.

`INTERACTIONS` has one for each name. `DHEN` stacks them, and takes a module of
one's own as well.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.models.layers import MLP, summed_in_f32

Tokens = Float[jax.Array, 'B M D']
Vectors = Float[jax.Array, 'B K E']


class Dot(nn.Module):
  """Dot products of all pairs of tokens, as in DLRM (arXiv 1906.00091)."""

  def __call__(self, tokens: Tokens) -> Vectors:
    """Returns the product of each pair, f32[B, M (M - 1) / 2, 1]."""
    return dot_interaction(tokens)[..., None]


class FM(nn.Module):
  """Sum of the elementwise products of all pairs of tokens.

  Summed over D it is the second order of a factorization machine, as in DeepFM
  (arXiv 1703.04247), in time M D rather than M^2 D.
  """

  def __call__(self, tokens: Tokens) -> Vectors:
    """Returns f32[B, 1, D]."""
    tokens = tokens.astype(jnp.float32)
    total = tokens.sum(axis=1, keepdims=True)
    return (total * total - (tokens * tokens).sum(axis=1, keepdims=True)) / 2


class Cross(nn.Module):
  """Crosses of DCN-v2 (arXiv 2008.13535): x <- x0 * (W x + b) + x.

  x0 is all tokens as one vector of M D elements, and x starts as x0. After n
  layers x has products of up to n + 1 elements.

  Attributes:
    layers: number of crosses.
    rank: rank of each W, which is then the product of two matrices without a
      bias between them. None: W has full rank, (M D)^2 elements.
  """

  layers: int = 1
  rank: int | None = None

  @nn.compact
  def __call__(self, tokens: Tokens) -> Vectors:
    """Returns f32[B, M, D]."""
    start = tokens.reshape(len(tokens), -1).astype(jnp.float32)
    x = start
    for _ in range(self.layers):
      factor = x
      if self.rank is not None:
        factor = _dense(self.rank, tokens, use_bias=False)(factor)
      x = start * _dense(start.shape[1], tokens)(factor) + x
    return x.reshape(tokens.shape)


class Attention(nn.Module):
  """Attention of each token to all tokens of its example (arXiv 1706.03762).

  Tokens have no order: permuted tokens give permuted results.

  Attributes:
    heads: number of heads. It must divide D.
  """

  heads: int = 1

  @nn.compact
  def __call__(self, tokens: Tokens) -> Vectors:
    """Returns f32[B, M, D].

    Raises:
      UserError: the heads do not divide D.
    """
    dim = tokens.shape[2]
    if dim % self.heads:
      raise UserError(
        f'the heads of attention must divide the width of its tokens, {dim}',
        got=self.heads,
        where='Attention.heads',
        hint='take a divisor, or change the dim of the tables',
      )

    def split(name: str) -> Float[jax.Array, 'B M T _']:
      x = _dense(dim, tokens, use_bias=False, name=name)(tokens)
      shape = *x.shape[:2], self.heads, dim // self.heads
      return x.reshape(shape).astype(tokens.dtype)

    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    query, key, value = map(split, ('query', 'key', 'value'))
    scores = product('bmtd,bntd->btmn', query, key)
    shares = nn.softmax(scores * (dim // self.heads) ** -0.5)
    mixed = product('btmn,bntd->bmtd', shares.astype(tokens.dtype), value)
    return _dense(dim, tokens, name='out')(mixed.reshape(tokens.shape))


class Linear(nn.Module):
  """Linear mixtures of the tokens, with the same weights for each element.

  Attributes:
    count: number of mixtures. None: as many as there are tokens.
  """

  count: int | None = None

  @nn.compact
  def __call__(self, tokens: Tokens) -> Vectors:
    """Returns f32[B, count, D]."""
    count = tokens.shape[1] if self.count is None else self.count
    mixed = _dense(count, tokens)(jnp.swapaxes(tokens, 1, 2))
    return jnp.swapaxes(mixed, 1, 2)


class Deep(nn.Module):
  """An MLP over all tokens as one vector.

  Attributes:
    sizes: widths of its layers, each with a ReLU.
  """

  sizes: Sequence[int] = (64,)

  @nn.compact
  def __call__(self, tokens: Tokens) -> Vectors:
    """Returns f32[B, 1, sizes[-1]]."""
    flat = tokens.reshape(len(tokens), -1)
    return MLP(self.sizes, dtype=str(tokens.dtype))(flat)[:, None]


InteractionFactory = Callable[[], nn.Module]
"""Makes an interaction. The class of a module is one, if it has defaults."""

INTERACTIONS: dict[str, InteractionFactory] = {
  'dot': Dot,
  'fm': FM,
  'cross': Cross,
  'low_rank_cross': functools.partial(Cross, rank=16),
  'attention': Attention,
  'linear': Linear,
  'deep': Deep,
}


def _dense(size: int, tokens: Tokens, **arguments: Any) -> nn.Dense:
  """Returns a layer whose products have the dtype of the tokens."""
  return nn.Dense(
    size,
    kernel_init=nn.initializers.glorot_normal(),
    dtype=tokens.dtype,
    dot_general=summed_in_f32,
    **arguments,
  )


@functools.cache
def _pairs(vectors: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns places of pairs j < i in a flat [V, V] matrix, and the inverse.

  That is the place of each pair, i32[P], and the pair at each place, i32[V *
  V], which is P on the diagonal.
  """
  i, j = np.tril_indices(vectors, -1)
  pair = np.full((vectors, vectors), len(i), np.int32)
  pair[i, j] = pair[j, i] = np.arange(len(i))
  return (i * vectors + j).astype(np.int32), pair.reshape(-1)


@jax.custom_vjp
def dot_interaction(
  vectors: Float[jax.Array, 'B V D'],
) -> Float[jax.Array, 'B P']:
  """Computes dot products of all P = V (V - 1) / 2 pairs of vectors, in f32.

  This is DLRM's interaction (arXiv 1906.00091, section 2.1.3). The order of the
  pairs (i, j), j < i, is that of `np.tril_indices(V, -1)`. The gradient is
  written by hand: (S + S^T) T, with S the pairs' gradients. The derived one
  scatters into [B, V, V], which XLA does one element at a time on a CPU.
  """
  places, _ = _pairs(vectors.shape[1])
  products = jnp.einsum(
    'bvd,bwd->bvw', vectors, vectors, preferred_element_type=jnp.float32
  )
  return products.reshape(len(vectors), -1)[:, places]


def _forward(
  vectors: Float[jax.Array, 'B V D'],
) -> tuple[Float[jax.Array, 'B P'], Float[jax.Array, 'B V D']]:
  return dot_interaction(vectors), vectors


def _backward(
  vectors: Float[jax.Array, 'B V D'], gradient: Float[jax.Array, 'B P']
) -> tuple[Float[jax.Array, 'B V D']]:
  examples, count, _ = vectors.shape
  _, pair = _pairs(count)
  # The diagonal reads this 0.
  with_zero = jnp.pad(gradient, ((0, 0), (0, 1)))
  symmetric = with_zero[:, pair].reshape(examples, count, count)
  symmetric = symmetric.astype(vectors.dtype)
  summed = jnp.einsum(
    'bvw,bwd->bvd', symmetric, vectors, preferred_element_type=jnp.float32
  )
  return (summed.astype(vectors.dtype),)


dot_interaction.defvjp(_forward, _backward)
