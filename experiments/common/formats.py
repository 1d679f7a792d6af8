"""Raw data sets by the name of their format: the one list of them."""

from collections.abc import Callable

import ml_collections

from slipstream_jax.errors import choose, UserError
from slipstream_jax.formats.avazu import avazu_raw
from slipstream_jax.formats.base import RawData
from slipstream_jax.formats.criteo import criteo_raw, terabyte_raw
from slipstream_jax.formats.movielens import movielens_raw
from slipstream_jax.formats.taobao import taobao_raw
from slipstream_jax.formats.tfds import FeatureMap, tfds_raw
from slipstream_jax.packed.pack import packed_like

RawFormat = Callable[[ml_collections.ConfigDict, str], RawData]
"""`config.data` and the path of raw files to the data in them."""
RAW_FORMATS: dict[str, RawFormat] = {
  'criteo': lambda data, path: criteo_raw(
    path,
    test_share=data.test_share,
    missing_flags=data.missing_flags,
    bad_lines=data.bad_lines,
  ),
  'terabyte': lambda data, path: terabyte_raw(
    path,
    test_share=data.test_share,
    missing_flags=data.missing_flags,
    bad_lines=data.bad_lines,
    sample=data.sample,
    sample_negatives=data.sample_negatives,
    seed=data.sample_seed,
  ),
  'avazu': lambda data, path: avazu_raw(
    path, test_share=data.test_share, bad_lines=data.bad_lines
  ),
  'taobao': lambda data, path: taobao_raw(
    path,
    steps=data.steps,
    per_user=data.per_user,
    min_history=data.min_history,
    test_share=data.test_share,
    bad_lines=data.bad_lines,
    seed=data.points_seed,
  ),
  'movielens': lambda data, path: movielens_raw(
    path,
    threshold=data.threshold or None,
    history=data.history,
    test_share=data.test_share,
    bad_lines=data.bad_lines,
  ),
  'tfds': lambda data, path: tfds_raw(
    path.removeprefix('tfds:'),
    FeatureMap(**data.features),
    train=data.train_split,
    test=data.test_split,
    data_dir=data.data_dir,
  ),
}
"""Names are those of `config.data.format`."""


NEW_EXAMPLES: dict[str, RawFormat] = {
  'criteo': lambda data, path: criteo_raw(
    path, missing_flags=data.missing_flags, labelled=None
  ),
  'avazu': lambda data, path: avazu_raw(path, labelled=None),
}
"""Of the formats whose lines are examples by themselves: files to score, with
labels or without."""
NEW_EXAMPLES['terabyte'] = NEW_EXAMPLES['criteo']  # a day, no sample of it


def new_examples(data: ml_collections.ConfigDict, path: str) -> RawData:
  """Raw data at `path` to be scored, read as those of `data` were.

  Raises:
    UserError: examples of the data are not lines by themselves, or a file.
  """
  if data.format is None and data.path is not None:
    return packed_like(path, data.path)
  if data.path is None or data.format not in NEW_EXAMPLES:
    raise UserError(
      'files can be scored of runs on a table that slip.pack packed, or on '
      + ', '.join(NEW_EXAMPLES),
      got='one on made-up clicks' if data.path is None else repr(data.format),
      where='config.data.format',
      hint='make batches yourself, and score them with'
      ' experiments.common.loading',
    )
  return NEW_EXAMPLES[data.format](data, path)


def raw_data(data: ml_collections.ConfigDict, path: str) -> RawData:
  """The raw data at `path`, of the format and with the settings of `data`.

  Raises:
    UserError: there is no such format, a setting is missing, or a file.
  """
  read = choose(RAW_FORMATS, data.format, 'config.data.format')
  try:
    return read(data, path)
  except AttributeError as error:
    raise UserError(
      'config.data must have the settings of its format',
      got=f'{data.format!r} without {error}',
      where='config.data.format',
      hint=f'use configs/{data.format}.py',
    ) from error
