"""The threshold that drops a chosen share of examples, without a search.

An example is stale if at least `alpha` of its lookups are, which is so iff the
alpha-th smallest change among its rows is below the threshold. The threshold
for a drop target is thus a quantile of that order statistic over a sample of
examples. The published code bisects instead (arXiv 2404.04270: [0, 0.1], 25
rounds, +-0.08), and drops nothing when no round lands in the band.
"""

import math
from numbers import Real
from typing import Any

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.types import Array


def example_change(
  change: Float[Array, ' U'], lookups: Int[Array, 'n ...'], alpha: int
) -> Float[Array, ' n']:
  """The alpha-th smallest row change among each example's lookups.

  An example with fewer than alpha real lookups is stale iff all of them are.
  Where alpha holds for each table of a sequence [n, F, L], take the maximum
  over tables of `example_change(change, lookups[:, f], alpha)`.

  Args:
    change: of each row. Negative: the row is not watched (cold; one such
      entry may serve all of them). inf or NaN: not stale at any threshold.
    lookups: [n, F], or [n, F, L] padded multi-hot, whose F * L lookups then
      count alike. Each is an index into `change`, or -1 for padding.
    alpha: stale lookups that make an example stale, in [1, F] ([1, F * L]).

  Returns:
    Of `change`'s dtype, numpy or JAX as it is. inf, which no threshold
    exceeds, for an example that may not be dropped: it has a lookup of a row
    not watched, no lookup at all, or fewer than alpha that can be stale.

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
  # With fewer real lookups than alpha the last real one decides; what may not
  # be stale is inf, and sorts behind.
  rank = xp.clip(real.sum(axis=1), 1, alpha) - 1
  nth = xp.take_along_axis(ranked, rank[:, None], axis=1)[:, 0]
  cold = (real & (looked_up < 0)).any(axis=1)
  return xp.where(cold, np.inf, nth)


def exact_threshold(
  example_changes: Float[np.ndarray, ' n'], drop_target: float | int
) -> float:
  """The threshold below which floor(drop_target * n) of n examples change.

  Equal changes are dropped together or not at all. Where that leaves no
  threshold with the exact number, the one with the nearest number is taken,
  of two equally near the one that drops fewer: so no search could come
  nearer, and a large group of equal changes (rows that never moved) does not
  turn skipping off unseen. Drop target 0 gives 0.0, which drops nothing; 1
  drops every example with a finite change, and no target drops another.

  Args:
    example_changes: from `example_change`, of a sample of n hot examples.
    drop_target: share of them to drop, in [0, 1].

  Returns:
    The smallest such threshold; exact when compared in the changes' dtype.

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
  # Devices flush subnormal numbers to zero; a threshold there drops nothing.
  finite = np.where(finite < tiny, finite.dtype.type(0), finite)
  wanted = math.floor(drop_target * len(example_changes))
  dropped = _nearest_cut(finite, min(wanted, len(finite)))
  if not dropped:
    return 0.0
  # Stale is what is strictly below: so the next number after the last dropped.
  last = finite[dropped - 1]
  return float(max(np.nextafter(last, finite.dtype.type(np.inf)), tiny))


def _nearest_cut(ranked: Float[np.ndarray, ' m'], wanted: int) -> int:
  """The number nearest `wanted` at which no run of equals is cut."""
  if wanted in (0, len(ranked)):
    return wanted
  fewer = int(np.searchsorted(ranked, ranked[wanted], side='left'))
  more = int(np.searchsorted(ranked, ranked[wanted], side='right'))
  return fewer if wanted - fewer <= more - wanted else more


def check_drop_target(drop_target: object, where: str) -> None:
  """Looks whether it is a share.

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
