"""What breaks in mid-run ends it, says why, and harms no checkpoint.

That no thread of ours outlives it, conftest asserts of every test.
"""

import math

import pytest

from experiments.common import build, record
from slipstream_jax.training import loop
from tests.support.runs import (
  arrays_of,
  assert_same_tree,
  run_job,
  smoke,
  summary_of,
)
from tests.support.watchdog import watchdog

AT = 90  # calls before the fault; checkpoints come every 40 steps


class Fault(Exception):
  """What no program expects."""


class Breaking:
  """A callable that fails at its call number `AT`."""

  def __init__(self, call):
    self.call, self.calls = call, 0

  def __call__(self, *args):
    self.calls += 1
    if self.calls == AT:
      raise Fault(f'broken at call {AT}')
    return self.call(*args)


class BreakingSource:
  """A batch source whose `next` breaks."""

  def __init__(self, source):
    self._source, self.breaking = source, Breaking(source.__next__)

  def __iter__(self):
    return self

  def __next__(self):
    return self.breaking()

  def get_state(self):
    return self._source.get_state()

  def set_state(self, state):
    self._source.set_state(state)

  def close(self):
    self._source.close()


def break_source(monkeypatch):
  made = []
  original = build.batches

  def batches(config, trainer, data, steps):
    made.append(BreakingSource(data.train(config.data.batch_size)))
    broken = data._replace(train=lambda size: made[0])
    return original(config, trainer, broken, steps)

  monkeypatch.setattr(build, 'batches', batches)


def break_planner(monkeypatch):
  made = []
  original = build.placements

  def placements(config, tables):
    (placed,) = original(config, tables)
    made.append(Breaking(placed.plan))
    return (placed._replace(plan=made[0]),)

  monkeypatch.setattr(build, 'placements', placements)


def break_step(monkeypatch):
  monkeypatch.setattr(loop, 'take_step', Breaking(loop.take_step))


def changes(placement):
  return {
    'placement': placement,
    'cache.capacity': 0.05,
    'skip.mode': 'off',
    'train.steps': 120,
    'train.checkpoint_steps': 40,
    'eval.curve_steps': 0,
  }


@pytest.fixture(scope='module', params=['pinned', 'cached'])
def whole(request, tmp_path_factory):
  """A placement, and the folder of a run with it that nothing broke."""
  workdir = tmp_path_factory.mktemp('whole') / request.param
  assert run_job(workdir, smoke(**changes(request.param))) == 0
  return request.param, workdir


@pytest.mark.parametrize('fault', [break_source, break_planner, break_step])
def test_a_fault_ends_the_run_and_spares_the_checkpoint(
  fault, whole, tmp_path, monkeypatch
):
  placement, unbroken = whole
  with monkeypatch.context() as patched:
    fault(patched)
    with (
      watchdog(busy_s=math.inf),
      pytest.raises(Fault, match='broken at call'),
    ):
      run_job(tmp_path / 'run', smoke(**changes(placement)))
  assert not (tmp_path / 'run' / record.SUMMARY).exists()
  resumed = smoke(**changes(placement) | {'resume': True})
  assert run_job(tmp_path / 'run', resumed) == 0
  one, other = (arrays_of(at, 120) for at in (tmp_path / 'run', unbroken))
  assert_same_tree(one, other)
  assert summary_of(tmp_path / 'run')['auc'] == summary_of(unbroken)['auc']
