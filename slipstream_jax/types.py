"""Array types of the library, with the dimension letters every file uses.

B examples, F features, L lookups per feature, U unique rows of a batch,
R rows of a table, N rows of the global row space, D dim, C slots,
I dense features.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Bool, Float, Int
import numpy as np

Lookups = Int[np.ndarray, 'B F'] | Int[np.ndarray, 'B F L']
"""Global row of every lookup; -1 where a padded bag or sequence has ended."""

Inverse = Int[np.ndarray, 'B F'] | Int[np.ndarray, 'B F L']
"""Position of every lookup among the batch's unique rows; -1 = padding."""

RowIds = Int[np.ndarray, ' U']
"""Unique global rows, table by table, each in the order of first use."""

ReassignedRows = Int[np.ndarray, ' _reassigned']
"""Rows that were reassigned to another id and must be reset to untrained
values, each once, i64."""

Slots = Int[np.ndarray, ' U']
"""Slot of each unique row in the device's array of rows."""

Positions = Int[np.ndarray, ' u']
"""Positions in a list of unique rows, i64."""

Rows = Float[jax.Array, 'U D']
"""Embedding rows on the device, of their tables' dtype."""

Array = Any
"""A numpy array on the host, or a JAX array on the device."""

DenseFeatures = (
  Float[jax.Array, 'B _I'] | Mapping[str, Float[jax.Array, 'B ...']]
)
"""Dense features as a model sees them: one array, or by name [B] or [B, w]."""

Embeddings = Mapping[
  str, Float[jax.Array, 'B _D'] | Float[jax.Array, 'B _L _D']
]
"""By feature name, what a model gets of its tables: pooled embeddings [B, D],
or sequences [B, L, D] that are 0 at padding."""

RealLookups = Mapping[str, Bool[jax.Array, 'B _L']]
"""By feature name, which lookups are not padding. L is 1 for one lookup."""

StaleRows = Bool[np.ndarray, ' H']
"""Which hot rows are stale. Stale rows are frozen and not moved."""


class Batch(NamedTuple):
  """A batch of B examples, made on the host. The step gets a device copy."""

  dense: Float[Array, 'B I']
  """Dense features, f32, finite; I may be 0."""
  lookups: Lookups
  """Global rows (first row of the table + local id), or -1 for padding. i32, or
  i64 above 2**31 rows. [B, F], or [B, F, L] if all features have the same
  length; otherwise [B, K], features side by side."""
  labels: Array
  """1.0 for a click, 0.0 for none, or a probability, f32. Any finite number for
  a loss that takes it, such as the squared error. [B], or [B, T] for models
  with T heads. None if unknown, in batches that are only scored."""
  weights: Float[Array, ' B']
  """Weight of each example in the loss, at least 0, f32. Padding has 0.0."""
  lookup_weights: Float[Array, '...'] | None = None
  """Weight of each lookup in its bag, shaped as `lookups`, f32, finite. None:
  all weigh 1."""
  offset: Float[Array, ' B'] | None = None
  """Added to the logit of each example in training only, f32, finite: known log
  odds, such as those of sampling. For models with one logit per example. Either
  all batches of a run have one, or none."""
  fresh: Int[Array, ' n'] | None = None
  """Global rows that were reassigned to another id, i64. Before this batch's
  step, they and their row state are reset to untrained values. If the batch's
  examples are dropped or delayed, these rows come with the next ones."""
  fresh_vectors: Int[Array, ' n'] | None = None
  """For each fresh row the number of the vector that it starts from, among
  those that the table's initializer has by id, i64. -1: its initial row. None:
  all are -1."""

  def map(self, change: Callable[[Array], Array]) -> 'Batch':
    """Returns the batch with each array of its examples changed. None stays."""
    *columns, fresh, vectors = self
    changed: list[Any] = [None if c is None else change(c) for c in columns]
    changed += [fresh, vectors]
    return Batch(*changed)


class RowBlock(NamedTuple):
  """Embedding rows and the row state that travels with them.

  Used for a whole table set in host memory (U = N), for a batch's unique rows
  on the device, and for transfers between the two.
  """

  rows: Float[Array, 'U D']
  """Embedding rows, of their tables' dtype."""
  state: tuple[Array, ...]
  """Leaves of the row optimizer's state that have a row axis: [U, ...]."""


class HotRows(NamedTuple):
  """The H hot rows, indexed both ways. Made by `selection.hot.hot_rows`."""

  rows: Int[np.ndarray, ' H']
  """Global row of each hot row, i64."""
  place: Int[np.ndarray, ' N_and_1']
  """Index in `rows` of each global row, or H if it is cold: i32[N + 1]. The
  last entry is -1, which numpy finds for the lookup -1 (padding)."""

  def places(self, lookups: Int[np.ndarray, '...']) -> Int[np.ndarray, '...']:
    """Returns the index of each row among the hot rows, i32, same shape."""
    return self.place.take(lookups)

  def with_cold(self, values: np.ndarray, cold: object) -> np.ndarray:
    """Appends to the values [H] one for all cold rows: [H + 1]."""
    return np.append(values, np.asarray(cold, values.dtype))


class RowChange(NamedTuple):
  """How far the hot rows moved in a window."""

  change: Float[Array, ' H']
  """Distance that each row moved, from `selection.staleness.row_change`."""
  touches: Int[Array, ' H']
  """Steps of the window that touched each row, i32."""


class Unique(NamedTuple):
  """A batch's unique rows, and the position of each lookup among them."""

  rows: RowIds
  """U global rows, i64, table by table, in the order of first use."""
  inverse: Inverse
  """Position in `rows` of each lookup, i32; -1 = padding."""
  counts: Int[np.ndarray, ' U']
  """Lookups of each row, i32."""
  hot: Int[np.ndarray, ' U'] | None = None
  """Index of each row among the H hot rows, i32, or H if it is cold. None if no
  placement reads it, or no rows were chosen as hot."""
  numbers: Int[np.ndarray, ' U'] | None = None
  """Number of each row on its lane, i64. None if rows are not ordered by lane.
  """


@runtime_checkable
class TableVocabulary(Protocol):
  """Maps the raw ids of one table to its rows, and back.

  Row 0 is for unknown and missing ids, unless all rows are hashes.
  """

  @property
  def size(self) -> int:
    """R, rows in total: the size of the table."""
    ...

  def rows(self, ids: Any) -> Int[np.ndarray, '...']:
    """Returns the rows of ids, in their shape, without learning from them.

    Args:
      ids: integers or strings in a numpy or arrow array, a polars or pandas
        series, or lists of one length.
    """
    ...

  def ids(self, rows: Any) -> np.ndarray:
    """Returns the ids of rows, as objects of their shape.

    Rows that no single id has give None.
    """
    ...

  def get_state(self) -> dict[str, Any]:
    """Returns numbers, words and arrays. 'what' is the kind of vocabulary."""
    ...
