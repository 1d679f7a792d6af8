"""Programs that tests start, and end whatever happens; disks full to them."""

import contextlib
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_S = 900.0
"""For what takes seconds: ends a test that hangs, and none that is slow."""


@contextlib.contextmanager
def started(command, **options):
  """A program run from the repository's root, as text; gone afterwards.

  It and all that it starts are a group, which is killed when the block ends,
  however it ends.

  Args:
    command: its arguments.
    options: of `subprocess.Popen`.
  """
  options = {'cwd': ROOT, 'text': True, 'stdin': subprocess.DEVNULL} | options
  # A shell's background ignores it, and so would what is started there.
  handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
  try:
    process = subprocess.Popen(command, start_new_session=True, **options)
  finally:
    signal.signal(signal.SIGINT, handler)
  try:
    yield process
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
      if pipe is not None:
        pipe.close()


def python(*arguments):
  """Python with these arguments, `started`; its errors can be read.

  It reads what others compiled, and adds nothing: one that is killed may leave
  half an entry behind.
  """
  only_read = {'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '1e9'}
  return started(
    [sys.executable, *arguments],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    env=os.environ | only_read,
  )


def finished(command, **options):
  """Exit code and outputs of a program that ends by itself.

  It shares what this process compiled, and adds to it.
  """
  options |= {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
  with started(command, **options) as process:
    out, errors = process.communicate(timeout=LIMIT_S)
  return subprocess.CompletedProcess(command, process.returncode, out, errors)


def wait_until(condition, process):
  """Returns once condition() holds, while the program runs."""
  until = time.monotonic() + LIMIT_S
  while not condition():
    assert process.poll() is None, 'the program ended first'
    assert time.monotonic() < until, 'what was waited for does not come'
    time.sleep(0.002)


@contextlib.contextmanager
def no_file_above(size):
  """What a full disk looks like, to this process alone."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
