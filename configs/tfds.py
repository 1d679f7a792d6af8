"""DLRM on any TensorFlow Datasets set of scalar features, by a feature map.

    python -m experiments.run --config=configs/tfds.py:movielens/100k-ratings

trains on MovieLens 100K: does a user give a movie 4 stars or more? The set must
be prepared in array_record files, in `--config.data.data_dir` (by default
TFDS's own, ~/tensorflow_datasets):

    import tensorflow_datasets as tfds
    tfds.builder(NAME, file_format='array_record').download_and_prepare()

Many builders, MovieLens' among them, need TensorFlow for that; do it where
there is one. To read it, none is needed.

`configs/tfds.py:NAME` is for the set of that name, with its feature map of
`MAPS` below. A set that is not there needs its own:

    --config.data.features.tables="('a', 'b')"
    --config.data.features.label="('c', '>=', 4.0)"
    --config.data.features.dense="('d',)" --config.data.features.transform=log1p
"""

from typing import Any

import ml_collections

from configs import common
from slipstream_jax.formats.avazu import TABLES

_LARGE = ('criteo_kaggle', 'avazu')
_LOG = {'transform': 'log1p'}
_MOVIELENS = {
  'tables': ('user_id', 'movie_id'),
  'label': ('user_rating', '>=', 4.0),
}
_DEMOGRAPHIC = {
  **_MOVIELENS,
  **_LOG,
  'tables': (
    *('user_id', 'movie_id', 'user_occupation_label', 'user_zip_code'),
    *('user_gender', 'bucketized_user_age'),
  ),
}
MAPS: dict[str, dict[str, Any]] = {
  'movielens/100k-ratings': {**_DEMOGRAPHIC, 'dense': ('raw_user_age',)},
  'movielens/1m-ratings': {**_DEMOGRAPHIC, 'dense': ('bucketized_user_age',)},
  'movielens/25m-ratings': _MOVIELENS,
  'criteo_kaggle': {
    'tables': tuple(f'C{i}' for i in range(1, 27)),
    'dense': tuple(f'I{i}' for i in range(1, 14)),
    'label': ('label', '==', 1),
    **_LOG,
  },
  'avazu': {
    'tables': TABLES,
    'dense': ('hour_of_day',),
    'label': ('click', '==', 1),
  },
}
"""Feature maps of some sets, by name."""


def get_config(
  name: str = 'movielens/100k-ratings',
) -> ml_collections.ConfigDict:
  """Returns the settings for a data set.

  The model is large for the data sets of `_LARGE`, else small.
  """
  config = common.start('', ('',))
  common.files(config, 'tfds', batch_size=2048)
  config.data.path = config.data.raw = f'tfds:{name}'
  # Folder in which TFDS has prepared the set. None: its own folder.
  config.data.data_dir = ml_collections.config_dict.placeholder(str)
  config.data.train_split = 'train[:80%]'  # in TFDS's words
  config.data.test_split = 'train[80%:]'  # the same for tests
  given = MAPS.get(name, {})
  features = config.data.features = ml_collections.ConfigDict()
  features.tables = given.get('tables', ())  # fields that are looked up
  features.label = given.get('label', ())  # field, comparison and value
  features.dense = given.get('dense', ())  # numeric fields
  # Of those, 'none' or 'log1p'.
  features.transform = given.get('transform', 'none')
  common.dlrm(config, dim=16, bottom=(512, 256, 64, 16), top=(512, 256))
  common.on_large_logs(config)
  if name not in _LARGE:
    _small(config)
  return config


def _small(config: ml_collections.ConfigDict) -> None:
  """Changes settings for sets of about 100,000 examples."""
  config.data.batch_size = 256
  config.data.min_count = 4
  common.small_model(config)
  common.sample(config)
