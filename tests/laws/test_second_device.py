"""No step is drawn to another device by what the host computed for it.

A CPU's second device stands in for an accelerator: the host's programs run on
the first.
"""

import jax
import pytest

from slipstream_jax.schedules.systems import SYSTEMS
from slipstream_jax.training import compiled
from slipstream_jax.training.loop import train
from tests.laws import test_systems
from tests.support import short_runs
from tests.support.small import assert_same_bits

RUNS = [
  ('xdl', None),
  ('dlrm_hybrid', 'examples'),
  ('fae', None),
  ('hotline_micro', None),
  ('cached', 'rows'),
]


@pytest.fixture
def second_device():
  device = jax.devices()[1]
  before = jax.config.jax_default_device
  # As in a process of its own: nothing compiled is shared with other tests.
  compiled.CACHE.clear()
  jax.config.update('jax_default_device', device)
  yield device
  jax.config.update('jax_default_device', before)
  compiled.CACHE.clear()


def ran(name, mode):
  """All there is in the end; where the state was, and whether bound to it."""
  skip = short_runs.skip(mode) if mode else None
  trainer, batches = test_systems.start(SYSTEMS[name], skip)
  devices, bound = set(), False
  with batches:
    for _ in train(trainer, batches, 20):
      state = trainer.state
      if trainer.rows != 'stream':  # hot rows are watched where they are
        state = state._replace(watch=None)
      leaves = jax.tree.leaves(state)
      devices |= {device for leaf in leaves for device in leaf.devices()}
      bound |= any(leaf.committed for leaf in leaves)
  return short_runs.everything(trainer), devices, bound


@pytest.mark.parametrize(('name', 'mode'), RUNS)
def test_steps_run_on_the_default_device_with_the_same_bits(
  name, mode, request
):
  expected, devices, bound = ran(name, mode)
  assert (devices, bound) == ({jax.devices()[0]}, False)
  second = request.getfixturevalue('second_device')
  same, devices, bound = ran(name, mode)
  assert (devices, bound) == ({second}, False)
  assert_same_bits(same, expected)
