"""Runs of several processes, which are killed, stopped and refused."""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from experiments.common import record
from slipstream_jax.checkpoint.manifest import steps_in
from slipstream_jax.checkpoint.places import open_place
from tests.support.programs import finished, LIMIT_S, started, wait_until
from tests.support.runs import (
  arrays_of,
  assert_one_sentence,
  assert_same_tree,
  manifest_of,
  summary_of,
)

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get('KILLS', '3'))
FLAGS = (
  '--config=configs/criteo.py:smoke',
  '--config.parts=8',
  '--config.train.steps=200',
  '--config.train.checkpoint_steps=20',
)


def launch(folder, *more, processes=2, **options):
  """Processes of a run, as `started`. One is `experiments.run` itself."""
  command = [sys.executable, '-m', 'experiments.run']
  if processes > 1:
    command[-1:] = ['experiments.launch', f'--processes={processes}']
  return started(
    [*command, *FLAGS, f'--workdir={folder}', *more],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    **options,
  )


# A signal that comes between two steps tries again a little later.
HANGS_IN_A_STEP = """
import ctypes, signal, time

def hang(number, frame):
  while frame and frame.f_code.co_name != 'take_step':
    frame = frame.f_back
  if frame:
    {}
  signal.setitimer(signal.ITIMER_REAL, 0.001)

signal.signal(signal.SIGUSR1, hang)
signal.signal(signal.SIGALRM, hang)
"""


def children_of(process):
  threads = pathlib.Path(f'/proc/{process.pid}/task').iterdir()
  return [
    int(child)
    for thread in threads
    for child in (thread / 'children').read_text().split()
  ]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """The folder of a run of one process."""
  folder = tmp_path_factory.mktemp('whole')
  command = [sys.executable, '-m', 'experiments.run', *FLAGS]
  done = finished([*command, f'--workdir={folder}'])
  assert done.returncode == 0, done.stderr
  return folder


def assert_same_run(one, other):
  last = summary_of(one)
  assert last['auc'] == summary_of(other)['auc']
  assert last['examples_dropped'] == summary_of(other)['examples_dropped']
  steps = last['steps']
  assert_same_tree(arrays_of(one, steps), arrays_of(other, steps))


@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_starts_again_when_a_process_dies_or_freezes(
  how, whole, tmp_path
):
  folder = tmp_path / 'run'
  with launch(folder) as process:
    wait_until(manifest_of(folder, 20).exists, process)
    _, last = sorted(children_of(process))
    os.kill(last, how)
    out, errors = process.communicate(timeout=LIMIT_S)
  assert process.returncode == 0, errors
  assert 'all start again' in ' '.join(out.split())
  assert_same_run(whole, folder)


@pytest.mark.parametrize(
  ('hang', 'said'),
  [
    # Its other threads live on, so that JAX does not notice.
    ('time.sleep(1e6)', '20.5 s .* it hangs'),
    # It holds Python's lock and cannot say so, but the other one waits for it.
    ('ctypes.PyDLL(None).sleep(1000000)', '28.5 s .* it waits'),
  ],
)
def test_a_run_starts_again_when_a_training_thread_hangs(
  hang, said, whole, tmp_path
):
  (tmp_path / 'sitecustomize.py').write_text(HANGS_IN_A_STEP.format(hang))
  folder = tmp_path / 'run'
  path = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
  with launch(folder, env=os.environ | {'PYTHONPATH': path}) as process:
    wait_until(manifest_of(folder, 20).exists, process)
    _, last = sorted(children_of(process))
    os.kill(last, signal.SIGUSR1)
    out, errors = process.communicate(timeout=LIMIT_S)
  assert process.returncode == 0, errors
  assert re.search(f'process . has taken no step for {said}', errors)
  assert 'all start again' in ' '.join(out.split())
  assert_same_run(whole, folder)


def test_a_signal_saves_once_and_ends_all(whole, tmp_path):
  folder = tmp_path / 'run'
  with launch(folder) as process:
    wait_until(manifest_of(folder, 20).exists, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=LIMIT_S)
  assert process.returncode == 143
  assert 'is saved, and this continues' in errors
  assert not (folder / record.SUMMARY).exists()
  with launch(folder, '--config.resume=True') as process:
    _, errors = process.communicate(timeout=LIMIT_S)
  assert process.returncode == 0, errors
  assert_same_run(whole, folder)


def newest(folder):
  """Step of the newest checkpoint, 0 without any."""
  place = folder / 'checkpoints'
  return max(steps_in(open_place(place)), default=0) if place.exists() else 0


@pytest.mark.parametrize('seed', range(-(-KILLS // 3)))
def test_processes_that_are_killed_again_and_again(seed, whole, tmp_path):
  """Any of four, at any time after another checkpoint is there."""
  rng, folder, before = random.Random(seed), tmp_path / 'run', 0
  often = '--restarts=3', '--config.train.checkpoint_steps=10'
  with launch(folder, *often, processes=4) as process:
    for _ in range(3):
      wait_until(lambda last=before: newest(folder) > last, process)
      wait_until(lambda: len(children_of(process)) == 4, process)
      time.sleep(rng.uniform(0, 0.3))
      started = children_of(process)
      os.kill(rng.choice(started), signal.SIGKILL)
      # Others may still end a checkpoint.
      wait_until(
        lambda own=started: not {*own} & {*children_of(process)}, process
      )
      before = newest(folder)
    out, errors = process.communicate(timeout=LIMIT_S)
  assert process.returncode == 0, errors
  assert ' '.join(out.split()).count('all start again') == 3
  assert_same_run(whole, folder)


def test_half_of_the_processes_start_after_a_start_that_saved_nothing(
  whole, tmp_path
):
  folder = tmp_path / 'run'
  over = '--config.replicas=2', '--config.hosts=2'
  with launch(folder, *over, processes=4) as process:
    wait_until(lambda: newest(folder), process)
    first = children_of(process)
    os.kill(first[-1], signal.SIGKILL)
    wait_until(lambda: not {*first} & {*children_of(process)}, process)
    wait_until(lambda: len(children_of(process)) == 4, process)
    os.kill(children_of(process)[-1], signal.SIGKILL)
    out, errors = process.communicate(timeout=LIMIT_S)
  assert process.returncode == 0, errors
  assert 'only 2, as the last start saved nothing' in ' '.join(out.split())
  assert_same_run(whole, folder)


def test_a_run_goes_on_with_fewer_processes(whole, tmp_path):
  folder = tmp_path / 'run'
  for processes in (4, 2):
    before = newest(folder)
    resume = f'--config.resume={bool(before)}'
    with launch(folder, resume, processes=processes) as process:
      wait_until(lambda last=before: newest(folder) > last, process)
      process.send_signal(signal.SIGTERM)
      _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143, errors
  with launch(folder, '--config.resume=True', processes=1) as process:
    _, errors = process.communicate(timeout=LIMIT_S)
  assert process.returncode == 0, errors
  assert_same_run(whole, folder)


def test_what_processes_cannot_train_is_refused(tmp_path):
  for words, more in {
    'cannot go back': '--config.train.on_bad_loss=rollback',
    'must divide the devices': '--config.devices=3',
  }.items():
    with launch(tmp_path / 'run', more) as process:
      _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert_one_sentence(errors, words)
  assert not (tmp_path / 'run').exists()
