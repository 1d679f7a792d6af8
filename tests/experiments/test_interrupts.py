"""Signals end a program well, and what it trained goes on to the same bits."""

import os
import re
import shlex
import signal
import sys
import threading

from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st
import pytest

from experiments.common import build, interrupts, record
from slipstream_jax.checkpoint.chain import find_chains
from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.training import loop
from tests.support.programs import LIMIT_S, python, wait_until
from tests.support.runs import (
  arrays_of,
  assert_same_tree,
  lines_of,
  manifest_of,
  run_job,
  smoke,
  summary_of,
)

SAME = (
  'auc',
  'log_loss',
  'lookups',
  'rows_loaded',
  'examples_trained',
  'steps',
)


def assert_same_run(one, other):
  steps = summary_of(one)['steps']
  assert_same_tree(arrays_of(one, steps), arrays_of(other, steps))
  for key in SAME + ('examples_hot_share', 'examples_dropped'):
    assert summary_of(one)[key] == summary_of(other)[key], key
  for kind in ('eval', 'decision'):  # 'train' lines also end where a run did
    told = [
      [
        {key: value for key, value in line.items() if 'seconds' not in key}
        for line in lines_of(workdir)
        if line['kind'] == kind
      ]
      for workdir in (one, other)
    ]
    assert told[0] == told[1]


class Signalling:
  """A callable that sends a signal at its call number `at`, or soon after."""

  def __init__(self, call, at, number, delay):
    self.call, self.at, self.number, self.delay = call, at, number, delay
    self.calls, self.timer = 0, None

  def __call__(self, *args, **kwargs):
    self.calls += 1
    if self.calls == self.at:
      signal_ = (os.getpid(), self.number)
      self.timer = threading.Timer(self.delay, os.kill, signal_)
      self.timer.start()
    return self.call(*args, **kwargs)


@pytest.mark.slow
@settings(
  max_examples=4,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
  at=st.integers(1, 140),
  delay=st.floats(0, 0.05),
  number=st.sampled_from([signal.SIGINT, signal.SIGTERM]),
  checkpoint_steps=st.sampled_from([0, 20]),
)
def test_a_signal_at_any_moment_changes_no_bit(
  at, delay, number, checkpoint_steps, finished, tmp_path_factory, capsys
):
  workdir = tmp_path_factory.mktemp('signalled') / 'run'
  changes = {'train.checkpoint_steps': checkpoint_steps}
  with pytest.MonkeyPatch.context() as patched:
    # The watcher would end the tests, too, if they were slow.
    patched.setattr(interrupts, '_GRACE_S', LIMIT_S)
    sender = Signalling(loop.take_step, at, number, delay)
    patched.setattr(loop, 'take_step', sender)
    code = run_job(workdir, smoke(**changes))
  assert code in (0, 128 + number)  # the run may have been through
  sender.timer.join()
  said = capsys.readouterr().err
  if code:
    saved = int(re.search(r'^error: interrupted; step (\d+) is', said)[1])
    assert manifest_of(workdir, saved).exists()
    assert saved >= at
    assert not (workdir / record.SUMMARY).exists()
    assert said.count('\n') == 1
    assert run_job(workdir, smoke(resume=True, **changes)) == 0
  assert_same_run(finished, workdir)


@pytest.mark.parametrize('where', ['evaluate', 'save'])
def test_a_signal_between_steps_changes_no_bit(
  where, finished, tmp_path, monkeypatch, capsys
):
  changes = {'train.checkpoint_steps': 60}
  with monkeypatch.context() as patched:
    patched.setattr(interrupts, '_GRACE_S', LIMIT_S)
    owner, name = {
      'evaluate': (build, 'evaluated'),
      'save': (Checkpoints, 'save'),
    }[where]
    call = getattr(owner, name)

    def signalled(*args, **how):
      if not interrupts.asked():
        signal.raise_signal(signal.SIGINT)
      return call(*args, **how)

    patched.setattr(owner, name, signalled)
    assert run_job(tmp_path / 'run', smoke(**changes)) == 130
  step = {'evaluate': 50, 'save': 60}[where]
  assert f'step {step} is saved' in capsys.readouterr().err
  config = smoke(resume=True, **changes)
  assert run_job(tmp_path / 'run', config) == 0
  assert_same_run(finished, tmp_path / 'run')


LONG = {'train.steps': 600, 'eval.curve_steps': 0}


