"""How far rows moved, and which of them are stale.

From Slipstream (arXiv 2404.04270) and its released code: a row is stale if
none of its elements moved by the threshold between two snapshots. Ours: a
row counts only if it was touched in between, for an untouched row did not
move because it had no chance to.

Every function takes numpy and JAX arrays alike, and runs inside `jit`.
"""

from typing import Any

from jaxtyping import Bool, Float, Int
import numpy as np

from slipstream_jax.types import Array


def row_change(
  rows: Float[Array, 'U ...'], snapshot: Float[Array, 'U ...']
) -> Float[Array, ' U']:
  """How far each row moved: max |row - snapshot| over its elements.

  Of f32 (f64 for f64 rows). NaN where a row holds NaN, so that a broken row
  is never stale.
  """
  # Half precision would round the threshold that this is compared with.
  dtype = np.promote_types(rows.dtype, np.float32)
  moved = rows.astype(dtype) - snapshot.astype(dtype)
  # The initial value is for rows without elements.
  return abs(moved).max(axis=tuple(range(1, rows.ndim)), initial=0)


def stale_rows(
  change: Float[Array, ' U'],
  threshold: Any,
  touches: Int[Array, ' U'] | None = None,
  min_touches: Any = 1,
) -> Bool[Array, ' U']:
  """Which rows are stale: moved by less than `threshold`, and touched.

  Args:
    change: from `row_change`.
    threshold: in the rows' unit, strict; float or f32[].
    touches: steps of the window that touched the row; None judges all.
    min_touches: fewer leave a row unknown, hence not stale; 0 judges all,
      as published. int or i32[].

  Returns:
    bool[U].
  """
  stale = change < threshold
  return stale if touches is None else stale & (touches >= min_touches)
