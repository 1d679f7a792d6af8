"""Best items for each user by brute force, and how many of them are right."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.tables import as_array, check_integers
from slipstream_jax.training.evaluate import predict_batch
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import Batch

_USERS = 1 << 8  # scored at once
_ITEMS = 1 << 14


class TopK(NamedTuple):
  """The best k items of n users, the best one first."""

  items: Int[np.ndarray, 'n k']
  """Numbers of the items, i64; -1 where fewer than k are left."""
  scores: Float[np.ndarray, 'n k']
  """Their scores, f32; -inf where there is no item."""


def top_k(
  users: Float[np.ndarray, 'n E'],
  items: Float[np.ndarray, 'm E'],
  k: int,
  without: object = None,
) -> TopK:
  """Returns the items with the largest products with each user's vector.

  All products are computed, in parts that take some 100 MB. Of equal items any
  may come first.

  Args:
    users: a vector for each user.
    items: a vector for each item.
    k: how many items to return.
    without: numbers of the items that each user must not get, such as those of
      the training part, [n, L] padded with -1. None: every user may get all.

  Raises:
    UserError: k is out of range, or `without` does not fit the users.
  """
  check_whole(k, 1, 'top_k, k', 'such as 10')
  seen = np.full((len(users), 0), -1)
  if without is not None:
    seen = _numbers(without, 'top_k, without')
    if len(seen) != len(users):
      raise UserError(
        f'items to leave out must be given for each user, [{len(users)}, L]',
        got=list(seen.shape),
        where='top_k, without',
        hint='pad shorter lists with -1',
      )
  best = TopK(
    np.full((len(users), k), -1), np.full((len(users), k), -np.inf, np.float32)
  )
  for first in range(0, len(users), _USERS):
    some = slice(first, first + _USERS)
    for at in range(0, len(items), _ITEMS):
      scores = users[some] @ items[at : at + _ITEMS].T
      row, column = np.nonzero((seen[some] >= at) & (seen[some] < at + _ITEMS))
      scores[row, seen[some][row, column] - at] = -np.inf
      _merge(best, some, scores, at)
  best.items[best.scores == -np.inf] = -1
  return best


def _merge(
  best: TopK, some: slice, scores: Float[np.ndarray, 'u i'], at: int
) -> None:
  """Writes into `best` what is better among the items from number `at` on."""
  k = best.items.shape[1]
  numbers = np.broadcast_to(np.arange(scores.shape[1]) + at, scores.shape)
  scores = np.concatenate([best.scores[some], scores], axis=1)
  numbers = np.concatenate([best.items[some], numbers], axis=1)
  chosen = np.argpartition(-scores, k - 1, axis=1)[:, :k]
  values = np.take_along_axis(scores, chosen, axis=1)
  order = np.argsort(-values, axis=1, kind='stable')
  chosen = np.take_along_axis(chosen, order, axis=1)
  best.items[some] = np.take_along_axis(numbers, chosen, axis=1)
  best.scores[some] = np.take_along_axis(scores, chosen, axis=1)


def recall_at_k(items: object, wanted: object) -> float:
  """Returns the mean share of each user's wanted items that were found.

  >>> recall_at_k([[3, 1], [2, 5]], [[1, 4], [2, -1]])
  0.75

  Args:
    items: numbers of the k items of each user, [n, k], the best one first.
    wanted: numbers of the right items, [n] or [n, L] padded with -1, none
      twice. Users without any are left out.

  Raises:
    UserError: no user has a wanted item, or the numbers of users differ.
  """
  hits, counts = _hits(items, wanted)
  return float(np.mean(hits.sum(axis=1) / counts))


def ndcg_at_k(items: object, wanted: object) -> float:
  """Returns the normalized discounted cumulative gain, a mean over users.

  An item at place i of the list, from 1 on, gains 1 / log2(i + 1). The largest
  sum that a user's list could have is 1.

  >>> ndcg_at_k([[3, 1], [2, 5]], [1, 2])
  0.8154648767857288

  Args:
    items: as for `recall_at_k`.
    wanted: as for `recall_at_k`.

  Raises:
    UserError: as `recall_at_k`.
  """
  hits, counts = _hits(items, wanted)
  gains = 1 / np.log2(np.arange(hits.shape[1]) + 2)
  largest = np.cumsum(gains)[np.minimum(counts, len(gains)) - 1]
  return float(np.mean(hits @ gains / largest))


def _hits(
  items: object, wanted: object
) -> tuple[np.ndarray, Int[np.ndarray, ' n']]:
  """Returns which found items are wanted, bool[n, k], and how many are."""
  ours = _numbers(items, 'recall_at_k, items')
  right = _numbers(wanted, 'recall_at_k, wanted')
  some = (right >= 0).any(axis=1)
  if len(ours) != len(right) or not some.any() or not ours.shape[1]:
    raise UserError(
      'there must be as many lists of wanted items as of found ones, and one'
      ' item in each at least for some user',
      got=f'{list(ours.shape)} and {list(right.shape)}',
      where='recall_at_k, wanted',
      hint='give numbers of items, padded with -1',
    )
  ours, right = ours[some], right[some]
  hits = np.zeros(ours.shape, bool)
  for column in right.T:
    hits |= (ours == column[:, None]) & (column >= 0)[:, None]
  return hits, (right >= 0).sum(axis=1)


def _numbers(values: object, where: str) -> Int[np.ndarray, 'n L']:
  """Returns numbers of items of each user as i64[n, L]."""
  numbers = as_array(values, where)
  check_integers(numbers, where)
  return numbers.astype(np.int64).reshape(len(numbers), -1)


def row_vectors(trainer: TrainerParts) -> Float[np.ndarray, 'R E']:
  """Returns the vectors of all rows of the items' table.

  Raises:
    UserError: the model has no towers, or its items have several features.
  """
  program = trainer.programs.side('items')
  return trainer.turns.run(
    lambda: np.concatenate(
      [predict_batch(trainer, one, program).logits for one in _rows_of(trainer)]
    )
  )


def _rows_of(trainer: TrainerParts) -> Iterator[Batch]:
  """Yields examples of all items. Their users have no lookups."""
  tables, names = trainer.shape.tables, trainer.recipe.model.items
  if len(names) != 1:
    raise UserError(
      'vectors of all items need items of one feature',
      got=', '.join(names),
      where='Trainer.vectors, source',
      hint='give the items as examples of a source',
    )
  feature = tables.features[names[0]]
  first, column = tables.first_rows[feature.table], tables.columns[names[0]]
  count = tables.tables[feature.table].rows
  # All batches have one size, so that one program scores them. Examples past
  # the end have no weight.
  size = min(_ITEMS, count)
  for start in range(0, count, size):
    rows = np.arange(start, start + size)
    lookups = np.full((size, tables.num_columns), -1)
    lookups[:, column.start] = np.where(rows < count, rows + first, -1)
    yield Batch(
      np.zeros((size, trainer.shape.dense_features), np.float32),
      lookups.reshape(size, *tables.example_shape),
      None,
      (rows < count).astype(np.float32),
    )
