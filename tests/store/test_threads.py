"""Rows copied by several threads are the rows that one thread copies."""

import threading

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import ml_dtypes
import numpy as np
import pytest

from slipstream_jax.store.threads import Helpers
from slipstream_jax.types import RowBlock
from tests.support import small

MUCH = 1 << 23  # bytes that are worth sharing among seven threads


@pytest.fixture(params=[1, 2, 4, 7])
def helpers(request):
  some = Helpers(request.param)
  yield some
  some.close()
  some.close()


def a_table(rows, seed, dtype):
  rng = np.random.default_rng(seed)
  state = rng.random(rows, np.float32), rng.random((rows, 3)).astype(dtype)
  values = rng.random((rows, 1 << 15), np.float32)  # 50 rows to a few threads
  return RowBlock(values.astype(dtype), state)


@settings(max_examples=20)
@given(
  used=st.lists(st.integers(0, 99), unique=True),
  padding=st.integers(0, 9),
  workers=st.integers(1, 6),
  dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
)
def test_gather_and_scatter_are_those_of_one_thread(
  used, padding, workers, dtype
):
  rows, size = np.array(used, np.int64), len(used) + padding
  table, new = a_table(100, 0, dtype), a_table(size, 1, dtype)
  expected = jax.tree.map(np.copy, table)
  some = Helpers(workers)
  try:
    store = small.store_of(table)
    block = store.gather(rows, size, some)
    store.scatter(rows, new, some)
  finally:
    some.close()
  for leaf, before, values, taken in zip(
    *(jax.tree.leaves(x) for x in (table, expected, new, block)), strict=True
  ):
    np.testing.assert_array_equal(taken[: len(rows)], before[rows])
    assert not taken[len(rows) :].any()
    before[rows] = values[: len(rows)]
    np.testing.assert_array_equal(leaf, before)


def test_each_thread_gets_a_part(helpers):
  together = threading.Barrier(helpers.workers)
  parts = []

  def work(part):
    together.wait(60)
    parts.append(part)

  helpers.run(work, 1000, MUCH)
  covered = [i for part in parts for i in range(1000)[part]]
  assert sorted(covered) == list(range(1000))
  assert len(parts) == helpers.workers


def test_an_error_comes_once_all_parts_are_done(helpers):
  done = []

  def work(part):
    if part.start == 0:
      raise OSError('no memory')
    done.append(part)

  with pytest.raises(OSError, match='no memory'):
    helpers.run(work, 1000, MUCH)
  assert len(done) == helpers.workers - 1


def test_an_error_of_another_thread_is_raised():
  some = Helpers(3)

  def work(part):
    if part.stop == 1000:
      raise OSError('no memory')

  with pytest.raises(OSError, match='no memory'):
    some.run(work, 1000, MUCH)
  some.close()


def test_few_rows_start_no_thread():
  some, parts = Helpers(4), []
  some.run(parts.append, 1000, 1 << 19)
  assert parts == [slice(0, 1000)]
  names = [thread.name for thread in threading.enumerate()]
  assert not any('slipstream-helper' in name for name in names)
