"""Tables of new examples, read as another one was: to score them."""

from collections.abc import Mapping
from typing import Any

from slipstream_jax.raw.base import RawData
from slipstream_jax.raw.frames.frame_raw import frame_raw
from slipstream_jax.raw.frames.sources import Source
from slipstream_jax.tables import Feature


def frame_like(
  source: Source, features: Mapping[str, Feature], settings: Mapping[str, Any]
) -> RawData:
  """A table of new examples, read as another one was; labels are not read.

  Args:
    source: see `Source`.
    features: of the other one's raw data.
    settings: of the other one's raw data, or what JSON made of them.

  Raises:
    KeyError: settings of another format.
    UserError: as `frame_raw`.
  """
  return frame_raw(
    source,
    features=features,
    dense=tuple(settings['dense']),
    label=None,
    lookup_weights=settings['lookup_weights'],
    fill=settings['dense'],
    separator=settings['separator'],
    too_long=settings['too_long'],
    delimiter=settings['delimiter'],
  )
