"""DLRM RM2 on Criteo Kaggle's shape (arXiv 2404.04270, 1906.00091).

    python -m experiments.run --config=configs/criteo.py

trains on an embedded synthetic stream with Criteo's table sizes (33.76 M
rows), skew and base rate; its results say nothing about real clicks. Expected
on 2 CPU cores: 2000 batches, of which Slipstream leaves out 22 %, in 40 s (1.5
minutes in all, 6 GiB), AUC 0.770 of the stream's best 0.811, as much as with
all of them (`--config.skip.mode=off`).

    python -m experiments.run --config=configs/criteo.py --config.data.path=FILE

trains on raw Criteo text. What should not be in memory is packed into a folder
first, where the path is then a folder: of `config.data`, training heeds only
`batch_size` and `shuffle`.

    python -m experiments.prepare --config=configs/criteo.py \
        --config.data.raw=FILE --config.data.path=DIR

Variants of the config:

* `configs/criteo.py:sample`: text samples of some 100,000 lines; one epoch in
  file order, the last fifth to test, ids seen fewer than 4 times share a row.
  Expected on the first 80,000 lines of dac_sample: AUC 0.772 +- 0.001, log
  loss 0.440, in 2 s.
* `configs/criteo.py:smoke`: seconds, on small tables.
"""

