"""DLRM RM4 on Avazu (arXiv 2404.04270, 2103.00686): 1 dense, 21 tables.

    python -m experiments.run --config=configs/avazu.py \
        --config.data.path=train.csv

trains on Avazu's train.csv, plain or gzip, held in memory.
"""

import ml_collections

from configs import criteo


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The experiment's settings; `variant` is '', 'sample' or 'smoke'.

  Raises:
    ValueError: there is no such variant.
  """
  config = criteo.get_config(variant)
  config.data.format = 'avazu'
  # Share of the inputs to test on, from the end; None: the last day.
  del config.data.test_share
  config.data.test_share = ml_collections.config_dict.placeholder(float)
  config.data.bad_lines = 0  # lines that may be skipped
  return config
