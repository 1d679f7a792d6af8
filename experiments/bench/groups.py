"""Compares tables in two groups with the same tables in one.

    python -m experiments.bench.groups --config=configs/criteo.py [--rounds=8]

Every other table gets an optimizer of its own, which is the same chain as that
of the others. So each of the two groups has half the features, and the sums are
the same.
"""

from collections.abc import Iterator
from typing import Any

from absl import flags
import ml_collections

from experiments.bench import runner

_ROUNDS = flags.DEFINE_integer(
  'rounds', 8, 'Turns that each contender takes.', lower_bound=1
)
_STEPS = flags.DEFINE_integer('steps', 25, 'Steps of one turn.', lower_bound=3)
_BATCHES = 300  # premade


def bench(config: ml_collections.ConfigDict, bar: Any) -> Iterator[runner.Item]:
  """Yields the examples/s of both."""
  from experiments.bench.contest import Contest, premade, trainer_of
  from experiments.common import build, datasets
  from slipstream_jax.tables import TableSet

  data = datasets.dataset(config)
  batches = premade(config, data, _BATCHES)
  recipe = build.recipe(config, data, steps=1 << 20)
  own = {
    name: table._replace(optimizer=recipe.row_optimizer) if i % 2 else table
    for i, (name, table) in enumerate(recipe.tables.tables.items())
  }
  two = TableSet(own, recipe.tables.features)
  contest = Contest(config, data, batches, _ROUNDS.value, _STEPS.value, bar)
  speeds = contest.speeds(
    'groups',
    {
      'one group': trainer_of(config, data),
      'two groups': trainer_of(config, data, tables=two),
    },
  )
  ratio = speeds['two groups'] / speeds['one group']
  yield 'examples/s', {'data': data.name, **speeds, 'ratio two to one': ratio}


if __name__ == '__main__':
  runner.run(bench)
