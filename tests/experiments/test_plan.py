"""What a plan says of several devices is what a run on them counts."""

import contextlib
import json
import sys
import types

import numpy as np
import pytest

from configs import criteo
from experiments.common import build, datasets
from experiments.plan import job
from slipstream_jax.errors import UserError
from tests.support.programs import finished
from tests.support.runs import changed

STEPS = 12
PLACEMENTS = 'resident', 'streamed', 'pinned', 'cached'
FEW = (1, 'pinned', 'float32'), (8, 'cached', 'bfloat16')
MORE = [
  pytest.param(devices, placement, 'float32', marks=pytest.mark.slow)
  for devices in (1, 2, 4, 8)
  for placement in PLACEMENTS
]


BAR = types.SimpleNamespace(begin=lambda *_: None, show=lambda *_: None)


def setting(**changes):
  config = changed(criteo.get_config('smoke'), {'skip.mode': 'off'} | changes)
  data = datasets.dataset(config)
  recipe = build.recipe(config, data, STEPS)
  return config, data, recipe, build.hot(config, data, recipe)


@pytest.mark.parametrize(('devices', 'placement', 'exchange'), [*FEW, *MORE])
def test_counts_are_those_of_a_run(devices, placement, exchange):
  from slipstream_jax.training.loop import train

  changes = {'placement': placement, 'cache.capacity': 0.05}
  given = setting(devices=devices, **changes)
  if devices > 1:
    given[0].exchange = exchange
  found = job.simulated(*given, devices, STEPS)
  config, data, recipe, hot = given
  trainer = build.trainer(config, data, recipe, hot)
  before = trainer.engine.counters
  batches = build.batches(config, trainer, data, STEPS)
  with contextlib.closing(batches):
    *_, last = train(trainer, batches, STEPS)
  counted = np.subtract(last.counters, before)
  np.testing.assert_array_equal(found.counters, counted)
  kept = sum(group.kept.block.rows.nbytes for group in trainer.engine.groups)
  states = [group.kept.block.state for group in trainer.engine.groups]
  kept += sum(leaf.nbytes for state in states for leaf in state)
  assert found.kept_bytes.sum() == kept
  counts = found.counters
  for own, total in (
    (found.used, counts.rows_used),
    (found.sent_bytes, counts.bytes_exchanged),
    (found.loaded_bytes, counts.bytes_loaded),
  ):
    assert own.shape == (devices,)
    np.testing.assert_allclose(own.sum() * STEPS, total)
  of_tables = [line['used a step'] for line in found.of_tables]
  np.testing.assert_allclose(sum(of_tables) * STEPS, counts.rows_used)


def test_more_devices_than_there_are():
  config = setting()[0]
  figures = dict(job.plan(config, BAR, ['1', '64'], 3, None))
  assert len(figures['tables on 64 devices']) == 26
  one, many = figures['devices']
  assert one['max_over_mean'] == 1
  assert one['sent_MB'] == 0
  assert many['rows'] < one['rows'] / 32
  assert 1 < many['max_over_mean'] < 3
  assert one | many == json.loads(json.dumps(one | many))


@pytest.mark.parametrize(
  ('devices', 'room', 'words'),
  [
    ('3', None, 'devices must be powers of two'),
    ('512', None, '512 parts must divide each batch of 256'),
    ('8', 1000, 'bytes of rows must fit on each of 8 devices'),
  ],
)
def test_what_cannot_be_is_refused(devices, room, words):
  with pytest.raises(UserError, match=words):
    dict(job.plan(setting()[0], BAR, [devices], 1, room))


def test_other_systems_are_refused():
  with pytest.raises(UserError, match='keep the order of examples'):
    dict(job.plan(setting(system='hotline')[0], BAR, ['1'], 1, None))


def test_the_program_as_it_is_called(tmp_path):
  command = [sys.executable, '-m', 'experiments.plan', '--steps=2']
  config = '--config=configs/criteo.py:smoke'
  done = finished([*command, config, f'--output={tmp_path}/plan.json'])
  assert done.returncode == 0, done.stderr
  assert 'tables on 8 devices' in done.stdout
  written = json.loads((tmp_path / 'plan.json').read_text())
  assert [line['devices'] for line in written['devices']] == [1, 2, 4, 8]
