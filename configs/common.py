"""Adds to a config the sections that all configs share.

Sections come in the order in which a run needs them: data, model, optimizers,
hot rows and skipping, placement and training.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

Chain = tuple[tuple[str, dict[str, Any]], ...]
"""Names of optimizers or transformations with their arguments, in order."""


def start(variant: str, variants: tuple[str, ...]) -> ConfigDict:
  """Returns a config without sections.

  Raises:
    ValueError: there is no such variant.
  """
  if variant not in variants:
    raise ValueError(f'variant must be one of {variants}, got {variant!r}')
  config = ConfigDict()
  config.seed = 0  # seed of data order, model, rows and skipping
  config.resume = False  # continue the run in --workdir
  return config


def files(
  config: ConfigDict,
  format: str | None,
  batch_size: int,
  source: str | None = None,
) -> None:
  """Adds section `data`: raw files, a packed folder, or a function.

  Args:
    config: the config.
    format: format of raw files. None if a function makes the data.
    batch_size: examples of a step.
    source: the function that makes the data, 'my_package.my_module:function'.
  """
  data = config.data = ConfigDict()
  # 'my_package.my_module:function' that makes a Dataset of the config. It
  # replaces all keys below but the batch size.
  data.source = placeholder(str) if source is None else source
  data.path = placeholder(str)  # a raw file, or a packed folder
  data.raw = placeholder(str)  # what experiments.prepare packs into the path
  # Format of raw files: 'criteo', 'terabyte', 'avazu', 'taobao', 'movielens'
  # or 'tfds'.
  data.format = placeholder(str) if format is None else format
  data.bad_lines = 0  # malformed lines of raw files that may be skipped
  # Share of the examples to test on, from the end. None: the format's split.
  data.test_share = placeholder(float)
  data.min_count = 1  # ids with fewer examples share one row
  data.hash_rows = placeholder(int)  # most rows of a table; None: no hashing
  data.batch_size = batch_size  # examples of a step
  data.shuffle = True  # shuffles training examples in each epoch


def synthetic(config: ConfigDict, proxy: str) -> None:
  """Adds to `data` the synthetic proxy that is used without a path."""
  data = config.data
  # Synthetic clicks, used without a path: 'kaggle', 'terabyte', 'avazu',
  # 'taobao', 'movielens', or 'planted', whose signal is in products of fields.
  data.proxy = proxy
  data.proxy_seed = placeholder(int)  # seed of the proxy. None: config.seed
  data.rows = placeholder(tuple)  # rows of each table of the proxy
  data.test_examples = 1 << 18  # test examples of the proxy
  data.drift_examples = 0  # examples until hot ids become rare; 0: never
  data.saturation = 0.0  # above 0, popular rows carry more of the signal


def model(config: ConfigDict, name: str, dim: int, **sizes: Any) -> None:
  """Adds section `model`. `sizes` are more keys, for a model of the user's."""
  model = config.model = ConfigDict()
  # 'dlrm', 'dcn', 'deepfm', 'wide_deep', 'dhen', 'dmt', 'tbsm', 'sasrec',
  # 'hstu', 'two_tower', or 'my_package.my_module:function' that makes a model
  # of this section.
  model.name = name
  model.dim = dim  # elements of a row
  # Normalization of the input of top: 'none', 'layer' or 'batch'.
  model.normalization = 'none'
  # Dtype of matrix products, summed in float32: 'float32' or 'bfloat16'.
  model.compute_dtype = 'float32'
  # Dtype of rows: 'float32', or 'bfloat16' or 'float16' with stochastic
  # rounding.
  model.table_dtype = 'float32'
  # Pooling of lists of ids: 'sum', 'mean', 'sqrtn', or 'none', which keeps
  # sequences. None: as the data set says.
  model.pooling = placeholder(str)
  # Rows start uniform in [-x, x]. None: x is 1/sqrt(rows of the table).
  model.init_scale = placeholder(float)
  model.update(sizes)


