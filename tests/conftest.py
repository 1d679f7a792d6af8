"""Strict by configuration: what JAX lets pass elsewhere is an error here."""

import gc
import os
import pathlib
import re
import shutil
import signal
import tempfile
import time

# Before JAX starts: a mesh to test on, and fp32 sums that do not depend on
# how many cores the machine has.
os.environ.setdefault('JAX_PLATFORMS', os.environ.get('SLIPSTREAM_TEST', 'cpu'))
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '')
  + ' --xla_force_host_platform_device_count=8'
  + ' --xla_gpu_deterministic_ops=true'
)

# Most time would go into compiling the same program again: jit knows a step by
# its model and optimizer, which each run makes anew. All workers of a run, and
# the programs that they start, share a folder; one that is given stays. Entries
# are written in place, and who reads half of one compiles anew.
_DIR = 'JAX_COMPILATION_CACHE_DIR'
_OWN = None if os.environ.get(_DIR) else tempfile.mkdtemp(prefix='slipstream-')
os.environ[_DIR] = _OWN or os.environ[_DIR]
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'

# Most of what is allocated is tracing's, and none of it garbage so soon.
gc.set_threshold(10_000, 10, 10)

from hypothesis import settings
import jax
import pytest

from tests import typechecks

# Again, as a plugin may have imported JAX before.
jax.config.update('jax_compilation_cache_dir', os.environ[_DIR])
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
jax.config.update('jax_transfer_guard', 'disallow')
if 'cuda' in os.environ['JAX_PLATFORMS']:
  # Tests read arrays of the device, and compare sums with those of float64.
  jax.config.update('jax_transfer_guard_device_to_host', 'allow')
  jax.config.update('jax_default_matmul_precision', 'float32')
# Not strict dtype promotion: optax.adam itself needs float ** int32.
jax.config.update('jax_numpy_rank_promotion', 'raise')

# EXAMPLES=3000 pytest tests/laws/test_schedules.py draws that many in each law.
_EXAMPLES = int(os.environ.get('EXAMPLES', '60'))
settings.register_profile('suite', deadline=None, max_examples=_EXAMPLES)
settings.load_profile('suite')

# Numba cannot compile what the hook wraps. Kernels in other files have
# `no_type_check`, which the hook skips.
_KERNELS = 'kernels'
_PACKAGE = pathlib.Path(__file__).resolve().parents[1] / 'slipstream_jax'
typechecks.install(
  [
    '.'.join(path.relative_to(_PACKAGE.parent).with_suffix('').parts)
    for path in sorted(_PACKAGE.rglob('*.py'))
    if not path.stem.endswith(_KERNELS) and path.stem != '__init__'
  ]
)


def pytest_unconfigure():
  if _OWN is not None:
    shutil.rmtree(_OWN, ignore_errors=True)


@pytest.fixture(scope='session', autouse=True)
def _signals_are_heard():
  """A shell ignores Ctrl-C for its background jobs, and they inherit that."""
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope='session', autouse=True)
def _compiled_steps_stay():
  """Else each test would compile anew what its trainer took along."""
  from slipstream_jax.training import compiled

  compiled.CACHE = {}


# These rooms are about other things than bits that differ from program to
# program, or hold numbers against float64. So LLVM need not optimize their
# programs, which is two fifths of compiling. All others, the laws of bits among
# them, have programs as users have them.
_NOT_OPTIMIZED = re.compile(
  r'tests/(api|experiments|reproduce|usage|test_|laws/test_public_api'
  r'|models/test_rms)'
)
_NOT = 'jax_disable_most_optimizations'


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
  """Before any fixture, as those of a session train, too.

  Programs that tests start do as this one. OPTIMIZE=1 optimizes all of them.
  """
  wanted = bool(_NOT_OPTIMIZED.match(item.nodeid))
  wanted &= 'OPTIMIZE' not in os.environ
  said = str(int(wanted))
  if os.environ.get(_NOT.upper(), '0') != said:
    os.environ[_NOT.upper()] = said
    jax.config.update(_NOT, wanted)
    _forget_programs()


def _forget_programs():
  from slipstream_jax.training import compiled

  compiled.CACHE.clear()
  jax.clear_caches()
  gc.collect()


def _pieces():
  """Pieces of memory that the process has. Programs take many of them."""
  maps = pathlib.Path('/proc/self/maps')
  return maps.read_bytes().count(b'\n') if maps.exists() else 0


@pytest.fixture(scope='module', autouse=True)
def _few_programs_stay():
  """A process may have 65,530 pieces, and ends where it needs more."""
  yield
  if _pieces() > 20_000:
    _forget_programs()


_looked = [0.0]


@pytest.fixture(autouse=True)
def _programs_of_a_long_module_do_not_all_stay():
  yield
  if time.monotonic() - _looked[0] > 10:  # to count many pieces takes 20 ms
    _looked[0] = time.monotonic()
    if _pieces() > 30_000:
      _forget_programs()


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
