"""Compares training of embeddings alone with PyTorch and FBGEMM.

    python -m experiments.bench.embedding [--dims=16,64,128] [--lookups=1,20]
    python -m experiments.bench.embedding --lookups=mlperf [--model=dcn]

26 tables have the sizes of Criteo Kaggle's, cut to `--most_rows`. Ids follow
Zipf's law with exponent 1.05. The model is a linear layer over the pooled
embeddings, so nearly all time goes into embeddings. All contenders train on the
same batches in turns. A ratio is examples/s over those of the faster peer.
PyTorch has no row-wise Adagrad. `of copy rate` is the share of this machine's
memory bandwidth that a step would need to read and write each of its rows once.

`mlperf` lookups have the bags of MLPerf's DLRM-DCNv2, 1 to 100 lookups long,
which `nn.EmbeddingBag` sits out. `--model=dcn` also has its dense layers, which
need `--dims=128`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from absl import flags

from experiments.bench import runner

flags.DEFINE_list('dims', ['16', '64', '128'], 'D of the rows.')
flags.DEFINE_list('lookups', ['1', '20'], 'Lookups of a bag, or mlperf.')
flags.DEFINE_enum('model', 'linear', ['linear', 'dcn'], 'Layers over the bags.')
flags.DEFINE_list(
  'optimizers', ['sgd', 'rowwise_adagrad'], 'Optimizers of the rows.'
)
flags.DEFINE_integer('batch', 2048, 'Examples of a batch.')
flags.DEFINE_integer('most_rows', 100_000, 'Most rows of a table.')
flags.DEFINE_integer(
  'rounds', 8, 'Turns that each contender takes.', lower_bound=1
)
flags.DEFINE_integer(
  'steps', 60, 'Steps of a turn with bags of one lookup.', lower_bound=3
)
_BATCHES = 16  # premade
_RATE = 0.01
_MLPERF: tuple[int, ...] = (
  *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1),
  *(6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)
"""Lookups of each bag of MLPerf's DLRM-DCNv2."""


class Asked(NamedTuple):
  """The program's flags."""

  dims: Sequence[str]
  lookups: Sequence[str]
  model: str
  optimizers: Sequence[str]
  batch: int
  most_rows: int
  rounds: int
  steps: int


def bench(bar: Any, **flags_: Any) -> Iterator[runner.Item]:
  """Yields the setting, and a table for each optimizer."""
  from experiments.bench import baselines
  from experiments.common import cli, machine
  from slipstream_jax.engine.buffers import reuse_host_memory

  asked = Asked(**flags_)
  reuse_host_memory()
  facts = {**machine.here(cli.again()), 'batch_size': asked.batch}
  for name in baselines.LINEAR:
    facts[f'without {name}'] = baselines.absent(name)
  copy_rate = _copy_rate()
  facts['copy_gb_per_s'] = copy_rate / 1e9
  yield 'setting', facts
  for optimizer in asked.optimizers:
    lines: list[dict[str, Any]] = []
    for lookups in asked.lookups:
      for dim in map(int, asked.dims):
        for line in _speeds(asked, optimizer, lookups, dim, bar):
          needed = line.pop('bytes') * line['best turn'] / asked.batch
          lines.append({**line, 'of copy rate': needed / copy_rate})
    yield f'examples/s with {optimizer}', lines


