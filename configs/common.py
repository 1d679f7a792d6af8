"""Sections that configs share: each function adds one of them to a config.

Sections stand in a config in the order in which a run needs them: data, model,
optimizers, hot rows and skipping, placement and training.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

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
  config.seed = 0  # of the data's order, the model, the rows and the choices
  config.resume = False  # continue the run in --workdir
  return config


def files(
  config: ConfigDict,
  format: str | None,
  batch_size: int,
  source: str | None = None,
) -> None:
  """Section `data`: raw files, the folder they were packed into, or a function.

  Args:
    config: gets it.
    format: of raw files; None where a function of one's own makes the data.
    batch_size: examples of a step.
    source: that function, 'my_package.my_module:function'.
  """
  data = config.data = ConfigDict()
  # 'my_package.my_module:function' that makes a Dataset of the config: one's
  # own data, in place of all below but the batch size.
  data.source = placeholder(str) if source is None else source
  data.path = placeholder(str)  # a raw file, or a packed folder
  data.raw = placeholder(str)  # what experiments.prepare packs into the path
  # Of raw files: 'criteo', 'terabyte', 'avazu', 'taobao', 'movielens' or
  # 'tfds'.
  data.format = placeholder(str) if format is None else format
  data.bad_lines = 0  # of raw files, the most that may be skipped
  # Share of the examples to test on, from the end; None: the format's own
  # split.
  data.test_share = placeholder(float)
  data.min_count = 1  # ids seen less often share one row
  data.hash_rows = placeholder(int)  # most rows of a table; None: no hashing
  data.batch_size = batch_size  # examples of a step
  data.shuffle = True  # what is trained on, anew in each epoch


def synthetic(config: ConfigDict, proxy: str) -> None:
  """Adds to `data` the proxy that is trained on where there is no path."""
  data = config.data
  # Made-up clicks, without a path: 'kaggle', 'terabyte', 'avazu', 'taobao' or
  # 'movielens'.
  data.proxy = proxy
  data.rows = placeholder(tuple)  # of each table, in place of the data set's
  data.test_examples = 1 << 18  # of the proxy
  data.drift_examples = 0  # examples after which hot ids cool; 0: never
  data.saturation = 0.0  # more: popular rows carry more of the signal


def model(config: ConfigDict, name: str, dim: int, **sizes: Any) -> None:
  """Section `model`; `sizes` are further keys, for a model of one's own."""
  model = config.model = ConfigDict()
  # 'dlrm', 'tbsm', or 'my_package.my_module:function' that makes a model of
  # this section.
  model.name = name
  model.dim = dim  # of a row
  # Of what enters top: 'none', 'layer' or 'batch'.
  model.normalization = 'none'
  # Of matrix products, summed in float32: 'float32' or 'bfloat16'.
  model.compute_dtype = 'float32'
  # Of rows: 'float32', or 'bfloat16' or 'float16' with stochastic rounding.
  model.table_dtype = 'float32'
  # Of lists of ids, 'sum', 'mean', 'sqrtn' or 'none', where sequences stay
  # sequences; None: as the data set has them.
  model.pooling = placeholder(str)
  # Rows start uniform within this of 0; None: 1/sqrt(rows of the table).
  model.init_scale = placeholder(float)
  model.update(sizes)


def dlrm(
  config: ConfigDict,
  dim: int,
  bottom: tuple[int, ...],
  top: tuple[int, ...],
  first_order: bool = False,
) -> None:
  """Section `model` of a DLRM."""
  model(config, 'dlrm', dim)
  config.model.bottom = bottom  # widths of the layers over the dense features
  # Widths of the layers over the interactions, less the last one, of 1.
  config.model.top = top
  # Adds a weight for each row, as a factorization machine has.
  config.model.first_order = first_order


def tbsm(
  config: ConfigDict,
  dim: int,
  bottom: tuple[int, ...],
  top: tuple[int, ...],
  attention: tuple[int, ...],
  final: tuple[int, ...],
) -> None:
  """Section `model` of a TBSM."""
  model(config, 'tbsm', dim)
  config.model.bottom = bottom
  config.model.top = top
  config.model.attention = attention  # widths of the layers over the history
  config.model.final = final  # widths of the layers before the logit


def optimizers(
  config: ConfigDict, rows: Chain, dense: Chain, dense_final: float
) -> None:
  """Section `optimizer`: of the rows, and of the model's parameters."""
  optimizer = config.optimizer = ConfigDict()
  # Names and arguments, in order: of slipstream_jax's row optimizers, or optax.
  optimizer.rows = rows
  optimizer.dense = dense  # of optax, for the model's parameters
  # Share of the dense learning rate that is left at the end of the data, after
  # a linear fall; 1.0 keeps it constant.
  optimizer.dense_final = dense_final


