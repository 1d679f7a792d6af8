"""Finds stale rows and examples, and the threshold of staleness.

From Slipstream (arXiv 2404.04270) and its released code. A row is stale if none
of its elements moved by the threshold between two snapshots. Here it must also
have been touched in between, because an untouched row had no chance to move.

An example is hot if all its lookups are of hot rows. It is stale if it is hot
and at least `alpha` of its lookups are of stale rows. That is so if and only if
the alpha-th smallest change among its rows is below the threshold. The
threshold for a drop target is therefore a quantile of that order statistic over
a sample. The published code bisects instead ([0, 0.1], 25 rounds, +-0.08), and
drops nothing if no round lands in the band.

`row_change`, `stale_rows` and `example_change` take numpy and JAX arrays, and
run inside `jit`.
"""

import math
from numbers import Real
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.types import Array, Lookups


def row_change(
  rows: Float[Array, 'U ...'], snapshot: Float[Array, 'U ...']
) -> Float[Array, ' U']:
  """Returns how far each row moved: max |row - snapshot| over its elements.

  f32 (f64 for f64 rows). NaN if a row holds NaN, so that it is never stale.
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
  """Returns which rows are stale: moved by less than `threshold`, and touched.

  Args:
    change: from `row_change`.
    threshold: in the rows' unit, float or f32[].
    touches: steps of the window that touched the row. None judges all rows.
    min_touches: rows with fewer are not stale, int or i32[]. 0 judges all rows,
      as published.
  """
  stale = change < threshold
  return stale if touches is None else stale & (touches >= min_touches)


def example_change(
  change: Float[Array, ' U'], lookups: Int[Array, 'n ...'], alpha: int
) -> Float[Array, ' n']:
  """Returns the alpha-th smallest row change among each example's lookups.

  An example with fewer than alpha real lookups is stale iff all of them are.

  Args:
    change: of each row. It is negative for rows that are not watched: one such
      entry may serve all cold rows. inf or NaN is not stale at any threshold.
    lookups: [n, F], or [n, F, L] padded, whose F * L lookups count alike. Each
      is an index into `change`, or -1 for padding.
    alpha: stale lookups that make an example stale, in [1, F] ([1, F * L]).

  Returns:
    Of `change`'s dtype, numpy or JAX as it is. inf for an example that may not
    be dropped: it looks up a row that is not watched, or no row, or fewer than
    alpha rows that can be stale.

  Raises:
    UserError: alpha is out of range.
  """
  xp: Any = change.__array_namespace__()
  places = lookups.reshape(lookups.shape[0], math.prod(lookups.shape[1:]))
  if not 1 <= alpha <= places.shape[1]:
    raise UserError(
      f'alpha must be in [1, {places.shape[1]}] for {places.shape[1]} lookups',
      got=alpha,
      where='example_change, alpha',
      hint='count the lookups of one example, at most all of them',
    )
  # Padding reads entry 0 and is masked: -1 would read the last one.
  real = places >= 0
  looked_up = change[xp.where(real, places, 0)]
  may_be_stale = real & (looked_up >= 0)  # NaN compares as False
  ranked = xp.sort(xp.where(may_be_stale, looked_up, np.inf), axis=1)
  # With fewer real lookups than alpha the last real one decides. Lookups that
  # may not be stale are inf and come last.
  rank = xp.clip(real.sum(axis=1), 1, alpha) - 1
  nth = xp.take_along_axis(ranked, rank[:, None], axis=1)[:, 0]
  cold = (real & (looked_up < 0)).any(axis=1)
  return xp.where(cold, np.inf, nth)


def exact_threshold(
  example_changes: Float[np.ndarray, ' n'], drop_target: float | int
) -> float:
  """Returns the threshold below which floor(drop_target * n) examples change.

  Equal changes are dropped together or not at all. If no threshold drops the
  exact number, the one with the nearest number is taken, of two the one that
  drops fewer. So a large group of equal changes (rows that never moved) does
  not turn skipping off unnoticed. Examples whose change is not finite are never
  dropped.

  Args:
    example_changes: from `example_change`, of a sample of n hot examples.
    drop_target: share of them to drop, in [0, 1].

  Returns:
    The smallest such threshold, or 0.0 if it drops nothing. It is exact when
    compared in the changes' dtype.

  Raises:
    UserError: the target is no share, or the sample is empty.
  """
  check_drop_target(drop_target, 'exact_threshold, drop_target')
  if not len(example_changes):
    raise UserError(
      'a threshold needs a sample of hot examples',
      got=f'{len(example_changes)} examples',
      where='exact_threshold, example_changes',
      hint='sample more examples, or watch more rows',
    )
  finite = np.sort(example_changes[np.isfinite(example_changes)])
  tiny = np.finfo(finite.dtype).smallest_normal
  # Devices flush subnormal numbers to zero. A threshold there drops nothing.
  finite = np.where(finite < tiny, finite.dtype.type(0), finite)
  wanted = math.floor(drop_target * len(example_changes))
  dropped = min(wanted, len(finite))
  if dropped not in (0, len(finite)):
    fewer = int(np.searchsorted(finite, finite[dropped], side='left'))
    more = int(np.searchsorted(finite, finite[dropped], side='right'))
    dropped = fewer if dropped - fewer <= more - dropped else more
  if not dropped:
    return 0.0
  # The next number after the last one dropped, as stale is strictly below.
  last = finite[dropped - 1]
  return float(max(np.nextafter(last, finite.dtype.type(np.inf)), tiny))


def check_drop_target(drop_target: object, where: str) -> None:
  """Checks that the drop target is a share.

  Raises:
    UserError: it is not in [0, 1].
  """
  # NaN compares as False.
  if not (isinstance(drop_target, Real) and 0 <= float(drop_target) <= 1):
    raise UserError(
      'the drop target must be in [0, 1]',
      got=repr(drop_target),
      where=where,
      hint='give the share of examples to drop, such as 0.3',
    )


Places = Int[np.ndarray, 'n F'] | Int[np.ndarray, 'n F L']
"""Place of each lookup among the hot rows, i32. H is cold, -1 padding."""

Alpha = int | tuple[int, ...] | None
"""Stale lookups that make an example stale: of all its lookups together, or of
each table's. None asks for all of them."""


