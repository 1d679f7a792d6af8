"""Laws of tables of any mix: placement changes no number of any group."""

import contextlib
import os
import tempfile
from typing import NamedTuple

from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.data.numbered import ColumnBatches, Columns
from slipstream_jax.data.source import SourceWrapper
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import (
  make_parts,
  planned,
  slipstream,
)
from tests.fuzz.cases import PLACED
from tests.fuzz.worlds import OPTIMIZERS, recipe, tables, World, WORLDS
from tests.support.small import assert_same_bits

EXAMPLES = int(os.environ.get('FUZZ_EXAMPLES', '3'))  # all are compiled
MIXED = [world for world in WORLDS.values() if world.is_mixed]
BATCHES, STEPS = 14, 18


class Mix(NamedTuple):
  """A world, how it is trained, and where its rows are."""

  world: World
  placements: tuple[str, ...]
  capacities: tuple[int, ...]
  look_ahead: int
  mode: str
  seed: int
  hot_share: float
  depth: int
  restored_at: int | None
  fresh: bool
  """Whether rows get other ids now and then."""


class Renewing(SourceWrapper):
  """A source whose batches bring rows that got another id."""

  def __init__(self, source, num_rows, seed):
    super().__init__(source)
    self.num_rows, self.seed = num_rows, seed

  def __next__(self):
    rng = np.random.default_rng((self.seed, self.get_state()['delivered']))
    batch = super().__next__()
    if rng.random() < 0.4:
      return batch
    # Some that the batch looks up, which a new id is, and some others.
    used = rng.choice(batch.lookups.ravel(), 2)
    others = rng.integers(0, self.num_rows, rng.integers(0, 3))
    return batch._replace(fresh=np.append(used[used >= 0], others))


@st.composite
def worlds(draw):
  """Any tables and features."""
  names = list('abcd'[: draw(st.integers(1, 4))])
  made = {
    name: slip.Table(
      draw(st.sampled_from([1, 2, 9, 40])),
      draw(st.sampled_from([1, 2, 3, 16, 128])),
      draw(st.sampled_from(['float32', 'float32', 'bfloat16', 'float16'])),
      optimizer=draw(st.sampled_from([None, None, *OPTIMIZERS])),
    )
    for name in names
  }
  owners = draw(st.permutations(names + draw(st.lists(st.sampled_from(names)))))
  features = {
    f'{owner}{number}': slip.Feature(
      owner,
      draw(st.sampled_from(['sum', 'mean', 'sqrtn', 'none'])),
      draw(st.sampled_from([1, 1, 3, 50])),
      draw(st.booleans()),
    )
    for number, owner in enumerate(owners[:6])
  }
  features |= {n: slip.Feature(n) for n in {*names} - {*owners[:6]}}
  optimizer = draw(st.sampled_from(list(OPTIMIZERS)))
  return World(made, features, optimizer, draw(st.integers(0, 2)))


@st.composite
def mixes(draw, world):
  groups = world.groups
  rows = st.sampled_from([1, 3, 20, 200])
  return Mix(
    world,
    tuple(draw(st.sampled_from(PLACED)) for _ in range(groups)),
    tuple(draw(rows) for _ in range(groups)),
    draw(st.integers(0, 2)),
    draw(st.sampled_from(['plain', 'examples', 'rows'])),
    draw(st.integers(0, 2**20)),
    draw(st.sampled_from([0.05, 0.8, 1.0])),
    draw(st.sampled_from([0, 2])),
    draw(st.none() | st.integers(1, STEPS - 1)),
    draw(st.booleans()),
  )


