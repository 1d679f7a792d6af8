"""Config to data set: packed in a folder, raw files, or a synthetic twin."""

import pathlib

import ml_collections

from experiments.common.formats import raw_data, settings_of
from slipstream_jax.data.base import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.packed.columns import read_manifest
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.raw.criteo import criteo_text
from slipstream_jax.raw.in_memory import in_memory
from slipstream_jax.raw.taobao import taobao_text
from slipstream_jax.synthetic.proxies import twin_dataset


def dataset(config: ml_collections.ConfigDict) -> Dataset:
  """The data set of `config.data`.

  A path that is a folder is a packed data set, made by `experiments.prepare`,
  which settled what its splits, rows and dense features are; another one is
  of raw data, held in memory. Without a path it is a synthetic twin.

  Raises:
    UserError: the file is missing or malformed, the folder not finished or
      of another format, or there is no such format or twin.
  """
  path = config.data.path
  if path is None:
    return _twin(config)
  if pathlib.Path(path).is_dir() and not path.startswith('tfds:'):
    _check_format(path, config.data.format)
    return packed_dataset(
      path,
      shuffle_seed=_shuffle_seed(config),
      test_split=config.eval.split,
    )
  return _raw(config, path)


def _check_format(folder: str, wanted: str) -> None:
  """Refuses a packed data set of another format than the config is for."""
  manifest = read_manifest(folder)
  holds = manifest.get('format')  # none where the library did not know it
  if holds and holds != wanted:
    raise UserError(
      f'{folder} holds {manifest["name"]}, so the config must be for {holds!r}',
      got=f'one for {wanted!r}',
      where='config.data.format',
      mend=f'use --config=configs/{holds}.py, or give another folder',
    )


def _shuffle_seed(config: ml_collections.ConfigDict) -> int | None:
  return config.seed if config.data.shuffle else None


def _raw(config: ml_collections.ConfigDict, path: str) -> Dataset:
  data = config.data
  # By day, Criteo's text holds out half of the last one; a sample has no days.
  if data.format == 'criteo':
    return criteo_text(
      path,
      test_share=data.test_share,
      min_count=data.min_count,
      hash_rows=data.hash_rows,
      missing_flags=data.missing_flags,
      shuffle_seed=_shuffle_seed(config),
      bad_lines=data.bad_lines,
    )
  # Cut as they are asked for, Taobao's series take a tenth of the memory.
  if data.format == 'taobao':
    with settings_of(data):
      return taobao_text(
        path,
        steps=data.steps,
        per_user=data.per_user,
        min_history=data.min_history,
        test_share=data.test_share,
        min_count=data.min_count,
        hash_rows=data.hash_rows,
        bad_lines=data.bad_lines,
        seed=data.points_seed,
        shuffle_seed=_shuffle_seed(config),
      )
  return in_memory(
    raw_data(data, path),
    min_count=data.min_count,
    hash_rows=data.hash_rows,
    shuffle_seed=_shuffle_seed(config),
  )


def _twin(config: ml_collections.ConfigDict) -> Dataset:
  data = config.data
  # Where popularity drifts, what follows on training is what counts.
  trained = config.train.steps or config.train.endless_steps
  return twin_dataset(
    data.twin,
    seed=config.seed,
    test_inputs=data.test_inputs,
    rows=data.rows,
    drift_inputs=data.drift_inputs,
    saturation=data.saturation,
    test_at=trained * data.batch_size if data.drift_inputs else 0,
  )
