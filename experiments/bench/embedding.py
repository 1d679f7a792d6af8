"""Compares training of embeddings alone with PyTorch and FBGEMM.

    python -m experiments.bench.embedding [--dims=16,64,128] [--lookups=1,20]

26 tables with the sizes of Criteo Kaggle's, cut to `--most_rows`. Ids follow
Zipf's law with exponent 1.05. The model is a linear layer over the pooled
embeddings, so hardly anything but embeddings takes time. All contenders train
on the same batches in turns. A ratio is examples/s over those of the faster
peer.
"""

from collections.abc import Iterator
from typing import Any

from absl import flags

from experiments.bench import runner

_DIMS = flags.DEFINE_list('dims', ['16', '64', '128'], 'D of the rows.')
_LOOKUPS = flags.DEFINE_list('lookups', ['1', '20'], 'Lookups of a bag.')
_OPTIMIZERS = flags.DEFINE_list(
  'optimizers', ['sgd', 'rowwise_adagrad'], 'Optimizers of the rows.'
)
_BATCH = flags.DEFINE_integer('batch', 2048, 'Examples of a batch.')
_MOST_ROWS = flags.DEFINE_integer('most_rows', 100_000, 'Most rows of a table.')
_ROUNDS = flags.DEFINE_integer(
  'rounds', 8, 'Turns that each contender takes.', lower_bound=1
)
_SECONDS = flags.DEFINE_float('seconds', 1.0, 'Seconds of one turn, about.')
_BATCHES = 16  # premade
_RATE = 0.01


def bench(bar: Any) -> Iterator[runner.Item]:
  """Yields the setting, and a table for each optimizer."""
  from experiments.bench import baselines
  from experiments.common import cli, machine
  from slipstream_jax.engine.buffers import reuse_host_memory

  reuse_host_memory()
  facts = {**machine.here(cli.again()), 'batch_size': _BATCH.value}
  for name in baselines.LINEAR:
    facts[f'without {name}'] = baselines.absent(name)
  yield 'setting', facts
  for optimizer in _OPTIMIZERS.value:
    yield (
      f'examples/s with {optimizer}',
      [
        figures(optimizer, int(lookups), int(dim), bar)
        for lookups in _LOOKUPS.value
        for dim in _DIMS.value
      ],
    )


def figures(optimizer: str, lookups: int, dim: int, bar: Any) -> dict[str, Any]:
  """Returns the examples/s of all contenders, and ratios to the best peer."""
  import ml_collections
  import numpy as np
  import optax

  from experiments.bench import baselines
  from experiments.bench.contest import Contest, TrainerParts, Turn
  from slipstream_jax.placement import cached
  from slipstream_jax.selection.hot import hot_rows
  from slipstream_jax.synthetic.spec import KAGGLE_ROWS
  from slipstream_jax.tables import Feature, Table, TableSet
  from slipstream_jax.training.recipe import Recipe
  from slipstream_jax.training.trainer_parts import make_parts
  from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS

  rows = tuple(min(size, _MOST_ROWS.value) for size in KAGGLE_ROWS)
  batches = _batches(rows, lookups)
  tables = TableSet(
    {f't{i}': Table(size, dim) for i, size in enumerate(rows)},
    {f't{i}': Feature(f't{i}', max_length=lookups) for i in range(len(rows))},
  )
  recipe = Recipe(
    _linear(),
    tables,
    ROW_OPTIMIZERS[optimizer](_RATE),
    optax.sgd(_RATE),
  )
  uses = np.zeros(sum(rows), np.int64)
  for batch in batches:
    np.add.at(uses, batch.lookups.ravel(), 1)
  popular = np.argsort(-uses, kind='stable')
  tenth, hundredth = len(popular) // 10, len(popular) // 100
  hot = hot_rows(popular[:tenth], len(popular))
  placements: dict[str, Any] = {
    'resident': 'resident',
    'pinned 10 %': 'pinned',
    'cached 10 %': cached(tenth),
    'cached 1 %': cached(hundredth),
    'streamed': 'streamed',
  }
  contenders: dict[str, TrainerParts | Turn] = {
    name: make_parts(recipe, placement, 0, hot=hot)
    for name, placement in placements.items()
  }
  for name in baselines.LINEAR:
    same = name.endswith('rowwise_adagrad') == (optimizer == 'rowwise_adagrad')
    if same and baselines.absent(name) is None:
      peer = baselines.linear(name, rows, dim, _RATE)
      contenders[name] = baselines.turn_of(peer, batches)
  config = ml_collections.ConfigDict(
    {
      'prefetch_batches': 2,
      'workers': None,
      'data': {'batch_size': _BATCH.value},
    }
  )
  data: Any = None
  steps = max(3, int(_SECONDS.value * 200_000 / _BATCH.value / lookups))
  contest = Contest(config, data, batches, _ROUNDS.value, steps, bar)
  speeds = contest.speeds(f'{optimizer}, {lookups} x {dim}', contenders)
  best = max((speeds[n] for n in baselines.LINEAR if n in speeds), default=None)
  found = {'lookups': lookups, 'dim': dim, **speeds}
  if best is not None:
    found |= {f'{name}, ratio': speeds[name] / best for name in placements}
  return found


def _batches(rows: tuple[int, ...], lookups: int) -> list[Any]:
  import numpy as np

  from experiments.bench.rows import zipf
  from slipstream_jax.tables import offsets
  from slipstream_jax.types import Batch

  size, rng = _BATCH.value, np.random.default_rng(0)
  batches = []
  for _ in range(_BATCHES):
    ids = [zipf(rng, most, size * lookups) for most in rows]
    columns = np.array(ids) + offsets(rows)[:-1, None]
    columns = columns.reshape(len(rows), size, lookups).transpose(1, 0, 2)
    shape = (size, len(rows), lookups)[: 2 + (lookups > 1)]
    batches.append(
      Batch(
        np.zeros((size, 0), np.float32),
        np.ascontiguousarray(columns, np.int32).reshape(shape),
        (rng.random(size) < 0.3).astype(np.float32),
        np.ones(size, np.float32),
      )
    )
  return batches


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
