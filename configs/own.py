"""Default settings for data of your own.

    python -m experiments.compare --own=my_module:function

A DLRM with a weight for each row beside its embedding, for 10,000 to a million
examples. A model that the function returns replaces it. The settings suit
64,000 lines of Criteo's log; see `configs/criteo.py:sample`.
"""

import ml_collections

from configs import common


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """Returns the settings.

  Raises:
    ValueError: there is no variant.
  """
  config = common.start(variant, ('',))
  common.files(config, None, batch_size=256)
  common.dlrm(config, dim=16, bottom=(64, 16), top=(64,))
  common.on_large_logs(config)
  common.small_model(config)
  common.hot_rows(config, bytes=1 << 26, profile_examples=1 << 20)
  common.phases(config)
  config.eval.curve_steps = 50
  config.log_steps = 10
  return config
