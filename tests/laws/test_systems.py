"""Laws of every system: what it trains, in which order, and what it moves."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.data.numbered import ColumnBatches, Columns, NumberedBatches
from slipstream_jax.engine.planner import Slices
from slipstream_jax.errors import UserError
from slipstream_jax.initializers import Constant
from slipstream_jax.models.adapters import Functions
from slipstream_jax.placement import cached, PLACEMENTS
from slipstream_jax.schedules.fae import Rate
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.schedules.systems import ROWS, SCHEDULES, System, SYSTEMS
from slipstream_jax.selection.hot import access_counts, hot_rows, popular_rows
from slipstream_jax.tables import Feature, Table, TableSet
from slipstream_jax.training import step as step_module
from slipstream_jax.training.loop import train
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import (
  make_parts,
  scheduled,
  slipstream,
)
from tests.support import small
from tests.support.small import assert_same_bits, everything

SIZE, BATCHES = small.BATCH, 25
COLUMNS = small.columns(SIZE * BATCHES, length=2, seed=4)
HOT = small.hot(COLUMNS, 600)
HELD_OUT = next(ColumnBatches(small.columns(128, length=2, seed=9), 128))
every_system = pytest.mark.parametrize('system', SYSTEMS.values(), ids=SYSTEMS)
PLACES = PLACEMENTS | {
  'cached': cached(150, look_ahead=2),
  None: PLACEMENTS['pinned'],
}


def spec_of(system, held_out=HELD_OUT):
  given = {'fae': (BATCHES, held_out, Rate(40), 2)}
  return SCHEDULES[system.schedule](*given.get(system.schedule, ()))


def trainer_of(system, recipe, dense=small.DENSE, hot=HOT, over=None):
  recipe = recipe._replace(microbatches=system.microbatches)
  where = PLACES[system.placement]
  return make_parts(recipe, where, dense, 3, hot, system.rows, over=over)


def source(columns=COLUMNS):
  return ColumnBatches(columns, SIZE, shuffle_seed=1, epochs=2)


def start(system, skip=None, devices=None):
  over = None if devices is None else Slices(devices, 8)
  trainer = trainer_of(system, small.recipe('adagrad', length=2), over=over)
  spec = spec_of(system)
  if skip is None:
    return trainer, scheduled(trainer, source(), spec, 2)
  batches = slipstream(trainer, source(), skip, regrouping=spec.regrouping)
  return trainer, batches


@functools.cache
def run(name, skip=None):
  """All that is there in the end, losses, counters, and the batches trained."""
  trainer, batches = start(SYSTEMS[name], skip)
  trained, losses = [], []
  with batches:
    while (item := batches.peek()) is not None:
      trained.append(item.scheduled.batch)
      losses += [record.loss for record in train(trainer, batches, 1)]
  return everything(trainer), losses, trainer.engine.counters, trained


def same_order(batches):
  """Plain training, on batches as they come."""
  trainer = trainer_of(
    System('', 'plain', 'streamed'), small.recipe('adagrad', length=2)
  )
  # Batches of a list, whose number is their position.
  given = NumberedBatches(batches.__getitem__, len(batches), 'these', reads='')
  with scheduled(trainer, given, SCHEDULES['plain'](), 2) as planned:
    losses = [record.loss for record in train(trainer, planned, 1000)]
  return everything(trainer), losses


def test_systems_are_named_once_and_made_of_what_there_is():
  assert [system.name for system in SYSTEMS.values()] == list(SYSTEMS)
  of_systems = {system.schedule for system in SYSTEMS.values()}
  assert of_systems | {'slipstream'} == set(SCHEDULES)
  places = {system.placement for system in SYSTEMS.values()}
  assert places <= {None, 'cached', *PLACEMENTS}
  assert {system.rows for system in SYSTEMS.values()} == set(ROWS)


# Every sum is exact: whatever the order of examples, and wherever rows are
# added up, the rows in the end must be the same to the bit.

EXACT_HOT = 40


def exact_recipe():
  features = {
    'one': Feature('a'),
    'sum': Feature('a', 'sum', 4),
    'mean': Feature('b', 'mean', 4),
    'other': Feature('c', 'sum', 2),
  }
  tables = {
    'a': Table(300, 4, initializer=Constant(0.5)),
    'b': Table(50, 4, initializer=Constant(-0.25)),
    'c': Table(200, 8, initializer=Constant(1.0)),
  }
  model = Functions(
    init=lambda key, dense, embeddings: {'w': jnp.zeros(dense.shape[1])},
    apply=lambda params, dense, embeddings: (
      dense @ params['w']
      + sum(  # features in their order, none like another
        e @ 2.0 ** -((jnp.arange(e.shape[1]) + number) % 3)
        for number, e in enumerate(embeddings.values())
      )
    ),
  )
  sgd = optax.sgd(2**-4)
  return Recipe(
    model,
    TableSet(tables, features),
    sgd,
    sgd,
    loss=lambda logits, labels: logits * labels,
  )


def exact_columns(recipe, examples=SIZE * BATCHES - 40, seed=0):
  rng = np.random.default_rng(seed)
  tables, lookups = recipe.tables, []
  for feature in tables.features.values():
    rows = tables.tables[feature.table].rows
    ids = (rng.random((examples, feature.max_length)) ** 4 * rows).astype(int)
    # Bags of 1, 2 or 4, so that to take their mean is exact.
    length = 2 ** rng.integers(0, feature.max_length.bit_length(), examples)
    ids[np.arange(feature.max_length) >= length[:, None]] = -1
    ids[ids >= 0] += tables.first_rows[feature.table]
    lookups.append(ids)
  return Columns(
    rng.integers(-4, 5, (examples, 3)).astype(np.float32) / 4,
    np.concatenate(lookups, axis=1),
    (rng.random(examples) < 0.5).astype(np.float32),
  )


@functools.cache
def exact(name, skips=False):
  recipe = exact_recipe()
  columns, n = exact_columns(recipe), recipe.tables.num_rows
  hot = hot_rows(
    popular_rows(access_counts([columns.lookups], n), EXACT_HOT, 1), n
  )
  system = SYSTEMS[name]
  trainer = trainer_of(system, recipe, dense=3, hot=hot)
  batches = ColumnBatches(columns, SIZE, epochs=2, pad_remainder=True)
  spec = spec_of(system, next(ColumnBatches(columns, SIZE)))
  if skips:
    skip = Skip(0, 'stale', 'examples', Phases(3, 5, 4, 14), threshold=0.0)
    planned = slipstream(trainer, batches, skip, regrouping=spec.regrouping)
  else:
    planned = scheduled(trainer, batches, spec, 2)
  with planned:
    losses = [record.loss for record in train(trainer, planned, 1000)]
  return everything(trainer), losses, trainer.engine.counters


@every_system
@pytest.mark.parametrize('skips', [False, True], ids=['alone', 'slipstream'])
def test_with_exact_sums_all_systems_agree_to_the_bit(system, skips):
  (rows, state), losses, counters = exact(system.name, skips)
  (same, other), expected, reference = exact('plain')
  assert counters.examples_trained == reference.examples_trained
  assert_same_bits(rows, same)
  assert_same_bits(state.params, other.params)
  assert abs(rows[0].rows - 0.5).max() > 0.05  # something was learned
  if system.schedule == 'plain' and not skips:
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


# On ordinary numbers, against plain training on the very same batches.


@every_system
def test_a_system_trains_as_plain_training_on_the_same_order(system):
  (rows, state), losses, counters, batches = run(system.name)
  (same, other), expected = same_order(batches)
  assert counters.examples_trained == 2 * SIZE * BATCHES
  if system.rows == 'stream' and system.microbatches == 1:
    assert losses == expected
    assert_same_bits(rows, same)
    assert_same_bits(state.params, other.params)
    return
  # Sums of float32 in another order, and what becomes of them in 50 steps.
  np.testing.assert_allclose(losses, expected, rtol=2e-5)
  leaves, others = jax.tree.leaves(rows), jax.tree.leaves(same)
  for one, two in zip(leaves, others, strict=True):
    np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)


def test_the_parameter_server_keeps_the_bits_of_the_fused_step():
  """On a CPU; elsewhere the sums of two devices differ."""
  assert_same_bits(run('xdl')[0], run('plain')[0])
  assert run('xdl')[1] == run('plain')[1]


# What crosses the link, counted by other means.


def lookups_of(batch):
  real = batch.lookups[batch.weights > 0]
  return real[real >= 0]


def test_rows_and_gradients_cross_of_a_parameter_server():
  *_, counters, batches = run('xdl')
  rows = sum(len(np.unique(lookups_of(batch))) for batch in batches)
  assert counters.rows_loaded == counters.rows_stored == rows
  assert counters.bytes_loaded == counters.bytes_stored == rows * 8 * 4
  assert counters.bytes_used == rows * (8 + 8) * 4
  assert counters.hits == 0


@every_system
def test_parameters_cross_of_a_parameter_server_alone(system):
  *_, counters, batches = run(system.name)
  (_, state), *_ = run(system.name)
  nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
  expected = 2 * len(batches) * nbytes if system.name == 'xdl' else 0
  assert counters.bytes_of_parameters == expected


@pytest.mark.parametrize('name', ['xdl', 'dlrm_hybrid'])
def test_a_step_takes_parameters_that_have_crossed(name, monkeypatch):
  trainer, batches = start(SYSTEMS[name])
  crossed, original = [], step_module.to_host

  def noted(tree):
    crossed.append(tree)
    return original(tree)

  monkeypatch.setattr(step_module, 'to_host', noted)
  with batches:
    for _ in range(3):
      before = trainer.state.params
      list(train(trainer, batches, 1))
      assert any(tree is before for tree in crossed) == (name == 'xdl')


def test_embeddings_and_their_gradients_cross_of_a_hybrid():
  *_, counters, batches = run('dlrm_hybrid')
  nbytes = 4 * SIZE * len(batches) * len(small.ROWS) * 8  # 4 B F D a step
  assert counters.bytes_loaded == counters.bytes_stored == nbytes
  assert counters.rows_loaded == counters.rows_stored == 0


def test_fae_synchronises_the_hot_rows_at_each_swap():
  *_, counters, batches = run('fae')
  popular = [small.hot_examples(HOT, b.lookups).all() for b in batches]
  here = [False, *popular]
  loads = sum(not a and b for a, b in itertools.pairwise(here))
  stores = sum(a and not b for a, b in itertools.pairwise(here))
  assert loads > 2
  hot, row_bytes = len(HOT.rows), (8 + 8) * 4
  assert counters.rows_loaded == loads * hot
  assert counters.rows_stored == stores * hot
  others = sum(
    np.count_nonzero(batch.weights)
    for batch, one in zip(batches, popular, strict=True)
    if not one
  )
  pooled = others * 4 * len(small.ROWS) * 8
  assert counters.bytes_loaded == loads * hot * row_bytes + pooled
  assert counters.bytes_stored == stores * hot * row_bytes + pooled


def test_where_hot_rows_are_pinned_there_is_nothing_to_synchronise():
  *_, counters, batches = run('fae_pinned')
  cold = sum(
    np.count_nonzero(HOT.places(np.unique(lookups_of(b))) == len(HOT.rows))
    for b in batches
  )
  assert counters.rows_loaded == len(HOT.rows) + cold  # once, at the start
  assert counters.rows_stored == cold


@every_system
def test_a_resumed_system_has_the_bits_of_an_uninterrupted_one(
  system, tmp_path
):
  whole = run(system.name)
  for stop in (9, 14):
    with contextlib.closing(Checkpoints(tmp_path / str(stop))) as checkpoints:
      halfway, batches = start(system)
      with batches:
        list(train(halfway, batches, stop))
        checkpoints.save(halfway, batches.get_state())
      resumed, batches = start(system)
      with batches:
        batches.set_state(checkpoints.restore(resumed).schedule_state)
        list(train(resumed, batches, 100))
    assert_same_bits(everything(resumed), whole[0])
    if system.name != 'cached':  # which loads its rows anew
      assert resumed.engine.counters == whole[2]


@every_system
def test_a_step_that_fails_is_tried_again(system):
  """Every other one, also where hot rows have just been swapped."""
  calls, whole = itertools.count(), run(system.name)
  trainer, batches = start(system)
  original = trainer.update

  def update(*arguments):
    if next(calls) % 2 == 0:
      raise RuntimeError('the device is busy')
    return original(*arguments)

  trainer.update = update
  with batches:
    while batches.peek() is not None:
      with pytest.raises(RuntimeError, match='busy'):
        list(train(trainer, batches, 1))
      list(train(trainer, batches, 1))
  assert_same_bits(everything(trainer), whole[0])
  assert trainer.engine.counters == whole[2]


SKIP = Skip(0.5, 'stale', 'examples', Phases(2, 3, 4, 10), seed=3, refill=True)


@every_system
@pytest.mark.parametrize('policy', ['stale', 'surprise_offset'])
def test_slipstream_goes_with_every_system(system, policy):
  _, losses, counters, batches = run(system.name, SKIP._replace(policy=policy))
  assert counters.examples_dropped > 0
  assert counters.examples_seen == 2 * SIZE * BATCHES
  kept = counters.examples_seen - counters.examples_dropped
  assert counters.examples_trained == kept
  # Where there are offsets, these batches bring them as a source of one's own.
  assert all((b.offset is None) == (policy == 'stale') for b in batches)
  assert policy == 'stale' or any(b.offset.any() for b in batches)
  _, expected = same_order(batches)
  np.testing.assert_allclose(losses, expected, rtol=2e-5)
  if system.schedule == 'hotline':
    for batch in batches:
      popular = small.hot_examples(HOT, batch.lookups)[batch.weights > 0]
      assert popular.all() or not popular.any()


def over_devices(devices, schedule, placement, skip, steps=1000, before=None):
  """Trains on several devices, perhaps from a folder on, and saves there."""
  trainer, batches = start(System('', schedule, placement), skip, devices)
  with batches:
    if before is not None and before.exists():
      with contextlib.closing(Checkpoints(before)) as checkpoints:
        batches.set_state(checkpoints.restore(trainer).schedule_state)
    losses = [record.loss for record in train(trainer, batches, steps)]
    if before is not None:
      with contextlib.closing(Checkpoints(before)) as checkpoints:
        checkpoints.save(trainer, batches.get_state())
  counters = trainer.engine.counters._replace(bytes_exchanged=0)
  return everything(trainer), losses, counters


one_device = functools.cache(functools.partial(over_devices, 1))


@pytest.mark.parametrize(
  ('schedule', 'placement', 'skip', 'devices'),
  [
    ('fae', 'swapped', None, 8),
    ('hotline', 'pinned', SKIP, 2),
    *(
      pytest.param(*one, devices, marks=pytest.mark.slow)
      for devices in (2, 4, 8)
      for one in (
        ('fae', 'swapped', SKIP),
        ('fae', 'pinned', None),
        ('hotline', 'swapped', None),
        ('hotline', 'cached', SKIP._replace(policy='surprise_offset')),
        ('hotline_micro', 'pinned', None),
      )
    ),
  ],
)
def test_devices_change_no_number_of_a_schedule(
  schedule, placement, skip, devices, tmp_path
):
  where = 'streamed' if placement == 'cached' else placement
  whole = one_device(schedule, where, skip)
  other = over_devices(devices, schedule, placement, skip)
  assert_same_bits(other[:2], whole[:2])
  if where == placement:
    assert other[2] == whole[2]
  # In the midst of a run of popular examples, or of others.
  for stop in (9, 14):
    of = schedule, placement, skip
    folder = tmp_path / str(stop)
    losses = over_devices(devices, *of, stop, folder)[1]
    end, more, counters = over_devices(1, *of, 1000, folder)
    assert_same_bits((end, losses + more), whole[:2])
    if where == placement:
      assert counters == whole[2]


def test_rows_on_the_host_cannot_be_elsewhere():
  recipe = small.recipe('adagrad', length=2)
  for rows in ('parameter_server', 'pooled'):
    with pytest.raises(UserError, match='stay there'):
      make_parts(recipe, 'pinned', small.DENSE, 3, HOT, rows)
  parts = recipe._replace(microbatches=2)
  with pytest.raises(UserError, match='cross the link at once'):
    make_parts(parts, 'streamed', small.DENSE, 3, HOT, 'pooled')
  with pytest.raises(UserError, match='rows'):
    make_parts(recipe, 'streamed', small.DENSE, 3, HOT, 'pulled')
