"""A long run: memory, threads and open files stay level.

pytest -m slow tests/guarding/test_long_run.py
SOAK_STEPS=200000 pytest -m slow tests/guarding/test_long_run.py   # an hour
"""

import json
import os
import pathlib
import statistics
import time

import pytest

from experiments.common.record import METRICS, SUMMARY
from tests.support.programs import python

STEPS = int(os.environ.get('SOAK_STEPS', '6000'))
SAMPLES = 60  # at least, of each part that is compared


def sample(process):
  """Resident kB, threads and open files of a process; None once it ended."""
  of = pathlib.Path('/proc') / str(process.pid)
  try:
    lines = (of / 'status').read_text().splitlines()
    values = dict(line.split(':', 1) for line in lines)
    files = len(os.listdir(of / 'fd'))
    return int(values['VmRSS'].split()[0]), int(values['Threads']), files
  except (OSError, KeyError):
    return None


def step_of(workdir):
  """The last step that the metrics tell of."""
  path = workdir / METRICS
  lines = path.read_text().splitlines()[:-1] if path.exists() else []
  return json.loads(lines[-1])['step'] if lines else 0


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/fd'), reason='no /proc')
@pytest.mark.parametrize('store', ['memory', 'tiered'])
def test_nothing_piles_up(store, tmp_path):
  """With checkpoints, refreshes of what stands still, and evaluations."""
  workdir, every = tmp_path / 'run', STEPS // 100
  changes = {
    'data.batch_size': 32,
    'train.steps': STEPS,
    'train.checkpoint_steps': every,
    'eval.curve_steps': every,
    'eval.curve_examples': 256,
    'log_steps': every,
    'placement': 'cached',
    'cache.capacity': 0.1,
    'cache.look_ahead_batches': 2,
    'skip.mode': 'rows',
    'skip.policy': 'stale',
    'skip.period_batches': every,
    'optimizer.dense_final': 1.0,
    'store.kind': store,
    'store.dram_bytes': 1 << 16,
    'store.path': str(tmp_path),
  }
  arguments = [f'--config.{key}={value}' for key, value in changes.items()]
  samples = []
  with python(
    *('-m', 'experiments.run', '--config=configs/criteo.py:smoke'),
    *(f'--workdir={workdir}', *arguments),
  ) as process:
    while process.poll() is None:
      one = sample(process)
      if one is not None:
        samples.append((step_of(workdir), *one))
      time.sleep(min(1.0, STEPS / 100_000))
    assert process.returncode == 0, process.stderr.read()
  assert (workdir / SUMMARY).exists()
  early, late = (
    [one for one in samples if first <= one[0] / STEPS < end]
    for first, end in ((0.2, 0.5), (0.7, 1.0))
  )
  assert min(len(early), len(late)) >= min(SAMPLES, STEPS // 200)
  before, after = (
    [statistics.median(column) for column in zip(*part, strict=True)]
    for part in (early, late)
  )
  assert after[1] <= 1.02 * before[1], (before, after)
  # One of them may be at work for a checkpoint, or not.
  most = [max(column) for column in zip(*early, strict=True)]
  assert max(one[2] for one in late) <= most[2] + 1, (before, after)
  assert max(one[3] for one in late) <= most[3] + 2, (before, after)
