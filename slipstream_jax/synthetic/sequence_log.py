"""A synthetic shop log in the shape of Taobao's; NOT real data.

Sequences of items rather than single ones.

As in `teacher`, example i is a pure function of (seed, i). An example is a
user, up to 20 items that they looked at, and a candidate that they click or
not:

* A user has a few interests: categories, some dearer than others. All that they
  look at is of these, half of it items that they come back to.
* An item belongs to one category, and popular categories have more items.
* A click's candidate is of the user's interests, too, but for a few strays;
  one that is not clicked is sampled by popularity, as in the published set-up.

So a candidate of a category is clicked with a chance that follows from Bayes'
rule, and the past tells it, as it shows the interests. Within its category an
item says nothing of the click.
"""

import functools
from typing import NamedTuple, no_type_check

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.data.base import Columns
from slipstream_jax.hashing import hashed, kernel, unit
from slipstream_jax.row_space import row_dtype
from slipstream_jax.synthetic.draws import log_rank_at
from slipstream_jax.synthetic.drift import holder, time_of
from slipstream_jax.synthetic.spec import check_spec, SequenceSpec
from slipstream_jax.synthetic.stream import Examples
from slipstream_jax.synthetic.teacher import key_of, zipf_of


class SequenceLaw(NamedTuple):
  """A spec as the kernel reads it."""

  examples: np.uint64
  """Key of the draws that differ from example to example."""
  population: np.uint64
  """Key of what users are."""
  drift: np.uint64
  """Key of who holds which rank."""
  spec: SequenceSpec
  """The spec itself, of the population."""
  lists: Float[np.ndarray, '2 4']
  """Power laws of users and of categories, see `_rank`; f64."""
  items: Float[np.ndarray, 'K 4']
  """The same of the items within each category, f64."""
  first_item: Int[np.ndarray, ' K_and_1']
  """First item of each category, from 0 on; i64."""
  shares: Float[np.ndarray, ' K']
  """Of each category, in all categories drawn by popularity; f64."""


def sequence_at(
  spec: SequenceSpec, positions: Int[np.ndarray, ' n']
) -> Examples:
  """The examples at these positions of the log, i64[n], none negative.

  Lookups are i32[n, 3, steps + 1]: the past from step 0 on, then -1 where it is
  short, and the candidate in the last step. The user's row stands in every step
  that is there. The one dense feature is log1p of the number of past items.

  Raises:
    UserError: the spec has a value out of range.
  """
  check_spec(spec)
  positions, examples = np.asarray(positions, np.int64), len(positions)
  columns = Columns(
    np.empty((examples, 1), np.float32),
    np.full((examples, 3, spec.steps + 1), -1, row_dtype(sum(spec.rows))),
    np.empty(examples, np.float32),
  )
  probabilities = np.empty(examples)
  dense, lookups, labels = columns[:3]
  _draw(_law_of(spec), positions, dense, lookups, labels, probabilities)
  return Examples(columns, probabilities)


@functools.lru_cache(maxsize=64)
def _law_of(spec: SequenceSpec) -> SequenceLaw:
  """The spec's law; its values must make sense."""
  users, items, categories = spec.rows
  user_skew, item_skew, category_skew = spec.skews
  users_law = _list_law(user_skew, spec.heads[0], np.array([users]))
  categories_law = _list_law(category_skew, 0.0, np.array([categories]))
  a, mass, _, _ = categories_law[0]
  ranks = np.arange(1, categories + 2, dtype=np.float64)
  shares = -np.diff(ranks**-a) / mass
  # The real log's popular categories have many items, if not quite as many.
  weights = shares**0.9
  # Each has one item, and its share of the rest: rounding the sums rather than
  # the shares makes them add up.
  rest = items - categories
  first = np.rint(rest * np.cumsum(weights) / weights.sum()).astype(np.int64)
  first = np.append(0, first + np.arange(1, categories + 1))
  sizes = np.diff(first)
  population = spec.population
  return SequenceLaw(
    examples=key_of(spec.seed, 'inputs'),  # see `teacher.law_of`
    population=key_of(population.seed, 'population'),
    drift=key_of(population.seed, 'drift'),
    spec=population,
    lists=np.concatenate([users_law, categories_law]),
    items=_list_law(item_skew, spec.heads[1], sizes),
    first_item=first,
    shares=shares,
  )


def _list_law(skew: float, head: float, ranks: np.ndarray) -> np.ndarray:
  """Rows (a, mass, q, ranks) for `_rank`, of lists of these lengths."""
  flat = np.maximum(head * ranks, 1.0)
  # For x of the law on [1, R / q + 1), (x - 1) q is one on [0, R) that is
  # flat below q: so `_rank` needs no other formula.
  laws = zipf_of([skew] * len(ranks), ranks / flat)
  return np.column_stack([laws[:, :2], flat, ranks])


@kernel
@no_type_check
def _rank(bits: np.uint64, law: np.ndarray) -> int:
  """A rank whose chance falls as (rank + q)^-s: flat up to q, Zipf's beyond."""
  log = log_rank_at(unit(bits), law[0], law[1])
  rank = 1 + np.int64((np.exp(log) - 1.0) * law[2])
  return min(rank, np.int64(law[3]))


