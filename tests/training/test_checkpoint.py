"""Checkpoints that lost something, are of something else, or have no room."""

import contextlib
import shutil

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from slipstream_jax.checkpoint import restore as restoring
from slipstream_jax.checkpoint import state as states
from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.engine.buffers import to_device
from slipstream_jax.errors import UserError
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.tables import TableSet
from slipstream_jax.training.trainer_parts import make_parts
from slipstream_jax.types import RowBlock
from tests.support import small
from tests.support.programs import no_file_above
from tests.support.small import assert_same_bits, everything

SCHEDULE = {'delivered': 3, 'order': np.arange(5000), 'nested': {'a': 1.5}}


def trainer_of(seed=0, step=0, tables=None):
  recipe = small.recipe('lazy_adam')
  if tables is not None:
    recipe = recipe._replace(tables=tables)
  trainer = make_parts(recipe, PLACEMENTS['streamed'], small.DENSE, seed)
  trainer.state = trainer.state._replace(step=to_device(np.int32(step)))
  # As far as anybody knows, all rows took a step.
  small.replace_rows(trainer.engine, trainer.engine.read_back())
  return trainer


@contextlib.contextmanager
def checkpoints_of(folder):
  checkpoints = Checkpoints(folder)
  try:
    yield checkpoints
  finally:
    checkpoints.close()


def save(folder, trainer, schedule=SCHEDULE):
  with checkpoints_of(folder) as checkpoints:
    return checkpoints.save(trainer, schedule)


