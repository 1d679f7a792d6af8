"""Trainers whose chain lets rows stand still: saved, resumed, refused."""

import contextlib

import jax
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts, slipstream
from tests.support import small
from tests.support.small import assert_same_bits, everything
from tests.training.skip_chain import (
  batches_for,
  HOT,
  NUMBERS,
  recipe,
  source,
  start,
)

LAST = 2 * NUMBERS['every'] + 6


@pytest.mark.parametrize(
  ('name', 'first'), [('streamed', 7), ('look_ahead', 8)]
)
def test_resuming_at_any_step_gives_the_same_bits(name, first, tmp_path):
  """Of a step and the next one, one is resumed under each placement."""
  trainer, folders = start(recipe(), name), {}
  with batches_for(trainer, 0) as batches, contextlib.ExitStack() as stack:
    for step in range(1, LAST):
      list(train(trainer, batches, 1))
      if step >= first and (step - first) % 2 == 0:  # from before a window on
        folder = stack.enter_context(
          contextlib.closing(Checkpoints(tmp_path / str(step)))
        )
        folder.save(trainer, batches.get_state())
        folders[step] = folder
    list(train(trainer, batches, 1))
    whole = everything(trainer)
    other = start(recipe(), name)
    for step, folder in folders.items():
      with batches_for(other, step % 3) as rest:
        rest.set_state(folder.restore(other).schedule_state)
        records = list(train(other, rest, LAST - step))
      assert len(records) == LAST - step
      assert_same_bits(whole, everything(other))


def test_iterators_may_be_trained_in_turn():
  """Each is planned anew, by what stands still then."""
  runs = []
  for name in ('streamed', 'resident'):
    trainer = start(recipe(), name)
    one, other = batches_for(trainer, 2), batches_for(trainer, 1)
    with one, other:
      for steps in (3, 9, 1, 2, 1, 5, 1, 1, 8, 4):
        list(train(trainer, one, steps))
        one, other = other, one
    runs.append(everything(trainer))
  assert_same_bits(*runs)


def test_a_checkpoint_of_other_windows_is_refused(tmp_path):
  trainer = start(recipe(), every=12, window=4)
  with (
    batches_for(trainer) as batches,
    contextlib.closing(Checkpoints(tmp_path)) as folder,
  ):
    list(train(trainer, batches, 3))
    folder.save(trainer, batches.get_state())
    with pytest.raises(slip.UserError, match=r'skip_stale of group 0 is \[12'):
      folder.restore(start(recipe(), every=12, window=5))


def chain_of(*links):
  return recipe()._replace(row_optimizer=optax.chain(optax.sgd(0.1), *links))


SKIP = slip.skip_stale(0.1, 12, 4)
REFUSED = {
  'one skip_stale': chain_of(SKIP, SKIP),
  'must see each step': chain_of(optax.apply_if_finite(SKIP, 3)),
  'must be one of hot, all': recipe()._replace(watched='cold'),
  'only where none of them moves': recipe('all'),
}


@pytest.mark.parametrize('said', REFUSED)
def test_what_cannot_judge_is_refused(said):
  of = REFUSED[said]
  with pytest.raises(slip.UserError, match=said):
    make_parts(of, 'streamed', small.DENSE, 3, HOT)


def test_arrays_are_looked_at_once_there_is_a_state():
  # When the transformation is made, they may not be known yet.
  every, window = jax.device_put((np.int32(4), np.int32(9)))
  of = chain_of(slip.skip_stale(0.1, every, window))
  with pytest.raises(slip.UserError, match=r'every\], got window 9, every 4'):
    make_parts(of, 'streamed', small.DENSE, 3, HOT)


def test_all_rows_watched_may_be_anywhere_in_a_chain():
  for said in ('one skip_stale', 'must see each step'):
    of = REFUSED[said]._replace(watched='all')
    make_parts(of, 'resident', small.DENSE, 3)


@pytest.mark.parametrize('watched', ['hot', 'all'])
def test_rows_are_compared_by_one_rule(watched):
  trainer = make_parts(recipe(watched), 'resident', small.DENSE, 3, HOT)
  phases = Phases(1, 3, 3, 9)
  skip = slip.Skip(0.5, 'stale', 'rows', phases)
  with pytest.raises(slip.UserError, match='compared by one rule') as error:
    slipstream(trainer, source(), skip)
  # All that would do, and of `skip` what is in the way.
  assert 'random, random_weighted, importance, surprise' in error.value.hint
  assert "mode 'examples', no threshold" in error.value.hint
  # One that compares none is another matter.
  skip = slip.Skip(0.5, 'random', phases=phases)
  with slipstream(trainer, source(), skip) as batches:
    records = list(train(trainer, batches, 30))
  kinds = {r.event['kind'] for r in records if r.event}
  assert kinds == {'decision'} | ({'judgement'} if watched == 'hot' else set())


def test_without_hot_rows_there_is_nothing_to_watch():
  with pytest.raises(slip.UserError, match='watches hot rows, got no hot rows'):
    make_parts(recipe(), 'streamed', small.DENSE, 3)


def test_three_statements():
  rng = np.random.default_rng(0)
  ids = np.minimum(rng.zipf(1.2, 6400), 500) - 1
  tables = {'item': slip.Table(500, embedding_dim=8)}
  moved, model = {}, recipe().model
  for watched, threshold in (('hot', 1.0), ('hot', 0.0), ('all', 1.0)):
    chain = optax.chain(
      slip.rowwise_adagrad(0.1), slip.skip_stale(threshold, 25, 5)
    )
    batches = slip.batches(None, {'item': ids}, ids % 2, batch_size=64, seed=0)
    placement = 'resident' if watched == 'all' else 'streamed'
    with slip.Trainer(
      model, tables, row_optimizer=chain, watched=watched, placement=placement
    ) as trainer:
      history = trainer.train(batches, steps=100)
      engine = trainer.parts.engine
      assert (engine.hot is None) == (watched == 'all')
    moved[watched, threshold] = history.counters
    kinds = [event['kind'] for event in history.events]
    assert kinds == ['judgement'] * 3 * (watched == 'hot')
    stale = [event['rows_stale'] for event in history.events]
    assert all(stale) == (threshold > 0 or watched == 'all')
  some, none, _ = moved.values()
  assert some.rows_stored < 0.75 * none.rows_stored
  assert some.bytes_loaded < none.bytes_loaded
  with pytest.raises(Exception, match='watched'):
    slip.Trainer(model, tables, watched='some')
