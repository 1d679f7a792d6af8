"""A synthetic log of item sequences in the shape of Taobao's. NOT real data.

As in `clicks`, example i is a pure function of (seed, i). An example is a
user, up to 20 items that the user looked at, and a candidate that is clicked or
not:

* A user has a few interests: categories, some weighted more than others. All
  items of the history are from them, and many are favourites that the user
  returns to.
* An item belongs to one category. Popular categories have more items.
* The candidate of a click is from the user's interests too, except for a few
  strays. One that is not clicked is sampled by popularity, as published.

The click chance of a candidate's category follows from Bayes' rule. Within its
category an item has no influence on the click.
"""

import functools
from typing import NamedTuple, no_type_check

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.data.numbered import Columns
from slipstream_jax.hashing import hashed, kernel, unit
from slipstream_jax.synthetic.clicks import key_of, zipf_of
from slipstream_jax.synthetic.draws import holder, log_rank_at, time_of
from slipstream_jax.synthetic.spec import check_spec, SequenceSpec
from slipstream_jax.synthetic.stream import Examples
from slipstream_jax.tables import row_dtype


class SequenceModel(NamedTuple):
  """The generative model of a spec, as the kernels read it."""

  examples: np.uint64
  """Key of the draws that differ between examples."""
  population: np.uint64
  """Key of the users' properties."""
  drift: np.uint64
  """Key of the holders of ranks."""
  spec: SequenceSpec
  """The spec of the population."""
  lists: Float[np.ndarray, '2 4']
  """Power laws of users and of categories, see `_rank`, f64."""
  items: Float[np.ndarray, 'K 4']
  """Power laws of the items within each category, f64."""
  first_item: Int[np.ndarray, ' K_and_1']
  """First item of each category, counted from 0, i64."""
  shares: Float[np.ndarray, ' K']
  """Share of each category when categories are drawn by popularity, f64."""


def sequence_at(
  spec: SequenceSpec, positions: Int[np.ndarray, ' n']
) -> Examples:
  """Returns the examples at some positions of the log, i64[n], none negative.

  Lookups are i32[n, 3, steps + 1]: the history from step 0 on, then -1 if it is
  short, and the candidate in the last step. The user's row is in every step
  that is not padding. The one dense feature is log1p of the number of past
  items.

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
  _draw(_model_of(spec), positions, dense, lookups, labels, probabilities)
  return Examples(columns, probabilities)


@functools.lru_cache(maxsize=64)
def _model_of(spec: SequenceSpec) -> SequenceModel:
  """Returns the spec's model. The spec must be valid."""
  users, items, categories = spec.rows
  user_skew, item_skew, category_skew = spec.skews
  users_law = _list_law(user_skew, spec.heads[0], np.array([users]))
  categories_law = _list_law(category_skew, 0.0, np.array([categories]))
  a, mass, _, _ = categories_law[0]
  ranks = np.arange(1, categories + 2, dtype=np.float64)
  shares = -np.diff(ranks**-a) / mass
  # In the real log, a category's items grow a little slower than its share.
  weights = shares**0.9
  # Each category has one item and its share of the rest. Rounding the sums
  # rather than the shares makes the sizes add up.
  rest = items - categories
  first = np.rint(rest * np.cumsum(weights) / weights.sum()).astype(np.int64)
  first = np.append(0, first + np.arange(1, categories + 1))
  sizes = np.diff(first)
  population = spec.population
  return SequenceModel(
    examples=key_of(spec.seed, 'inputs'),  # see `clicks.click_model`
    population=key_of(population.seed, 'population'),
    drift=key_of(population.seed, 'drift'),
    spec=population,
    lists=np.concatenate([users_law, categories_law]),
    items=_list_law(item_skew, spec.heads[1], sizes),
    first_item=first,
    shares=shares,
  )


def _list_law(skew: float, head: float, ranks: np.ndarray) -> np.ndarray:
  """Returns rows (a, mass, q, ranks) for `_rank`, one for each list length."""
  flat = np.maximum(head * ranks, 1.0)
  # If x follows the power law on [1, R / q + 1), then (x - 1) q is in [0, R)
  # and flat below q, so `_rank` needs no other formula.
  laws = zipf_of([skew] * len(ranks), ranks / flat)
  return np.column_stack([laws[:, :2], flat, ranks])


@kernel
@no_type_check
def _rank(bits: np.uint64, law: np.ndarray) -> int:
  """Draws a rank with a chance of about (rank + q)^-s.

  It is flat up to q, and Zipf's law beyond.
  """
  log = log_rank_at(unit(bits), law[0], law[1])
  rank = 1 + np.int64((np.exp(log) - 1.0) * law[2])
  return min(rank, np.int64(law[3]))


# Purposes of the draws that share a key. Far apart, because steps and numbers
# of interests or favourites are added to them.
_USER, _PAST, _SHORT, _LABEL, _STRAY, _CANDIDATE, _INTEREST, _FAVOURITE = (
  i << 32 for i in range(1, 9)
)


