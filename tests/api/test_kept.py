"""Saved and restored at any step: the run goes on as if unbroken."""

import contextlib
import itertools
import os
import pathlib
import random
import shutil
import socket
from unittest import mock

from flax import linen as nn
from hypothesis import given, Phase, settings
from hypothesis import strategies as st
import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.checkpoint.chain import consolidate, read_chain
from slipstream_jax.checkpoint.manifest import publish, read_manifest
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.errors import UserError
from slipstream_jax.schedules import chooser, scored
from slipstream_jax.schedules.scored import BatchScorer
from slipstream_jax.training import trainer_parts
from tests.api import shop
from tests.support.texts.mutations import flip
from tests.support.watchdog import watchdog

STEPS = 40


@pytest.fixture(scope='module')
def wholes():
  """Trains a run in one piece for each way to skip."""
  trained = {}
  for name, skip in shop.SKIPS.items():
    with shop.trainer() as trainer:
      trainer.train(shop.source(), STEPS, skip=skip)
    trained[name] = trainer
  return trained


PLACINGS = shop.PLACINGS | {
  'lru': slip.cached(13, 'lru'),
  'static': slip.cached(13, 'static'),
  'some cached': {'user': slip.cached(37, look_ahead=2), 'item': 'streamed'},
}
any_placing = st.sampled_from([*PLACINGS])


@settings(max_examples=6, phases=[Phase.generate])
@given(
  st.sampled_from([*shop.SKIPS]),
  st.integers(1, STEPS - 1),
  any_placing,
  any_placing,
  st.sampled_from(['new', 'used', 'same', 'other source', 'skipping']),
  st.booleans(),
)
def test_a_run_resumes_at_any_step_under_any_placement(
  wholes, tmp_path_factory, skip, at, before, then, into, closes
):
  folder = tmp_path_factory.mktemp('run')
  settings = shop.SKIPS[skip]
  with shop.trainer(placement=PLACINGS[before]) as first:
    first.train(shop.source(), at, skip=settings)
    if closes:
      first.close()
    assert first.save(folder) == at
    same = into == 'same'
    trainer = first if same else shop.trainer(placement=PLACINGS[then])
    if same:
      trainer.train(shop.source(), 2, skip=settings)
    elif into == 'used':
      trainer.train(shop.source(seed=5), 5)
    elif into == 'other source':
      trainer.predict(shop.held_out(None))
    elif into == 'skipping':
      trainer.train(shop.source(seed=5), 12, skip=shop.SKIPS['rows'])
    for _ in range(2):
      assert trainer.restore(folder) == at
    trainer.predict(shop.held_out(None), max_batches=2)
    trainer.rows('user')
    again = folder / 'again'
    trainer.save(again)  # also before it goes on
    with trainer:
      trainer.train(shop.source(), STEPS - at, skip=settings)
    shop.assert_same(trainer, wholes[skip])
    assert shop.examples_of(trainer) == shop.examples_of(wholes[skip])
  with shop.trainer() as trainer:
    trainer.restore(again)
    trainer.train(shop.source(), STEPS - at, skip=settings)
  shop.assert_same(trainer, wholes[skip])


@pytest.mark.parametrize('short', [20, 21, 22])
@pytest.mark.parametrize('refill', [None, True, False])
def test_kept_examples_make_full_batches_where_data_are_long(short, refill):
  skip = slip.Skip(0.5, phases=slip.Phases(1, 0, 1, 0), refill=refill)
  source = shop.source(epochs=1)  # 21 batches
  with (
    mock.patch.object(trainer_parts, 'SHORT', short),
    shop.trainer() as trainer,
  ):
    steps = len(trainer.train(source, skip=skip).losses)
  refilled = short <= 21 if refill is None else refill
  assert (steps < 18) == refilled
  assert steps == 21 or refilled


