"""DLRM RM2 on Criteo Kaggle's shape (arXiv 2404.04270, 1906.00091).

    python -m experiments.run --config=configs/criteo.py

trains on an embedded synthetic stream with Criteo's table sizes (33.76 M
rows), skew and base rate. Its results say nothing about real clicks.
Expected: AUC 0.7702, log loss 0.4715, 29.1 % of the examples left out.
The stream's best AUC is 0.811. On 2 CPU cores the 2000 batches take 36 s (50 s
in all, 3.6 GB). `--config.skip.mode=off` leaves nothing out.
Expected: AUC 0.7698, log loss 0.4717.

    python -m experiments.run --config=configs/criteo.py --config.data.path=FILE

trains on raw Criteo text, which is held in memory. Larger files are packed into
a folder first, which is then the path. With it, training uses only `batch_size`
and `shuffle` of `config.data`.

    python -m experiments.prepare --config=configs/criteo.py \
        --config.data.raw=FILE --config.data.path=DIR

Variants of the config:

* `configs/criteo.py:sample`: samples of about 100,000 lines. One epoch in file
  order, the last fifth to test on. Ids seen fewer than 4 times share a row.
  On 80,000 lines reconstructed from a hashed cache of dac_sample it takes 2 s.
  Expected: AUC 0.7715, log loss 0.4403.
* `configs/criteo.py:smoke`: seconds, on small tables.
* `configs/criteo.py:planted`: a synthetic stream of twelve small tables, whose
  signal is in products of two and of three fields. It tells interactions
  apart, and says nothing about real clicks.
* `configs/criteo.py:dcn`, `:deepfm`, `:wide_deep`, `:dhen`: another model with
  the same widths, on the same data (docs/models.md). Not yet run for all 2000
  batches: there is no figure to expect.
* `configs/criteo.py:towers`: DMT, a DLRM whose features meet in four towers
  first (docs/how-to/planning.md).
"""

import ml_collections

from configs import common

# What `experiments.towers` finds after 300 steps of this config.
_TOWERS = (
  (0, 1, 4, 17, 19, 23, 25),
  (2, 8, 9, 10, 12, 14, 16),
  (3, 5, 7, 18, 20, 21),
  (6, 11, 13, 15, 22, 24),
)


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """Returns the settings.

  `variant` is '', 'sample', 'smoke', 'planted', 'towers', or a name of
  `common.ZOO`.

  Raises:
    ValueError: there is no such variant.
  """
  config = common.start(
    variant, ('', 'sample', 'smoke', 'planted', 'towers', *common.ZOO)
  )
  common.files(config, 'criteo', batch_size=2048)
  config.data.missing_flags = False  # one more dense feature for each: missing?
  common.synthetic(config, 'kaggle')
  common.dlrm(config, dim=16, bottom=(512, 256, 64, 16), top=(512, 256))
  common.on_large_logs(config)
  match variant:
    case 'sample':
      _sample(config)
    case 'smoke':
      _smoke(config)
    case 'planted':
      _planted(config)
    case 'towers':
      common.towers(config, _TOWERS)
    case 'dcn' | 'deepfm' | 'wide_deep' | 'dhen':
      common.another_model(config, variant)
  return config


def _sample(config: ml_collections.ConfigDict) -> None:
  """Changes settings for samples of about 100,000 lines."""
  config.data.batch_size = 256
  config.data.test_share = 0.2
  config.data.min_count = 4
  config.data.missing_flags = True
  config.data.shuffle = False
  common.small_model(config)
  common.sample(config)


def _smoke(config: ml_collections.ConfigDict) -> None:
  """Changes settings for a run of seconds on small tables."""
  common.smoke(config)
  config.data.test_share = 0.2
  config.data.rows = (100, 50, 10_000, 2000, 300, 24, 1200, 600, 3) + (50,) * 17
  config.model.bottom = (64, 16)
  config.model.top = (64,)


def _planted(config: ml_collections.ConfigDict) -> None:
  """Changes settings for the stream with planted interactions."""
  config.data.proxy = 'planted'
  config.data.batch_size = 512
  config.data.test_examples = 1 << 16
  config.model.bottom = (32, 16)
  config.model.top = (64, 32)
  config.skip.mode = 'off'
  config.placement = 'resident'
