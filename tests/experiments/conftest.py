"""A run that many tests look at, and none changes."""

import pytest

from tests.support.runs import run_job, smoke


@pytest.fixture(scope='session')
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('runs') / 'finished'
  assert run_job(workdir, smoke()) == 0
  return workdir
