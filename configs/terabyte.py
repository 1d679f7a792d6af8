r"""DLRM RM3 on Criteo's Terabyte click logs (arXiv 2404.04270, 2103.00686).

    python -m experiments.prepare --config=configs/terabyte.py \
        --config.data.raw=FOLDER --config.data.path=DIR
    python -m experiments.run --config=configs/terabyte.py \
        --config.data.path=DIR

FOLDER has `day_0` to `day_23`, plain or gzip. As in the published runs, 1.83 %
of their lines are kept, about 80 M. Ids are hashed to at most 40 M rows per
table. Published for all baselines: AUC 0.802, accuracy 81.07 %, log loss 0.424.
A system may fall short of that by 0.2 points. Not yet run here. The published
tables have 266 M rows of 64, which need 63 GB of host memory, and more for the
row state.

Without a path it trains on the synthetic stream with a hundredth of the rows.
That says nothing about real clicks. `configs/terabyte.py:full` has all 266 M
rows, 69 GB with their row state. `configs/terabyte.py:smoke` takes seconds, on
small tables.

`configs/terabyte.py:dcn` is MLPerf's DLRM-DCNv2: D = 128, three crosses of rank
512, and up to 100 lookups for each feature. As there, a bag has the id itself,
and others that are drawn once for each id. Not yet run here on real logs. On
the synthetic stream it has a hundredth of the rows.

`configs/terabyte.py:towers` is DMT, a DLRM whose features meet in four towers
first (docs/how-to/planning.md).
"""

import ml_collections
from ml_collections import config_dict

from configs import common

# MLPerf's tables of these logs, capped at 40 M rows, by a hundred.
_ROWS = (
  *(400_000, 390, 172, 74, 202, 3, 71, 15, 3, 400_000, 30_679, 4052, 10),
  *(22, 119, 3, 4, 9, 14, 400_000, 400_000, 400_000, 5901, 129, 3, 3),
)


# Lookups of each feature of MLPerf's DLRM-DCNv2.
_MULTI_HOT = (
  *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1),
  *(6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)


# In order. `experiments.towers` finds better ones.
_TOWERS = (
  (0, 1, 2, 3, 4, 5, 6),
  (7, 8, 9, 10, 11, 12, 13),
  (14, 15, 16, 17, 18, 19),
  (20, 21, 22, 23, 24, 25),
)


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """Returns the settings. `variant` is '', 'full', 'dcn', 'towers' or 'smoke'.

  Raises:
    ValueError: there is no such variant.
  """
  config = common.start(variant, ('', 'full', 'dcn', 'towers', 'smoke'))
  common.files(config, 'terabyte', batch_size=2048)
  # Lookups of each feature's bag, which are drawn. None: one, its id.
  config.data.multi_hot = config_dict.placeholder(tuple)
  config.data.missing_flags = False  # one more dense feature for each: missing?
  config.data.hash_rows = 40_000_000
  config.data.sample = 0.0183  # share of the lines that are kept
  config.data.sample_negatives = 1.0  # and of those without a click
  config.data.sample_seed = 0  # of the choice of lines
  common.synthetic(config, 'terabyte')
  if variant != 'full':
    config.data.rows = _ROWS
  common.dlrm(config, dim=64, bottom=(512, 256, 64), top=(512, 512, 256))
  common.on_large_logs(config)
  match variant:
    case 'dcn':
      _dcn(config)
    case 'towers':
      common.towers(config, _TOWERS)
    case 'smoke':
      _smoke(config)
  return config


def _dcn(config: ml_collections.ConfigDict) -> None:
  """Changes the model to that of MLPerf's DLRM-DCNv2."""
  config.data.multi_hot = _MULTI_HOT
  common.another_model(config, 'dcn')
  config.model.dim = 128
  config.model.bottom = (512, 256, 128)
  config.model.top = (1024, 1024, 512, 256)
  config.model.rank = 512


def _smoke(config: ml_collections.ConfigDict) -> None:
  """Changes settings for a run of seconds on small tables."""
  common.smoke(config)
  config.data.hash_rows = 10_000
  config.data.sample = 1.0
  config.data.rows = (100, 50, 10_000, 2000, 300, 24, 1200, 600, 3) + (50,) * 17
  config.model.bottom = (64, 64)
  config.model.top = (64,)
