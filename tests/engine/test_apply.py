"""Device programs of a plan."""

import jax
import ml_dtypes
import numpy as np
import pytest

from slipstream_jax import row_kernels
from slipstream_jax.engine import apply
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