def dlrm(
  config: ConfigDict,
  dim: int,
  bottom: tuple[int, ...],
  top: tuple[int, ...],
  first_order: bool = False,
) -> None:
  """Adds section `model` of a DLRM."""
  model(config, 'dlrm', dim)
  # Dim of each table, at most model.dim. Narrower rows end in zeros where they
  # interact. None: model.dim for all.
  config.model.dims = placeholder(tuple)
  config.model.bottom = bottom  # widths of the layers over the dense features
  # Widths of the layers over the interactions, without the last, of width 1.
  config.model.top = top
  # Adds a weight for each row, as in a factorization machine.
  config.model.first_order = first_order
  # Of a DMT, the features of each tower, by their place, as
  # `experiments.towers` finds them.
  config.model.towers = placeholder(tuple)
  # Elements of a vector that its towers return. None: as those that interact.
  config.model.width = placeholder(int)
  config.model.form = 'linear'  # of its towers: 'linear', 'cross', 'identity'


ZOO = ('dcn', 'deepfm', 'wide_deep', 'dhen')
"""Models that `another_model` puts in the place of a DLRM."""
SEQUENCES = ('sasrec', 'hstu')
"""Models that it puts in the place of a TBSM, or of two towers."""


def towers(config: ConfigDict, towers: tuple[tuple[int, ...], ...]) -> None:
  """Replaces a DLRM by a DMT, whose vectors are half as wide as rows."""
  config.model.name = 'dmt'
  config.model.towers = towers
  config.model.width = config.model.dim // 2


def another_model(config: ConfigDict, name: str) -> None:
  """Replaces the model of a config by another one on the same data.

  One of `ZOO` gets the widths of a DLRM. Embeddings keep their width, so that
  rows of a model that has a weight for each row become one longer. One of
  `SEQUENCES` gets the dim of a TBSM, or of two towers, whose task it takes.
  """
  model = config.model
  model.name = name
  match name:
    case 'dcn':
      model.crosses = 3  # number of crosses
      model.rank = placeholder(int)  # of their matrices; None: full rank
    case 'deepfm' | 'wide_deep':
      model.dim += not model.first_order
      model.first_order = True
    case 'dhen':
      # Interactions of each layer: names of slipstream_jax.INTERACTIONS.
      model.layers = (('dot', 'linear'), ('dot', 'linear'))
      # Tokens that each layer ends in. None: as many as there are features.
      model.tokens = placeholder(int)
    case 'sasrec' | 'hstu':
      _sequences_instead(config, name)


def _sequences_instead(config: ConfigDict, name: str) -> None:
  """Replaces a TBSM, or two towers, by blocks over a history."""
  before = config.model
  blocks(config, name, before.dim)
  config.model.init_scale = 0.3  # smaller rows give no product a size
  if 'log_q' in before:
    config.data.steps = 50
    config.model.next_item = True
    config.model.top = ()
    config.model.log_q = before.log_q
    if name == 'hstu':
      config.model.times = 2  # the first column of the steps' ages


def tbsm(
  config: ConfigDict,
  dim: int,
  bottom: tuple[int, ...],
  top: tuple[int, ...],
  attention: tuple[int, ...],
  final: tuple[int, ...],
) -> None:
  """Adds section `model` of a TBSM."""
  model(config, 'tbsm', dim)
  config.model.bottom = bottom
  config.model.top = top
  config.model.attention = attention  # widths of the layers over the history
  config.model.final = final  # widths of the layers before the logit


def blocks(config: ConfigDict, name: str, dim: int) -> None:
  """Adds section `model` of a SASRec or HSTU."""
  model(config, name, dim)
  config.model.blocks = 2  # number of blocks over the history
  config.model.heads = 2  # heads of each block; they must divide model.dim
  # First column of the dense features with the steps' times. None: no times.
  config.model.times = placeholder(int)
  # Widths of the layers over state and candidate, without the last, of width 1.
  config.model.top = (64,)
  # Whether it learns which item of the batch comes next, rather than clicks.
  # Then top must be ().
  config.model.next_item = False
  config.model.log_q = placeholder(int)  # as for two towers, of next items


