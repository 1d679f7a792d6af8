"""Array types of the library, with the dimension letters every file uses.

B inputs, F features, L lookups per feature, U distinct rows of a batch,
R rows of a table, N rows of the global row space, D dim, C slots,
I dense features.
"""

from typing import NamedTuple

import jax
from jaxtyping import Float, Int
import numpy as np

Lookups = Int[np.ndarray, 'B F'] | Int[np.ndarray, 'B F L']
"""Global row of every lookup; -1 where a padded multi-hot list has ended."""

Inverse = Int[np.ndarray, 'B F'] | Int[np.ndarray, 'B F L']
"""Position of every lookup among the batch's distinct rows; -1 = padding."""

RowIds = Int[np.ndarray, ' U']
"""Distinct global rows, in the order of their first use in the batch."""

Slots = Int[np.ndarray, ' U']
"""Place of each distinct row in the device's array of rows."""

Rows = Float[jax.Array, 'U D']
"""Embedding rows on the device."""

Embeddings = Float[jax.Array, 'B F D']
"""Pooled embeddings: what a model sees of its tables."""

Pytree = object
"""Any nesting of containers with arrays as leaves."""


class Batch(NamedTuple):
  """One batch on the host. Every array is C-contiguous."""

  dense: Float[np.ndarray, 'B I']
  """Dense features, f32."""
  lookups: Lookups
  """Global rows (`offset[table] + local id`), i32, or i64 above 2**31 rows."""
  labels: Float[np.ndarray, ' B']
  """1.0 for a click, else 0.0; f32."""
  weights: Float[np.ndarray, ' B']
  """Weight of each input in the loss, f32; 0.0 marks padding."""
