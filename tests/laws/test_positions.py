"""Which batches a trainer trains: those of one schedule, and from where."""

import contextlib
import gc
import itertools
import random
import weakref

import jaxtyping
import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.data.numbered import ColumnBatches, Columns, NumberedBatches
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.training import loop
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import (
  make_parts,
  planned,
  slipstream,
)
from tests.api import shop
from tests.support import small
from tests.support.short_runs import (
  BATCH,
  BATCHES,
  batches_for,
  COLUMNS,
  HOT,
  skip,
  source,
  start,
  unbroken,
  WHERE,
)
from tests.support.small import assert_same_bits, everything
from tests.support.watchdog import watchdog


def test_iterators_in_turn_plan_for_the_rows_as_they_are():
  """Each was planned ahead before the other's steps."""

  def run(placement):
    trainer = make_parts(
      small.recipe('adagrad'), WHERE[placement], small.DENSE, 3, HOT
    )
    one, other = (
      planned(trainer, ColumnBatches(COLUMNS, BATCH, shuffle_seed=seed), 2)
      for seed in (1, 2)
    )
    with one, other:
      for steps in (3, 1, 4, 2):
        for batches in (one, other):
          assert len(list(train(trainer, batches, steps))) == steps
    return everything(trainer)

  for placement in ('streamed', 'pinned', 'lru', 'look_ahead'):
    assert_same_bits(run(placement), run('resident'))


def test_a_plan_for_another_turn_is_refused():
  trainer, batches = start('lru', 'plain', 2)
  with batches:
    next(batches)
    item = next(batches)
    with pytest.raises(UserError, match=r'holds for step 1 .*got step 0'):
      loop.take_step(trainer, item)
  trainer.check_consistent()


def test_a_trainer_follows_the_schedule_made_last():
  trainer, batches = start('pinned', 'rows', 2)
  with batches:
    list(train(trainer, batches, 6))
    with planned(trainer, ColumnBatches(COLUMNS, BATCH), 2) as plain:
      with pytest.raises(UserError, match='follows one schedule'):
        list(train(trainer, batches, 1))
      assert len(list(train(trainer, plain, 3))) == 3


def test_a_schedule_gets_the_losses_of_its_own_steps():
  """Not those of one before it, which had the same numbers."""
  trainer, before = start('pinned', 'auto', 2)
  with before:
    list(train(trainer, before, 6))
    assert trainer.probe.losses.all()
    with batches_for(trainer, 'auto', 2) as after:
      assert not trainer.probe.losses.all()
      with pytest.raises(UserError, match='follows one schedule'):
        list(train(trainer, before, 1))
      losses = [record.loss for record in train(trainer, after, 6)]
      assert {*map(float, trainer.probe.losses.all().values())} <= {*losses}


def test_a_schedule_goes_on_where_its_losses_are_gone():
  """As another one has had the trainer since."""
  trainer, before = start('pinned', 'auto', 2)
  with before, watchdog():
    list(train(trainer, before, 9))
    state = before.get_state()
    for other in 'auto', 'plain':
      with batches_for(trainer, other, 2) as batches:
        list(train(trainer, batches, 4))
    with batches_for(trainer, 'auto', 2) as batches:
      batches.set_state(state)
      assert len(list(train(trainer, batches, 10_000))) == 2 * BATCHES - 9


def test_a_restore_asks_for_the_position_of_the_batches(tmp_path):
  trainer, batches = start('lru', 'plain', 2)
  with batches, contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
    list(train(trainer, batches, 4))
    checkpoints.save(trainer, batches.get_state())
    list(train(trainer, batches, 4))
    position = checkpoints.restore(trainer)
    with pytest.raises(UserError, match=r'call batches\.set_state'):
      list(train(trainer, batches, 1))
    before = batches.get_state()
    with pytest.raises(UserError):
      batches.set_state({'delivered': 1, 'order': 7})
    assert batches.get_state() == before  # one that is refused changes nothing
    batches.set_state(position.schedule_state)
    list(train(trainer, batches, 10_000))
  assert_same_bits(everything(trainer), unbroken('lru', 'plain')[0])