def two_tower(
  config: ConfigDict, dim: int, items: tuple[str, ...], widths: tuple[int, ...]
) -> None:
  """Adds section `model` of a TwoTower."""
  model(config, 'two_tower', dim)
  # Features of the item. All others are of the user.
  config.model.item_features = items
  config.model.widths = widths  # widths of the layers of each tower
  config.model.temperature = 0.1  # divides the cosine of two vectors
  # Column of the dense features with the logarithm of how often the item
  # occurs. None: no correction.
  config.model.log_q = placeholder(int)


def optimizers(
  config: ConfigDict, rows: Chain, dense: Chain, dense_final: float
) -> None:
  """Adds section `optimizer`, for rows and for the model's parameters."""
  optimizer = config.optimizer = ConfigDict()
  # Names and arguments of row optimizers of slipstream_jax, or of optax. The
  # last one may be skip_stale, with a threshold, every and window.
  optimizer.rows = rows
  # The same for the model's parameters, of optax, or shampoo or muon.
  optimizer.dense = dense
  # Share of the dense learning rate at the end of the data, after a linear
  # decay. 1.0 keeps it constant.
  optimizer.dense_final = dense_final
  # Cycles of the dense learning rate. In each it falls as a cosine, and the
  # checkpoint at the end stays, for an ensemble. 0: one linear fall.
  optimizer.cycles = 0
  optimizer.rows_fall = False  # whether the learning rates of rows fall, too


def hot_rows(config: ConfigDict, bytes: int, profile_examples: int) -> None:
  """Adds section `hot`: popular rows for skipping, pinning and caches."""
  hot = config.hot = ConfigDict()
  hot.bytes = bytes  # device memory for the popular rows
  # Which rows are popular: those with most 'lookups', or, as in FAE, those with
  # the largest 'share' of their table's lookups.
  hot.cut = 'lookups'
  hot.profile_examples = profile_examples  # read first, to find those rows
  # First training batches that are counted instead, as Hotline learns accesses.
  # 0: none.
  hot.learn_batches = 0


def skipping(
  config: ConfigDict,
  policy: str | None = None,
  alpha: int | tuple[int, ...] | None = None,
) -> None:
  """Adds section `skip` without its phases; see `phases`.

  Args:
    config: the config.
    policy: one of `POLICIES`. None: the best that fits the model.
    alpha: stale lookups that make an example stale. None: all of them.
  """
  skip = config.skip = ConfigDict()
  # 'examples' leaves examples out, 'rows' freezes stale rows, 'off'.
  skip.mode = 'examples'
  # Which examples are kept: 'surprise', 'surprise_offset', 'surprise_root',
  # 'local_case_control', 'infobatch_once', 'negatives', 'importance', 'stale',
  # 'stale_revisit', 'stale_negatives', 'stale_importance', 'random' or
  # 'random_weighted'. None: 'surprise_offset' for a model of one logit with the
  # logistic loss, else 'surprise'.
  skip.policy = placeholder(str) if policy is None else policy
  # Share of the examples of skip.drop_of to drop. The word auto, which is
  # experimental, drops as many as skip.auto_cost allows by estimate. A model
  # that learns again after a plateau loses more.
  skip.drop = FieldReference(0.3, field_type=object)
  skip.auto_cost = 0.001  # share of the log loss that auto may lose
  # Model that predicts clicks for policies that need it: 'pairs', 'linear', or
  # 'best', the one of them with the smaller loss on the first 65,536 examples.
  # 'model' takes the model that is trained, which costs a pass per example.
  skip.scorer = 'linear'
  skip.drop_of = 'all'  # skip.drop is a share of 'all' or 'hot' examples
  # Batches between two fits of the policy. 0: one fit in each period.
  skip.refit_batches = 10
  # Whether kept examples are cut into full batches again. False: a step for
  # the kept examples of each batch, so there are as many steps as without.
  # None: False where a pass over the data has fewer than 1,000 batches.
  skip.refill = placeholder(bool)
  # Part of the chance to be kept that is equal for all. None: the policy's.
  skip.uniform = placeholder(float)
  # Share of the run after which nothing is dropped. None: the whole run.
  skip.until = placeholder(float)
  # Stale lookups that make an example stale. None: all of them.
  skip.alpha = placeholder(int) if alpha is None else alpha
  skip.min_touches = 1  # 0: untouched rows are stale, too, as published
  # Rows that change less are stale. None: the value that meets the target.
  skip.threshold = placeholder(float)
  skip.warm_up_again = False  # warms up in each period, as published