def trained(mix, placements, restored_at=None):
  """All bits and counts after some steps, or the sentence in their place."""
  rng = np.random.default_rng(mix.seed)
  made = recipe(mix.world)
  first, end = made.tables.column_rows
  examples = 4 * BATCHES
  lookups = (rng.random((examples, len(first))) ** 3 * (end - first)).astype(
    int
  )
  lookups = np.where(rng.random(lookups.shape) < 0.2, -1, lookups + first)
  columns = Columns(
    rng.normal(size=(examples, mix.world.dense)).astype(np.float32),
    lookups.reshape(examples, *made.tables.example_shape),
    (rng.random(examples) < 0.4).astype(np.float32),
  )
  if made.tables.is_weighted:
    weights = rng.choice([-1, 0, 0.5, 1, 2], columns.lookups.shape)
    columns = columns._replace(lookup_weights=weights.astype(np.float32))
  rows = made.tables.num_rows
  hot = rng.permutation(rows)[: max(1, int(mix.hot_share * rows))]

  def start():
    chosen = hot_rows(hot, rows)
    trainer = make_parts(
      made, placements, mix.world.dense, seed=mix.seed % 3, hot=chosen
    )
    source = ColumnBatches(columns, 4, shuffle_seed=mix.seed)
    if mix.fresh:
      source = Renewing(source, rows, mix.seed)
    if mix.mode == 'plain':
      return trainer, planned(trainer, source, mix.depth)
    phases = slip.Phases(1, 3, 3, 9, warm_up_again=False)
    policy = slip.POLICIES['stale']
    how = slip.Skip(0.5, policy, mix.mode, phases, 1, 0)
    batches = slipstream(trainer, source, how, 2 * STEPS, mix.depth)
    return trainer, batches

  trainer, batches = start()
  losses = []
  with contextlib.ExitStack() as stack:
    stack.enter_context(batches)
    try:
      if restored_at is not None:
        losses += [r.loss for r in train(trainer, batches, restored_at)]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        checkpoints = stack.enter_context(
          contextlib.closing(Checkpoints(folder))
        )
        step = checkpoints.save(trainer, batches.get_state())
        list(train(trainer, batches, 2))  # lost with the crash
        trainer, batches = start()
        stack.enter_context(batches)
        position = checkpoints.restore(trainer)
        assert position.step == step
        batches.set_state(position.schedule_state)
      left = STEPS - (restored_at or 0)
      losses += [r.loss for r in train(trainer, batches, left)]
    except slip.UserError as error:
      return str(error)
  state = jax.device_get(trainer.state)
  bits = jax.tree.map(np.array, (trainer.engine.read_back(), state))
  counters = trainer.engine.counters
  return bits, losses, counters


def law(mix):
  placements = [
    slip.PLACEMENTS.get(name) or slip.cached(rows, name, mix.look_ahead)
    for name, rows in zip(mix.placements, mix.capacities, strict=True)
  ]
  expected = trained(mix, ['resident'] * mix.world.groups)
  found = trained(mix, placements)
  if isinstance(expected, str):
    assert found == expected
    return
  assert_same_bits(expected[:2], found[:2])
  counted = ('examples_seen', 'examples_trained', 'lookups', 'rows_used')
  for name in (*counted, 'bytes_used'):
    assert getattr(expected[2], name) == getattr(found[2], name)
  if mix.restored_at is not None:
    # What a cache moves is another matter: it starts anew.
    resumed = trained(mix, placements, mix.restored_at)
    assert_same_bits(found[:2], resumed[:2])


few = settings(
  max_examples=8,
  deadline=None,
  suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.parametrize('number', range(len(MIXED)))
@few
@given(data=st.data())
def test_placements_change_no_number_of_a_group(number, data):
  law(data.draw(mixes(MIXED[number])))


@pytest.mark.slow
@settings(few, max_examples=EXAMPLES)
@given(data=st.data())
def test_any_tables_under_any_placements(data):
  law(data.draw(mixes(data.draw(worlds()))))


def test_one_placement_is_given_by_name_for_each_table():
  world = WORLDS['shared']
  made = tables(world)
  given_ = {'user': 'streamed', 'item': 'resident', 'country': 'streamed'}
  trainer = make_parts(recipe(world), given_, world.dense)
  assert [p.name for p in trainer.engine.placements] == ['streamed', 'resident']
  assert len(made.groups) == 2
  for wrong, said in (
    ({'user': 'streamed'}, 'must name the tables user, item, country'),
    (given_ | {'user': 'resident'}, 'must have one placement'),
    (given_ | {'item': 'cached'}, 'a cache needs a capacity'),
    (given_ | {'item': 'moon'}, 'must be one of resident, streamed, pinned'),
    (['streamed'] * 3, r'each of the groups user, country \| item'),
    (3, 'placement must be one|parameter .placement'),
  ):
    with pytest.raises(Exception, match=said):
      make_parts(recipe(world), wrong, world.dense)
