"""DLRM (arXiv 1906.00091), and the frame that it shares with other models.

The frame has stems, an interaction and a head. The stems turn the dense
features into one token and each embedding into another. The interaction turns
these tokens into features. The head is an MLP from the features to the logit.
A model of one's own is a subclass with another `interact`.
"""

from collections.abc import Sequence
import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from slipstream_jax.errors import choose, UserError
from slipstream_jax.models.embedding import padded, stacked
from slipstream_jax.models.interactions import Dot, Tokens
from slipstream_jax.models.layers import MLP, side_by_side, widths_to_logit
from slipstream_jax.models.normalization import Features, NORMALIZATIONS
from slipstream_jax.types import DenseFeatures, Embeddings


class TokenModel(nn.Module):
  """Click model over dense features and one embedding per feature.

  By itself its interaction is none: the head sees all tokens as one vector.

  Attributes:
    bottom: layer widths over the dense features. The DLRM reference also lists
      the number of dense features. The last width must be that of the vectors
      that interact.
    top: layer widths over the interactions, up to the logit. The last width of
      1 is optional: (64, 32) and (64, 32, 1) are the same model.
    first_order: whether the last element of a row is its weight in the logit,
      the linear part of a factorization machine. D - 1 elements then interact.
    normalization: a name of `NORMALIZATIONS`, applied to the top MLP's input.
    dtype: dtype of matrix products, 'float32' or 'bfloat16'. Their sums, the
      parameters and all else are f32.
    padded: whether narrower embeddings are filled up with zeros, so that tables
      may differ in dim. Otherwise they are refused.
  """

  bottom: Sequence[int] = (512, 256, 64, 16)
  top: Sequence[int] = (512, 256)
  first_order: bool = False
  normalization: str = 'none'
  dtype: str = 'float32'
  padded: bool = dataclasses.field(default=False, kw_only=True)

  @nn.compact
  def __call__(
    self,
    dense: DenseFeatures,
    embeddings: Embeddings,
    *,
    train: bool = False,
    weights: Float[jax.Array, ' B'] | None = None,
  ) -> Float[jax.Array, ' B']:
    """Computes logits f32[B] of examples.

    Args:
      dense: dense features f32[B, I], or by name. These are concatenated.
      embeddings: f32[B, D] by feature name. They interact in this order.
      train: whether normalization uses and learns the batch's statistics.
      weights: each example's weight in the loss, f32[B]. None: all 1.

    Raises:
      UserError: the bottom MLP does not end at the vectors' width, the
        normalization does not exist, the examples are sequences, or the
        embeddings differ in dim, or are too wide to be padded.
    """
    name = type(self).__name__
    choose(NORMALIZATIONS, self.normalization, f'{name}, normalization')
    if self.padded:
      embeddings = padded(
        embeddings, self.bottom[-1] + self.first_order, self.first_order, name
      )
    rows = stacked(embeddings, name)
    vectors = rows[..., :-1] if self.first_order else rows
    self._check(rows.shape, vectors.shape[-1])
    dense = side_by_side(dense)
    x = MLP(self.bottom, dtype=self.dtype, name='bottom')(dense)
    tokens = jnp.concatenate([x[:, None], vectors], axis=1)
    logits = self.head(self.interact(x, tokens), weights, train)
    if self.first_order:
      logits = logits + rows[..., -1].sum(axis=1)
    beside = self.beside(dense, tokens)
    return logits if beside is None else logits + beside

  def head(
    self,
    features: Features,
    weights: Float[jax.Array, ' B'] | None,
    train: bool,
  ) -> Float[jax.Array, ' B']:
    """Computes logits f32[B] from what `interact` returns."""
    if weights is None:
      weights = jnp.ones(len(features), jnp.float32)
    features = NORMALIZATIONS[self.normalization](features, weights, train)
    sizes = widths_to_logit(self.top, f'{type(self).__name__}.top')
    top = MLP(sizes, False, dtype=self.dtype, name='top')
    return top(features)[:, 0]

  def interact(self, x: Float[jax.Array, 'B D'], tokens: Tokens) -> Features:
    """Computes the features that the head sees.

    Args:
      x: the token of the dense features, f32[B, D].
      tokens: all tokens, f32[B, M, D]. The first one is `x`.

    Returns:
      f32[B, W] of any width W.
    """
    del x
    return flat(tokens)

  def beside(
    self, dense: Float[jax.Array, 'B I'], tokens: Tokens
  ) -> Float[jax.Array, ' B'] | None:
    """Computes what is added to the logit of the head, f32[B]. None: nothing.

    Args:
      dense: dense features, f32[B, I].
      tokens: as for `interact`.
    """
    del dense, tokens
    return None

  def _check(self, rows: tuple[int, ...], dim: int) -> None:
    name = type(self).__name__
    if len(rows) != 3:
      raise UserError(
        'the model needs one pooled embedding per feature, [B, D]',
        got=[rows[0], *rows[2:]],
        where=f'{name}, embeddings',
        hint='take TBSM for sequences, or features with another combiner'
        " than 'none'",
      )
    if self.bottom[-1] != dim:
      raise UserError(
        'the bottom MLP must end at the width of the vectors it meets, '
        f'{dim}'
        + (" (the tables' dim less 1 for first_order)" * self.first_order),
        got=self.bottom[-1],
        where=f'{name}.bottom',
        hint=f'end it with {dim} or change the dim of the tables',
      )


def flat(vectors: Float[jax.Array, 'B K E']) -> Features:
  """Returns all vectors of an example as one, [B, K E]."""
  return vectors.reshape(len(vectors), -1)


class DLRM(TokenModel):
  """Dot products of all pairs of tokens, beside the dense features' token.

  `TokenModel` has its attributes.
  """

  def interact(self, x: Float[jax.Array, 'B D'], tokens: Tokens) -> Features:
    """Returns the dense token and M (M - 1) / 2 products, f32[B, W]."""
    pairs = Dot()(tokens.astype(self.dtype))
    return jnp.concatenate([x, flat(pairs)], axis=1)