def phases(
  config: ConfigDict,
  warm_up: int | None = None,
  window: int | None = None,
  settle: int | None = None,
  period: int | None = None,
) -> None:
  """Adds the phases of `skip`; see slipstream_jax/schedules/phases.py.

  Without lengths they fit the batches in a pass over the data.
  """
  skip = config.skip
  skip.warm_up_batches = placeholder(int)  # batches before the first window
  skip.window_batches = placeholder(int)  # in which changes are measured
  skip.settle_batches = placeholder(int)  # until the result is used
  skip.period_batches = placeholder(int)  # from window to window
  if warm_up is not None:
    skip.warm_up_batches, skip.window_batches = warm_up, window
    skip.settle_batches, skip.period_batches = settle, period


def training(config: ConfigDict) -> None:
  """Adds placement, training, checkpoints, evaluation and logging."""
  # Published system: 'plain', 'cached', 'xdl', 'dlrm_hybrid', 'fae',
  # 'fae_pinned', 'hotline' or 'hotline_micro'. All but 'plain' have their own
  # placement.
  config.system = 'plain'
  # Rows on the device: 'resident', 'streamed', 'swapped', 'pinned' or
  # 'cached'.
  config.placement = 'pinned'
  config.cache = ConfigDict()
  # Rows that a cache keeps on each device. Up to 1 it is a share of all rows.
  config.cache.capacity = 0.01
  # Eviction: 'look_ahead', 'lfu', 'lru' or 'static'.
  config.cache.eviction = 'look_ahead'
  config.cache.look_ahead_batches = 16  # batches that a cache knows ahead
  config.store = ConfigDict()
  # Where rows that are not on the device are kept: in 'memory', in a 'file' on
  # a disk, or 'tiered': on a disk, with the ones used last in memory.
  config.store.kind = 'memory'
  config.store.dram_bytes = 1 << 32  # host memory for tiered rows
  # Tables with room for all their rows in it. The others share the rest.
  config.store.whole = ()
  # Folder for the file of rows, which is removed after the run. None: the
  # system's folder of temporary files.
  config.store.path = placeholder(str)
  config.devices = 1  # devices of all processes that share rows and examples
  config.processes = 1  # as many as `experiments.launch` starts
  # Seconds without a step after which one of several processes ends, as it
  # hangs. 0: never.
  config.hang_seconds = 20.0
  # Equal parts of a batch. The bits of a run depend on them, and not on the
  # number of devices. None: 1 for one device, else 8.
  config.parts = placeholder(int)
  # Devices that have the same rows, such as one of each host. Rows are then
  # exchanged within a host, and only sums of gradients between hosts.
  config.replicas = 1
  # Groups of neighbouring devices, to each of which a row goes once. Those of a
  # DMT have the tables of one tower each, and no row goes between them.
  config.hosts = 1
  # In what devices exchange rows and gradients: 'float32' or 'bfloat16'.
  config.exchange = 'float32'
  config.prefetch_batches = 2  # batches prepared ahead of the step
  # Threads that find unique rows, each of one batch. None: one for each core,
  # at most 8.
  config.workers = placeholder(int)

  config.train = ConfigDict()
  # Batches to read. Skipping makes fewer steps of them. 0: train.epochs passes
  # over the data.
  config.train.steps = 0
  config.train.epochs = 1  # passes over the data
  config.train.endless_steps = 2000  # batches to read of endless data
  config.train.checkpoint_steps = 0  # steps between checkpoints; 0: at the end
  # Whether the last checkpoint stays when the run is finished, to predict and
  # to train longer.
  config.train.keep_checkpoint = True
  # If a loss is not finite: 'stop' the run, 'skip' the step, or 'rollback' to
  # the last checkpoint and leave the batch out.
  config.train.on_bad_loss = 'stop'
  config.train.most_bad_losses = 10  # the run stops after more of them
  # The run warns of larger elements of rows that are 100 times the first.
  config.train.largest_element = 1000.0

  config.checkpoint = ConfigDict()
  # Folder of the checkpoints, or a URL such as s3://bucket/run. None: a folder
  # of the workdir.
  config.checkpoint.path = placeholder(str)
  # Rows in a checkpoint: 'consecutive', changed since the previous checkpoint,
  # 'one_shot', changed since the base, 'intermittent', the same with a new base
  # if that costs less, or 'full', all rows that were ever updated.
  config.checkpoint.policy = 'consecutive'
  config.checkpoint.keep = 2  # checkpoints to keep
  # Host memory for rows that change before they are written. If it is used up,
  # steps wait.
  config.checkpoint.memory_bytes = 1 << 28
  # Increments are merged into a base, in the background, when they are this
  # many times as large as the base. 0: never.
  config.checkpoint.consolidate = 1.0
  # Format of rows: 'raw', or the smaller 'int8', 'int4', 'int3' or 'int2', from
  # which no run can resume.
  config.checkpoint.codec = 'raw'
  # If a checkpoint cannot be written: 'stop', or 'warn' and try the next one.
  config.checkpoint.on_error = 'stop'
  config.checkpoint.grace_seconds = 300.0  # to save after a Ctrl-C or SIGTERM

  config.eval = ConfigDict()
  config.eval.batch_size = 8192  # examples scored at once
  # Held-out split of packed data: 'test', or 'validation' to tune on.
  config.eval.split = 'test'
  # Steps between points of the learning curve; 0: none.
  config.eval.curve_steps = 250
  config.eval.curve_examples = 1 << 15  # examples scored for a point

  config.log_steps = 20  # steps between lines of the metrics
  # Whether to write a trace of some steps into the workdir, for JAX's profiler.
  config.profile = False


