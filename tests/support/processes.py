"""Processes that end with their test, and disks that are full to them."""

import contextlib
import pathlib
import resource
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
WATCHDOG_S = 300  # of a hang; nothing takes a tenth of it


@contextlib.contextmanager
def started(*arguments):
  """A Python process, which is killed whatever happens."""
  # A shell's background ignores it, and so would what is started there.
  handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
  try:
    process = subprocess.Popen(
      [sys.executable, *arguments],
      cwd=ROOT,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
  finally:
    signal.signal(signal.SIGINT, handler)
  try:
    yield process
  finally:
    process.kill()
    process.communicate()


def wait_for(condition):
  """Until it holds; a hang fails the test."""
  until = time.monotonic() + WATCHDOG_S
  while not condition():
    assert time.monotonic() < until, 'it never came'
    time.sleep(0.01)


@contextlib.contextmanager
def no_file_above(size):
  """What a full disk looks like, to this process alone."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
