"""Array types of the library, with the dimension letters every file uses.

B examples, F features, L lookups per feature, U unique rows of a batch,
R rows of a table, N rows of the global row space, D dim, C slots,
I dense features.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import Bool, Float, Int
import numpy as np

Lookups = Int[np.ndarray, 'B F'] | Int[np.ndarray, 'B F L']
"""Global row of every lookup; -1 where a padded bag or sequence has ended."""

Inverse = Int[np.ndarray, 'B F'] | Int[np.ndarray, 'B F L']
"""Position of every lookup among the batch's unique rows; -1 = padding."""

RowIds = Int[np.ndarray, ' U']
"""Unique global rows, in the order of their first use in the batch."""

FreshRows = Int[np.ndarray, ' _fresh']
"""Rows that got another id and are made untrained, each once, i64."""

Slots = Int[np.ndarray, ' U']
"""Place of each unique row in the device's array of rows."""

Positions = Int[np.ndarray, ' u']
"""Places in a list of unique rows, i64."""

Rows = Float[jax.Array, 'U D']
"""Embedding rows on the device, of their tables' dtype."""

Array = Any
"""An array of either side: numpy on the host, JAX on the device."""

DenseFeatures = (
  Float[jax.Array, 'B _I'] | Mapping[str, Float[jax.Array, 'B ...']]
)
"""Dense features as a model sees them: one array, or by name [B] or [B, w]."""

Embeddings = Mapping[
  str, Float[jax.Array, 'B _D'] | Float[jax.Array, 'B _L _D']
]
"""By feature name, what a model sees of its tables: pooled ones [B, D],
sequences [B, L, D], which are 0 at padding."""

RealLookups = Mapping[str, Bool[jax.Array, 'B _L']]
"""By feature name, which lookups are no padding; L is 1 of one lookup."""

StaleRows = Bool[np.ndarray, ' H']
"""Which of the hot rows stand still: not moved, for they do not change."""


class Batch(NamedTuple):
  """One batch, made on the host; the step sees its copy on the device."""

  dense: Float[Array, 'B I']
  """Dense features, f32, finite; I may be 0."""
  lookups: Lookups
  """Global rows (first row of the table + local id), each of its feature's
  table, or -1; i32, or i64 above 2**31 rows. [B, F], or [B, F, L] where all
  features are as long; [B, K] of uneven ones, features side by side."""
  labels: Array
  """1.0 for a click, else 0.0, or its chance; f32 in [0, 1]. [B], or [B, T] of
  models with T heads. None: not known, in batches that are only predicted."""
  weights: Float[Array, ' B']
  """Weight of each example in the loss, at least 0, f32; 0.0 marks padding."""
  lookup_weights: Float[Array, '...'] | None = None
  """Weight of each lookup in its bag, shaped as `lookups`, f32, finite; None:
  all weigh 1."""
  offset: Float[Array, ' B'] | None = None
  """Added to the logit of each example in training alone, f32, finite: what is
  known of its log odds besides the model, such as how it was sampled. Of models
  of one logit per example. None: nothing; in all batches of a run, or none."""
  fresh: Int[Array, ' n'] | None = None
  """Global rows that got another id: before this batch's step they and their
  row state are made those of untrained rows, as at the start. i64; None: no
  row. Of a batch whose examples are dropped, or wait, they come with the first
  examples that are trained of it or after it."""

  def map(self, change: Callable[[Array], Array]) -> 'Batch':
    """The batch with each array of its examples changed; what is None stays."""
    *columns, fresh = self
    changed: list[Any] = [None if c is None else change(c) for c in columns]
    changed.append(fresh)
    return Batch(*changed)


class RowBlock(NamedTuple):
  """Rows together with the row state that travels with them.

  The same shape serves a whole table set in host memory (U = N), a batch's
  unique rows on the device, and anything that moves between the two.
  """

  rows: Float[Array, 'U D']
  """Embedding rows, of their tables' dtype."""
  state: tuple[Array, ...]
  """Leaves of the row optimizer's state that have a row axis: [U, ...]."""


class HotRows(NamedTuple):
  """The H hot rows, in both directions; `selection.hot.hot_rows` makes them."""

  rows: Int[np.ndarray, ' H']
  """Global row of each hot row, i64."""
  place: Int[np.ndarray, ' N_and_1']
  """Of each global row its index in `rows`, or H if cold: i32[N + 1]. The
  last is -1, which is where numpy finds the lookup -1 (padding)."""

  def places(self, lookups: Int[np.ndarray, '...']) -> Int[np.ndarray, '...']:
    """Where each row is among the hot ones, i32, shaped as `lookups`."""
    return self.place.take(lookups)

  def with_cold(self, values: np.ndarray, cold: object) -> np.ndarray:
    """Values [H] of the hot rows, and one last for all cold rows: [H + 1]."""
    return np.append(values, np.asarray(cold, values.dtype))


class RowChange(NamedTuple):
  """What the hot rows did in a window."""

  change: Float[Array, ' H']
  """How far each moved, from `selection.change.row_change`."""
  touches: Int[Array, ' H']
  """Steps of the window that touched it, i32."""


class Unique(NamedTuple):
  """A batch's unique rows, and where each lookup finds its own."""

  rows: RowIds
  """U global rows, in the order of their first use, i64."""
  inverse: Inverse
  """Position in `rows` of each lookup, i32; -1 = padding."""
  hot: Int[np.ndarray, ' U'] | None = None
  """Place of each row among the H hot ones, i32, H if it is cold; None where
  no rows were chosen as hot."""
