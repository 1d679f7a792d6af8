"""Programs that tests start, and end whatever happens."""

import contextlib
import os
import pathlib
import signal
import subprocess
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
  process = subprocess.Popen(command, start_new_session=True, **options)
  try:
    yield process
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
      if pipe is not None:
        pipe.close()


def finished(command, **options):
  """Exit code and outputs of a program that ends by itself."""
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
  with started(command, **pipes | options) as process:
    out, errors = process.communicate(timeout=LIMIT_S)
  return subprocess.CompletedProcess(command, process.returncode, out, errors)


def wait_until(condition, process):
  """Returns once condition() holds, while the program runs."""
  until = time.monotonic() + LIMIT_S
  while not condition():
    assert process.poll() is None, 'the program ended first'
    assert time.monotonic() < until, 'what was waited for does not come'
    time.sleep(0.002)
