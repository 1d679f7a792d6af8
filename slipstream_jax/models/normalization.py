"""Normalizes features between layers.

Slipstream (arXiv 2404.04270) mentions feature normalization and does not say
which. Members of `NORMALIZATIONS` map features f32[B, I], the examples' weights
in the loss f32[B] and whether this is training to features f32[B, I].
"""

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

Features = Float[jax.Array, 'B I']
NormalizeFn = Callable[[Features, Float[jax.Array, ' B'], bool], Features]

_EPSILON = 1e-5  # added to variances
_NAME = 'normalization'  # of the variables


class WeightedBatchNorm(nn.Module):
  """Normalizes over a batch (arXiv 1502.03167) of weighted examples.

  An example kept with probability p and weight 1/p counts as 1/p examples.
  Weighted statistics therefore estimate those of all examples. Padding has
  weight 0 and does not count. Evaluation uses the statistics of all examples
  trained on, whose weights decay by `momentum` at each step. They are exact
  from the first step on, whatever the initial values.

  Attributes:
    momentum: the factor of an example's weight at each further step.
  """

  momentum: float = 0.99

  @nn.compact
  def __call__(
    self, x: Features, weights: Float[jax.Array, ' B'], train: bool
  ) -> Features:
    """Returns features f32[B, I] of mean `bias` and deviation `scale`."""
    width = x.shape[-1:]
    f32 = jnp.float32  # whatever JAX_ENABLE_X64 says
    scale = self.param('scale', nn.initializers.ones, width, f32)
    bias = self.param('bias', nn.initializers.zeros, width, f32)
    mean = self.variable('batch_stats', 'mean', jnp.zeros, width, f32)
    var = self.variable('batch_stats', 'var', jnp.ones, width, f32)
    seen = self.variable('batch_stats', 'weight', jnp.zeros, (), f32)
    if not train:
      return _normalized(x, mean.value, var.value, scale, bias)

    total = weights.sum()
    share = (weights / _or_one(total))[:, None]
    batch_mean = (share * x).sum(axis=0)
    batch_var = (share * (x - batch_mean[None]) ** 2).sum(axis=0)
    # Merges two sets of examples (Chan, Golub and LeVeque, 1983). Sums of
    # squares would lose a small variance to rounding.
    seen.value = self.momentum * seen.value + total
    rate = total / _or_one(seen.value)
    moved = batch_mean - mean.value
    mean.value += rate * moved
    old = (1 - rate) * (var.value + rate * moved**2)
    var.value = old + rate * batch_var
    return _normalized(x, batch_mean, batch_var, scale, bias)


def _or_one(total: Float[jax.Array, '']) -> Float[jax.Array, '']:
  """Returns a divisor. A batch of padding has no effect."""
  return jnp.where(total > 0, total, 1.0)


def _normalized(
  x: Features,
  mean: Float[jax.Array, ' I'],
  var: Float[jax.Array, ' I'],
  scale: Float[jax.Array, ' I'],
  bias: Float[jax.Array, ' I'],
) -> Features:
  factor = scale * jax.lax.rsqrt(var + _EPSILON)
  return (x - mean[None]) * factor[None] + bias[None]


def _none(
  x: Features, weights: Float[jax.Array, ' B'], train: bool
) -> Features:
  del weights, train
  return x


def _layer(
  x: Features, weights: Float[jax.Array, ' B'], train: bool
) -> Features:
  """Normalizes over the features of each example (arXiv 1607.06450)."""
  del weights, train
  # Flax's fast variance, E[x^2] - E[x]^2, loses small ones to rounding.
  norm = nn.LayerNorm(_EPSILON, use_fast_variance=False, name=_NAME)
  return norm(x)


def _batch(
  x: Features, weights: Float[jax.Array, ' B'], train: bool
) -> Features:
  """Normalizes over the weighted examples of the batch."""
  return WeightedBatchNorm(name=_NAME)(x, weights, train)


NORMALIZATIONS: dict[str, NormalizeFn] = {
  'none': _none,
  'layer': _layer,
  'batch': _batch,
}
