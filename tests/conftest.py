"""Strict by configuration: what JAX lets pass elsewhere is an error here."""

import os

# Before JAX starts: a mesh to test on, and fp32 sums that do not depend on
# how many cores the machine has.
os.environ.setdefault('JAX_PLATFORMS', os.environ.get('SLIPSTREAM_TEST', 'cpu'))
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '')
  + ' --xla_force_host_platform_device_count=8'
  + ' --xla_gpu_deterministic_ops=true'
)

from hypothesis import settings
import jax
from jaxtyping import install_import_hook
import pytest

jax.config.update('jax_transfer_guard', 'disallow')
# Not strict dtype promotion: optax.adam itself needs float ** int32.
jax.config.update('jax_numpy_rank_promotion', 'raise')

settings.register_profile('suite', deadline=None, max_examples=60)
settings.load_profile('suite')

# Shapes and dtypes of every annotated call; numba cannot compile through it.
_CHECKED = [
  'data.admission',
  'data.ahead',
  'data.avazu',
  'data.avazu_errors',
  'data.bad_lines',
  'data.batches',
  'data.criteo',
  'data.criteo_lines',
  'data.drift',
  'data.events',
  'data.in_memory',
  'data.journal',
  'data.order',
  'data.packed',
  'data.packed_batches',
  'data.packed_dataset',
  'data.packed_reader',
  'data.packed_vocabulary',
  'data.position',
  'data.prepare',
  'data.ranking',
  'data.raw',
  'data.scheduled',
  'data.series',
  'data.series_batches',
  'data.spec',
  'data.spill',
  'data.synthetic',
  'data.taobao',
  'data.taobao_log',
  'data.taobao_raw',
  'data.teacher',
  'data.terabyte',
  'data.text',
  'data.tfds',
  'data.tfds_sets',
  'data.twins',
  'data.vocabulary',
  'errors',
  'models',
  'placement',
  'schedules.base',
  'schedules.choosing',
  'schedules.phases',
  'schedules.plain',
  'schedules.rebatch',
  'schedules.scorer',
  'schedules.slipstream',
  'selection',
  'staleness',
  'store.host_table',
  'stream',
  'tables',
  'train',
  'transforms',
  'types',
]
install_import_hook(
  [f'slipstream_jax.{name}' for name in _CHECKED], 'beartype.beartype'
)


@pytest.fixture(autouse=True)
def _no_thread_outlives_its_test():
  import threading

  before = set(threading.enumerate())
  yield
  left = [
    thread.name
    for thread in set(threading.enumerate()) - before
    if thread.name.startswith('slipstream')
  ]
  assert not left, f'threads left running: {left}'