def on_large_logs(config: ConfigDict) -> None:
  """Adds all sections after the model, with settings for millions of clicks."""
  optimizers(
    config,
    rows=(('rowwise_adagrad', {'learning_rate': 0.05}),),
    dense=(('adam', {'learning_rate': 1e-3}),),
    dense_final=0.0,
  )
  hot_rows(config, bytes=1 << 28, profile_examples=1 << 21)
  skipping(config)
  phases(config, warm_up=40, window=60, settle=20, period=1000)
  training(config)


def small_model(config: ConfigDict) -> None:
  """Changes a DLRM and its optimizers for 10,000 to a million examples."""
  config.model.dim = 17
  config.model.bottom = (64, 16)
  config.model.top = (64,)
  config.model.first_order = True
  config.model.init_scale = 0.01
  # Gradients are means over the batch: small, and so must the start be.
  start = {'learning_rate': 0.03, 'initial_accumulator_value': 1e-7}
  config.optimizer.rows = (('adagrad', start),)
  config.optimizer.dense = (('adam', {'learning_rate': 3e-3}),)


def sample(config: ConfigDict) -> None:
  """Changes settings for text of about 100,000 lines, without skipping.

  docs/skipping.md has the cost of skipping there.
  """
  config.skip.mode = 'off'
  config.placement = 'streamed'
  phases(config, warm_up=10, window=15, settle=8, period=125)
  config.eval.curve_steps = 50
  config.log_steps = 10


def smoke(config: ConfigDict) -> None:
  """Changes settings for a run of seconds on small synthetic tables."""
  config.data.batch_size = 256
  config.data.test_examples = 4096
  hot_rows(config, bytes=1 << 19, profile_examples=1 << 15)
  phases(config, warm_up=10, window=12, settle=4, period=100)
  config.train.steps = 200
  config.eval.batch_size = 1024
  config.eval.curve_steps = 50
  config.eval.curve_examples = 2048
  config.log_steps = 10