import ml_collections


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The experiment's settings; `variant` is '', 'sample' or 'smoke'.

  Raises:
    ValueError: there is no such variant.
  """
  config = ml_collections.ConfigDict()
  config.seed = 0
  config.resume = False  # continue the run in --workdir

  config.data = ml_collections.ConfigDict()
  config.data.path = ml_collections.config_dict.placeholder(str)
  # Without a path: a synthetic twin of 'kaggle', 'terabyte', 'avazu', 'taobao'.
  config.data.twin = 'kaggle'
  config.data.drift_inputs = 0  # inputs after which hot ids cool; 0: never
  config.data.saturation = 0.0  # more: popular rows carry more of the signal
  config.data.format = 'criteo'  # of raw files
  config.data.bad_lines = 0  # of raw files, that may be skipped
  # What experiments.prepare packs into the folder config.data.path.
  config.data.raw = ml_collections.config_dict.placeholder(str)
  config.data.batch_size = 2048
  config.data.test_share = 0.2  # of the file's lines, taken from its end
  config.data.test_inputs = 1 << 18  # of the twin
  config.data.min_count = 1  # ids seen less often share one row
  config.data.hash_rows = ml_collections.config_dict.placeholder(int)
  config.data.missing_flags = False
  config.data.shuffle = True
  # Rows of each table of the twin, in place of the data set's.
  config.data.rows = ml_collections.config_dict.placeholder(tuple)

  config.model = ml_collections.ConfigDict()
  config.model.name = 'dlrm'
  config.model.dim = 16
  config.model.bottom = (512, 256, 64, 16)
  config.model.top = (512, 256)
  config.model.first_order = False
  config.model.normalization = 'none'  # of what enters top: 'layer', 'batch'
  # Of matrix products, summed in float32: 'float32' or 'bfloat16'.
  config.model.compute_dtype = 'float32'
  # Of rows: 'float32', or 'bfloat16' or 'float16' with stochastic rounding.
  config.model.table_dtype = 'float32'
  # Of lists of ids, 'sum' or 'mean'; None: series stay series.
  config.model.pooling = ml_collections.config_dict.placeholder(str)
  # Rows start uniform within this of 0; None: 1/sqrt(rows of the table).
  config.model.init_scale = ml_collections.config_dict.placeholder(float)

  config.optimizer = ml_collections.ConfigDict()
  # Chains: names of factories with their arguments, in order. Those of rows are
  # of ROW_OPTIMIZERS or optax, those of dense parameters of optax.
  config.optimizer.rows = (('rowwise_adagrad', {'learning_rate': 0.05}),)
  config.optimizer.dense = (('adam', {'learning_rate': 1e-3}),)
  # Share of the dense learning rate that is left at the end of the data, after
  # a linear fall; 1.0 keeps it constant.
  config.optimizer.dense_final = 0.0

  config.skip = ml_collections.ConfigDict()
  # 'inputs': leave inputs out; 'rows': let stale rows stand still; 'off'.
  config.skip.mode = 'inputs'
  config.skip.policy = 'surprise'
  config.skip.drop_target = 0.3  # inputs to drop, as a share of the hot ones
  config.skip.hot_bytes = 1 << 28  # device memory for hot rows
  config.skip.profile_inputs = 1 << 21  # read first, to find them
  # In batches of the source: see slipstream_jax/schedules/phases.py.
  config.skip.warm_up = 40
  config.skip.window = 60
  config.skip.settle = 20
  config.skip.period = 1000
  config.skip.warm_up_again = False
  # Stale lookups that make an input stale; None: all of them.
  config.skip.alpha = ml_collections.config_dict.placeholder(int)
  config.skip.min_touches = 1  # 0: rows not touched are stale, as published
  # In place of the one that meets the drop target.
  config.skip.threshold = ml_collections.config_dict.placeholder(float)

  config.placement = 'pinned'  # 'resident', 'streamed', 'cached'
  config.cache = ml_collections.ConfigDict()
  config.cache.capacity = 0.01  # up to 1 a share of all rows, else rows
  # Who leaves: 'look_ahead', 'lfu', 'lru', 'static'.
  config.cache.eviction = 'look_ahead'
  config.cache.look_ahead = 16  # batches known before they are trained
  config.prefetch = 2  # batches prepared ahead of the step

  config.train = ml_collections.ConfigDict()
  config.train.steps = 0  # 0: train.epochs passes over the data instead
  config.train.epochs = 1
  config.train.endless_steps = 2000  # where the data has no end
  config.train.checkpoint_steps = 0  # 0: only at the end

  config.eval = ml_collections.ConfigDict()
  config.eval.batch_size = 8192
  config.eval.split = 'test'  # of packed data; 'validation', to tune on
  config.eval.curve_steps = 250  # 0: no learning curve
  config.eval.curve_inputs = 1 << 15

  config.log_steps = 20

  match variant:
    case '':
      pass
    case 'sample':
      _sample(config)
    case 'smoke':
      _smoke(config)
    case _:
      raise ValueError(
        f"variant must be '', 'sample' or 'smoke', got {variant!r}"
      )
  return config


def _sample(config: ml_collections.ConfigDict) -> None:
  """Samples of raw text: 80,000 lines reach AUC 0.77 in one epoch."""
  config.data.batch_size = 256
  config.data.min_count = 4
  config.data.missing_flags = True
  config.data.shuffle = False
  config.model.dim = 17
  config.model.bottom = (64, 16)
  config.model.top = (64,)
  config.model.first_order = True
  config.model.init_scale = 0.01
  # Gradients are means over the batch: small, and so must the start of
  # Adagrad's sum be.
  adagrad = {'learning_rate': 0.03, 'initial_accumulator_value': 1e-7}
  config.optimizer.rows = (('adagrad', adagrad),)
  config.optimizer.dense = (('adam', {'learning_rate': 3e-3}),)
  # Every input of so few still teaches: see docs/skipping.md for the price.
  config.skip.mode = 'off'
  config.placement = 'streamed'
  config.skip.warm_up = 10
  config.skip.window = 15
  config.skip.settle = 8
  config.skip.period = 125
  config.eval.curve_steps = 50
  config.log_steps = 10


def _smoke(config: ml_collections.ConfigDict) -> None:
  """A run of seconds over small tables, for tests and laptops."""
  config.data.batch_size = 256
  config.data.test_inputs = 4096
  config.data.rows = (100, 50, 10_000, 2000, 300, 24, 1200, 600, 3) + (50,) * 17
  config.model.bottom = (64, 16)
  config.model.top = (64,)
  config.skip.hot_bytes = 1 << 19
  config.skip.profile_inputs = 1 << 15
  config.skip.warm_up = 10
  config.skip.window = 12
  config.skip.settle = 4
  config.skip.period = 100
  config.train.steps = 200
  config.eval.batch_size = 1024
  config.eval.curve_steps = 50
  config.eval.curve_inputs = 2048
  config.log_steps = 10
