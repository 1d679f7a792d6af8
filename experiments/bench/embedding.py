"""Compares training of embeddings alone with PyTorch and FBGEMM.

    python -m experiments.bench.embedding [--dims=16,64,128] [--lookups=1,20]

26 tables have the sizes of Criteo Kaggle's, cut to `--most_rows`. Ids follow
Zipf's law with exponent 1.05. The model is a linear layer over the pooled
embeddings, so nearly all time goes into embeddings. All contenders train on the
same batches in turns. A ratio is examples/s over those of the faster peer.
PyTorch has no row-wise Adagrad.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from absl import flags

from experiments.bench import runner

flags.DEFINE_list('dims', ['16', '64', '128'], 'D of the rows.')
flags.DEFINE_list('lookups', ['1', '20'], 'Lookups of a bag.')
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


class Asked(NamedTuple):
  """The program's flags."""

  dims: Sequence[str]
  lookups: Sequence[str]
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
  yield 'setting', facts
  for optimizer in asked.optimizers:
    lines: list[dict[str, Any]] = []
    for lookups in map(int, asked.lookups):
      rows, batches = _examples(asked, lookups)
      for dim in map(int, asked.dims):
        lines += _speeds(asked, optimizer, rows, batches, dim, bar)
    yield f'examples/s with {optimizer}', lines


def _speeds(
  asked: Asked,
  optimizer: str,
  rows: tuple[int, ...],
  batches: Sequence[Any],
  dim: int,
  bar: Any,
) -> Iterator[dict[str, Any]]:
  """Yields examples/s of each contender, and the ratio to the faster peer's.

  They are of the median turn and of the best one, on which other work of the
  machine has the least effect.
  """
  import ml_collections
  import numpy as np

  from experiments.bench import baselines
  from experiments.bench.contest import Contest, Turn
  from slipstream_jax.training.trainer_parts import TrainerParts

  ours = _trainers(optimizer, rows, batches, dim)
  contenders: dict[str, TrainerParts | Turn] = {**ours}
  for name in baselines.LINEAR:
    same = name.endswith('rowwise_adagrad') == (optimizer == 'rowwise_adagrad')
    if same and baselines.absent(name) is None:
      peer = baselines.linear(name, rows, dim, _RATE)
      contenders[name] = baselines.turn_of(peer, batches)
  size, lookups = len(batches[0].labels), batches[0].lookups[0].size
  config = {
    'prefetch_batches': 2,
    'workers': None,
    'data': {'batch_size': size},
  }
  # Ours prepares some batches between its turns, so turns must not be short.
  steps = max(12, asked.steps * len(rows) // lookups)
  unused: Any = None
  contest = Contest(
    ml_collections.ConfigDict(config),
    unused,
    batches,
    asked.rounds,
    steps,
    bar,
  )
  phase = f'{optimizer}, {lookups // len(rows)} lookups, D = {dim}'
  seconds = contest.seconds(phase, contenders)
  peers = [turns for name, turns in seconds.items() if name not in ours]
  for name, turns in seconds.items():
    line = {'lookups': lookups // len(rows), 'dim': dim, 'who': name}
    for choose, title in ((np.median, 'median'), (np.min, 'best turn')):
      own = choose(turns)
      line[title] = steps * size / own
      if peers:
        line[f'{title}, ratio'] = min(map(choose, peers)) / own
    yield line


def _trainers(
  optimizer: str, rows: tuple[int, ...], batches: Sequence[Any], dim: int
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
  length = batches[0].lookups[0].size // len(rows)
  tables = {f't{i}': Table(size, dim) for i, size in enumerate(rows)}
  features = {name: Feature(name, max_length=length) for name in tables}
  recipe = Recipe(
    _linear(),
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
    name: make_parts(recipe, placement, 0, hot=hot)
    for name, placement in placements.items()
  }


def _examples(asked: Asked, lookups: int) -> tuple[tuple[int, ...], list[Any]]:
  """Returns rows of the tables, and batches with bags of some lookups."""
  import numpy as np

  from experiments.bench.vocabulary import zipf
  from slipstream_jax.synthetic.spec import KAGGLE_ROWS
  from slipstream_jax.tables import offsets
  from slipstream_jax.types import Batch

  rows = tuple(min(size, asked.most_rows) for size in KAGGLE_ROWS)
  size, rng = asked.batch, np.random.default_rng(0)
  batches = []
  for _ in range(_BATCHES):
    ids = [zipf(rng, most, size * lookups) for most in rows]
    columns = np.array(ids, np.int32) + offsets(rows)[:-1, None]
    columns = columns.reshape(len(rows), size, lookups).transpose(1, 0, 2)
    shape = (size, len(rows), lookups)[: 2 + (lookups > 1)]
    batches.append(
      Batch(
        np.zeros((size, 0), np.float32),
        columns.reshape(shape).astype(np.int32),
        (rng.random(size) < 0.3).astype(np.float32),
        np.ones(size, np.float32),
      )
    )
  return rows, batches


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
