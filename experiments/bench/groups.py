r"""Examples/s of tables in two groups beside the same tables in one.

    python -m experiments.bench.groups --config=configs/criteo.py [--rounds=8]

Every other table gets an optimizer of its own, the very chain of the others: so
the two groups have half the features each, and the sums are the same.
"""

import contextlib
import functools
import itertools

from absl import flags
import ml_collections

from experiments.bench import contest
from experiments.common import build, cli, datasets, errors, report
from experiments.common.progress import Bar
from slipstream_jax.tables import TableSet
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import planned

_ROUNDS = flags.DEFINE_integer(
  'rounds', 8, 'Turns that each contender takes.', lower_bound=1
)
_STEPS = flags.DEFINE_integer('steps', 25, 'Steps of one turn.', lower_bound=3)
_BATCHES = 300  # premade


def main(config: ml_collections.ConfigDict) -> None:
  """Measures and prints."""
  errors.check(config)
  screen = report.console()
  config.skip.mode = 'off'  # every batch costs the same
  data = datasets.dataset(config)
  source = data.train(config.data.batch_size)
  batches = list(itertools.islice(source, _BATCHES))
  source.close()
  with Bar(screen, None, 'turn', 'groups') as bar:
    contenders = contest.Contest(
      config, data, batches, _ROUNDS.value, _STEPS.value, bar
    )
    speed = compared(contenders)
  one, two = speed['one group'], speed['two groups']
  screen.print(
    f'{data.name}\none group: {one:,.0f} examples/s, two groups: {two:,.0f},'
    f' {two / one:.3f} of it',
    highlight=False,
  )


def compared(contenders: contest.Contest) -> dict[str, float]:
  """Examples/s of one group and of two, in alternation."""
  config, data = contenders.config, contenders.data
  recipe = build.recipe(config, data, steps=1 << 20)
  tables = {'one group': recipe.tables, 'two groups': in_two_groups(recipe)}
  turns: dict[str, contest.Turn] = {}
  with contextlib.ExitStack() as opened:
    for name, chosen in tables.items():
      trainer = contest.trainer_of(config, data, tables=chosen)
      source = contest.Replay(contenders.batches)
      stream = planned(trainer, source, config.prefetch_batches, config.workers)
      opened.enter_context(stream)
      turns[name] = functools.partial(contest.turn_of, trainer, stream)
    return contest.alternate(contenders, turns, 'groups')


def in_two_groups(recipe: Recipe) -> TableSet:
  """The recipe's tables, every other one with its chain as its own."""
  tables = recipe.tables
  own = {
    name: table._replace(optimizer=recipe.row_optimizer) if i % 2 else table
    for i, (name, table) in enumerate(tables.tables.items())
  }
  return TableSet(own, tables.features)


if __name__ == '__main__':
  cli.run(main)
