"""Which examples are hot, and which of those are stale.

An example is hot iff all its lookups are of hot rows, and stale iff at least
`alpha` of its lookups are of stale rows (arXiv 2404.04270, and its released
code). Both are looked up rather than searched for: `HotRows.place` is an
array as long as all tables, i32 and thus 1/D of their bytes. It finds 150 M
to 500 M lookups a second on one core (33.8 M rows, skewed lookups), where
`np.searchsorted` in 0.3 M to 4.2 M hot rows finds 15 M to 8 M.
"""

import math
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.selection.threshold import example_change
from slipstream_jax.types import HotRows, Lookups

Places = Int[np.ndarray, 'n F'] | Int[np.ndarray, 'n F L']
"""Place of each lookup among the hot rows, i32; H = cold; -1 = padding."""

Alpha = int | tuple[int, ...] | None
"""Stale lookups that make an example stale: of all its lookups together, or
of each table's; None asks for all of them."""


class ExampleKinds(NamedTuple):
  """What is known of n examples from the rows that they look up."""

  hot: Bool[np.ndarray, ' n']
  """Every row is hot; also if there is no lookup."""
  stale: Bool[np.ndarray, ' n']
  """Hot, and at least alpha lookups are of stale rows."""
  stale_share: Float[np.ndarray, ' n']
  """Share of the lookups that are of stale rows, f32 in [0, 1]."""


def classify(
  hot: HotRows,
  lookups: Lookups,
  stale: Bool[np.ndarray, ' H_and_1'],
  alpha: Alpha = None,
) -> ExampleKinds:
  """Tells hot and stale examples from the others.

  An example, or with alpha per table a table's list in it, that has fewer than
  alpha real lookups needs all of them stale; one without lookups is not
  stale. A cold example is never stale.

  Args:
    hot: the hot rows.
    lookups: [n, F], or [n, F, L] with -1 for padding.
    stale: of each hot row, and False for all cold ones:
      `hot.with_cold(mask, False)`, made once per mask.
    alpha: in [1, F * L], or for each table in [1, L]; L is 1 for [n, F].

  Raises:
    UserError: alpha is out of range, or `stale` is no mask of these rows.
  """
  _check_length(hot, stale, 'classify, stale')
  return classify_places(hot.places(lookups), stale, alpha)


def classify_places(
  places: Places, stale: Bool[np.ndarray, ' H_and_1'], alpha: Alpha = None
) -> ExampleKinds:
  """`classify` of examples whose `hot.places(lookups)` are at hand."""
  cold = len(stale) - 1
  places = _by_table(places, alpha)
  needed = _alphas(places.shape, alpha)
  # -1, padding, finds the last entry, which is of cold rows: not stale.
  stale_lookups = _count(stale.take(places))
  real_lookups = _count(places >= 0)
  enough = stale_lookups >= np.minimum(needed, real_lookups)
  total = real_lookups.sum(axis=1)
  is_hot = places.max(axis=(1, 2), initial=-1) < cold
  is_stale = is_hot & enough.all(axis=1) & (total > 0)
  share = stale_lookups.sum(axis=1) / np.maximum(total, 1)
  return ExampleKinds(is_hot, is_stale, share.astype(np.float32))


def _count(flags: Bool[np.ndarray, 'n T K']) -> Int[np.ndarray, 'n T']:
  """How many are set; of few each, numpy's own sum takes five times longer."""
  few = np.ones(flags.shape[2], np.float32)
  return (flags.astype(np.float32) @ few).astype(np.int64)


def example_changes(
  hot: HotRows,
  lookups: Lookups,
  change: Float[np.ndarray, ' H_and_1'],
  alpha: Alpha = None,
) -> Float[np.ndarray, ' n']:
  """The threshold above which `classify` calls each example stale.

  What `exact_threshold` needs: `stale = change < T` makes exactly those
  examples stale whose value here is below T.

  Args:
    hot: the hot rows.
    lookups: [n, F] or [n, F, L] of sampled examples, as for `classify`.
    change: of each hot row, and -1 for all cold ones:
      `hot.with_cold(change, -1)`. Give inf to rows not touched enough.
    alpha: as for `classify`.

  Raises:
    UserError: as `classify`.
  """
  _check_length(hot, change, 'example_changes, change')
  return place_changes(hot.places(lookups), change, alpha)


def place_changes(
  places: Places, change: Float[np.ndarray, ' H_and_1'], alpha: Alpha = None
) -> Float[np.ndarray, ' n']:
  """`example_changes` of examples whose `hot.places(lookups)` are at hand."""
  places = _by_table(places, alpha)
  tables = [
    np.where(
      (places[:, table] >= 0).any(axis=1),
      example_change(change, places[:, table], needed),
      change.dtype.type(-np.inf),  # an empty list asks for nothing
    )
    for table, needed in enumerate(_alphas(places.shape, alpha).tolist())
  ]
  # Stale iff each table's list is, so the highest value decides; an example
  # without any lookup is never stale.
  highest = np.max(tables, axis=0)
  return np.where(highest == -np.inf, change.dtype.type(np.inf), highest)


def _by_table(places: Places, alpha: Alpha) -> Int[np.ndarray, 'n T K']:
  """Places by what alpha is counted over: tables, or all in one."""
  tables = places.shape[1] if isinstance(alpha, tuple) else 1
  lookups = math.prod(places.shape[1:])  # -1 would fail for no examples
  return places.reshape(len(places), tables, lookups // tables)


def check_alpha(
  lookups: Lookups, alpha: Alpha, where: str = 'Skip.alpha'
) -> None:
  """Looks whether alpha fits lookups [n, F] or [n, F, L].

  Raises:
    UserError: alpha is out of range.
  """
  if alpha is not None:
    _alphas(_by_table(lookups, alpha).shape, alpha, where)


def _alphas(
  shape: tuple[int, ...], alpha: Alpha, where: str = 'alpha'
) -> Int[np.ndarray, ' T']:
  """Alpha of each of T tables of K lookups, checked."""
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


def _check_length(hot: HotRows, values: np.ndarray, where: str) -> None:
  if len(values) != len(hot.rows) + 1:
    raise UserError(
      f'{len(hot.rows)} hot rows take {len(hot.rows) + 1} values',
      got=len(values),
      where=where,
      hint='add the one of all cold rows with hot.with_cold',
    )
