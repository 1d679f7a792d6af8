"""TBSM RM1 on Taobao's user behaviour (arXiv 2008.11922, 2404.04270).

    python -m experiments.run --config=configs/taobao.py --config.data.path=LOG

trains on the raw log, UserBehavior.csv, or on what `experiments.prepare` packed
of it. Without a path it trains on a synthetic proxy.
Published for a full run, with SGD at 0.05 for all (config.optimizer) and users
rather than times held out: accuracy 89.21 %, log loss 0.269 (arXiv 2103.00686).
Not yet run here on the full log.
Variants of the config:

* `configs/taobao.py:sample`: some two hours of the log, 100,000 lines, whose
  users have one or two events each. One epoch, the last fifth of the time to
  test. On a sample of 96,168 lines it takes seconds.
  Expected: AUC 0.7501, log loss 0.6032.
  Other seeds give an AUC of up to 0.771. Whether the candidate's category is in
  the history has AUC 0.697 alone. Three epochs are `--config.train.epochs=3`.
  Expected: AUC 0.7860, log loss 0.5634.
  With `--config.train.epochs=3`, `--config.skip.mode=examples` and
  `--config.placement=pinned` some examples are left out.
  Expected: AUC 0.7777, log loss 0.5782, 22.6 % of the examples left out.
  SGD at 0.05 for all learns more slowly: two seeds reached an AUC of 0.505 and
  0.595 in three epochs.
* `configs/taobao.py:sasrec` and `:hstu`: another model on such a sample, with
  the settings of `:sample`. HSTU knows the order of events, not their times.
* `configs/taobao.py:smoke`: seconds, on such a sample, with skipping.
"""

import ml_collections

from configs import common


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """Returns the settings.

  `variant` is '', 'sample', 'sasrec', 'hstu' or 'smoke'.

  Raises:
    ValueError: there is no such variant.
  """
  config = common.start(variant, ('', 'sample', 'sasrec', 'hstu', 'smoke'))
  common.files(config, 'taobao', batch_size=256)
  config.data.steps = 20  # most events of a history
  config.data.per_user = 10  # most points of a user, with two examples each
  config.data.min_history = 10  # earlier events that a point needs
  config.data.test_share = 0.2  # of the points, the latest ones
  config.data.points_seed = 0  # of the choice of points and of drawn items
  common.synthetic(config, 'taobao')
  common.tbsm(
    config,
    dim=16,
    bottom=(16,),
    top=(15, 15),
    attention=(15, 15),
    final=(60,),
  )
  config.model.init_scale = 0.3  # smaller rows give no product a size
  if variant in common.SEQUENCES:
    common.another_model(config, variant)
  common.optimizers(
    config,
    # Gradients are means over the batch: small, and so must the start be.
    rows=(
      ('adagrad', {'learning_rate': 0.03, 'initial_accumulator_value': 1e-7}),
    ),
    dense=(('adam', {'learning_rate': 1e-3}),),
    dense_final=1.0,
  )
  common.hot_rows(config, bytes=1 << 28, profile_examples=1 << 19)
  # As published. The scores of 'surprise' are linear in the rows, and by these
  # alone an item that came next looks like one that did not. Stale steps, of
  # the 21 of each table, that make an example stale:
  common.skipping(config, 'stale', alpha=(4, 4, 4))
  common.phases(config, warm_up=1000, window=1500, settle=100, period=20_000)
  common.training(config)
  config.eval.curve_steps = 5000
  config.eval.curve_examples = 1 << 17
  config.log_steps = 200
  if variant:
    _sample(config)
  if variant == 'smoke':
    _smoke(config)
  return config


def _sample(config: ml_collections.ConfigDict) -> None:
  """Changes settings for 100,000 lines. Most users have one or two events."""
  config.data.batch_size = 64
  config.data.min_history = 1
  config.data.min_count = 10  # few items of so short a time occur again
  config.data.bad_lines = 1  # such samples tend to be cut off
  start = {'learning_rate': 0.1, 'initial_accumulator_value': 1e-7}
  config.optimizer.rows = (('adagrad', start),)
  config.optimizer.dense = (('adam', {'learning_rate': 3e-3}),)
  config.skip.mode = 'off'
  config.placement = 'streamed'
  common.phases(config, warm_up=20, window=20, settle=8, period=125)
  config.eval.curve_steps = 200
  config.eval.curve_examples = 1 << 14
  config.log_steps = 50


def _smoke(config: ml_collections.ConfigDict) -> None:
  """Changes settings for a run of seconds that skips."""
  config.skip.mode = 'examples'
  config.placement = 'pinned'
  config.hot.bytes = 1 << 20
  config.train.steps = 150
  config.eval.curve_steps = 50
  config.eval.batch_size = 1024
  config.log_steps = 10
