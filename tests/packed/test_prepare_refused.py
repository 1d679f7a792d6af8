"""What `prepare` refuses, and a folder that it has finished before."""

import functools
import itertools
import os

import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.packed import columns as packed
from slipstream_jax.packed import journal
from slipstream_jax.packed.prepare import prepare
from tests.support.packed_folders import checksums, prepared
from tests.support.raw_example import fields, raw_of


def stopped(raw, folder, **arguments):
  """Stops a preparation after two saves."""
  work = prepare(raw, folder, **arguments)
  for _ in range(8):
    next(work)
  work.close()


@pytest.mark.parametrize(
  ('change', 'arguments', 'named'),
  [
    ({'parts': (0.5, 0.5)}, {}, 'sources'),
    ({'settings': {'sample': 0.5}}, {}, "settings {'sample': 0.5} after {}"),
    ({}, {'min_count': 2}, 'min_count 2 after 1'),
    ({}, {'hash_rows': 64}, 'hash_rows 64 after None'),
  ],
)
def test_other_sources_or_settings_do_not_continue_nor_write_over(
  tmp_path, change, arguments, named
):
  stopped(raw_of(fields()), tmp_path)
  with pytest.raises(UserError, match=named):
    prepared(raw_of(fields(), **change), tmp_path, **arguments)
  before = prepared(raw_of(fields()), tmp_path).manifest
  with pytest.raises(UserError, match=named) as caught:
    prepared(raw_of(fields(), **change), tmp_path, **arguments)
  assert str(tmp_path / packed.MANIFEST) in str(caught.value)
  assert 'give another folder' in str(caught.value)
  assert packed.open_packed(tmp_path).manifest == before


def test_a_finished_folder_is_left_as_it_is(tmp_path):
  prepared(raw_of(fields()), tmp_path)
  before = checksums(tmp_path)
  times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
  # As a kill between the manifest and the end leaves it, the second time.
  for left in False, True:
    if left:
      (tmp_path / packed.UNFINISHED).mkdir()
    assert list(prepare(raw_of(fields()), tmp_path)) == []
    assert {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == times
  assert checksums(tmp_path) == before


def test_a_source_that_changed_since_is_noticed(tmp_path):
  source = tmp_path / 'source'
  source.write_text('lines')
  raw = raw_of(fields())
  raw = raw._replace(parts=(raw.parts[0]._replace(name=str(source)),))
  prepared(raw, tmp_path / 'data')
  os.utime(source, ns=(0, 12345))
  with pytest.raises(UserError, match=r"'changed': 12345}\] after"):
    prepared(raw, tmp_path / 'data')


def test_a_file_and_a_folder_of_other_things_are_refused(tmp_path):
  (tmp_path / 'thesis.txt').write_text('years of work')
  with pytest.raises(UserError, match=r'must be empty, got thesis\.txt'):
    prepared(raw_of(fields()), tmp_path)
  with pytest.raises(UserError, match='folder that can be written'):
    prepared(raw_of(fields()), tmp_path / 'thesis.txt' / 'data')
  assert [path.name for path in tmp_path.iterdir()] == ['thesis.txt']


def test_two_at_a_time_are_refused(tmp_path):
  work = prepare(raw_of(fields()), tmp_path)
  next(work)
  with pytest.raises(UserError, match='another one at work'):
    prepared(raw_of(fields()), tmp_path)
  work.close()
  prepared(raw_of(fields()), tmp_path)


def test_a_spilled_file_cut_by_others_is_noticed(tmp_path):
  stopped(raw_of(fields()), tmp_path)
  path = tmp_path / packed.UNFINISHED / 'b.int64'
  path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(UserError, match='something changed the file'):
    prepared(raw_of(fields()), tmp_path)


def refused(raw, at):
  """The same raw data, of which chunk number `at`, from 0, is refused."""
  count = itertools.count()

  def refusing(part):
    for chunk in part.chunks():
      if next(count) == at:
        raise UserError('a line', got='x', where='y, line 1', hint='mend it')
      yield chunk

  parts = tuple(
    part._replace(chunks=functools.partial(refusing, part))
    for part in raw.parts
  )
  return raw._replace(parts=parts)


@pytest.mark.parametrize('parts', [(1.0,), (0.1, 0.9)])
def test_refused_data_leave_nothing_that_cannot_be_continued(tmp_path, parts):
  """Whichever chunk it is; what is left continues to the same bits."""
  raw, left = raw_of(fields(400), parts), []
  prepared(raw, tmp_path / 'whole')
  chunks = sum(1 for part in raw.parts for _ in part.chunks())
  for at in range(chunks):
    folder = tmp_path / f'{at}' / 'made' / 'too'
    if at % 2:
      folder.mkdir(parents=True)
    with pytest.raises(UserError, match='mend it'):
      prepared(refused(raw, at), folder)
    assert not packed.is_finished(folder)
    left.append(journal.path_in(folder).exists())
    if not left[-1]:
      assert folder.exists() == bool(at % 2)
      assert at % 2 or not (tmp_path / f'{at}').exists()
      assert not at % 2 or not list(folder.iterdir())
    prepared(raw, folder)
    assert checksums(folder) == checksums(tmp_path / 'whole')
  assert left == sorted(left)
  assert set(left) == {False, True}


@pytest.mark.parametrize('parts', [(1.0,), (1.0, 0.0)])
def test_too_few_examples_leave_nothing(tmp_path, parts):
  with pytest.raises(UserError, match='got 0 to train, 0 to validation, 1 to'):
    prepared(raw_of(fields(1), parts), tmp_path / 'data')
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  'arguments',
  [{'min_count': 0}, {'hash_rows': 0}, {'hash_rows': 9, 'min_count': 2}],
)
def test_bad_arguments_leave_no_folder(tmp_path, arguments):
  with pytest.raises(UserError, match=r'min_count|hash_rows'):
    prepared(raw_of(fields()), tmp_path / 'data', **arguments)
  assert not (tmp_path / 'data').exists()
