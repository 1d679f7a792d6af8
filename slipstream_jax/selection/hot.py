"""Finds hot rows: the most popular ones that fit the device.

A profile holds the lookups of some examples, drawn at random (5 % in the
published runs). Lookups are counted, and all rows of all tables are ranked
together (Slipstream, arXiv 2404.04270). Only rows seen in the profile are hot.

Popularity drifts, so `renewed` counts hot rows again: a few lookups of every
batch are kept, and once a period frequent cold rows take the places of hot rows
that were looked up less often. The number of hot rows stays, and so do the
places of those that remain. This only tells hot examples from cold ones. The
rows that are kept on the device, compared or scored stay the same.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxtyping import Int, Integer
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.tables import offsets as row_offsets
from slipstream_jax.tables import TableSet
from slipstream_jax.types import HotRows, Lookups, StaleRows


def access_counts(
  profile: Iterable[Int[np.ndarray, '...']], num_rows: int
) -> Int[np.ndarray, ' N']:
  """Counts the lookups of each row of all tables, i32[N].

  Takes time linear in the lookups, which need not be in memory together.

  Args:
    profile: global rows that sampled examples look up, in parts of any shape.
      -1 is padding.
    num_rows: N, rows of all tables.
  """
  counts = np.zeros(num_rows + 1, np.int32)
  for lookups in profile:
    np.add.at(counts, lookups.reshape(-1), 1)  # -1, padding, is the last
  return counts[:-1]


def popular_rows(
  counts: Integer[np.ndarray, ' N'],
  budget_bytes: int,
  row_bytes: int | Sequence[int],
  offsets: Int[np.ndarray, ' tables_and_1'] | None = None,
) -> Int[np.ndarray, ' H']:
  """Returns the most popular rows of all tables that fit the budget.

  Published budget: 256 MiB, a row being 4 * D bytes.

  Args:
    counts: lookups of each row, from `access_counts`, or of any integer dtype.
    budget_bytes: device memory for the hot rows.
    row_bytes: of one row, with the row state that moves with it. Either one
      number, or one for each table: rows are then ranked by their lookups per
      byte.
    offsets: first global row of each table and N last, `TableSet.offsets`.
      Needed if `row_bytes` differ.

  Returns:
    Global rows, i64, most often looked up first. Of equal counts the lower row
    comes first.

  Raises:
    UserError: no row fits, or none was looked up.
  """
  one = isinstance(row_bytes, int | np.integer)
  row_sizes: list[int] = [row_bytes] if one else [*row_bytes]  # type: ignore
  ends = [0, len(counts)]
  if len({*row_sizes}) > 1:
    assert offsets is not None
    ends = offsets.tolist()
  _check_room(budget_bytes, min(row_sizes))
  parts = []
  for size, first, end in zip(row_sizes, ends[:-1], ends[1:], strict=False):
    own = counts[first:end]
    rows = np.flatnonzero(own > 0)
    if budget_bytes < size or not len(rows):
      continue
    uses = own[rows].astype(np.int64)
    # Most rows are left out before they are sorted: no more are needed than
    # would fit alone, and the one that would not, as none after it is hot.
    most = budget_bytes // size + 1
    if most < len(rows):
      kept = uses >= np.partition(uses, -most)[-most]
      rows, uses = rows[kept], uses[kept]
    parts.append((rows + first, uses, np.full(len(rows), size)))
  if not parts:
    if not (counts > 0).any():
      raise UserError(
        'a profile needs lookups',
        got=f'none of {counts.size} rows looked up',
        where='popular_rows, counts',
        hint='sample at least one example that looks up a row',
      )
    _check_room(budget_bytes, max(row_sizes))
  rows, uses, sizes = map(np.concatenate, zip(*parts, strict=True))
  order = np.argsort(-uses / sizes, kind='stable')  # rows ascend before
  fitting = np.searchsorted(np.cumsum(sizes[order]), budget_bytes, side='right')
  return rows[order[:fitting]]


def _check_room(budget_bytes: int, row_bytes: int) -> None:
  if row_bytes < 1:
    raise UserError(
      'a row takes at least 1 byte',
      got=row_bytes,
      where='popular_rows, row_bytes',
      hint='give 4 * dim, and the bytes of its row state',
    )
  if budget_bytes < row_bytes:
    raise UserError(
      f'the budget must hold a row of {row_bytes} bytes',
      got=f'{budget_bytes} bytes',
      where='popular_rows, budget_bytes',
      hint='raise the budget, such as to 256 MiB (268435456)',
    )


def rows_by_share(
  counts: Integer[np.ndarray, ' N'],
  budget_bytes: int,
  row_bytes: int | Sequence[int],
  offsets: Int[np.ndarray, ' tables_and_1'],
) -> Int[np.ndarray, ' H']:
  """Returns the rows with at least some share of their table's lookups.

  It is the smallest share whose rows fit the budget, so rows of equal share are
  all hot, or none is. This is the cut of FAE (arXiv 2103.00686).
  `popular_rows` compares lookups of all tables instead.

  The arguments, the result's order and the errors are those of `popular_rows`,
  but for ties at the cut.
  """
  sizes = np.broadcast_to(np.asarray(row_bytes), len(offsets) - 1)
  _check_room(budget_bytes, int(sizes.min()))
  totals = np.add.reduceat(counts, offsets[:-1], dtype=np.int64)
  rows = np.flatnonzero(counts > 0)
  table = np.searchsorted(offsets, rows, side='right') - 1
  shares = counts[rows] / totals[table]
  order = np.argsort(-shares, kind='stable')
  ranked = -shares[order]
  ends = np.cumsum(sizes[table[order]])
  fitting = int(np.searchsorted(ends, budget_bytes, side='right'))
  if fitting < len(order):
    fitting = int(np.searchsorted(ranked, ranked[fitting]))
  if not fitting:
    raise UserError(
      'the rows of the largest share of lookups must fit the budget',
      got=f'{budget_bytes} bytes, and {len(order)} rows that were looked up',
      where='rows_by_share, budget_bytes',
      hint='raise the budget, or count the lookups of more examples',
    )
  return rows[order[:fitting]]


CUTS = {'lookups': popular_rows, 'share': rows_by_share}
"""Ways to choose hot rows: by lookups, or by the share of a table's lookups."""


