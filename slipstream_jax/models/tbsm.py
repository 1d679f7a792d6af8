"""TBSM (arXiv 2008.11922): a DLRM per step, attention over the steps.

One small DLRM turns every step of a sequence into a vector: the L - 1 steps of
the history and the candidate. The candidate's vector attends to the history.
The final MLP sees the result and the candidate. As in the released code for
Taobao, vectors are projected onto the unit sphere, steps are compared by the
positive semidefinite product h^T A^T A w, and an MLP over all products gives
each step a weight between 0 and 1 in place of a softmax.
"""

from collections.abc import Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from slipstream_jax.errors import choose, UserError
from slipstream_jax.models.embedding import stacked
from slipstream_jax.models.interactions import dot_interaction
from slipstream_jax.models.layers import MLP, side_by_side, widths_to_logit
from slipstream_jax.models.normalization import NORMALIZATIONS
from slipstream_jax.types import DenseFeatures, Embeddings, RealLookups

_TINY = 1e-12  # least squared length of a vector that is made one unit long


class TBSM(nn.Module):
  """Click model over sequences: L - 1 steps of history, the candidate last.

  The defaults are those for Taobao: 1-16, 22-15-15, 20-15-15-20 and 30-60-1.
  Both vectors are 15 wide.

  Attributes:
    bottom: layer widths over a step's dense features. The last one must be the
      tables' dim.
    top: layer widths over a step's interactions. The last one is the width V of
      the step's vector.
    attention: layer widths over the L - 1 products, before the L - 1 weights.
      If empty, the products are the weights.
    final: layer widths over context and candidate [2 V], up to the logit. The
      last width of 1 is optional: (60,) and (60, 1) are the same model.
    normalization: a name of `NORMALIZATIONS`, applied to the top MLP's input.
    dtype: dtype of matrix products, 'float32' or 'bfloat16'. Their sums, the
      attention, the parameters and all else are f32.
  """

  bottom: Sequence[int] = (16,)
  top: Sequence[int] = (15, 15)
  attention: Sequence[int] = (15, 15)
  final: Sequence[int] = (60,)
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
    real: RealLookups | None = None,
  ) -> Float[jax.Array, ' B']:
    """Computes logits f32[B] of sequences.

    Args:
      dense: f32[B, I]. All steps share fewer than L features. Otherwise each
        step has I / L, those of the first step first. Named features are
        concatenated.
      embeddings: f32[B, L, D] by feature name. Pooled ones are refused.
      train: whether normalization uses and learns the batch's statistics.
      weights: each example's weight in the loss, f32[B]. None: all 1.
      real: bool[B, L] by feature name, False for padding. None: all True. A
        step without a lookup is not part of the history, whatever its dense
        features and rows are.

    Raises:
      UserError: the examples are not sequences, the features differ in dim or
        length, the dense features cannot be split over the steps, the bottom
        MLP does not end at the tables' dim, or the normalization does not
        exist.
    """
    choose(NORMALIZATIONS, self.normalization, 'TBSM, normalization')
    rows, dense = stacked(embeddings, 'TBSM'), side_by_side(dense)
    _check_sequence(dense.shape, rows.shape)
    examples, _, steps, dim = rows.shape
    if self.bottom[-1] != dim:
      raise UserError(
        f'the bottom MLP must end at the width of the vectors it meets, {dim}',
        got=self.bottom[-1],
        where='TBSM.bottom',
        hint=f'end it with {dim} or change the dim of the tables',
      )
    if weights is None:
      weights = jnp.ones(examples, jnp.float32)
    there = jnp.ones((examples, steps), bool)
    if real is not None:
      there = jnp.stack([real[name] for name in embeddings], axis=1).any(axis=1)

    if dense.shape[1] < steps:
      dense = jnp.tile(dense, (1, steps))
    x = MLP(self.bottom, dtype=self.dtype, name='bottom')(
      dense.reshape(examples * steps, -1)
    )
    vectors = jnp.swapaxes(rows, 1, 2).reshape(examples * steps, -1, dim)
    interacting = jnp.concatenate([x[:, None], vectors], axis=1)
    pairs = dot_interaction(interacting.astype(self.dtype))
    joined = jnp.concatenate([x, pairs], axis=1)
    # A step weighs as much as its example, and padding does not count.
    step_weights = (weights[:, None] * there).reshape(-1)
    normalize = NORMALIZATIONS[self.normalization]
    joined = normalize(joined, step_weights, train)
    vectors = MLP(self.top, dtype=self.dtype, name='top')(joined)
    vectors = _on_sphere(vectors).reshape(examples, steps, -1)

    # A step of padding has a vector of 0, so the context does not change.
    history = jnp.where(there[:, :-1, None], vectors[:, :-1], 0.0)
    candidate = vectors[:, -1]
    context = self._attend(history, candidate)
    sizes = widths_to_logit(self.final, 'TBSM.final')
    last = MLP(sizes, False, dtype=self.dtype, name='final')
    return last(jnp.concatenate([context, candidate], axis=1))[:, 0]

  def _attend(
    self,
    history: Float[jax.Array, 'B H V'],
    candidate: Float[jax.Array, 'B V'],
  ) -> Float[jax.Array, 'B V']:
    """Returns the weighted sum of the history's vectors."""
    width = candidate.shape[-1]
    # Glorot's deviation for a square matrix, as in the released code.
    inner = self.param('inner', nn.initializers.glorot_normal(), (width, width))
    product = jnp.einsum('bhv,bv->bh', history, (candidate @ inner.T) @ inner)
    if self.attention:
      sizes = (*self.attention, history.shape[1])
      mlp = MLP(sizes, activate_last=False, name='attention')
      product = nn.sigmoid(mlp(product))
    return jnp.einsum('bh,bhv->bv', product, history)


def _on_sphere(x: Float[jax.Array, 'B V']) -> Float[jax.Array, 'B V']:
  """Scales vectors to length 1. Those of length 0, from a ReLU, stay."""
  squared = jnp.sum(x * x, axis=-1, keepdims=True)
  # The square root of 0 has no gradient, so the maximum comes first.
  return x * jax.lax.rsqrt(jnp.maximum(squared, _TINY))


def _check_sequence(
  dense: tuple[int, ...], embeddings: tuple[int, ...]
) -> None:
  if len(embeddings) != 4 or embeddings[2] < 2:
    raise UserError(
      'the model needs sequences of a history and a candidate, [B, L, D]',
      got=[embeddings[0], *embeddings[2:]],
      where='TBSM, embeddings',
      hint="take DLRM for pooled rows, or features with combiner 'none'",
    )
  if dense[1] == 0 or (dense[1] > embeddings[2] and dense[1] % embeddings[2]):
    raise UserError(
      f'each of the {embeddings[2]} steps must have as many dense features',
      got=f'{dense[1]} in all',
      where='Batch.dense',
      hint='give fewer features, which all steps share, or some to each step',
    )
