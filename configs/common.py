"""Sections that configs share: each function adds one of them to a config.

Sections stand in a config in the order in which a run needs them: data, model,
optimizers, hot rows and skipping, placement and training.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

Chain = tuple[tuple[str, dict[str, Any]], ...]
"""Names of optimizers or transformations with their arguments, in order."""


def start(variant: str, variants: tuple[str, ...]) -> ConfigDict:
  """A config without sections.

  Raises:
    ValueError: there is no such variant.
  """
  if variant not in variants:
    raise ValueError(f'variant must be one of {variants}, got {variant!r}')
  config = ConfigDict()
  config.seed = 0
  config.resume = False  # continue the run in --workdir
  return config


def files(config: ConfigDict, format: str, batch_size: int) -> None:
  """Section `data`: raw files, or the folder that they were packed into."""
  data = config.data = ConfigDict()
  data.path = placeholder(str)  # a raw file, or a packed folder
  data.raw = placeholder(str)  # what experiments.prepare packs into the path
  data.format = format  # of raw files
  data.bad_lines = 0  # of raw files, that may be skipped
  # Share of the examples to test on, from the end; None: the format's own
  # split.
  data.test_share = placeholder(float)
  data.min_count = 1  # ids seen less often share one row
  data.hash_rows = placeholder(int)  # most rows of a table; None: no hashing
  data.batch_size = batch_size
  data.shuffle = True


def synthetic(config: ConfigDict, proxy: str) -> None:
  """Adds to `data` the proxy that is trained on where there is no path."""
  data = config.data
  data.proxy = proxy  # 'kaggle', 'terabyte', 'avazu', 'taobao', 'movielens'
  data.rows = placeholder(tuple)  # of each table, in place of the data set's
  data.test_examples = 1 << 18
  data.drift_examples = 0  # examples after which hot ids cool; 0: never
  data.saturation = 0.0  # more: popular rows carry more of the signal


def layers(config: ConfigDict, name: str, **sizes: Any) -> None:
  """Section `model`: 'dlrm' or 'tbsm' with the sizes of its layers."""
  model = config.model = ConfigDict({'name': name} | sizes)
  model.normalization = 'none'  # of what enters top: 'layer', 'batch'
  # Of matrix products, summed in float32: 'float32' or 'bfloat16'.
  model.compute_dtype = 'float32'
  # Of rows: 'float32', or 'bfloat16' or 'float16' with stochastic rounding.
  model.table_dtype = 'float32'
  # Of lists of ids, 'sum' or 'mean'; None: sequences stay sequences.
  model.pooling = placeholder(str)
  # Rows start uniform within this of 0; None: 1/sqrt(rows of the table).
  model.init_scale = placeholder(float)


def optimizers(
  config: ConfigDict, rows: Chain, dense: Chain, dense_final: float
) -> None:
  """Section `optimizer`.

  Args:
    config: gets it.
    rows: of `ROW_OPTIMIZERS`, or of optax.
    dense: of optax.
    dense_final: share of the dense learning rate that is left at the end of
      the data, after a linear fall; 1.0 keeps it constant.
  """
  config.optimizer = ConfigDict(
    {'rows': rows, 'dense': dense, 'dense_final': dense_final}
  )


def hot_rows(config: ConfigDict, bytes: int, profile_examples: int) -> None:
  """Section `hot`: popular rows, for skipping, pinning and warming a cache."""
  hot = config.hot = ConfigDict()
  hot.bytes = bytes  # device memory for them
  hot.profile_examples = profile_examples  # read first, to find them


def skipping(
  config: ConfigDict, policy: str, alpha: int | tuple[int, ...] | None = None
) -> None:
  """Section `skip`, but for its phases: see `phases`.

  Args:
    config: gets it.
    policy: of `POLICIES`.
    alpha: stale lookups that make an example stale; None: all of them.
  """
  skip = config.skip = ConfigDict()
  # 'examples': leave examples out; 'rows': let stale rows stand still; 'off'.
  skip.mode = 'examples'
  skip.policy = policy
  skip.drop_target = 0.3  # examples to drop, as a share of the hot ones
  skip.alpha = placeholder(int) if alpha is None else alpha
  skip.min_touches = 1  # 0: rows not touched are stale, as published
  # In place of the one that meets the drop target.
  skip.threshold = placeholder(float)
  skip.warm_up_again = False  # in each period, as published


def phases(
  config: ConfigDict, warm_up: int, window: int, settle: int, period: int
) -> None:
  """Phases of `skip`, in batches: see slipstream_jax/schedules/phases.py."""
  config.skip.warm_up_batches = warm_up
  config.skip.window_batches = window
  config.skip.settle_batches = settle
  config.skip.period_batches = period


def training(config: ConfigDict) -> None:
  """What is left: placement, steps, evaluation, and what is told."""
  config.placement = 'pinned'  # 'resident', 'streamed', 'cached'
  config.cache = ConfigDict()
  config.cache.capacity = 0.01  # up to 1 a share of all rows, else rows
  # Who leaves: 'look_ahead', 'lfu', 'lru', 'static'.
  config.cache.eviction = 'look_ahead'
  config.cache.look_ahead_batches = 16  # known before they are trained
  config.prefetch_batches = 2  # prepared ahead of the step

  config.train = ConfigDict()
  config.train.steps = 0  # 0: train.epochs passes over the data instead
  config.train.epochs = 1
  config.train.endless_steps = 2000  # where the data has no end
  config.train.checkpoint_steps = 0  # 0: only at the end

  config.eval = ConfigDict()
  config.eval.batch_size = 8192
  config.eval.split = 'test'  # of packed data; 'validation', to tune on
  config.eval.curve_steps = 250  # 0: no learning curve
  config.eval.curve_examples = 1 << 15

  config.log_steps = 20


def sample(config: ConfigDict) -> None:
  """For text of some 100,000 lines, every example of which still teaches.

  What skipping would cost there is in docs/skipping.md.
  """
  config.skip.mode = 'off'
  config.placement = 'streamed'
  phases(config, warm_up=10, window=15, settle=8, period=125)
  config.eval.curve_steps = 50
  config.log_steps = 10


def smoke(config: ConfigDict) -> None:
  """A run of seconds over a proxy with small tables, for tests and laptops."""
  config.data.batch_size = 256
  config.data.test_examples = 4096
  hot_rows(config, bytes=1 << 19, profile_examples=1 << 15)
  phases(config, warm_up=10, window=12, settle=4, period=100)
  config.train.steps = 200
  config.eval.batch_size = 1024
  config.eval.curve_steps = 50
  config.eval.curve_examples = 2048
  config.log_steps = 10
