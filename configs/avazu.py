"""DLRM RM4 on Avazu's click log: 1 dense feature, 21 tables (arXiv 2404.04270).

    python -m experiments.run --config=configs/avazu.py --config.data.path=FILE

trains one epoch on Avazu's train.csv or train.gz, held in memory: 40.4 M lines
take some 25 GB, prepare them first where that is too much. To test on it holds
out the last day, 30 October 2014 (4.2 M lines); `--config.data.test_share=0.2`
leaves the 32.3 M inputs to train on that RM4 has. Published for that, and not
yet run here: AUC 0.758, log loss 0.390, accuracy 83.61 %. Variants:

* `configs/avazu.py:sample`: files of some 10,000 lines; two epochs in file
  order, the last fifth of a single day to test, ids seen fewer than 4 times
  share a row. Expected on the first 9,999 lines (one hour) of train.csv, in 2 s
  (and 10 s to compile): AUC 0.721 +- 0.002, log loss 0.408; logistic regression
  on the same rows: 0.726, 0.406.
* `configs/avazu.py:smoke`: seconds, on a synthetic stream with 21 small tables;
  says nothing about clicks.
"""

import ml_collections

from configs import criteo


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The experiment's settings; `variant` is '', 'sample' or 'smoke'.

  Raises:
    ValueError: there is no such variant.
  """
  config = criteo.get_config(variant)
  config.data.format = config.data.twin = 'avazu'
  # Fewer inputs would not fill the budget with rows of known popularity.
  config.skip.profile_inputs = 6_460_000
  if variant == 'smoke':
    config.skip.profile_inputs = 1 << 15
    config.data.rows = (7, 7, 300, 400, 26, 500, 60, 36, 9000, 20_000, 1000) + (
      (5, 4, 200, 8, 9, 90, 4, 60, 150, 50)
    )
    return config
  # Share of the inputs to test on, from the end; None: the last day.
  del config.data.test_share
  config.data.test_share = ml_collections.config_dict.placeholder(float)
  if variant == 'sample':
    config.data.batch_size = 128
    config.train.epochs = 2
  return config
