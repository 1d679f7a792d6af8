"""Makes a data set of `config.data`: packed, raw, synthetic, or one's own."""

from collections.abc import Callable
import inspect
import pathlib
from typing import Any

import ml_collections

from experiments.common import own
from experiments.common.errors import key_of
from slipstream_jax.data.multi_hot import multi_hot
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import choose, UserError
from slipstream_jax.formats.avazu import avazu_raw
from slipstream_jax.formats.base import RawData
from slipstream_jax.formats.criteo import criteo_raw, terabyte_raw
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.formats.movielens import movielens_raw
from slipstream_jax.formats.taobao import taobao_raw
from slipstream_jax.formats.tfds import FeatureMap, tfds_raw
from slipstream_jax.packed.columns import read_manifest
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.packed.pack import packed_like
from slipstream_jax.synthetic.proxies import proxy_dataset

RAW_FORMATS: dict[str, Callable[..., RawData]] = {
  'criteo': criteo_raw,
  'terabyte': terabyte_raw,
  'avazu': avazu_raw,
  'taobao': taobao_raw,
  'movielens': movielens_raw,
  'tfds': tfds_raw,
}
"""Functions that read raw data, by `config.data.format`."""
NEW_EXAMPLES: dict[str, Callable[..., RawData]] = {
  'criteo': criteo_raw,
  'avazu': avazu_raw,
  'terabyte': criteo_raw,  # a whole day, no sample
}
"""Formats with one example in each line. Files to score may lack labels."""


def dataset(config: ml_collections.ConfigDict) -> Dataset:
  """Returns the data set of `config.data`.

  `source` names a function of the user's own and comes first. A path that is a
  folder was packed by `experiments.prepare`. Any other path is raw data, which
  are held in memory. Without a path it is a synthetic proxy. With `multi_hot`
  each lookup becomes a bag.

  Raises:
    UserError: files are missing or malformed, or a setting is invalid.
  """
  plain, lengths = _dataset(config), config.data.get('multi_hot')
  return plain if lengths is None else multi_hot(plain, lengths)


def _dataset(config: ml_collections.ConfigDict) -> Dataset:
  data = config.data
  path, seed = data.path, config.seed if data.shuffle else None
  if data.get('source'):
    return _own(config)
  if path is None:
    return _proxy(config)
  if pathlib.Path(path).is_dir() and not path.startswith('tfds:'):
    _check_format(path, data.format)
    split = config.eval.split
    return packed_dataset(path, shuffle_seed=seed, test_split=split)
  return in_memory(
    raw_data(data, path),
    min_count=data.min_count,
    hash_rows=data.hash_rows,
    shuffle_seed=seed,
    test_split=config.eval.split,
  )


def raw_data(data: ml_collections.ConfigDict, path: str) -> RawData:
  """Returns the raw data at a path, with the settings of `config.data`.

  Raises:
    UserError: files are missing or malformed, or a setting is invalid.
  """
  read = choose(RAW_FORMATS, data.format, 'config.data.format')
  settings = _settings(read, data)
  if data.format == 'movielens':
    settings['threshold'] = settings['threshold'] or None
  if data.format == 'tfds':
    path = path.removeprefix('tfds:')
    settings['features'] = FeatureMap(**settings['features'])
  return read(path, **settings)


def _settings(
  read: Callable[..., RawData], data: ml_collections.ConfigDict
) -> dict[str, Any]:
  """Returns the arguments after the path, by the config keys that set them.

  Raises:
    UserError: a key is missing.
  """
  names = [*inspect.signature(read).parameters][1:]
  keys = {name: key_of(read.__name__, name) for name in names}
  try:
    return {
      name: getattr(data, key.removeprefix('data.'))
      for name, key in keys.items()
      if key is not None
    }
  except AttributeError as error:
    raise UserError(
      'config.data must have the settings of its format',
      got=f'{data.format!r} without {error}',
      where='config.data.format',
      hint=f'use configs/{data.format}.py',
    ) from error


def new_examples(data: ml_collections.ConfigDict, path: str) -> RawData:
  """Returns the raw data at a path, to be scored by a run on `config.data`.

  Raises:
    UserError: files of this format cannot be scored, or are malformed.
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
  read = NEW_EXAMPLES[data.format]
  # A line left out would shift the scores of all later ones.
  every = {'bad_lines': 0, 'labelled': None}
  return read(path, **_settings(read, data) | every)


def _own(config: ml_collections.ConfigDict) -> Dataset:
  name, where = config.data.source, 'config.data.source'
  if not own.is_own(name):
    raise UserError(
      f'{where} must name a function',
      got=repr(name),
      where=where,
      hint='write my_package.my_module:function',
    )
  data = own.called(name, config, where)
  if not isinstance(data, Dataset):
    raise UserError(
      f'the function that {where} names must return a Dataset',
      got=f'a {type(data).__name__}',
      where=where,
      hint='see Dataset in slipstream_jax/data/source.py',
    )
  return data


def _check_format(folder: str, wanted: str) -> None:
  """Checks that a packed data set has the format that the config is for."""
  manifest = read_manifest(folder)
  holds = manifest.get('format')  # none if the user packed own data
  if holds and holds != wanted:
    raise UserError(
      f'{folder} holds {manifest["name"]}, so the config must be for {holds!r}',
      got=f'one for {wanted!r}',
      where='config.data.format',
      hint=f'use --config=configs/{holds}.py, or give another folder',
    )


def _proxy(config: ml_collections.ConfigDict) -> Dataset:
  data = config.data
  # If popularity drifts, the test examples follow the training examples.
  trained = config.train.steps or config.train.endless_steps
  return proxy_dataset(
    data.proxy,
    seed=config.seed if data.proxy_seed is None else data.proxy_seed,
    test_examples=data.test_examples,
    rows=data.rows,
    drift_examples=data.drift_examples,
    saturation=data.saturation,
    test_at=trained * data.batch_size if data.drift_examples else 0,
  )