class ExampleKinds(NamedTuple):
  """Kinds of n examples, by the rows that they look up."""

  hot: Bool[np.ndarray, ' n']
  """All rows are hot. True without a lookup."""
  stale: Bool[np.ndarray, ' n']
  """Hot, and at least alpha lookups are of stale rows."""
  stale_share: Float[np.ndarray, ' n']
  """Share of the lookups that are of stale rows, f32 in [0, 1]."""


def classify(
  places: Places, stale: Bool[np.ndarray, ' H_and_1'], alpha: Alpha = None
) -> ExampleKinds:
  """Finds the hot and the stale examples.

  An example, or with alpha per table a table's list in it, that has fewer than
  alpha real lookups is stale if all of them are. One without lookups is not
  stale, and neither is a cold one.

  Args:
    places: `hot.places` of the lookups [n, F] or [n, F, L].
    stale: of each hot row, and False for all cold ones:
      `hot.with_cold(mask, False)`, made once per mask.
    alpha: in [1, F * L], or for each table in [1, L]. L is 1 for [n, F].

  Raises:
    UserError: alpha is out of range.
  """
  # H, of cold rows, is the largest place, and -1, of padding, the smallest.
  axes = tuple(range(1, places.ndim))
  is_hot = places.max(axis=axes, initial=-1) < len(stale) - 1
  places = _by_table(places, alpha)
  needed = _alphas(places.shape, alpha)
  # -1, padding, finds the last entry, which is of cold rows: not stale.
  stale_lookups = _count(stale.take(places))
  real_lookups = _count(places >= 0)
  enough = stale_lookups >= np.minimum(needed, real_lookups)
  total = real_lookups.sum(axis=1)
  is_stale = is_hot & enough.all(axis=1) & (total > 0)
  share = stale_lookups.sum(axis=1) / np.maximum(total, 1)
  return ExampleKinds(is_hot, is_stale, share.astype(np.float32))


def _count(flags: Bool[np.ndarray, 'n T K']) -> Int[np.ndarray, 'n T']:
  """Counts set flags, for few flags five times as fast as numpy's sum."""
  few = np.ones(flags.shape[2], np.float32)
  return (flags.astype(np.float32) @ few).astype(np.int64)


def example_changes(
  places: Places, change: Float[np.ndarray, ' H_and_1'], alpha: Alpha = None
) -> Float[np.ndarray, ' n']:
  """Returns the threshold above which `classify` calls each example stale.

  `stale = change < T` makes exactly those examples stale whose value here is
  below T, which is what `exact_threshold` needs.

  Args:
    places: `hot.places` of the lookups of n sampled examples.
    change: of each hot row, and -1 for all cold ones:
      `hot.with_cold(change, -1)`. Give inf to rows not touched enough.
    alpha: as for `classify`.

  Raises:
    UserError: alpha is out of range.
  """
  places = _by_table(places, alpha)
  tables = [
    np.where(
      (places[:, table] >= 0).any(axis=1),
      example_change(change, places[:, table], needed),
      change.dtype.type(-np.inf),  # an empty list decides nothing
    )
    for table, needed in enumerate(_alphas(places.shape, alpha).tolist())
  ]
  # Stale iff each table's list is, so the highest value decides. An example
  # without a lookup is never stale.
  highest = np.max(tables, axis=0)
  return np.where(highest == -np.inf, change.dtype.type(np.inf), highest)


def _by_table(places: Places, alpha: Alpha) -> Int[np.ndarray, 'n T K']:
  """Groups places by what alpha is counted over: each table, or all."""
  tables = places.shape[1] if isinstance(alpha, tuple) else 1
  lookups = math.prod(places.shape[1:])  # -1 would fail for no examples
  return places.reshape(len(places), tables, lookups // tables)


def check_alpha(
  lookups: Lookups, alpha: Alpha, where: str = 'Skip.alpha'
) -> None:
  """Checks alpha for lookups [n, F] or [n, F, L].

  Raises:
    UserError: alpha is out of range.
  """
  if alpha is not None:
    _alphas(_by_table(lookups, alpha).shape, alpha, where)


def _alphas(
  shape: tuple[int, ...], alpha: Alpha, where: str = 'alpha'
) -> Int[np.ndarray, ' T']:
  """Returns the checked alpha of each of T tables of K lookups."""
  _, tables, most = shape
  alphas = (most,) if alpha is None else alpha
  given = alphas if isinstance(alphas, tuple) else (alphas,)
  if len(given) != tables or not all(1 <= a <= most for a in given):
    raise UserError(
      f'alpha must be in [1, {most}] for {most} lookups'
      + (f' of each of {tables} tables' if tables > 1 else ''),
      got=alpha,
      where=where,
      hint='count the lookups of one example, at most all of them',
    )
  return np.array(given)
