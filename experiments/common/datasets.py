"""Config to data set: packed in a folder, raw files, or a synthetic proxy."""

import pathlib

import ml_collections

from experiments.common import own as functions
from experiments.common.formats import raw_data
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.packed.columns import read_manifest
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.synthetic.proxies import proxy_dataset


def dataset(config: ml_collections.ConfigDict) -> Dataset:
  """The data set of `config.data`.

  A path that is a folder is a packed data set, made by `experiments.prepare`,
  which settled what its splits, rows and dense features are; another one is
  of raw data, held in memory. Without a path it is a synthetic proxy. A
  `source` comes before all of them: it names a function of one's own.

  Raises:
    UserError: the file is missing or malformed, the folder not finished or
      of another format, or there is no such format or proxy.
  """
  data = config.data
  if data.get('source'):
    return _own(config)
  path = data.path
  shuffle_seed = config.seed if data.shuffle else None
  if path is None:
    return _proxy(config)
  if pathlib.Path(path).is_dir() and not path.startswith('tfds:'):
    _check_format(path, config.data.format)
    return packed_dataset(
      path, shuffle_seed=shuffle_seed, test_split=config.eval.split
    )
  return in_memory(
    raw_data(data, path),
    min_count=data.min_count,
    hash_rows=data.hash_rows,
    shuffle_seed=shuffle_seed,
  )


def _own(config: ml_collections.ConfigDict) -> Dataset:
  """What the function that `config.data.source` names makes of the config."""
  name, where = config.data.source, 'config.data.source'
  if not functions.is_own(name):
    raise UserError(
      f'{where} must name a function',
      got=repr(name),
      where=where,
      hint='write my_package.my_module:function',
    )
  data = functions.called(name, config, where)
  if not isinstance(data, Dataset):
    raise UserError(
      f'the function that {where} names must return a Dataset',
      got=f'a {type(data).__name__}',
      where=where,
      hint='see Dataset in slipstream_jax/data/source.py',
    )
  return data


def _check_format(folder: str, wanted: str) -> None:
  """Refuses a packed data set of another format than the config is for."""
  manifest = read_manifest(folder)
  holds = manifest.get('format')  # none where the library did not know it
  if holds and holds != wanted:
    raise UserError(
      f'{folder} holds {manifest["name"]}, so the config must be for {holds!r}',
      got=f'one for {wanted!r}',
      where='config.data.format',
      hint=f'use --config=configs/{holds}.py, or give another folder',
    )


def _proxy(config: ml_collections.ConfigDict) -> Dataset:
  data = config.data
  # Where popularity drifts, what follows on training is what counts.
  trained = config.train.steps or config.train.endless_steps
  return proxy_dataset(
    data.proxy,
    seed=config.seed,
    test_examples=data.test_examples,
    rows=data.rows,
    drift_examples=data.drift_examples,
    saturation=data.saturation,
    test_at=trained * data.batch_size if data.drift_examples else 0,
  )
