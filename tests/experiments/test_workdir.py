"""The folder of a run is its alone, and is known to be so before any work."""

import contextlib

import pytest

from experiments.common import record
from experiments.common import workdir as folders
from tests.support.runs import (
  assert_one_sentence,
  no_work,
  run_job,
  smoke,
  snapshot,
)


def test_a_folder_that_was_made_for_nothing_is_gone(tmp_path):
  for name in 'made', 'made/within', 'there':
    (tmp_path / 'there').mkdir(exist_ok=True)
    for fails in True, False:
      with (
        contextlib.suppress(KeyError),
        folders.made_folder(str(tmp_path / name), '--workdir') as path,
      ):
        assert path.is_dir()
        if fails:
          raise KeyError(name)
      assert [one.name for one in tmp_path.iterdir()] == ['there']
  with folders.made_folder(str(tmp_path / 'made'), '--workdir') as path:
    (path / 'kept').touch()
  assert (tmp_path / 'made' / 'kept').exists()


@pytest.mark.parametrize('resume', [False, True])
def test_a_folder_is_for_one_run_at_a_time(
  resume, finished, tmp_path, capsys, monkeypatch
):
  no_work(monkeypatch)
  workdir = finished if resume else tmp_path / 'run'
  config = smoke(resume=resume)
  with folders.claimed(workdir, config):
    before = snapshot(workdir)
    assert run_job(workdir, config) == 1
    assert_one_sentence(capsys.readouterr().err, 'one run at a time', 'process')
    assert snapshot(workdir) == before
  assert workdir.exists() == resume  # what was made for nothing is gone


@pytest.mark.parametrize('where', ['file/run', 'file'])
def test_a_folder_that_cannot_be_written_is_told_first(
  where, tmp_path, capsys, monkeypatch
):
  no_work(monkeypatch)
  (tmp_path / 'file').write_text('')
  assert run_job(tmp_path / where, smoke()) == 1
  assert_one_sentence(capsys.readouterr().err, str(tmp_path / where))
  assert [path.name for path in tmp_path.iterdir()] == ['file']


@pytest.mark.parametrize('url', ['gs://bucket/run', 's3://bucket/run', 'gs:/x'])
def test_a_url_is_no_workdir(url, tmp_path, capsys, monkeypatch):
  no_work(monkeypatch)
  monkeypatch.chdir(tmp_path)
  assert run_job(url, smoke()) == 1
  assert_one_sentence(capsys.readouterr().err, url, '--workdir')
  assert not list(tmp_path.iterdir())


def test_a_finished_workdir_is_not_overwritten(finished, capsys):
  before = (finished / record.SUMMARY).read_text()
  assert run_job(finished, smoke()) == 1
  assert_one_sentence(capsys.readouterr().err, str(finished))
  assert (finished / record.SUMMARY).read_text() == before


def test_checkpoints_of_another_run_are_left_alone(
  finished, tmp_path, capsys, monkeypatch
):
  no_work(monkeypatch)
  before = snapshot(finished)
  config = smoke()
  config.checkpoint.path = str(finished / 'checkpoints')
  assert run_job(tmp_path / 'run', config) == 1
  assert_one_sentence(
    capsys.readouterr().err, 'a place of its own', 'config.checkpoint.path'
  )
  assert snapshot(finished) == before
