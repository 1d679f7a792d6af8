"""Formats of raw files and models, by the names that configs give them."""

from collections.abc import Callable
from typing import TypeAlias

from flax import linen as nn
import ml_collections

from slipstream_jax.data.batches import Dataset
from slipstream_jax.data.criteo import criteo_text
from slipstream_jax.data.taobao import taobao_text
from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.models.tbsm import TBSM

Config: TypeAlias = ml_collections.ConfigDict


def _criteo(config: Config) -> Dataset:
  data = config.data
  return criteo_text(
    data.path,
    test_share=data.test_share,
    min_count=data.min_count,
    hash_rows=data.hash_rows,
    missing_flags=data.missing_flags,
    shuffle_seed=config.seed if data.shuffle else None,
  )


def _taobao(config: Config) -> Dataset:
  data = config.data
  return taobao_text(
    data.path,
    steps=data.steps,
    per_user=data.per_user,
    min_history=data.min_history,
    test_share=data.test_share,
    min_count=data.min_count,
    hash_rows=data.hash_rows,
    bad_lines=data.bad_lines,
    seed=config.seed,
    shuffle_seed=config.seed if data.shuffle else None,
  )


def _dlrm(model: Config) -> nn.Module:
  bottom, top = map(tuple, (model.bottom, model.top))
  return DLRM(bottom, top, model.first_order, model.normalization)


def _tbsm(model: Config) -> nn.Module:
  return TBSM(
    tuple(model.bottom),
    tuple(model.top),
    tuple(model.attention),
    tuple(model.final),
    model.normalization,
  )


FORMATS: dict[str, Callable[[Config], Dataset]] = {
  'criteo': _criteo,
  'taobao': _taobao,
}
"""A run's config, with the path of a raw file, to its data set."""

MODELS: dict[str, Callable[[Config], nn.Module]] = {
  'dlrm': _dlrm,
  'tbsm': _tbsm,
}
"""The part `config.model` to the model; those without a name are 'dlrm'."""
