"""The watchdog ends what hangs, and no process outlives its test."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.support import programs
from tests.support.watchdog import Hang, watchdog


def test_a_wait_for_nothing_is_a_hang():
  told = []
  with (
    pytest.raises(Hang, match='waits for nothing'),
    watchdog(lambda: told.append(1), tick_s=0.2),
  ):
    threading.Event().wait()
  assert told


def spin():
  while True:
    pass


def test_what_never_ends_is_a_hang():
  with pytest.raises(Hang), watchdog(tick_s=0.1, busy_s=0.3):
    spin()
  assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


CHILD = """
import os, time
os.fork()
os.write(1, b'here\\n')
while True:
  time.sleep(1)
"""


class Mishap(Exception):
  """What a test does not expect."""


def meet_a_mishap(pipe):
  options = {'stdout': subprocess.PIPE, 'pass_fds': (pipe,)}
  with programs.started([sys.executable, '-c', CHILD], **options) as process:
    os.close(pipe)
    assert [process.stdout.readline() for _ in range(2)] == ['here\n'] * 2
    raise Mishap


def test_programs_end_with_all_that_they_started():
  ours, theirs = os.pipe()
  with pytest.raises(Mishap):
    meet_a_mishap(theirs)
  with watchdog():
    assert os.read(ours, 1) == b''  # nobody is left who could write
  os.close(ours)
