"""Old checkpoints, as version 5 wrote them, become checkpoints of today."""

import contextlib
import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.saving import version_5
from slipstream_jax.saving.checkpoint import Checkpoints
from slipstream_jax.saving.packing import (
  arrays_of,
  checksums,
  json_checksum,
  pack,
  tables_of,
)
from slipstream_jax.training.loop import train
from tests.laws.test_placements import assert_same_bits
from tests.support.short_runs import batches_for, everything, start, unbroken


def save_as_before(folder, trainer, schedule_state):
  """What `Checkpoints.save` of version 5 wrote."""
  packed = pack({'of': schedule_state, 'grown': trainer.grown})
  schedule = np.frombuffer(packed.data, np.uint8)
  blocks = [group.read_back() for group in trainer.engine.groups]
  tables = {
    name: {
      part: {f'{at.start:012d}': leaf[at] for at in version_5._pieces(leaf)}
      for part, leaf in parts.items()
    }
    for name, parts in version_5._by_table(trainer, blocks).items()
  }
  arrays = arrays_of(trainer) | {'schedule': schedule, 'tables': tables}
  of_tables = {
    key: value
    for key, value in tables_of(trainer).items()
    if not key.startswith('untrained')
  }
  step = int(jax.device_get(trainer.state.step))
  position = {
    'version': 5,
    'schedule_state': packed.state['of'],
    'grown': packed.state['grown'],
    'schedule_bytes': len(schedule),
    'window': trainer.probe.window,
    'losses': list(trainer.probe.losses.items()),
    'hot_here': False,
    'counters': trainer.counters_of_steps._asdict(),
    'shapes': version_5._shapes(arrays),
    'tables': of_tables,
    'seed': trainer.engine.untrained.seed,
    'checksums': checksums(arrays),
  }
  position['checksum'] = json_checksum(position)
  args = ocp.args.Composite(
    arrays=ocp.args.PyTreeSave(arrays), position=ocp.args.JsonSave(position)
  )
  options = ocp.CheckpointManagerOptions(
    max_to_keep=1, enable_async_checkpointing=False
  )
  with ocp.CheckpointManager(folder, options=options) as manager:
    manager.save(step, args=args)


@pytest.mark.parametrize('schedule', ['plain', 'rows'])
def test_what_was_converted_goes_on_as_unbroken(schedule, tmp_path):
  old, new = tmp_path / 'old', tmp_path / 'new'
  trainer, batches = start('streamed', schedule, 0)
  with batches:
    list(train(trainer, batches, 9))
    save_as_before(old, trainer, batches.get_state())
  other, unused = start('pinned', schedule, 0)
  unused.close()
  with (
    contextlib.closing(Checkpoints(old)) as checkpoints,
    pytest.raises(UserError, match=r'convert it: .*version_5\.convert'),
  ):
    checkpoints.restore(other)
  assert version_5.convert(old, new, other) == 9
  resumed, unused = start('resident', schedule, 0)
  unused.close()
  with (
    contextlib.closing(Checkpoints(new)) as checkpoints,
    batches_for(resumed, schedule, 2) as batches,
  ):
    batches.set_state(checkpoints.restore(resumed).schedule_state)
    list(train(resumed, batches, 10_000))
  assert_same_bits(everything(resumed), unbroken('resident', schedule)[0])


def test_what_is_damaged_is_not_converted(tmp_path):
  trainer, batches = start('streamed', 'plain', 0)
  with batches:
    list(train(trainer, batches, 3))
    save_as_before(tmp_path / 'old', trainer, batches.get_state())
  before = everything(trainer)
  position = tmp_path / 'old' / '3' / 'position' / 'metadata'
  saved = json.loads(position.read_text())
  for change, said in (
    ({'window': 77}, 'its position has another checksum'),
    ({'version': 4}, 'of version 4, not 5'),
  ):
    changed = {k: v for k, v in saved.items() if k != 'checksum'} | change
    changed['checksum'] = saved['checksum']
    if 'version' in change:
      del changed['checksum']
      changed['checksum'] = json_checksum(changed)
    position.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=said):
      version_5.convert(tmp_path / 'old', tmp_path / 'new', trainer)
  with pytest.raises(UserError, match='a checkpoint of version 5, got none'):
    version_5.convert(tmp_path / 'new', tmp_path / 'more', trainer)
  np.testing.assert_equal(saved['version'], 5)
  assert_same_bits(before, everything(trainer))
