"""Formats of raw files and models, by the names that configs give them."""

from collections.abc import Callable
from typing import TypeAlias

from flax import linen as nn
import ml_collections

from slipstream_jax.data.avazu import avazu_raw
from slipstream_jax.data.batches import Dataset
from slipstream_jax.data.criteo import criteo_text
from slipstream_jax.data.in_memory import in_memory
from slipstream_jax.data.raw import RawData
from slipstream_jax.data.tfds import FeatureMap, tfds_raw
from slipstream_jax.models.dlrm import DLRM

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


def _avazu(config: Config) -> Dataset:
  data = config.data
  return _in_memory(
    config,
    avazu_raw(data.path, test_share=data.test_share, bad_lines=data.bad_lines),
  )


def _tfds(config: Config) -> Dataset:
  data = config.data
  raw = tfds_raw(
    data.path.removeprefix('tfds:'),
    FeatureMap(**data.features),
    train=data.train_split,
    test=data.test_split,
    data_dir=data.data_dir,
  )
  return _in_memory(config, raw)


def _in_memory(config: Config, raw: RawData) -> Dataset:
  data = config.data
  return in_memory(
    raw,
    min_count=data.min_count,
    hash_rows=data.hash_rows,
    shuffle_seed=config.seed if data.shuffle else None,
  )


def _dlrm(model: Config) -> nn.Module:
  bottom, top = map(tuple, (model.bottom, model.top))
  return DLRM(bottom, top, model.first_order, model.normalization)


FORMATS: dict[str, Callable[[Config], Dataset]] = {
  'avazu': _avazu,
  'criteo': _criteo,
  'tfds': _tfds,
}
"""A run's config, with the path of a raw file, to its data set."""

MODELS: dict[str, Callable[[Config], nn.Module]] = {
  'dlrm': _dlrm,
}
"""The part `config.model` to the model; those without a name are 'dlrm'."""
