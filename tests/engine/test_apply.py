"""Device programs of a plan."""

import jax
import ml_dtypes
import numpy as np
import pytest

from slipstream_jax import row_kernels
from slipstream_jax.engine import apply
from slipstream_jax.engine.mesh import devices_of, SPLIT
from slipstream_jax.types import RowBlock


@pytest.mark.parametrize('threads', [1, 3])
@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize('dim', [1, 31, 67, 128])
def test_rows_are_taken_as_they_are_and_zeros_where_there_is_none(
  threads, dtype, dim
):
  limits = [*row_kernels.limits]
  rng = np.random.default_rng(0)
  table = rng.integers(-100, 100, (50, dim, 5)).astype(dtype)
  slots = rng.choice(90, 64, replace=False).astype(np.int32)  # 50 on: no row
  padded = np.concatenate([table, np.zeros((40, dim, 5), dtype)])
  row_kernels.limits[:] = threads, 1
  try:
    block = apply.gather_slots(*jax.device_put((RowBlock(table, ()), slots)))
    np.testing.assert_array_equal(np.asarray(block.rows), padded[slots])
    parts = RowBlock(table[:20], ()), RowBlock(table[20:], ())
    joined = apply.join(*jax.device_put((*parts, slots)))
    np.testing.assert_array_equal(np.asarray(joined.rows), padded[slots])
  finally:
    row_kernels.limits[:] = limits


def test_lanes_are_padded_each_with_numbers_past_the_last():
  values = np.array([3, -1, 4, 1, -1, -1])
  padded = apply.pad_lanes(values, np.array([0, 3, 3, 6]), 10, 4)
  assert padded.tolist() == [3, 10, 4, 11, 10, 11, 12, 13, 1, 10, 11, 12]


@pytest.mark.parametrize('devices', [1, 2, 8])
def test_arrays_that_are_put_as_one_keep_their_bits(devices):
  rng = np.random.default_rng(0)
  arrays = [
    rng.integers(0, 1 << 32, shape, np.uint32).view(dtype)  # also signalling
    for shape, dtype in (
      ((8, 3), np.float32),
      ((16,), np.int32),
      ((8, 0, 2), np.float32),
      ((24, 1, 2), np.uint32),
      ((8,), np.float32),
    )
  ]
  of_all = devices_of(devices)
  packed = of_all.packed({'some': arrays[:2], 'more': (None, *arrays[2:])})
  unpack = of_all.compiled(lambda one: one.unpacked(), (SPLIT,), SPLIT)
  got = unpack(packed)
  assert got['more'][0] is None
  pairs = zip(arrays, [*got['some'], *got['more'][1:]], strict=True)
  for array, one in pairs:
    assert one.dtype == array.dtype
    np.testing.assert_array_equal(
      jax.device_get(one).view(np.uint32), array.view(np.uint32)
    )