def hot_rows(config: ConfigDict, bytes: int, profile_examples: int) -> None:
  """Section `hot`: popular rows, for skipping, pinning and warming a cache."""
  hot = config.hot = ConfigDict()
  hot.bytes = bytes  # device memory for the popular rows
  hot.profile_examples = profile_examples  # read first, to find those rows


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
  # Which examples: 'surprise', 'surprise_offset', 'local_case_control',
  # 'infobatch_once', 'negatives', 'importance', 'stale', 'stale_revisit',
  # 'stale_negatives', 'stale_importance', 'random' or 'random_weighted'.
  skip.policy = policy
  # Examples to drop, as a share of those of skip.drop_of; or the word auto: as
  # many as cost less than skip.auto_cost.
  skip.drop = FieldReference(0.3, field_type=object)
  skip.auto_cost = 0.001  # share of the log loss that auto may cost
  # What predicts clicks, for policies that ask for it: 'pairs' or 'linear'.
  skip.scorer = 'linear'
  skip.drop_of = 'all'  # what it is a share of: 'all' examples, or the 'hot'
  # Batches from one fit of the policy's scale to the next; 0: once a period.
  skip.refit_batches = 10
  # What is kept is cut into full batches again; False: a step for what is kept
  # of each batch, so that there are as many steps as in a plain run.
  skip.refill = True
  # Part of the chance to be kept that is alike for all; None: the policy's.
  skip.uniform = placeholder(float)
  # Share of the run's batches after which nothing is dropped; None: never.
  skip.until = placeholder(float)
  # Stale lookups that make an example stale; None: all of them.
  skip.alpha = placeholder(int) if alpha is None else alpha
  skip.min_touches = 1  # 0: rows not touched are stale, as published
  # Row change below which a row is stale; None: what meets the drop target.
  skip.threshold = placeholder(float)
  skip.warm_up_again = False  # warm up in each period, as published


def phases(
  config: ConfigDict, warm_up: int, window: int, settle: int, period: int
) -> None:
  """Phases of `skip`, in batches: see slipstream_jax/schedules/phases.py."""
  config.skip.warm_up_batches = warm_up  # trained before anything is compared
  config.skip.window_batches = window  # between a snapshot and its comparison
  config.skip.settle_batches = settle  # until its outcome is used
  config.skip.period_batches = period  # from one window to the next


def training(config: ConfigDict) -> None:
  """What is left: placement, steps, evaluation, and what is told."""
  # Way to train: 'plain', 'cached', 'xdl', 'dlrm_hybrid', 'fae', 'fae_pinned',
  # 'hotline' or 'hotline_micro'; all but 'plain' have a placement of their own.
  config.system = 'plain'
  # Rows on the device: 'resident', 'streamed', 'swapped', 'pinned' or
  # 'cached'.
  config.placement = 'pinned'
  config.cache = ConfigDict()
  # Rows that a cache keeps: up to 1 a share of all rows.
  config.cache.capacity = 0.01
  # Who leaves: 'look_ahead', 'lfu', 'lru', 'static'.
  config.cache.eviction = 'look_ahead'
  config.cache.look_ahead_batches = 16  # that a cache may know ahead
  config.store = ConfigDict()
  # Where rows are that the device does not keep: in 'memory'; in a 'file' on a
  # disk; or 'tiered', on a disk, and the ones used last in memory, too.
  config.store.kind = 'memory'
  config.store.dram_bytes = 1 << 32  # of tiered rows, those in host memory
  # Folder on that disk, for a file as long as the run; None: the system's for
  # temporary files.
  config.store.path = placeholder(str)
  config.prefetch_batches = 2  # batches prepared ahead of the step
  # Threads that find unique rows, of a batch each; None: as many as there are
  # cores, at most 8.
  config.workers = placeholder(int)

  config.train = ConfigDict()
  # Batches to read; a step each, but for those that skipping leaves out. 0:
  # train.epochs passes over the data instead.
  config.train.steps = 0
  config.train.epochs = 1  # passes over the data
  config.train.endless_steps = 2000  # batches, where the data has no end
  config.train.checkpoint_steps = 0  # steps between checkpoints; 0: at the end
  # Whether the last checkpoint stays once the run is finished: to predict, and
  # to train on. Until then there is one in any case where resuming needs it.
  config.train.keep_checkpoint = True
  # A step whose loss is not finite: 'stop' the run; 'skip': it changes nothing;
  # 'rollback': back to the last checkpoint, and past its batch.
  config.train.on_bad_loss = 'stop'
  config.train.most_bad_losses = 10  # after which the run stops in any case
  # Of an element of a row; above it, and 100 times what it was, the run warns.
  config.train.largest_element = 1000.0

  config.checkpoint = ConfigDict()
  # Where checkpoints go: a folder, or a URL such as s3://bucket/run; None: a
  # folder of the workdir.
  config.checkpoint.path = placeholder(str)
  # Rows that one has: 'consecutive', those changed since the one before;
  # 'one_shot', since the base; 'intermittent', likewise, with a new base where
  # that costs less; 'full', all that took a step.
  config.checkpoint.policy = 'consecutive'
  config.checkpoint.keep = 2  # that can be restored
  # Host memory for rows that change before they are written: once it is spent,
  # steps wait.
  config.checkpoint.memory_bytes = 1 << 28
  # Increments become a base, in the background, once they are so many times as
  # large as theirs; 0: never.
  config.checkpoint.consolidate = 1.0
  # Of the rows: 'raw'; or 'int8', 'int4', 'int3' or 'int2', smaller, but no run
  # goes on from them.
  config.checkpoint.codec = 'raw'
  # Where one cannot be written: 'stop'; or 'warn', and the next one catches up.
  config.checkpoint.on_error = 'stop'
  config.checkpoint.grace_seconds = 300.0  # to save in, once asked to end

  config.eval = ConfigDict()
  config.eval.batch_size = 8192  # examples scored at once
  # Of packed data, 'test'; or 'validation', to tune on.
  config.eval.split = 'test'
  # Steps between points of the learning curve; 0: none.
  config.eval.curve_steps = 250
  config.eval.curve_examples = 1 << 15  # that are scored for a point

  config.log_steps = 20  # steps that a line of the metrics sums up
  # Whether a trace of some steps is written to the workdir, for JAX's profiler.
  config.profile = False


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