def popular_rows_of_groups(
  counts: Integer[np.ndarray, ' N'], tables: TableSet, rooms: Sequence[int]
) -> Int[np.ndarray, ' H']:
  """Returns the most popular global rows of each group, i64.

  Args:
    counts: as for `popular_rows`.
    tables: whose rows were counted.
    rooms: largest number of rows of each group.

  Raises:
    UserError: a number is 0, or no row was looked up.
  """
  chosen = []
  for group, room in zip(tables.groups, rooms, strict=True):
    firsts = np.array([tables.first_rows[name] for name in group.tables])
    sizes = [tables.tables[name].rows for name in group.tables]
    own = [counts[f : f + s] for f, s in zip(firsts, sizes, strict=True)]
    rows = popular_rows(np.concatenate(own), room, 1)
    starts = row_offsets(sizes)
    table = np.searchsorted(starts, rows, side='right') - 1
    chosen.append(rows + (firsts - starts[:-1])[table])
  return np.concatenate(chosen)


def hot_rows(rows: Int[np.ndarray, ' H'], num_rows: int) -> HotRows:
  """Builds the lookup array of hot rows.

  Args:
    rows: unique global rows, in the order that a mask of hot rows has.
    num_rows: N, rows of all tables.

  Raises:
    UserError: no rows, a row twice, or one outside the tables.
  """
  num_hot = len(rows)
  good = num_hot and rows.dtype.kind in 'iu'
  good = good and rows.min() >= 0 and rows.max() < num_rows
  hot = _with_places(rows, num_rows) if good else None
  # A row that comes twice has the place of one of them.
  if hot is None or not np.array_equal(hot.place[rows], np.arange(num_hot)):
    raise UserError(
      f'hot rows must be unique rows in [0, {num_rows}), at least one',
      got=f'{num_hot} rows, {rows[:3].tolist()} first',
      where='hot_rows, rows',
      hint='take them from popular_rows of counts of these tables',
    )
  return hot


def _with_places(rows: Int[np.ndarray, ' H'], num_rows: int) -> HotRows:
  place = np.full(num_rows + 1, len(rows), np.int32)
  place[rows] = np.arange(len(rows), dtype=np.int32)
  place[-1] = -1
  return HotRows(rows.astype(np.int64), place)


