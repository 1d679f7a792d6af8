"""SIGKILL at any instant: the resumed run ends with the bits of an unbroken.

pytest -m slow tests/checkpoint/test_killed.py            # 100 instants
KILLS=1000 pytest -m slow tests/checkpoint/test_killed.py
"""

import contextlib
import os
import random
import subprocess

import pytest

from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.training.loop import train
from tests.checkpoint.runs import DONE, READY
from tests.support.programs import LIMIT_S, python, wait_until
from tests.support.short_runs import start, unbroken
from tests.support.small import assert_same_bits, everything

KILLS = int(os.environ.get('KILLS', '100'))
KINDS = [
  ('pinned', 'rows', 'consecutive'),
  ('streamed', 'plain', 'intermittent'),
  ('look_ahead', 'examples', 'one_shot'),
  ('resident', 'chain', 'full'),
]


def killed_again_and_again(folder, kind, rng, most):
  """How often it was killed before it came to its end, at most so often."""
  kills = 0
  while not (folder / DONE).exists():
    (folder / READY).unlink(missing_ok=True)
    with python('-m', 'tests.checkpoint.runs', str(folder), *kind) as process:
      if kills == most:
        assert process.wait(LIMIT_S) == 0
        break
      # From its first step on; now and then from its very start.
      if rng.random() < 0.8:
        wait_until(
          lambda process=process: (
            (folder / READY).exists() or process.poll() == 0
          ),
          process,
        )
      with contextlib.suppress(subprocess.TimeoutExpired):
        assert process.wait(rng.expovariate(1 / 0.3)) == 0
        break
    kills += 1  # leaving the block killed it
  return kills


def assert_is_whole(folder, kind):
  placement, schedule, _ = kind
  trainer, batches = start(placement, schedule, 0)
  with (
    batches,
    contextlib.closing(Checkpoints(folder / 'saved')) as checkpoints,
  ):
    position = checkpoints.restore(trainer)
    assert not position.skipped
    batches.set_state(position.schedule_state)
    assert not list(train(trainer, batches, 1))
  rows, _ = unbroken(placement, schedule)
  assert_same_bits(everything(trainer), rows)


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS[:2], ids='-'.join)
def test_a_killed_run_ends_with_the_bits_of_an_unbroken(kind, tmp_path):
  unbroken(*kind[:2])  # so that programs need not compile
  rng = random.Random(kind[0])
  killed_again_and_again(tmp_path, kind, rng, 3)
  assert_is_whole(tmp_path, kind)


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS, ids='-'.join)
def test_killed_at_many_instants(kind, tmp_path):
  unbroken(*kind[:2])
  rng, kills, number = random.Random(kind[2]), 0, 0
  while kills < KILLS / len(KINDS):
    folder = tmp_path / str(number)
    folder.mkdir()
    kills += killed_again_and_again(folder, kind, rng, 6)
    assert_is_whole(folder, kind)
    number += 1
