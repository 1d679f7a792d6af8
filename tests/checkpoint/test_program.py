"""Lists and copies of a run's checkpoints."""

import shutil
import sys

import numpy as np
import pytest

from experiments.checkpoints import job
from slipstream_jax.checkpoint.chain import merged_rows, read_chain
from slipstream_jax.checkpoint.manifest import read_manifest, steps_in
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.checkpoint.row_file import concatenate
from slipstream_jax.errors import UserError
from tests.support.programs import finished
from tests.support.runs import (
  assert_one_sentence,
  assert_same_tree,
  run_job,
  smoke,
  snapshot,
)
from tests.support.texts.mutations import flip

STEPS = {'train.steps': 100, 'eval.curve_steps': 0, 'skip.mode': 'off'}
KEPT = {
  'train.checkpoint_steps': 30,
  'checkpoint.keep': 3,
  'checkpoint.consolidate': 0.0,
}


@pytest.fixture(scope='module')
def kept(tmp_path_factory):
  """A run with a base and increments."""
  folder = tmp_path_factory.mktemp('kept') / 'run'
  assert run_job(folder, smoke(**STEPS, **KEPT)) == 0
  return folder


@pytest.fixture
def run(kept, tmp_path):
  """A copy of it, to spoil."""
  return shutil.copytree(kept, tmp_path / 'run')


@pytest.mark.slow
def test_a_list_says_what_is_whole(run):
  place = job.place_of(str(run))
  before = snapshot(run)
  listed = job.entries(place)
  assert snapshot(run) == before
  assert [row['step'] for row in listed] == [30, 60, 90, 100]
  assert [row['whole'] for row in listed] == ['link', 'yes', 'yes', 'yes']
  assert not any(row['flaw'] for row in listed)
  assert [row['kind'] for row in listed] == [
    'base',
    *('increment on 30', 'increment on 60', 'increment on 90'),
  ]
  bytes_of_rows = [read_manifest(place, row['step']).bytes for row in listed]
  others = listed[-1]['bytes'] - bytes_of_rows[-1]
  assert listed[-1]['bytes_read'] == sum(bytes_of_rows) + others
  assert job.entries(open_place(run / 'checkpoints')) == listed


@pytest.mark.slow
def test_a_list_says_what_is_damaged_and_why(run):
  place = job.place_of(str(run))
  (of_90,) = place.names('increment-000000000090')
  flip(run / 'checkpoints' / of_90)
  flip(run / 'checkpoints' / 'manifest-000000000100.json')
  *whole, third, last = job.entries(place)
  assert [row['whole'] for row in whole] == ['link', 'yes']
  assert third['whole'] == last['whole'] == 'no'
  assert of_90 in third['flaw']
  assert third['kind'] == 'increment on 60'
  assert 'manifest' in last['flaw']
  assert last['rows'] is None
  # Their sizes are right.
  assert not job.entries(place, verify=False)[2]['flaw']
  (base,) = place.names('base-000000000030')
  place.delete(base)
  assert all(row['flaw'] for row in job.entries(place))


def rows_of(place, step):
  chain = read_chain(place, step)
  return {
    group: concatenate([*merged_rows(place, chain, group)])
    for group in chain[-1].rows
  }


@pytest.mark.slow
def test_a_copy_is_a_base_of_the_newest(run, tmp_path):
  place, into = job.place_of(str(run)), open_place(tmp_path / 'archive')
  flip(run / 'checkpoints' / 'manifest-000000000100.json')
  with pytest.raises(UserError, match=r'got step 100: .* step 90 is'):
    job.copied(place, into, 'raw')
  told = []
  assert job.copied(place, into, 'raw', 90, told.append).step == 90
  assert 'manifest-000000000100.json' in told[0]
  assert len(read_chain(into, 90)) == 1
  for group, piece in rows_of(place, 90).items():
    copy = rows_of(into, 90)[group]
    np.testing.assert_array_equal(copy.rows, piece.rows)
    assert_same_tree(copy.values, piece.values)
  before = snapshot(tmp_path / 'archive')
  with pytest.raises(UserError, match='no checkpoint of its step, got one of'):
    job.copied(place, into, 'int4', 90)
  with pytest.raises(UserError, match='a place of its own'):
    job.copied(place, place, 'int4', 90)
  assert snapshot(tmp_path / 'archive') == before


@pytest.mark.slow
def test_a_copy_begins_anew_where_its_source_went(run, tmp_path, monkeypatch):
  place, into = job.place_of(str(run)), open_place(tmp_path / 'archive')
  copy, steps = job.copy_as_base, []

  def while_it_goes_on(place, chain, *rest):
    if not steps:
      for name in place.names('increment-000000000100'):
        place.delete(name)
      place.delete('manifest-000000000100.json')
    steps.append(chain[-1].step)
    return copy(place, chain, *rest)

  monkeypatch.setattr(job, 'copy_as_base', while_it_goes_on)
  assert job.copied(place, into, 'int4').step == 90
  assert steps == [100, 90]
  assert steps_in(into) == [90]


@pytest.mark.slow
def test_the_program_as_it_is_called(run, tmp_path):
  command = [sys.executable, '-m', 'experiments.checkpoints']
  done = finished([*command, str(run)])
  assert (done.returncode, done.stderr) == (0, '')
  assert 'increment on 90' in done.stdout
  archive = tmp_path / 'archive'
  flags = [f'--copy={archive}', '--codec=int4']
  done = finished([*command, str(run), *flags])
  assert (done.returncode, done.stderr) == (0, '')
  place = open_place(archive)
  assert read_chain(place, 100)[0].codec == 'int4'
  with pytest.raises(UserError, match='in full precision, got codec int4'):
    job.copied(place, open_place(tmp_path / 'more'), 'raw')
  flip(archive / 'manifest-000000000100.json')
  done = finished([*command, str(archive)])
  assert done.returncode == 1
  assert 'step 100: a manifest must be' in done.stdout
  assert_one_sentence(done.stderr, 'that is whole')


@pytest.mark.parametrize(
  ('asked', 'said'),
  [
    ({'copy': 'a', 'codec': 'int5'}, 'int5'),
    ({'codec': 'int4'}, '--codec needs --copy'),
    ({'step': 90}, '--step needs --copy'),
  ],
)
def test_what_cannot_be_asked_for(asked, said, tmp_path):
  with pytest.raises(UserError, match=said):
    job.list_or_copy(str(tmp_path / 'none'), **asked)


def test_where_there_is_nothing(tmp_path):
  with pytest.raises(UserError, match='got none'):
    job.entries(job.place_of(str(tmp_path)))
  with pytest.raises(UserError, match='a URL that fsspec can open'):
    job.place_of('none://of/these')
