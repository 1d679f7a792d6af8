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
* `configs/movielens.py:two_tower`: retrieval, on such sets. The loss is over
  the batch, with log-Q from the number of earlier ratings of each movie, so
  ratings come in the order of time. Each counts as a choice of its movie: a
  threshold of 0.5 makes all labels 1.
* `configs/movielens.py:sasrec`, `:hstu`: click models over the 50 movies that
  the user rated before, on such sets. HSTU knows their times.
* `configs/movielens.py:smoke`: seconds, on a synthetic stream with two small
  tables. It says nothing about movies.
"""

import ml_collections

from configs import common


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """Returns the settings.

  `variant` is '', 'sample', 'two_tower', 'sasrec', 'hstu' or 'smoke'.

  Raises:
    ValueError: there is no such variant.
  """
  config = common.start(
    variant, ('', 'sample', 'two_tower', 'sasrec', 'hstu', 'smoke')
  )
  common.files(config, 'movielens', batch_size=2048)
  config.data.test_share = 0.2  # of the ratings, the latest ones
  config.data.threshold = 4.0  # stars of a click; 0: the label is stars / 5
  config.data.history = 0  # most items that a user rated before; 0: none
  config.data.steps = 0  # most earlier items of a sequence; 0: no sequences
  common.synthetic(config, 'movielens')
  common.dlrm(config, dim=16, bottom=(64, 16), top=(128, 64))
  common.on_large_logs(config)
  config.hot.bytes = 1 << 22
  match variant:
    case 'sample':
      _sample(config)
    case 'two_tower':
      _sample(config)
      _two_tower(config)
    case 'sasrec' | 'hstu':
      _sample(config)
      _sequences(config, variant)
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


def _two_tower(config: ml_collections.ConfigDict) -> None:
  """Changes the model to two towers, on ratings in the order of time."""
  config.data.threshold = 0.5
  config.data.shuffle = False  # so that counts of earlier ratings compare
  config.data.batch_size = 512
  common.two_tower(config, dim=32, items=('item',), widths=(64, 32))
  config.model.log_q = 1  # the number of earlier ratings of the item


def _sequences(config: ml_collections.ConfigDict, name: str) -> None:
  """Changes the model to one over sequences."""
  config.data.steps = 50
  common.blocks(config, name, dim=32)
  config.model.init_scale = 0.3  # smaller rows give no product a size
  if name == 'hstu':
    config.model.times = 2  # the first column of the steps' ages
