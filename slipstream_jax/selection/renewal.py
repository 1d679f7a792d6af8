"""Which examples are hot, where popularity drifts: hot rows counted again.

Hot rows are found before training, and what is popular then may be forgotten
half-way. So a few lookups of every batch are kept, and once a period they are
counted: cold rows that came often take the places of hot rows that did not
come. There are as many as before, and those that stay keep their places.

It is for telling hot examples from cold ones, and no more. Which rows are kept
on the device, compared, or scored by one weight each, stays as it was found.
"""

from typing import NamedTuple

from jaxtyping import Int
import numpy as np

from slipstream_jax.types import HotRows, Lookups

COUNTED = 1 << 20
"""Lookups that are kept of a period, at most."""
LEAST = 2
"""Lookups among them that make a cold row hot: one may be chance."""


class Recount(NamedTuple):
  """Hot rows as they were counted last, and what is to be counted next."""

  hot: HotRows
  recent: tuple[Int[np.ndarray, ' _'], ...] = ()
  """Global rows that some examples looked up since, in parts."""


def noted(recount: Recount, lookups: Lookups, period: int) -> Recount:
  """With some of a batch's lookups, in a period of so many batches."""
  width = max(1, int(np.prod(lookups.shape[1:])))
  examples = max(1, COUNTED // (period * width))
  some = lookups[:examples].reshape(-1)
  return recount._replace(recent=(*recount.recent, some[some >= 0]))


def renewed(recount: Recount) -> Recount:
  """Counts what was noted, and lets rows that came often be hot.

  A cold row takes the place of a hot one that came less often, the most
  frequent that of the least frequent; of equals the one that was found hot
  last goes first.
  """
  hot, parts = recount.hot, recount.recent
  recent = np.concatenate(parts) if parts else np.empty(0, np.int64)
  rows, counts = np.unique(recent, return_counts=True)
  places, number = hot.place[rows], len(hot.rows)
  is_hot = places < number
  often = ~is_hot & (counts >= LEAST)
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
  """The hot rows with `rows` at these of their places, each once in all."""
  if not len(places):
    return hot
  all_rows, place = hot.rows.copy(), hot.place.copy()
  # First all that go: one of them may come back at another place.
  place[all_rows[places]] = len(all_rows)
  all_rows[places] = rows
  place[rows] = places
  return HotRows(all_rows, place)


def state_of(recount: Recount, first: HotRows) -> dict[str, np.ndarray]:
  """As a position holds it: what differs from the hot rows of the start."""
  changed = np.flatnonzero(recount.hot.rows != first.rows)
  parts = recount.recent
  return {
    'places': changed,
    'rows': recount.hot.rows[changed],
    'recent': np.concatenate(parts) if parts else np.empty(0, np.int64),
  }


def recount_of(state: dict[str, np.ndarray], first: HotRows) -> Recount:
  """The inverse of `state_of`."""
  recent = state['recent']
  return Recount(
    replaced(first, state['places'], state['rows']),
    (recent,) if len(recent) else (),
  )