# Purposes of the draws that share a key: far apart, as steps and numbers of
# interests or favourites are added to them.
_USER, _PAST, _SHORT, _LABEL, _STRAY, _CANDIDATE, _INTEREST, _FAVOURITE = (
  i << 32 for i in range(1, 9)
)


@kernel
@no_type_check
def _interest(bits: np.uint64, interests: int) -> int:
  """One of a user's interests, the first ones far more often."""
  u = unit(bits)
  # Below k of n with chance sqrt(k / n), which `_click_chance` relies on.
  return np.int64(u * u * interests)


@kernel
@no_type_check
def _item(law: SequenceLaw, bits: np.uint64, category: int, time: int) -> int:
  """An item of category 1, 2, ... by its popularity there."""
  at = category - 1
  rank = _rank(bits, law.items[at])
  if law.spec.drift_examples > 0:
    # A category is a list of its own: who comes next is of the same one.
    key, size = hashed(law.drift, category), np.int64(law.items[at, 3])
    rank = holder(key, rank, size, time, law.spec.drift_examples)
  return law.first_item[at] + rank - 1


@kernel
@no_type_check
def _draw_past(
  law: SequenceLaw,
  key: np.uint64,
  me: np.uint64,
  time: int,
  mine: np.ndarray,
  lookups: np.ndarray,
) -> int:
  """Fills items and categories of the past steps; returns how many."""
  spec = law.spec
  past, u = spec.steps, unit(hashed(key, _SHORT))
  if u < spec.short_share:
    # Given that, u is uniform below the share: no second draw is needed.
    past = 1 + np.int64(u / spec.short_share * (spec.steps - 1))
  for step in range(past):
    bits = hashed(key, _PAST + step)
    which = _interest(bits, spec.interests)
    bits = hashed(bits, 0)  # anew, as those said which interest it is
    if unit(bits) < spec.loyalty:
      # The lowest bits, which hardly tell in `unit`; then a hash of the user
      # and not of the example, as that makes an item one they come back to.
      favourite = np.int64(bits & np.uint64(0xFFFF)) % spec.favourites
      bits = hashed(me, _FAVOURITE + which * spec.favourites + favourite)
    else:
      bits = hashed(bits, 0)
    lookups[1, step] = _item(law, bits, mine[which], time)
    lookups[2, step] = mine[which]
  return past


@kernel
@no_type_check
def _draw_candidate(
  law: SequenceLaw, key: np.uint64, clicked: bool, mine: np.ndarray
) -> int:
  """The candidate's category."""
  stray = unit(hashed(key, _STRAY)) < law.spec.stray_share
  # A stray and one that is not clicked are drawn alike: `_click_chance` takes
  # them together.
  bits = hashed(key, _CANDIDATE)
  if clicked and not stray:
    return mine[_interest(bits, law.spec.interests)]
  return _rank(bits, law.lists[1])


@kernel
@no_type_check
def _click_chance(law: SequenceLaw, category: int, mine: np.ndarray) -> float:
  """Chance of a click on a candidate of this category, by Bayes' rule."""
  # The odds of this category among clicks and among the others. A user may
  # have drawn it for several interests, whose chances add up.
  spec, liked = law.spec, 0.0
  for which in range(spec.interests):
    if mine[which] == category:
      below, above = which / spec.interests, (which + 1) / spec.interests
      liked += np.sqrt(above) - np.sqrt(below)
  odds = (1.0 - spec.stray_share) * liked / law.shares[category - 1]
  odds = (odds + spec.stray_share) * spec.base_rate
  return odds / (odds + 1.0 - spec.base_rate)


@kernel
@no_type_check
def _draw(
  law: SequenceLaw,
  positions: np.ndarray,
  dense: np.ndarray,
  lookups: np.ndarray,
  labels: np.ndarray,
  probabilities: np.ndarray,
) -> None:
  """Fills f32[n, 1], integer[n, 3, S + 1] of -1, f32[n] and f64[n]."""
  spec = law.spec
  users, items, _ = spec.rows
  mine = np.empty(spec.interests, np.int64)
  for i in range(len(positions)):
    key, time = hashed(law.examples, positions[i]), time_of(positions[i])
    user = _rank(hashed(key, _USER), law.lists[0])
    user = holder(law.drift, user, users, time, spec.drift_examples)
    me = hashed(law.population, user)
    for which in range(spec.interests):
      mine[which] = _rank(hashed(me, _INTEREST + which), law.lists[1])
    past = _draw_past(law, key, me, time, mine, lookups[i])
    # The label comes first and the candidate follows from it: what a model
    # must find out is the chance the other way round.
    clicked = unit(hashed(key, _LABEL)) < spec.base_rate
    category = _draw_candidate(law, key, clicked, mine)
    lookups[i, 2, spec.steps] = category
    lookups[i, 1, spec.steps] = _item(
      law, hashed(hashed(key, _CANDIDATE), 0), category, time
    )
    for step in range(spec.steps + 1):
      # Steps between are padding. Global rows: users, items, then categories;
      # users and categories count from 1 so far, items from 0.
      if step < past or step == spec.steps:
        lookups[i, 0, step] = user - 1
        lookups[i, 1, step] += users
        lookups[i, 2, step] += users + items - 1
    dense[i, 0] = np.log1p(past)
    labels[i] = clicked
    probabilities[i] = _click_chance(law, category, mine)