def test_batches_that_a_schedule_counts_on_cannot_be_left_out():
  """A window without a snapshot would be judged by nothing."""
  trainer, batches = start('pinned', 'rows', 0)
  with batches:
    for _ in range(11):
      list(train(trainer, batches, 1))
      before = batches.get_state()
      if next(batches).scheduled.edge.must_train:
        with pytest.raises(UserError, match='see each of its batches trained'):
          list(train(trainer, batches, 1))
      batches.set_state(before)


def test_a_schedule_that_follows_losses_does_not_wait_for_one_left_out():
  trainer, batches = start('lru', 'auto', 2)
  with batches, watchdog():
    list(train(trainer, batches, 5))
    assert loop.leave_out(trainer, batches)
    taken = len(list(train(trainer, batches, 10_000)))
  assert 5 + 1 + taken == 2 * BATCHES


def test_train_takes_planned_batches_and_whole_numbers():
  trainer, batches = start('streamed', 'plain', 0)
  # As for users: only our own tests check types.
  jaxtyping.config.update('jaxtyping_disable', True)
  try:
    with batches:
      with pytest.raises(UserError, match='planned batches, got ColumnBatches'):
        list(train(trainer, source(), 1))
      with pytest.raises(UserError, match=r'whole number, .*got -1'):
        list(train(trainer, batches, -1))
  finally:
    jaxtyping.config.update('jaxtyping_disable', False)


def test_a_position_of_other_settings_is_refused():
  trainer, batches = start('pinned', 'rows', 0)
  with batches:
    list(train(trainer, batches, 3))
    state = batches.get_state()
  others = skip('rows')._replace(drop=0.25)
  batches = slipstream(trainer, source(), others, None, 0)
  same = pytest.raises(UserError, match=r'same settings, drop 0\.5')
  with batches, same:
    batches.set_state(state)


@pytest.mark.parametrize('saved', ['at the end', 'before it is known'])
def test_what_is_read_after_the_last_step_is_counted_once(saved, tmp_path):
  """All of it is dropped, so that no batch reports it."""
  hot = small.hot(COLUMNS, sum(small.ROWS))
  drops_all = Skip(1, 'random', 'examples', Phases(1, 2, 2, 0))

  def begin():
    trainer = make_parts(small.recipe(), 'pinned', small.DENSE, hot=hot)
    given = ColumnBatches(COLUMNS, BATCH, epochs=1)
    return trainer, slipstream(trainer, given, drops_all)

  trainer, batches = begin()
  checkpoints = Checkpoints(tmp_path)
  with batches:
    if saved == 'before it is known':
      list(train(trainer, batches, 3))
      checkpoints.save(trainer, batches.get_state())
    assert len(list(train(trainer, batches, 100))) < 4
    step = checkpoints.save(trainer, batches.get_state())
  assert step == 3
  again, batches = begin()
  with batches:
    position = checkpoints.restore(again)
    batches.set_state(position.schedule_state)
    assert not list(train(again, batches, 100))
    assert not list(train(again, batches, 100))  # nor twice here
  checkpoints.close()
  assert again.engine.counters == trainer.engine.counters
  assert trainer.engine.counters.examples_seen == len(COLUMNS.labels)


def of_rows():
  """Batches that the user holds, by global rows."""
  lookups = np.stack([shop.USERS, shop.ITEMS + 60], axis=1)
  columns = Columns(shop.DENSE, lookups, shop.CLICKS)
  return ColumnBatches(columns, shop.BATCH, shuffle_seed=6)


