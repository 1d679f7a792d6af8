"""Checkpoints of another trainer, of a bad state, or without room."""

import contextlib

import jax
import numpy as np
import pytest

from slipstream_jax.checkpoint.chain import read_chain
from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.checkpoint.manifest import publish
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.engine.buffers import to_device
from slipstream_jax.errors import UserError
from slipstream_jax.tables import TableSet
from slipstream_jax.training.trainer_parts import make_parts
from slipstream_jax.types import RowBlock
from tests.support import small
from tests.support.programs import no_file_above
from tests.support.small import assert_same_bits, everything

POSITION = {'delivered': 3, 'order': np.arange(5000), 'nested': {'a': 1.5}}


def trainer_of(seed=0, step=0, **changes):
  recipe = small.recipe('lazy_adam')._replace(**changes)
  trainer = make_parts(recipe, 'streamed', small.DENSE, seed)
  trainer.state = trainer.state._replace(step=to_device(np.int32(step)))
  # As far as anybody knows, all rows took a step.
  small.replace_rows(trainer.engine, trainer.engine.read_back())
  return trainer


def save(folder, trainer, position=POSITION):
  with contextlib.closing(Checkpoints(folder)) as checkpoints:
    return checkpoints.save(trainer, position)


def restore(folder, trainer):
  with contextlib.closing(Checkpoints(folder)) as checkpoints:
    return checkpoints.restore(trainer)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A checkpoint, and its trainer."""
  folder, trainer = tmp_path_factory.mktemp('saved'), trainer_of(seed=1, step=7)
  assert save(folder, trainer) == 7
  return folder, trainer


def swapped(kind):
  """Tables like those of `small`, except for one thing."""
  tables, features = dict(small.tables().tables), dict(small.tables().features)
  if kind == 'order':
    others = {name: tables.pop(name) for name in ('t0', 't2', 't3')}
    tables |= others
  elif kind == 'name':
    tables = {'other' if k == 't2' else k: t for k, t in tables.items()}
    features['t2'] = features['t2']._replace(table='other')
  elif kind == 'pooling':
    features['t2'] = features['t2']._replace(combiner='mean')
  elif kind == 'sizes':
    for name, more in ('t0', -3), ('t1', 3):
      tables[name] = tables[name]._replace(
        vocabulary_size=tables[name].vocabulary_size + more
      )
  return TableSet(tables, features)


OTHERS = {
  'order': ("its table 0 is.*'t0'", {'tables': swapped('order')}),
  'name': ("its feature 2 is.*'t2'", {'tables': swapped('name')}),
  'pooling': ("its feature 2 is.*'t2'", {'tables': swapped('pooling')}),
  'sizes': ("its table 0 is.*'t0'", {'tables': swapped('sizes')}),
  'model': (
    'the model and tables it is of',
    {'model': small.recipe('lazy_adam', top=(99,)).model},
  ),
}


@pytest.mark.parametrize('kind', OTHERS)
def test_a_checkpoint_of_another_recipe_changes_nothing(kind, saved):
  said, changes = OTHERS[kind]
  other = trainer_of(**changes)
  before = everything(other)
  with pytest.raises(UserError, match=said):
    restore(saved[0], other)
  assert_same_bits(before, everything(other))


def test_a_checkpoint_of_another_version_changes_nothing(tmp_path):
  save(tmp_path, trainer_of(step=7))
  place = open_place(tmp_path)
  (link,) = read_chain(place, 7)
  place.delete('manifest-000000000007.json')
  publish(place, link._replace(payload=link.payload | {'version': 9}))
  other = trainer_of(seed=1)
  before = everything(other)
  with pytest.raises(UserError, match='must be of version 7 or 8, got 9 '):
    restore(tmp_path, other)
  other.check_consistent()
  assert_same_bits(everything(other), before)


def test_a_save_that_would_be_lost_is_refused(saved):
  folder, trainer = saved
  files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
  assert save(folder, trainer) == 7  # the same once more
  for other, step, position in (
    (trainer_of(seed=5, step=3), 3, POSITION),
    (trainer_of(seed=5, step=7), 7, POSITION),
    (trainer, 7, POSITION | {'delivered': 4}),
  ):
    with pytest.raises(UserError, match=f'later step than 7.*got step {step}'):
      save(folder, other, position)
  assert files == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
  fresh = trainer_of(seed=2)
  np.testing.assert_equal(restore(folder, fresh).schedule_state, POSITION)
  assert_same_bits(everything(trainer), everything(fresh))


def test_a_save_after_that_of_another_is_refused(tmp_path):
  with contextlib.closing(Checkpoints(tmp_path)) as one:
    one.save(trainer_of(step=1), POSITION)
    save(tmp_path, trainer_of(seed=1, step=5))
    with pytest.raises(UserError, match='later step than 5'):
      one.save(trainer_of(step=2), POSITION)


@pytest.mark.parametrize(
  ('where', 'value'), [('rows', np.nan), ('params', np.inf)]
)
def test_a_state_that_is_not_finite_is_not_saved(where, value, tmp_path):
  bad = trainer_of(step=2)
  save(tmp_path, trainer_of(step=1))
  if where == 'rows':
    (table,) = bad.engine.read_back()
    rows = table.rows.copy()
    rows[-1, 3] = value
    small.replace_rows(bad.engine, [RowBlock(rows, table.state)])
  else:
    leaves, form = jax.tree.flatten(bad.state.params)
    broken = np.array(jax.device_get(leaves[0]))
    broken.flat[0] = value
    leaves[0] = to_device(broken)
    bad.state = bad.state._replace(params=jax.tree.unflatten(form, leaves))
  with pytest.raises(UserError, match=r'must be finite.*step 2'):
    save(tmp_path, bad)
  assert restore(tmp_path, trainer_of(seed=3)).step == 1


@pytest.mark.parametrize('size', [0, 100_000])
def test_without_room_the_last_checkpoint_stays(size, tmp_path):
  good, more, fresh = trainer_of(step=1), trainer_of(1, 2), trainer_of(2)
  with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
    checkpoints.save(good, POSITION)
    with (
      no_file_above(size),
      pytest.raises(UserError, match='must be written whole') as caught,
    ):
      checkpoints.save(more, POSITION)
  assert '\n' not in str(caught.value)
  assert restore(tmp_path, fresh).step == 1
  assert_same_bits(everything(good), everything(fresh))
  assert save(tmp_path, more) == 2  # what was left behind is not in the way
  assert restore(tmp_path, fresh).step == 2
  assert_same_bits(everything(more), everything(fresh))


def test_a_folder_that_cannot_be_made_and_one_that_is_not_there(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='must be written whole'):
    save(tmp_path / 'file' / 'checkpoints', trainer_of())
  with pytest.raises(UserError, match='resuming needs a checkpoint'):
    restore(tmp_path / 'none', trainer_of())
  assert not (tmp_path / 'none').exists()
