"""Strict by configuration: what JAX lets pass elsewhere is an error here."""

import gc
import os
import pathlib
import shutil
import tempfile

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

# Most time would go into compiling the same program again: jit knows a step by
# its model and optimizer, which each run makes anew. Entries are written in
# place: they are of this process, and of programs that it sees through.
_COMPILED = tempfile.mkdtemp(prefix='slipstream-tests-')
jax.config.update('jax_compilation_cache_dir', _COMPILED)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)

settings.register_profile('suite', deadline=None, max_examples=60)
settings.load_profile('suite')

# What numba compiles it cannot compile through the hook's wrappers.
_KERNELS = ('_kernels', 'kernels', 'digits', 'draws')
_PACKAGE = pathlib.Path(__file__).resolve().parents[1] / 'slipstream_jax'
install_import_hook(
  [
    '.'.join(path.relative_to(_PACKAGE.parent).with_suffix('').parts)
    for path in sorted(_PACKAGE.rglob('*.py'))
    if not path.stem.endswith(_KERNELS) and path.stem != '__init__'
  ],
  'beartype.beartype',
)


def pytest_unconfigure():
  shutil.rmtree(_COMPILED, ignore_errors=True)


@pytest.fixture(scope='session', autouse=True)
def _compiled_steps_stay():
  """Else each test would compile anew what its trainer took along."""
  from slipstream_jax.training import compiled, sharing

  assert compiled
  sharing.SHARED[:] = [{} for _ in sharing.SHARED]


@pytest.fixture(scope='module', autouse=True)
def _few_programs_stay():
  """Each takes pieces of memory, of which a process may have 65,530."""
  yield
  maps = pathlib.Path('/proc/self/maps')
  if maps.exists() and maps.read_bytes().count(b'\n') > 20_000:
    from slipstream_jax.training import sharing

    for compiled in sharing.SHARED:
      compiled.clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _no_thread_outlives_its_test():
  import threading

  before = set(threading.enumerate())
  yield
  started = {
    thread
    for thread in set(threading.enumerate()) - before
    if thread.name.startswith('slipstream')
  }
  if started:  # of an iterator that was dropped, they end by themselves, soon
    gc.collect()
    for thread in started:
      thread.join(5)
  left = [thread.name for thread in started if thread.is_alive()]
  assert not left, f'threads left running: {left}'