def restore(folder, trainer):
  with checkpoints_of(folder) as checkpoints:
    return checkpoints.restore(trainer)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A checkpoint, and the trainer that it is of."""
  folder, trainer = tmp_path_factory.mktemp('saved'), trainer_of(seed=1, step=7)
  assert save(folder, trainer) == 7
  return folder, trainer


@pytest.fixture(scope='module')
def other():
  """A trainer of the same shapes, with other numbers."""
  return trainer_of(seed=2)


def files_of(folder):
  files = sorted(path for path in folder.rglob('*') if path.is_file())
  return [path for path in files if path.stat().st_size]


def assert_told_or_restored(folder, saved, other):
  """What is damaged is told, and changes nothing; what is not, restored."""
  before = everything(other)
  error, position = None, None
  try:
    position = restore(folder, other)
  except UserError as raised:
    error = str(raised)
  if error is not None:
    assert str(folder) in error
    assert '\n' not in error
    assert_same_bits(before, everything(other))
    return True
  assert_same_bits(everything(saved), everything(other))
  np.testing.assert_equal(position.schedule_state, SCHEDULE)
  again = trainer_of(seed=2)  # as different as it was before
  other.state = again.state
  small.replace_rows(other.engine, again.engine.read_back(), seed=2)
  return False


@settings(max_examples=25)
@given(data=st.data())
def test_a_flipped_bit_is_told_or_does_no_harm(
  data, saved, other, tmp_path_factory
):
  folder = tmp_path_factory.mktemp('flipped') / 'checkpoints'
  shutil.copytree(saved[0], folder)
  # By bytes: nearly all of them are array data, the rest is drawn by file.
  files = files_of(folder)
  sizes = [path.stat().st_size for path in files]
  if data.draw(st.booleans(), label='in arrays'):
    path = files[int(np.argmax(sizes))]
  else:
    path = data.draw(st.sampled_from(files), label='file')
  content = bytearray(path.read_bytes())
  at = data.draw(st.integers(0, len(content) - 1), label='byte')
  content[at] ^= 1 << data.draw(st.integers(0, 7), label='bit')
  path.write_bytes(content)
  assert_told_or_restored(folder, saved[1], other)


def test_damaged_files_do_not_reach_the_reader_of_arrays(
  saved, other, tmp_path, monkeypatch
):
  read, call = [], restoring.read_dense

  def recorded(data, *others):
    read.append(len(data))
    return call(data, *others)

  monkeypatch.setattr(restoring, 'read_dense', recorded)
  files = files_of(saved[0])
  assert len(files) == 4  # rows, state, schedule, and the manifest
  for path in files:
    folder = tmp_path / path.name
    shutil.copytree(saved[0], folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    (folder / path.name).write_bytes(content)
    with pytest.raises(UserError, match=f'checksum.*{path.name}'):
      restore(folder, other)
  assert not read
  assert restore(saved[0], trainer_of()).step == 7
  assert len(read) == 1


@pytest.mark.parametrize('cut', ['missing', 'empty', 'half'])
def test_missing_and_cut_files_are_told(cut, saved, other, tmp_path):
  told = 0
  for number, path in enumerate(files_of(saved[0])):
    folder = tmp_path / str(number)
    shutil.copytree(saved[0], folder)
    broken = folder / path.relative_to(saved[0])
    if cut == 'missing':
      broken.unlink()
    else:
      content = broken.read_bytes()
      broken.write_bytes(content[: len(content) // 2 if cut == 'half' else 0])
    told += assert_told_or_restored(folder, saved[1], other)
  assert told == 4  # rows, state, schedule, and the manifest


def swapped(kind):
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


@pytest.mark.parametrize('kind', ['order', 'name', 'pooling', 'sizes'])
def test_tables_of_the_same_shapes_are_told_apart(kind, saved):
  changed = trainer_of(tables=swapped(kind))
  before = everything(changed)
  which = {'pooling': 'feature 2', 'name': 'feature 2'}.get(kind, 'table 0')
  with pytest.raises(UserError, match=f'its {which} is') as caught:
    restore(saved[0], changed)
  assert f"'t{which[-1]}'" in str(caught.value)
  assert_same_bits(before, everything(changed))


@pytest.mark.parametrize('step', [3, 7])
def test_a_save_that_would_be_lost_is_refused(step, saved, tmp_path):
  shutil.copytree(saved[0], tmp_path / 'c')
  with pytest.raises(UserError, match='later step than 7') as caught:
    save(tmp_path / 'c', trainer_of(seed=5, step=step))
  assert f'got step {step}' in str(caught.value)
  fresh = trainer_of(seed=2)
  assert restore(tmp_path / 'c', fresh).step == 7
  assert_same_bits(everything(saved[1]), everything(fresh))


def test_saving_the_same_again_does_nothing(saved):
  before = {path: path.stat().st_mtime_ns for path in files_of(saved[0])}
  assert save(saved[0], saved[1]) == 7
  after = {path: path.stat().st_mtime_ns for path in files_of(saved[0])}
  assert before == after
  with pytest.raises(UserError, match='later step'):
    save(saved[0], saved[1], SCHEDULE | {'delivered': 4})


def test_a_save_after_that_of_another_is_refused(tmp_path):
  with checkpoints_of(tmp_path) as one:
    one.save(trainer_of(step=1), SCHEDULE)
    save(tmp_path, trainer_of(seed=1, step=5))
    with pytest.raises(UserError, match='later step than 5'):
      one.save(trainer_of(step=2), SCHEDULE)


@pytest.mark.parametrize('where', ['rows', 'params'])
@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_not_saved(where, value, tmp_path):
  good, bad = trainer_of(step=1), trainer_of(step=2)
  save(tmp_path, good)
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


@pytest.mark.parametrize('size', [0, 1000, 100_000])
def test_without_room_the_last_checkpoint_stays(size, tmp_path):
  good, more = trainer_of(step=1), trainer_of(seed=1, step=2)
  with checkpoints_of(tmp_path) as checkpoints:
    checkpoints.save(good, SCHEDULE)
    with (
      no_file_above(size),
      pytest.raises(UserError, match='must be written whole') as caught,
    ):
      checkpoints.save(more, SCHEDULE)
  assert '\n' not in str(caught.value)
  fresh = trainer_of(seed=2)
  assert restore(tmp_path, fresh).step == 1
  assert_same_bits(everything(good), everything(fresh))
  assert save(tmp_path, more) == 2  # what was left behind is not in the way
  assert restore(tmp_path, fresh).step == 2
  assert_same_bits(everything(more), everything(fresh))


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='must be written whole'):
    save(tmp_path / 'file' / 'checkpoints', trainer_of())


def test_a_checkpoint_of_another_version_changes_nothing(
  other, tmp_path, monkeypatch
):
  before = everything(other)
  with monkeypatch.context() as earlier:
    earlier.setattr(states, 'VERSION', 9)
    save(tmp_path, trainer_of(seed=1, step=7))
  with pytest.raises(UserError, match='must be of version 7 or 8, got 9 '):
    restore(tmp_path, other)
  other.check_consistent()
  assert_same_bits(everything(other), before)


def test_a_url_that_nothing_opens_is_told():
  with pytest.raises(UserError, match='a URL that fsspec can open'):
    Checkpoints('nowhere://bucket/run')


def test_under_a_url(other):
  trainer = trainer_of(seed=1, step=4)
  url = 'memory://slipstream/run'
  save(url, trainer)
  assert restore(url, other).step == 4
  assert_same_bits(everything(trainer), everything(other))


def test_looking_for_a_checkpoint_makes_no_folder(tmp_path):
  with pytest.raises(UserError, match='resuming needs a checkpoint'):
    restore(tmp_path / 'none', trainer_of())
  assert not (tmp_path / 'none').exists()