def _speeds(
  asked: Asked,
  optimizer: str,
  lookups: str,
  dim: int,
  bar: Any,
) -> Iterator[dict[str, Any]]:
  """Yields examples/s of each contender, and the ratio to the faster peer's.

  They are of the median turn and of the best one, on which other work of the
  machine has the least effect. `bytes` are those of a step's rows, twice.
  """
  import ml_collections
  import numpy as np

  from experiments.bench import baselines
  from experiments.bench.contest import Contest, Turn
  from slipstream_jax.training.trainer_parts import TrainerParts

  lengths = _MLPERF
  if lookups != 'mlperf':
    lengths = (int(lookups),) * len(_MLPERF)
  rows, batches = _examples(asked, lengths)
  ours = _trainers(asked.model, optimizer, rows, lengths, batches, dim)
  contenders: dict[str, TrainerParts | Turn] = {**ours}
  for name in baselines.LINEAR:
    same = name.endswith('rowwise_adagrad') == (optimizer == 'rowwise_adagrad')
    same = same and (name != 'embedding_bag' or lookups != 'mlperf')
    if same and baselines.absent(name) is None:
      make = baselines.dcn if asked.model == 'dcn' else baselines.linear
      peer = make(name, rows, dim, _RATE, lengths)
      contenders[name] = baselines.turn_of(peer, batches)
  size = asked.batch
  config = {
    'prefetch_batches': 2,
    'workers': None,
    'data': {'batch_size': size},
  }
  # Ours prepares some batches between its turns, so turns must not be short.
  steps = max(12, asked.steps * len(rows) // sum(lengths))
  unused: Any = None
  contest = Contest(
    ml_collections.ConfigDict(config),
    unused,
    batches,
    asked.rounds,
    steps,
    bar,
  )
  phase = f'{optimizer}, {lookups} lookups, D = {dim}'
  seconds = contest.seconds(phase, contenders)
  peers = [turns for name, turns in seconds.items() if name not in ours]
  unique = np.mean([len(np.unique(batch.lookups)) for batch in batches])
  nbytes = 2 * 4 * dim * float(unique)
  for name, turns in seconds.items():
    line: dict[str, Any] = {'lookups': lookups, 'dim': dim, 'who': name}
    line['bytes'] = nbytes
    for choose, title in ((np.median, 'median'), (np.min, 'best turn')):
      own = choose(turns)
      line[title] = steps * size / own
      if peers:
        line[f'{title}, ratio'] = min(map(choose, peers)) / own
    yield line


def _trainers(
  model: str,
  optimizer: str,
  rows: tuple[int, ...],
  lengths: tuple[int, ...],
  batches: Sequence[Any],
  dim: int,
) -> dict[str, Any]:
  """Returns a trainer for each placement, by name."""
  import numpy as np
  import optax

  from slipstream_jax.placement import cached
  from slipstream_jax.selection.hot import hot_rows
  from slipstream_jax.tables import Feature, Table, TableSet
  from slipstream_jax.training.recipe import Recipe
  from slipstream_jax.training.trainer_parts import make_parts
  from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS

  number = sum(rows)
  tables = {f't{i}': Table(size, dim) for i, size in enumerate(rows)}
  features = {
    name: Feature(name, max_length=length)
    for name, length in zip(tables, lengths, strict=True)
  }
  recipe = Recipe(
    _dcn() if model == 'dcn' else _linear(),
    TableSet(tables, features),
    ROW_OPTIMIZERS[optimizer](_RATE),
    optax.sgd(_RATE),
  )
  lookups = np.concatenate([batch.lookups.ravel() for batch in batches])
  uses = np.bincount(lookups, minlength=number)
  hot = hot_rows(np.argsort(-uses, kind='stable')[: number // 10], number)
  placements: dict[str, Any] = {
    'resident': 'resident',
    'pinned 10 %': 'pinned',
    'cached 10 %': cached(number // 10),
    'cached 1 %': cached(number // 100),
    'streamed': 'streamed',
  }
  return {
    name: make_parts(recipe, placement, batches[0].dense.shape[1], hot=hot)
    for name, placement in placements.items()
  }


def _examples(
  asked: Asked, lengths: tuple[int, ...]
) -> tuple[tuple[int, ...], list[Any]]:
  """Returns rows of the tables, and batches with bags of these lengths."""
  import numpy as np

  from experiments.bench.vocabulary import zipf
  from slipstream_jax.synthetic.spec import KAGGLE_ROWS
  from slipstream_jax.tables import offsets
  from slipstream_jax.types import Batch

  rows = tuple(min(size, asked.most_rows) for size in KAGGLE_ROWS)
  size, rng = asked.batch, np.random.default_rng(0)
  batches = []
  for _ in range(_BATCHES):
    ids = [
      zipf(rng, most, size * length).reshape(size, length) + start
      for most, length, start in zip(rows, lengths, offsets(rows), strict=False)
    ]
    columns = np.concatenate(ids, axis=1).astype(np.int32)
    if len({*lengths}) == 1 < lengths[0]:
      columns = columns.reshape(size, len(rows), lengths[0])
    dense = 13 if asked.model == 'dcn' else 0
    batches.append(
      Batch(
        np.ones((size, dense), np.float32),
        columns,
        (rng.random(size) < 0.3).astype(np.float32),
        np.ones(size, np.float32),
      )
    )
  return rows, batches


def _copy_rate() -> float:
  """Returns the bytes/s that copies read and write, with a thread per core."""
  from concurrent.futures import ThreadPoolExecutor
  import os

  import numpy as np

  from experiments.bench.contest import seconds_of

  count = os.cpu_count() or 1
  pairs = np.zeros((count, 2, 1 << 27), np.uint8)
  with ThreadPoolExecutor(count) as pool:

    def copy() -> None:
      [*pool.map(lambda pair: np.copyto(*pair), pairs)]

    seconds = min(seconds_of(copy) for _ in range(8))
  return pairs.nbytes / seconds


def _dcn() -> Any:
  """Returns the dense layers of MLPerf's DLRM-DCNv2, with low-rank crosses."""
  from experiments.bench import baselines
  import slipstream_jax as slip

  return slip.DCN(
    bottom=baselines.DCN_BOTTOM,
    top=baselines.DCN_TOP,
    crosses=baselines.DCN_CROSSES,
    rank=baselines.DCN_RANK,
  )


def _linear() -> Any:
  """Returns a model of one linear layer over all embeddings."""
  import jax.numpy as jnp

  from slipstream_jax.models.adapters import Functions
  from slipstream_jax.models.embedding import stacked

  def whole(embeddings: Any) -> Any:
    x = stacked(embeddings, 'linear')
    return x.reshape(len(x), -1)

  def init(key: Any, embeddings: Any) -> Any:
    del key
    return jnp.zeros(whole(embeddings).shape[1]), jnp.zeros(())

  def apply(params: Any, embeddings: Any) -> Any:
    return whole(embeddings) @ params[0] + params[1]

  return Functions(init, apply)


if __name__ == '__main__':
  runner.run(bench, 'none')