def test_kept_examples_make_full_batches_where_the_length_is_not_known():
  skip = slip.Skip(0.5, phases=slip.Phases(1, 0, 1, 0))
  source = slip.batches(
    shop.dicts, [*shop.IDS], 'label', dense='dense', batch_size=shop.BATCH
  )
  with shop.trainer() as trainer:
    assert len(trainer.train(source, skip=skip).losses) < 18


@pytest.mark.parametrize('at', [9, 20, 33])
def test_a_drop_that_is_found_follows_the_model_after_a_restore(at, tmp_path):
  """Losses of steps before the save are known after the restore."""
  skip = slip.Skip('auto', phases=slip.Phases(2, 0, 3, 25), refit=2)
  followed = []

  def may_drop(self, policy, facts, segments, most):
    followed.append(segments)
    return 0.3, 0.0

  patches = (
    mock.patch.object(BatchScorer, 'may_drop', may_drop),
    mock.patch.object(chooser, 'FIRST', 20),
    mock.patch.object(scored, 'FIRST', 20),
  )
  with contextlib.ExitStack() as stack:
    for patch in patches:
      stack.enter_context(patch)
    with shop.trainer() as whole:
      whole.train(shop.source(), STEPS, skip=skip)
    wanted = followed.copy()
    followed.clear()
    with shop.trainer() as first:
      first.train(shop.source(), at, skip=skip)
      first.save(tmp_path)
    before = len(followed)
    with shop.trainer() as second:
      second.restore(tmp_path)
      second.train(shop.source(), STEPS - at, skip=skip)
  shop.assert_same(second, whole)
  assert len(wanted[-1]) > 3
  assert followed[before:][-1] == wanted[-1]


@pytest.mark.parametrize('then', PLACINGS)
def test_a_run_without_hot_rows_goes_on_where_there_are_some(then, tmp_path):
  source, skip = shop.source(), shop.SKIPS['rows']
  with shop.trainer() as trainer:
    trainer.train(source, 9)  # chooses no hot rows
    trainer.save(tmp_path)
    trainer.train(source, 14, skip=skip)
  with shop.trainer(placement=PLACINGS[then]) as other:
    other.restore(tmp_path)
    other.train(shop.source(), 14, skip=skip)
  shop.assert_same(other, trainer)


def test_resume_false_begins_where_the_source_is(tmp_path):
  with shop.trainer() as trainer, shop.trainer() as other:
    trainer.train(shop.source(), 12, skip=shop.SKIPS['stale'])
    trainer.save(tmp_path)
    other.restore(tmp_path, resume=False)
    shop.assert_same(trainer, other)
    trainer.train(shop.source(seed=7), 6)
    other.train(shop.source(seed=7), 6)
    shop.assert_same(trainer, other)
    other.save(tmp_path)  # and so does what is saved of it
    other.restore(tmp_path)
    trainer.train(shop.source(seed=8), 1)
    with pytest.raises(UserError, match=r'the same examples .*resume=False'):
      other.train(shop.source(seed=8), 1)


def test_saved_before_the_first_step(tmp_path, wholes):
  trainer = shop.trainer()
  trainer.predict(shop.held_out(None))
  assert trainer.save(tmp_path) == 0
  assert trainer.save(tmp_path) == 0
  with shop.trainer() as other:
    other.restore(tmp_path)
    other.train(shop.source(), STEPS)
  shop.assert_same(other, wholes['none'])


def test_a_new_trainer_predicts_before_it_sees_a_source(tmp_path):
  with shop.trainer() as trainer:
    trainer.train(shop.source(), 12, skip=shop.SKIPS['rows'])
    trainer.save(tmp_path)
    wanted = trainer.predict(shop.held_out(None))
    metrics = trainer.evaluate(shop.held_out())
  other = shop.trainer(placement='pinned')
  other.restore(tmp_path)
  shop.assert_same(other, trainer)
  np.testing.assert_array_equal(other.predict(shop.held_out(None)), wanted)
  assert other.evaluate(shop.held_out()) == metrics


