"""DLRM on MovieLens' ratings: who gives which movie 4 stars or more?

    python -m experiments.run --config=configs/movielens.py \
        --config.data.path=ratings.csv

trains one epoch on the raw file of any of GroupLens' sets: `u.data` of ml-100k,
`ratings.dat` of ml-1m and ml-10m, `ratings.csv` of ml-20m, ml-25m, ml-32m and
ml-latest, plain or gzip. No TensorFlow is needed. The latest fifth is held out.
That is harder than the random fifth that is often reported. Without a path it
trains on a synthetic proxy with the sizes of ml-25m. Not yet run here on any
real file: there is no figure to expect. Variants:

* `configs/movielens.py:sample`: for ml-100k and ml-1m, small and shuffled, two
  epochs, ids seen fewer than 4 times share a row.
* `configs/movielens.py:smoke`: seconds, on a synthetic stream with two small
  tables. It says nothing about movies.
"""

import ml_collections

from configs import common


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """Returns the settings. `variant` is '', 'sample' or 'smoke'.

  Raises:
    ValueError: there is no such variant.
  """
  config = common.start(variant, ('', 'sample', 'smoke'))
  common.files(config, 'movielens', batch_size=2048)
  config.data.test_share = 0.2  # of the ratings, the latest ones
  config.data.threshold = 4.0  # stars of a click; 0: the label is stars / 5
  config.data.history = 0  # most items that a user rated before; 0: none
  common.synthetic(config, 'movielens')
  common.dlrm(config, dim=16, bottom=(64, 16), top=(128, 64))
  common.on_large_logs(config)
  config.hot.bytes = 1 << 22
  match variant:
    case 'sample':
      _sample(config)
    case 'smoke':
      _smoke(config)
  return config


def _sample(config: ml_collections.ConfigDict) -> None:
  """Changes settings for sets of 100,000 to a million ratings."""
  config.data.batch_size = 256
  config.data.min_count = 4
  common.small_model(config)
  config.model.top = (128, 64)
  config.optimizer.dense = (('adam', {'learning_rate': 1e-3}),)
  common.sample(config)
  config.train.epochs = 2


def _smoke(config: ml_collections.ConfigDict) -> None:
  """Changes settings for a run of seconds on two small tables."""
  common.smoke(config)
  config.data.rows = (9000, 4000)