@kernel
@no_type_check
def _interest(bits: np.uint64, interests: int) -> int:
  """Draws one of a user's interests, the first ones far more often."""
  u = unit(bits)
  # It is below k of n with chance sqrt(k / n), as `_click_chance` assumes.
  return np.int64(u * u * interests)


@kernel
@no_type_check
def _item(
  model: SequenceModel, bits: np.uint64, category: int, time: int
) -> int:
  """Draws an item of category 1, 2, ... by its popularity there."""
  at = category - 1
  rank = _rank(bits, model.items[at])
  if model.spec.drift_examples > 0:
    # A category is a separate list, so the next holder is in the same category.
    key, size = hashed(model.drift, category), np.int64(model.items[at, 3])
    rank = holder(key, rank, size, time, model.spec.drift_examples)
  return model.first_item[at] + rank - 1


@kernel
@no_type_check
def _draw_past(
  model: SequenceModel,
  key: np.uint64,
  me: np.uint64,
  time: int,
  mine: np.ndarray,
  lookups: np.ndarray,
) -> int:
  """Fills items and categories of the past steps. Returns their number."""
  spec = model.spec
  past, u = spec.steps, unit(hashed(key, _SHORT))
  if u < spec.short_share:
    # Here u is uniform below the share, so no second draw is needed.
    past = 1 + np.int64(u / spec.short_share * (spec.steps - 1))
  for step in range(past):
    bits = hashed(key, _PAST + step)
    which = _interest(bits, spec.interests)
    bits = hashed(bits, 0)  # new bits, because the old ones chose the interest
    if unit(bits) < spec.loyalty:
      # The lowest bits hardly affect `unit`. The item is a hash of the user and
      # not of the example, so that the user returns to it.
      favourite = np.int64(bits & np.uint64(0xFFFF)) % spec.favourites
      bits = hashed(me, _FAVOURITE + which * spec.favourites + favourite)
    else:
      bits = hashed(bits, 0)
    lookups[1, step] = _item(model, bits, mine[which], time)
    lookups[2, step] = mine[which]
  return past


@kernel
@no_type_check
def _draw_candidate(
  model: SequenceModel, key: np.uint64, clicked: bool, mine: np.ndarray
) -> int:
  """Draws the candidate's category."""
  stray = unit(hashed(key, _STRAY)) < model.spec.stray_share
  # Strays and candidates that are not clicked have the same distribution, as
  # `_click_chance` assumes.
  bits = hashed(key, _CANDIDATE)
  if clicked and not stray:
    return mine[_interest(bits, model.spec.interests)]
  return _rank(bits, model.lists[1])


@kernel
@no_type_check
def _click_chance(
  model: SequenceModel, category: int, mine: np.ndarray
) -> float:
  """Returns the chance of a click on this category, by Bayes' rule."""
  # Compares the category's chance among clicks and among the rest. A user may
  # have it for several interests, whose chances add up.
  spec, liked = model.spec, 0.0
  for which in range(spec.interests):
    if mine[which] == category:
      below, above = which / spec.interests, (which + 1) / spec.interests
      liked += np.sqrt(above) - np.sqrt(below)
  odds = (1.0 - spec.stray_share) * liked / model.shares[category - 1]
  odds = (odds + spec.stray_share) * spec.base_rate
  return odds / (odds + 1.0 - spec.base_rate)


@kernel
@no_type_check
def _draw(
  model: SequenceModel,
  positions: np.ndarray,
  dense: np.ndarray,
  lookups: np.ndarray,
  labels: np.ndarray,
  probabilities: np.ndarray,
) -> None:
  """Fills f32[n, 1], integer[n, 3, S + 1] of -1, f32[n] and f64[n]."""
  spec = model.spec
  users, items, _ = spec.rows
  mine = np.empty(spec.interests, np.int64)
  for i in range(len(positions)):
    key, time = hashed(model.examples, positions[i]), time_of(positions[i])
    user = _rank(hashed(key, _USER), model.lists[0])
    user = holder(model.drift, user, users, time, spec.drift_examples)
    me = hashed(model.population, user)
    for which in range(spec.interests):
      mine[which] = _rank(hashed(me, _INTEREST + which), model.lists[1])
    past = _draw_past(model, key, me, time, mine, lookups[i])
    # The label is drawn first and the candidate given the label. A trained
    # model must learn the chance of the label given the candidate.
    clicked = unit(hashed(key, _LABEL)) < spec.base_rate
    category = _draw_candidate(model, key, clicked, mine)
    lookups[i, 2, spec.steps] = category
    lookups[i, 1, spec.steps] = _item(
      model, hashed(hashed(key, _CANDIDATE), 0), category, time
    )
    for step in range(spec.steps + 1):
      # Steps in between are padding. Converts to global rows: users, items,
      # then categories. Users and categories count from 1 so far, items from 0.
      if step < past or step == spec.steps:
        lookups[i, 0, step] = user - 1
        lookups[i, 1, step] += users
        lookups[i, 2, step] += users + items - 1
    dense[i, 0] = np.log1p(past)
    labels[i] = clicked
    probabilities[i] = _click_chance(model, category, mine)