def test_a_skip_that_was_saved_is_asked_for(tmp_path, wholes):
  with shop.trainer() as trainer:
    trainer.train(shop.source(), 12, skip=shop.SKIPS['stale'])
    trainer.save(tmp_path)
  with shop.trainer() as trainer:
    trainer.restore(tmp_path)
    for skip, message in (
      ('none', 'same skip, got none .*give it, or restore with resume=False'),
      ('surprise', 'skip by the same settings.*resume=False'),
    ):
      with pytest.raises(UserError, match=message):
        trainer.train(shop.source(), 3, skip=shop.SKIPS[skip])
    with pytest.raises(UserError, match='same examples'):
      trainer.train(shop.source(seed=3), 3, skip=shop.SKIPS['stale'])
    # None of that spoils it.
    trainer.train(shop.source(), STEPS - 12, skip=shop.SKIPS['stale'])
  shop.assert_same(trainer, wholes['stale'])


class Wider(nn.Module):
  @nn.compact
  def __call__(self, dense, e):
    return nn.Dense(1)(e['user'])[:, 0] + 0 * dense[:, 0]


OTHERS = {
  'model': {'model': Wider()},
  'rows': {'tables': shop.TABLES | {'user': slip.Table(61, embedding_dim=4)}},
  'fewer rows': {
    'tables': shop.TABLES | {'user': slip.Table(20, embedding_dim=4)}
  },
  'dims': {'tables': shop.TABLES | {'user': slip.Table(60, embedding_dim=5)}},
  'names': {'tables': {'who': slip.Table(60, embedding_dim=4)} | shop.TABLES},
  'optimizer': {'row_optimizer': slip.adagrad(0.1)},
}


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A folder with a checkpoint that has hot rows and a decision."""
  folder = tmp_path_factory.mktemp('saved')
  with shop.trainer() as trainer:
    trainer.train(shop.source(), 12, skip=shop.SKIPS['stale'])
    trainer.save(folder)
  return folder


@pytest.mark.parametrize('what', OTHERS)
def test_that_of_another_trainer_is_refused(what, saved):
  other = shop.trainer(**OTHERS[what])
  with pytest.raises(UserError):
    other.restore(saved)
  with pytest.raises(UserError, match='made when its first source comes'):
    other.rows('user')


DAMAGES = [
  pathlib.Path.unlink,
  lambda path: path.write_bytes(b''),
  lambda path: path.write_bytes(b'\xff\xfe\x00'),
  lambda path: path.write_bytes(path.read_bytes()[:-8]),
  lambda path: path.write_bytes(bytes(8) + path.read_bytes()[8:]),
]
OTHER_FACTS = [
  {'dense_features': '3'},
  {'dense_features': 4},
  {'dense_columns': {'a': 'b'}},
  {'watched': False},
  {'hot': ['x']},
]


def damaged(saved, folder):
  """Yields copies of a checkpoint, each damaged in another way."""
  names = sorted(path.name for path in saved.iterdir())
  for number, (name, damage) in enumerate(itertools.product(names, DAMAGES)):
    copy = shutil.copytree(saved, folder / f'{number}')
    damage(copy / name)
    yield copy
  manifest = read_manifest(open_place(saved), 12)
  facts = manifest.payload['facts']
  others = [{'facts': facts | other} for other in OTHER_FACTS]
  others += [{'version': 99}, {'facts': {}}, {'facts': {'hot': None}}]
  for number, other in enumerate(others):
    copy = shutil.copytree(saved, folder / f'other-{number}')
    payload = manifest.payload | other
    publish(open_place(copy), manifest._replace(payload=payload))
    yield copy
  (folder / 'empty').mkdir()
  yield folder / 'empty'
  yield folder / 'none'


def test_a_damaged_folder_leaves_the_trainer_as_it_was(saved, tmp_path):
  source, skip, new = shop.source(seed=3), shop.SKIPS['rows'], shop.trainer()
  with shop.trainer() as trainer:
    trainer.train(source, 8, skip=skip)
    for copy in damaged(saved, tmp_path):
      assert why_refused(new, copy), copy
      assert why_refused(trainer, copy), copy
    trainer.train(source, 3, skip=skip)
    trainer.train(shop.source(seed=4), 7)
  with pytest.raises(UserError, match='made when its first source comes'):
    new.rows('user')
  with shop.trainer() as unbroken:
    unbroken.train(shop.source(seed=3), 11, skip=skip)
    unbroken.train(shop.source(seed=4), 7)
  shop.assert_same(trainer, unbroken)


def chain_in(folder, trainer, stops, source=None):
  """Saves a base and increments; returns the state of each step."""
  source, states = source or shop.source(), {}
  for at, steps in enumerate(stops):
    trainer.train(source, steps)
    step = trainer.save(folder)
    states[step] = shop.state_of(trainer)
    if at == len(stops) - 2:  # the newest but one becomes a base
      consolidate(place := open_place(folder), read_chain(place, step))
  return states


def is_one_of(trainer, states):
  """Whether a trainer has one of these states, every bit of it."""
  own = shop.state_of(trainer)
  return any(
    all(itertools.starmap(np.array_equal, zip(own, state, strict=True)))
    for state in states
  )


def why_refused(trainer, folder, **how):
  """Restores; returns the sentence of an error, or None if there was none."""
  said = None
  try:
    trainer.restore(folder, **how)
  except UserError as error:
    said = str(error)
  assert said is None or '\n' not in said
  return said


def assert_newest_or_refused(trainer, folder, states, name):
  """Asks for the newest, and where it is refused for the other whole one.

  Args:
    trainer: to restore into.
    folder: with damage in a file.
    states: of the two steps that were whole.
    name: of that file.

  Returns:
    Whether the newest is refused.
  """
  older, newest = sorted(states)
  said = why_refused(trainer, folder)
  if said is None:
    assert is_one_of(trainer, [states[newest]])
    return False
  assert f'got step {newest}: ' in said
  assert name in said
  both = why_refused(trainer, folder, step=older)
  if both is None:
    assert f'step {older} is whole: ask for it by step={older}' in said
    assert is_one_of(trainer, [states[older]])
  else:  # they share the file
    assert name in both
    assert 'ask for it' not in said
  return True


def test_a_flipped_bit_never_gives_an_older_model_unasked(tmp_path):
  rng = random.Random(0)
  with shop.trainer(placement='pinned') as trainer:
    stops = [rng.randint(1, 4) for _ in range(rng.randint(2, 4))]
    states = chain_in(tmp_path, trainer, stops)
    newest, older = sorted(states)[:-3:-1]
    states = {step: states[step] for step in (newest, older)}
    paths, refused = [*tmp_path.iterdir()], 0
    for path in paths:
      data = path.read_bytes()
      for _ in range(3):
        flip(path, rng)
        one = trainer, tmp_path, states, path.name
        refused += assert_newest_or_refused(*one)
        path.write_bytes(data)
    assert refused > len(paths)
    assert trainer.restore(tmp_path) == newest


def put_pipe(path):
  os.mkfifo(path)


def put_socket(path):
  with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(path.parent):
    one.bind(path.name)


def put_device(path):
  path.symlink_to('/dev/zero')


KINDS = [put_pipe, put_socket, put_device, pathlib.Path.mkdir]


def test_what_is_no_file_is_refused_and_nobody_waits(tmp_path):
  with shop.trainer() as trainer:
    states = chain_in(tmp_path, trainer, [2, 1, 3])
    newest, older = sorted(states)[:-3:-1]
    states, refused = {step: states[step] for step in (newest, older)}, 0
    paths = [*tmp_path.iterdir()]
    for path, put in itertools.product(paths, KINDS):
      hidden = path.rename(tmp_path.with_name('hidden'))
      put(path)
      with watchdog():
        one = trainer, tmp_path, states, path.name
        refused += assert_newest_or_refused(*one)
      path.rmdir() if path.is_dir() else path.unlink()
      hidden.rename(path)
    assert refused > 2 * len(paths)


RUNS = {
  'rows': {'row_optimizer': slip.rowwise_adagrad(0.3)},
  'seed': {'seed': 7},
  'data': {},
}


@pytest.mark.parametrize('what', RUNS)
def test_files_of_two_runs_never_make_a_third(what, tmp_path):
  rng, folders, states = random.Random(what), [], []
  for number, arguments in enumerate([{}, RUNS[what]]):
    labels = 1 - shop.CLICKS if number and what == 'data' else shop.CLICKS
    with shop.trainer(**arguments) as trainer:
      folders.append(tmp_path / str(number))
      source = shop.source(labels)
      for _ in range(3):
        trainer.train(source, 1)
        step = trainer.save(folders[-1])
        states.append(shop.state_of(trainer))
  # `save` closes its checkpoints, which stops a consolidation that has begun.
  # So a chain may have become a base in one folder only.
  names = sorted({path.name for one in folders for path in one.iterdir()})
  by_step = {
    step: [name for name in names if f'-{step:012d}' in name]
    for step in range(1, 4)
  }
  subsets = [by_step[1], by_step[2], by_step[3], by_step[1] + by_step[2]]
  subsets += [rng.sample(names, rng.randrange(1, len(names))) for _ in range(9)]
  with shop.trainer() as trainer:
    for number, names_of_other in enumerate(subsets):
      mixed = tmp_path / f'mixed-{number}'
      shutil.copytree(folders[number % 2], mixed)
      for name in names_of_other:
        if (folders[1 - number % 2] / name).exists():
          shutil.copy(folders[1 - number % 2] / name, mixed / name)
      for step in (None, 2):
        if why_refused(trainer, mixed, step=step) is None:
          assert is_one_of(trainer, states), names_of_other


def test_a_save_that_fails_leaves_the_one_before(tmp_path):
  source = shop.source()
  with shop.trainer() as trainer:
    trainer.train(source, 5)
    trainer.save(tmp_path)
    rows = trainer.rows('user')
    trainer.train(source, 6, skip=shop.SKIPS['stale'])
    trainer.parts.inconsistent = 'a step'
    with pytest.raises(UserError, match='completed step'):
      trainer.save(tmp_path)
    trainer.parts.inconsistent = None
    with shop.trainer() as other:
      assert other.restore(tmp_path) == 5
      np.testing.assert_array_equal(other.rows('user'), rows)
    trainer.save(tmp_path)
    kinds = {path.name.split('-')[0] for path in tmp_path.iterdir()}
    assert kinds <= {'manifest', 'file', 'base', 'increment'}
    with pytest.raises(UserError, match='of a later step than 11'):
      other.save(tmp_path)
    with shop.trainer() as other:
      assert other.restore(tmp_path) == 11


def test_a_folder_that_cannot_be():
  trainer = shop.trainer()
  with pytest.raises(UserError, match='made when its first source comes'):
    trainer.save('anywhere')
  trainer.predict(shop.held_out(None), max_batches=1)
  for call in trainer.save, trainer.restore:
    with pytest.raises(UserError, match='a URL that fsspec can open'):
      call('nowhere://bucket/run')
  with pytest.raises(UserError):
    trainer.save('/dev/null/run')


def test_under_a_url(wholes):
  url = 'memory://kept/run'
  with shop.trainer() as trainer, shop.trainer() as other:
    trainer.train(shop.source(), 12, skip=shop.SKIPS['stale'])
    trainer.save(url)
    assert other.restore(url) == 12
    other.train(shop.source(), STEPS - 12, skip=shop.SKIPS['stale'])
  shop.assert_same(other, wholes['stale'])


def test_a_history_says_whether_skipping_saves_time():
  with shop.trainer() as trainer:
    assert trainer.train(shop.source(), 110).payoff is None
    skip = slip.Skip(0.3, phases=slip.Phases(4, 0, 3, 1000))
    paid = trainer.train(shop.source(), 160, skip=skip).payoff
  assert paid.left_out == pytest.approx(0.3, abs=0.1)
  assert paid.step_ms > 0
  assert isinstance(paid.pays, bool)