SOURCES = {
  'shuffled': lambda: shop.source(seed=1),
  'in order': lambda: shop.source(seed=None),
  'an epoch': lambda: shop.source(seed=4, epochs=1),
  'a function': lambda: slip.batches(shop.dicts),
  'a list': lambda: [*shop.dicts()][::-1],
  'a generator': shop.dicts,
  'a generator in batches': lambda: slip.batches(shop.dicts()),
  'made in C': lambda: map(dict, shop.dicts()),
  'rows': of_rows,
}
ONE_WAY = ('a generator', 'a generator in batches', 'made in C')


def batches_of(kind, trainer):
  """All batches of a source, in their order."""
  made = SOURCES[kind]()
  if isinstance(made, ColumnBatches):
    return made
  if not hasattr(made, 'bind'):
    made = slip.batches(made)
  return made.bind(trainer.tables)


def by_hand(kinds, turns):
  """A trainer of the batches of several sources, laid in a row by hand."""
  trainer = shop.trainer()
  left = [batches_of(kind, trainer) for kind in kinds]
  row = [
    batch
    for which, steps in turns
    for batch in itertools.islice(left[which], steps)
  ]
  source = NumberedBatches(row.__getitem__, len(row), 'by hand', reads='those')
  with trainer:
    trainer.train(source, len(row))
  return trainer


@pytest.mark.parametrize('seed', range(8))
def test_sources_in_turn_are_trained_as_laid_in_a_row(seed, tmp_path):
  """Each is resumed where it was: closed, saved or restored in between."""
  rng = random.Random(seed)
  kinds = rng.sample([*SOURCES], 3)
  turns = [(i, 1) for i in range(3)]
  turns += [(rng.randrange(3), rng.randint(1, 3)) for _ in range(7)]
  arguments = {
    'prefetch': rng.choice([0, 2]),
    'placement': rng.choice(['streamed', 'pinned', slip.cached(30)]),
  }
  held, trained = [SOURCES[kind]() for kind in kinds], []
  trainer = shop.trainer(**arguments)
  trainer.predict(shop.held_out(None), max_batches=1)  # hot rows are chosen
  with watchdog():
    for which, steps in turns:
      assert len(trainer.train(held[which], steps).losses) == steps
      trained.append(which)
      match rng.randrange(4):
        case 0:
          trainer.close()
        case 1:
          trainer.predict(shop.held_out(None), max_batches=1)
        case 2 if not {*kinds} & {*ONE_WAY} and len({*trained}) == 3:
          # Into another trainer, with other objects of the same sources.
          trainer.save(tmp_path / 'run')
          trainer.close()
          trainer = shop.trainer(**arguments)
          trainer.restore(tmp_path / 'run')
          held = [SOURCES[kind]() for kind in kinds]
    trainer.close()
  shop.assert_same(trainer, by_hand(kinds, turns))


def test_a_restore_asks_for_the_sources_that_were_saved(tmp_path):
  sources = [shop.source(seed=seed) for seed in (1, 2)]
  with shop.trainer() as trainer, shop.trainer() as other:
    for one in sources:
      trainer.train(one, 3)
    trainer.save(tmp_path)
    other.restore(tmp_path)
    with pytest.raises(UserError, match=r'one of the 2 .* or restore with res'):
      other.train(shop.source(seed=3), 1)
    other.train(shop.source(seed=2), 2)
    other.train(shop.source(seed=3), 0)  # later ones may be new
    other.train(shop.source(seed=1), 2)
    for one in reversed(sources):
      trainer.train(one, 2)
    shop.assert_same(trainer, other)


@pytest.mark.parametrize('kind', ['arrays', 'functions'])
@pytest.mark.parametrize('steps', [(1, 3), (3, 1), (4, 2)])
def test_sources_that_look_alike_are_never_exchanged(tmp_path, kind, steps):
  def alike():
    return shop.source() if kind == 'arrays' else slip.batches(shop.dicts)

  sources = alike(), alike()
  with shop.trainer() as trainer, shop.trainer() as other:
    for one, count in zip(sources, steps, strict=True):
      trainer.train(one, count)
    trainer.save(tmp_path)
    other.restore(tmp_path)
    with pytest.raises(UserError, match='one that fits 2 of them'):
      other.train(alike(), 1)
    shop.assert_same(trainer, other)


