"""Raw data sets by the name of their format: the one list of them."""

from collections.abc import Callable

import ml_collections

from slipstream_jax.data.criteo import criteo_raw
from slipstream_jax.data.raw import RawData
from slipstream_jax.data.terabyte import terabyte_raw

RawFormat = Callable[[ml_collections.ConfigDict], RawData]
"""`config.data` to the raw data at `config.data.raw`."""


def _criteo(data: ml_collections.ConfigDict) -> RawData:
  return criteo_raw(
    data.raw, missing_flags=data.missing_flags, bad_lines=data.bad_lines
  )


def _terabyte(data: ml_collections.ConfigDict) -> RawData:
  return terabyte_raw(
    data.raw,
    missing_flags=data.missing_flags,
    bad_lines=data.bad_lines,
    sample=data.sample,
    sample_negatives=data.sample_negatives,
    seed=data.sample_seed,
  )


RAW_FORMATS: dict[str, RawFormat] = {
  'criteo': _criteo,
  'terabyte': _terabyte,
}
"""Names are those of `config.data.format`."""
