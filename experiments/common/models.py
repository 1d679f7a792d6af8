"""Models by the names that configs give them."""

from collections.abc import Callable

from flax import linen as nn
import ml_collections

from slipstream_jax.errors import choose
from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.models.tbsm import TBSM

_DTYPES = {name: name for name in ('float32', 'bfloat16')}


def _dtype(model: ml_collections.ConfigDict) -> str:
  return choose(_DTYPES, model.compute_dtype, 'config.model.compute_dtype')


def _dlrm(model: ml_collections.ConfigDict) -> nn.Module:
  return DLRM(
    tuple(model.bottom),
    tuple(model.top),
    model.first_order,
    model.normalization,
    _dtype(model),
  )


def _tbsm(model: ml_collections.ConfigDict) -> nn.Module:
  return TBSM(
    tuple(model.bottom),
    tuple(model.top),
    tuple(model.attention),
    tuple(model.final),
    model.normalization,
    _dtype(model),
  )


MODELS: dict[str, Callable[[ml_collections.ConfigDict], nn.Module]] = {
  'dlrm': _dlrm,
  'tbsm': _tbsm,
}
"""The part `config.model` to the model, by `config.model.name`."""
