"""Time spent on compiling: a union of stretches, in whatever thread."""

import random
import threading

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytest

from experiments.common.meter import _Spans, compiled, is_compiling

stretches = st.lists(
  st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=30
)


@given(stretches=stretches, since=st.none() | st.integers(0, 80))
def test_what_overlaps_counts_once(stretches, since):
  """Against the moments that any of them covers, one by one."""
  spans, covered = _Spans(), np.zeros(100, bool)
  for start, length in sorted(stretches, key=sum):
    spans.add(float(start), float(start + length))
    covered[start : start + length] = True
  now = max([80, *(sum(x) for x in stretches)])
  if since is not None:
    covered[since:now] = True
  began = None if since is None else float(since)
  assert spans.seconds(began, float(now)) == covered.sum()


def test_many_stretches_are_let_go_and_still_counted():
  spans = _Spans()
  for start in range(5000):
    spans.add(float(start), start + 0.5)
  assert spans.seconds(None, 6000.0) == pytest.approx(2500)
  assert len(spans._apart) <= 1001


def test_kernels_of_numba_count():
  before = compiled().seconds

  @numba.njit
  def kernel(x):
    return x + 1

  assert kernel(1) == 2
  after = compiled().seconds
  assert after > before
  assert kernel(2) == 3
  assert compiled().seconds == after


def test_another_thread_sees_that_xla_compiles():
  unseen = random.random()  # so that no cache has the program

  def long_program(x):
    for number in range(400):
      x = jnp.sin(x) + number * unseen
    return x

  compiled()
  seen, ended = set(), threading.Event()

  def look():
    while not ended.is_set():
      seen.add(is_compiling())
      ended.wait(0.001)

  watcher = threading.Thread(target=look)
  watcher.start()
  jax.jit(long_program).lower(jax.ShapeDtypeStruct((3,), 'float32')).compile()
  ended.set()
  watcher.join()
  assert True in seen
  assert not is_compiling()