@pytest.mark.parametrize(
  ('number', 'checkpoint_steps'),
  [
    pytest.param(signal.SIGINT, 0, marks=pytest.mark.slow),
    (signal.SIGTERM, 20),
  ],
)
def test_what_a_signalled_process_says_continues_it(
  number, checkpoint_steps, tmp_path
):
  workdir = tmp_path / 'run'
  changes = LONG | {'train.checkpoint_steps': checkpoint_steps}
  flags = [f'--config.{key}={value}' for key, value in changes.items()]
  command = ['-m', 'experiments.run', '--config=configs/criteo.py:smoke']
  metrics = workdir / record.METRICS
  with python(*command, *flags, f'--workdir={workdir}') as process:
    wait_until(
      lambda: metrics.exists() and metrics.stat().st_size > 1000, process
    )
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number
  assert not (workdir / record.SUMMARY).exists()
  said = re.fullmatch(
    r'error: interrupted; step \d+ is saved, and this continues: (.*)\n', errors
  )
  words = shlex.split(said[1])
  assert words[1:] == [
    *command,
    *flags,
    f'--workdir={workdir}',
    '--config.resume=True',
  ]
  if checkpoint_steps:  # once is enough to see that it is understood
    return
  with python(*words[1:]) as process:
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
  assert run_job(tmp_path / 'whole', smoke(**changes)) == 0
  assert_same_run(tmp_path / 'whole', workdir)


PROGRAMS = {
  # Waits in a step that does not end: the second signal ends it.
  'twice': """
with interrupts.gently():
  tell()
  while True:
    time.sleep(1000)
""",
  # Python drops an exception raised in a callback.
  'dropped': """
class Callback:
  def __del__(self):
    tell()
    while True:
      time.sleep(1000)
interrupts._GRACE_S = 0.2
Callback()
while True:
  time.sleep(1000)
""",
  # Ends at the second one before its grace is over.
  'hurried': """
with interrupts.gently(1000.0):
  tell()
  while True:
    time.sleep(1000)
""",
  # Ends well: the grace is of what is gentle alone.
  'ready': """
with interrupts.gently(0.2):
  tell()
  while not interrupts.asked():
    time.sleep(0.001)
time.sleep(0.5)
raise KeyboardInterrupt
""",
  'once': """
tell()
while True:
  time.sleep(1000)
""",
  # What no exception ends: threads that are waited for at the end.
  'thread': """
threading.Thread(target=time.sleep, args=(1000,)).start()
tell()
while True:
  time.sleep(1000)
""",
}


@pytest.mark.parametrize('kind', PROGRAMS)
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_never_lost(kind, number, tmp_path):
  body = PROGRAMS[kind].replace('\n', '\n  ')
  script = f"""
import pathlib, sys, threading, time
from experiments.common import cli, interrupts

def tell():
  pathlib.Path({str(tmp_path / 'ready')!r}).touch()

def main():
  {body}

cli.run(main, config='none')
"""
  with python('-c', script) as process:
    wait_until((tmp_path / 'ready').exists, process)
    process.send_signal(number)
    if kind in ('twice', 'hurried'):
      wait_for_signal(process, number)
      process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number, errors
  assert errors.startswith('error: interrupted')
  assert errors.count('\n') == 1
  assert 'the last checkpoint' in errors


SLOW = """
import sys, time
from experiments.common import cli, interrupts
from experiments.run import __main__ as program
from slipstream_jax.checkpoint import places

write = places._Folder.write

def slow(place, name, pieces):
  def passing():
    for piece in pieces:
      yield piece
      while interrupts.asked():
        time.sleep(1000)
  return write(place, name, passing())

places._Folder.write = slow
sys.modules['__main__'] = program  # which has its flags
cli.run('experiments.run.job:run')
"""


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_what_is_not_saved_within_the_grace_ends_all_the_same(
  number, finished, tmp_path
):
  """A disk that takes for ever; the checkpoint before is what holds."""
  workdir, changes = tmp_path / 'run', {'train.checkpoint_steps': 20}
  config = '--config=configs/criteo.py:smoke'
  flags = ['--config.train.checkpoint_steps=20', f'--workdir={workdir}']
  grace = '--config.checkpoint.grace_seconds=1'
  with python('-c', SLOW, config, grace, *flags) as process:
    wait_until(manifest_of(workdir, 40).exists, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, errors
  assert re.fullmatch(
    r'error: not ready 1 s after it was asked to end '
    r'\(config\.checkpoint\.grace_seconds\); the last checkpoint, .*\n',
    errors,
  )
  assert not (workdir / record.SUMMARY).exists()
  search = find_chains(open_place(workdir / 'checkpoints'))
  assert search.chains
  assert not search.skipped
  assert search.chains[0][-1].step >= 40
  assert run_job(workdir, smoke(resume=True, **changes)) == 0
  assert_same_run(finished, workdir)


def wait_for_signal(process, number):
  """Until the process has taken the signal: two at a time are one."""
  status = f'/proc/{process.pid}/status'
  if not os.path.exists(status):
    pytest.skip(f'no {status} on {sys.platform}')

  def taken():
    with open(status) as lines:
      pending = [x.split()[1] for x in lines if x.startswith('ShdPnd')]
    return not int(pending[0], 16) & 1 << number - 1

  wait_until(taken, process)


def test_a_signal_while_a_program_imports_ends_it():
  """Also once polars, which takes signals of its own, has been imported."""
  lines = (
    'import sys',
    "sys.argv = ['-m']",
    'import experiments, os, polars, signal, time',
    'os.kill(os.getpid(), signal.SIGINT)',
    'time.sleep(60)',
  )
  with python('-c', '; '.join(lines)) as process:
    assert process.wait(LIMIT_S) == 130
