"""DLRM (arXiv 1906.00091): bottom MLP, dot interaction, top MLP."""

from collections.abc import Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from slipstream_jax.errors import choose, UserError
from slipstream_jax.models.embedding import stacked
from slipstream_jax.models.layers import (
  dot_interaction,
  MLP,
  side_by_side,
  widths_to_logit,
)
from slipstream_jax.models.normalization import NORMALIZATIONS
from slipstream_jax.types import DenseFeatures, Embeddings


class DLRM(nn.Module):
  """Click model over dense features and one embedding per feature.

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
  """

  bottom: Sequence[int] = (512, 256, 64, 16)
  top: Sequence[int] = (512, 256)
  first_order: bool = False
  normalization: str = 'none'
  dtype: str = 'float32'

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
        embeddings differ in dim.
    """
    choose(NORMALIZATIONS, self.normalization, 'DLRM, normalization')
    rows = stacked(embeddings, 'DLRM')
    if rows.ndim != 3:
      raise UserError(
        'the model needs one pooled embedding per feature, [B, D]',
        got=list(rows[:, 0].shape),
        where='DLRM, embeddings',
        hint='take TBSM for sequences, or features with another combiner'
        " than 'none'",
      )
    vectors = rows[..., :-1] if self.first_order else rows
    if self.bottom[-1] != vectors.shape[-1]:
      raise UserError(
        'the bottom MLP must end at the width of the vectors it meets, '
        f'{vectors.shape[-1]}'
        + (" (the tables' dim less 1 for first_order)" * self.first_order),
        got=self.bottom[-1],
        where='DLRM.bottom',
        hint=f'end it with {vectors.shape[-1]} or change the dim of the tables',
      )
    x = MLP(self.bottom, dtype=self.dtype, name='bottom')(side_by_side(dense))
    interacting = jnp.concatenate([x[:, None], vectors], axis=1)
    pairs = dot_interaction(interacting.astype(self.dtype))
    joined = jnp.concatenate([x, pairs], axis=1)
    if weights is None:
      weights = jnp.ones(len(joined), jnp.float32)
    joined = NORMALIZATIONS[self.normalization](joined, weights, train)
    sizes = widths_to_logit(self.top)
    top = MLP(sizes, False, dtype=self.dtype, name='top')
    logits = top(joined)[:, 0]
    if self.first_order:
      logits = logits + rows[..., -1].sum(axis=1)
    return logits
