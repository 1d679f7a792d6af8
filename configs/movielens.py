"""DLRM on MovieLens' ratings: who gives which movie 4 stars or more?

    python -m experiments.run --config=configs/movielens.py \
        --config.data.path=ratings.csv

trains one epoch on the raw file of any of GroupLens' sets: `u.data` of ml-100k,
`ratings.dat` of ml-1m and ml-10m, `ratings.csv` of ml-20m, ml-25m, ml-32m and
ml-latest, plain or gzip. No TensorFlow is needed. The latest fifth is held out.
That is harder than the random fifth that is often reported. Without a path it
trains on a synthetic proxy with the sizes of ml-25m. Not yet run here on a real
file without a variant. Variants:

* `configs/movielens.py:sample`: for ml-100k and ml-1m, small and shuffled, two
  epochs, ids seen fewer than 4 times share a row.
* `configs/movielens.py:two_tower`: retrieval, on such sets. Each rating counts
  as a choice of its movie: a threshold of 0.5 makes all labels 1. The last
  rating of each user is to test on, and the one before to choose settings on,
  with `--config.eval.split=validation`. The loss is over the batch, with log-Q
  from the number of ratings of each movie in the training part.
* `configs/movielens.py:sasrec`, `:hstu`: which movie comes after the 50 that
  the user rated before, on the same split. HSTU knows their times.
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
  # Ratings held out: 'time', the latest of all, 'last', each user's last one,
  # or 'random', some of each user's.
  config.data.split = 'time'
  config.data.test_share = 0.2  # of the ratings; 'last' does not use it
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
      _two_tower(config)
      common.another_model(config, variant)
      config.optimizer.dense = (('adam', {'learning_rate': 3e-3}),)
      config.train.epochs = 5
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
  """Changes the model to two towers, and holds out each user's last rating."""
  config.data.threshold = 0.5
  config.data.split = 'last'
  config.data.min_count = 1
  config.data.shuffle = True
  config.data.batch_size = 512
  config.train.epochs = 10
  config.eval.curve_steps = 500
  common.two_tower(config, dim=32, items=('item',), widths=(64, 32))
  config.model.log_q = 1  # the number of ratings of the item to train on