def test_a_pass_that_was_at_its_end_is_said_to_be(tmp_path):
  def one_pass():
    return shop.source(seed=None, epochs=1)

  with shop.trainer() as trainer, shop.trainer() as other:
    trainer.train(one_pass())
    trainer.save(tmp_path)
    other.restore(tmp_path)
    with pytest.raises(UserError, match=r'at the end of these examples.*anew'):
      other.train(one_pass())
    for one in trainer, other:
      one.train(one_pass())
    shop.assert_same(trainer, other)


@pytest.mark.parametrize('name', [*shop.SKIPS])
def test_a_skip_is_resumed_after_another_source_or_refused(name):
  skip, source, extra = shop.SKIPS[name], shop.source(), shop.source(seed=2)
  with shop.trainer() as trainer:
    trainer.train(shop.source(seed=9), 1, skip=shop.SKIPS['surprise'])
    trainer.train(source, 13, skip=skip)
    trainer.train(extra, 1)
    if name in ('none', 'surprise'):
      trainer.train(source, 20, skip=skip)
      return
    with pytest.raises(UserError, match='without another source in between'):
      trainer.train(source, 1, skip=skip)
    # It is where it was: the next batches are the next ones of its order.
    rest = shop.source().bind(trainer.tables)
    seen = trainer.parts.engine.counters.examples_seen
    for _ in range(seen // shop.BATCH - 2):
      next(rest)
    wanted = trainer.parts.engine.counters.examples_trained
    trainer.train(source, 1)
    assert trainer.parts.engine.counters.examples_trained == (
      wanted + np.count_nonzero(next(rest).weights)
    )


def test_no_source_is_kept_alive_for_its_position(tmp_path):
  class Chunk(list):
    """One that can be told to be gone."""

  gone = []
  gc.collect()
  gc.disable()  # a cycle would keep what it refers to
  try:
    with shop.trainer(prefetch=1, workers=4) as trainer:
      for _ in range(6):
        chunk = Chunk([*shop.dicts(5)])
        plain = [chunk[0]]  # cannot be referred to weakly
        trainer.train(chunk, 2)
        trainer.train(plain, 1)
        gone.append(weakref.ref(chunk))
        del chunk, plain
      trainer.train(shop.source(), 1)
      assert not any(one() for one in gone)
      trainer.save(tmp_path)
  finally:
    gc.enable()
  with shop.trainer() as other:
    other.restore(tmp_path)
    with pytest.raises(UserError, match=r'one of the [12] '):
      other.train(shop.source(seed=9), 1)


@pytest.mark.parametrize(('seed', 'epochs'), [(0, 1), (1, 2)])
def test_predictions_come_in_the_order_of_the_examples(seed, epochs):
  """Whatever the order in which training shuffles them."""
  with shop.trainer() as trainer:
    trainer.train(shop.source(), 3)
    of_held_out = trainer.predict(shop.held_out(None))
    for size in 16, 100, 400:
      given = {'batch_size': size, 'seed': seed}
      plain = given | {'seed': None, 'epochs': 1}
      wanted = trainer.predict(shop.source(None, **plain))
      # Products of matrices of another size may be rounded in another way.
      np.testing.assert_allclose(wanted, of_held_out, atol=1e-6)
      got = trainer.predict(shop.source(None, epochs=epochs, **given))
      np.testing.assert_array_equal(got, np.tile(wanted, epochs))
      endless = shop.source(None, **given)
      got = trainer.predict(endless, max_batches=2)
      np.testing.assert_array_equal(got, np.resize(wanted, len(got)))
      assert len(got) == (min(2 * size, 328) if size < 328 else 656)
      assert trainer.evaluate(shop.source(epochs=1, **given)) == (
        trainer.evaluate(shop.source(**plain))
      )