def hot_by_group(
  hot: HotRows, tables: TableSet
) -> tuple[HotRows, tuple[HotRows, ...]]:
  """Returns the hot rows ordered by group, and those of each group.

  The rows of each group are numbered within it. Within a group the order stays.
  A group may have none.
  """
  if len(tables.groups) == 1:
    return hot, (hot,)
  parts = tables.in_groups(hot.rows)
  order = np.concatenate([places for places, _ in parts])
  of_groups = tuple(
    _with_places(rows, group.num_rows)
    for (_, rows), group in zip(parts, tables.groups, strict=True)
  )
  return _with_places(hot.rows[order], tables.num_rows), of_groups


def stale_by_group(
  stale: StaleRows | None, hot: Sequence[HotRows | None]
) -> list[Any]:
  """Splits the mask [H] of all hot rows into one [H_g] per group."""
  if stale is None:
    return [None] * len(hot)
  ends = np.cumsum([0 if h is None else len(h.rows) for h in hot])
  return list(np.split(stale, ends[:-1]))


COUNTED = 1 << 20
"""Most lookups that are kept of a period."""
_RECOUNT_LEAST = 2  # kept lookups that make a cold row hot: one may be chance


class Recount(NamedTuple):
  """Hot rows as they were counted last, and the lookups to count next."""

  hot: HotRows
  recent: tuple[Int[np.ndarray, ' _'], ...] = ()
  """Global rows that some examples have looked up since, in parts."""


def noted(recount: Recount, lookups: Lookups, period: int) -> Recount:
  """Keeps some lookups of a batch, in a period of `period` batches."""
  width = max(1, int(np.prod(lookups.shape[1:])))
  examples = max(1, COUNTED // (period * width))
  some = lookups[:examples].reshape(-1)
  return recount._replace(recent=(*recount.recent, some[some >= 0]))


def renewed(recount: Recount) -> Recount:
  """Counts the kept lookups, and makes frequent cold rows hot.

  The most frequent cold row takes the place of the least frequent hot row, if
  that was looked up less often, and so on. Of equal hot rows the last goes
  first.
  """
  hot, parts = recount.hot, recount.recent
  recent = np.concatenate(parts) if parts else np.empty(0, np.int64)
  rows, counts = np.unique(recent, return_counts=True)
  places, number = hot.place[rows], len(hot.rows)
  is_hot = places < number
  often = ~is_hot & (counts >= _RECOUNT_LEAST)
  order = np.argsort(-counts[often], kind='stable')
  come, times = rows[often][order], counts[often][order]
  # Of 16 bits, which numpy sorts in linear time.
  uses = np.zeros(number, np.uint16)
  uses[places[is_hot]] = np.minimum(counts[is_hot], np.iinfo(np.uint16).max)
  least = number - 1 - np.argsort(uses[::-1], kind='stable')[: len(come)]
  come, times = come[: len(least)], times[: len(least)]
  better = times > uses[least]
  return Recount(replaced(hot, least[better], come[better]))


def replaced(
  hot: HotRows, places: Int[np.ndarray, ' m'], rows: Int[np.ndarray, ' m']
) -> HotRows:
  """Returns the hot rows with `rows` at the given places, all unique."""
  if not len(places):
    return hot
  all_rows, place = hot.rows.copy(), hot.place.copy()
  # All rows go first, because one of them may come back at another place.
  place[all_rows[places]] = len(all_rows)
  all_rows[places] = rows
  place[rows] = places
  return HotRows(all_rows, place)


def recount_state(recount: Recount, first: HotRows) -> dict[str, np.ndarray]:
  """Returns what differs from the hot rows of the start, for a position."""
  # Most often they are the same object, and there may be millions.
  same = recount.hot is first
  changed = np.flatnonzero([] if same else recount.hot.rows != first.rows)
  parts = recount.recent
  return {
    'places': changed,
    'rows': recount.hot.rows[changed],
    'recent': np.concatenate(parts) if parts else np.empty(0, np.int64),
  }


def recount_of(state: dict[str, np.ndarray], first: HotRows) -> Recount:
  """Restores a recount from the result of `recount_state`."""
  recent = state['recent']
  return Recount(
    replaced(first, state['places'], state['rows']),
    (recent,) if len(recent) else (),
  )
