"""A run that many tests look at, and none changes; signals that are heard."""

import signal

import pytest

from tests.support.runs import run_job, smoke


@pytest.fixture(scope='session')
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('runs') / 'finished'
  assert run_job(workdir, smoke()) == 0
  return workdir


@pytest.fixture(scope='session', autouse=True)
def heard():
  """In a shell's background Ctrl-C is ignored, and a run leaves it so."""
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
