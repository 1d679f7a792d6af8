"""Best items for each user by brute force, and how many of them are right."""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import itertools
from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.models.towers import item_features
from slipstream_jax.tables import as_array, check_integers
from slipstream_jax.training.evaluate import predict_batch, vectors
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


def log_counts(ids: object) -> Float[np.ndarray, ' n']:
  """Returns how often each id occurs in its column, as a logarithm, f32[n].

  It is what `log_q` of a `TwoTower` reads, for a column of items to train on.

  >>> np.exp(log_counts(['a', 'b', 'a'])).round().tolist()
  [2.0, 1.0, 2.0]

  Args:
    ids: [n] numbers or words.

  Raises:
    UserError: the ids are not one column.
  """
  column = as_array(ids, 'log_counts, ids')
  if column.ndim != 1:
    raise UserError(
      'ids must be one column, [n]',
      got=list(column.shape),
      where='log_counts, ids',
      hint='give the item of each example',
    )
  _, place, counts = np.unique(column, return_inverse=True, return_counts=True)
  return np.log(counts[place]).astype(np.float32)


K = 10
"""Items that a user gets when held-out examples are ranked."""
RECALL, NDCG = f'recall_at_{K}', f'ndcg_at_{K}'
"""Names of the metrics of that ranking."""


class _Choices(NamedTuple):
  """Items that users chose, one line for each choice."""

  users: Int[np.ndarray, 'n U']
  """Rows of the features of a user. U is 0 for sequences."""
  items: Int[np.ndarray, ' n']
  """Numbers of items."""


def ranked(
  trainer: TrainerParts,
  test: Callable[[], BatchSource],
  known: Iterable[Batch],
  max_batches: int | None = None,
) -> dict[str, float]:
  """Returns `recall_at_10` and `ndcg_at_10` of held-out examples.

  All items of known examples are ranked for each user, but those that the user
  has there. The user's held-out items are wanted, and those that are not known
  count as misses. A user is known by the rows of its features, and the first
  held-out example gives its vector. Each example of a sequence model is a user
  of its own, who may get items of the history again.

  Args:
    trainer: of a model of users and items, whose items have one feature.
    test: begins a pass over held-out examples.
    known: the examples that the model was trained on, and others to leave out.
    max_batches: the most batches of the held-out ones. None: all.

  Raises:
    UserError: as `row_vectors`.
  """
  with contextlib.closing(test()) as batches:
    asked = _choices(trainer, itertools.islice(batches, max_batches))
  had = _choices(trainer, known)
  choosable, places = np.unique(had.items, return_inverse=True)
  user = np.arange(len(asked.items) + len(had.items))
  if asked.users.shape[1]:
    both = np.concatenate([asked.users, had.users])
    user = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)
  of_asked, of_had = np.split(user, [len(asked.items)])
  order = np.argsort(of_had, kind='stable')
  of_had, places = of_had[order], places[order]
  everybody, first = np.unique(of_asked, return_index=True)
  queries = vectors(trainer, test(), 'users', max_batches)[first]
  items = row_vectors(trainer)[choosable]
  lists = np.empty((len(everybody), K), np.int64)
  for start in range(0, len(everybody), _USERS):
    part = slice(start, start + _USERS)
    some = everybody[part]
    own = slice(*np.searchsorted(of_had, [some[0], some[-1] + 1]))
    without = _lists(of_had[own], places[own], some)
    best = top_k(queries[part], items, K, without).items
    lists[part] = np.where(best >= 0, choosable[best], -1)
  wanted = _lists(of_asked, asked.items, everybody)
  return {
    RECALL: recall_at_k(lists, wanted),
    NDCG: ndcg_at_k(lists, wanted),
  }


def _lists(
  users: Int[np.ndarray, ' n'],
  items: Int[np.ndarray, ' n'],
  some: Int[np.ndarray, ' u'],
) -> Int[np.ndarray, 'u L']:
  """Returns the distinct items of some users, in order, padded with -1."""
  own = np.isin(users, some)
  row = np.searchsorted(some, users[own])
  row, item = np.unique(np.stack([row, items[own]]), axis=1)
  starts = np.searchsorted(row, np.arange(len(some) + 1))
  lists = np.full((len(some), np.diff(starts).max()), -1)
  lists[row, np.arange(len(row)) - starts[row]] = item
  return lists


def _choices(trainer: TrainerParts, batches: Iterable[Batch]) -> _Choices:
  """Returns the users and items of examples."""
  tables = trainer.shape.tables
  names = item_features(trainer.recipe.model, [*tables.features])
  of_items = np.concatenate([np.r_[tables.columns[name]] for name in names])
  place, first_row = _item(trainer)
  users, items = [], []
  for batch in batches:
    rows = batch.lookups.reshape(len(batch.weights), -1)[batch.weights > 0]
    users.append(np.delete(rows, of_items, axis=1))
    items.append(rows[:, place].astype(np.int64) - first_row)
  return _Choices(np.concatenate(users), np.concatenate(items))


def row_vectors(trainer: TrainerParts) -> Float[np.ndarray, 'R E']:
  """Returns the vectors of all rows of the items' table.

  Raises:
    UserError: the model has no vectors, or its items have several features.
  """
  program = trainer.programs.side('items')
  return trainer.turns.run(
    lambda: np.concatenate(
      [predict_batch(trainer, one, program).logits for one in _rows_of(trainer)]
    )
  )


def _item(trainer: TrainerParts) -> tuple[int, int]:
  """Returns the column of lookups with the item, and its table's first row."""
  tables = trainer.shape.tables
  names = item_features(trainer.recipe.model, [*tables.features])
  if len(names) != 1:
    raise UserError(
      'vectors of all items need items of one feature',
      got=', '.join(names),
      where='Trainer.vectors, source',
      hint='give the items as examples of a source',
    )
  table = tables.features[names[0]].table
  return tables.columns[names[0]].stop - 1, tables.first_rows[table]


def _rows_of(trainer: TrainerParts) -> Iterator[Batch]:
  """Yields examples of all items. Their users have no lookups."""
  tables = trainer.shape.tables
  place, first = _item(trainer)
  names = item_features(trainer.recipe.model, [*tables.features])
  count = tables.tables[tables.features[names[0]].table].rows
  # All batches have one size, so that one program scores them. Examples past
  # the end have no weight.
  size = min(_ITEMS, count)
  for start in range(0, count, size):
    rows = np.arange(start, start + size)
    lookups = np.full((size, tables.num_columns), -1)
    lookups[:, place] = np.where(rows < count, rows + first, -1)
    yield Batch(
      np.zeros((size, trainer.shape.dense_features), np.float32),
      lookups.reshape(size, *tables.example_shape),
      None,
      (rows < count).astype(np.float32),
    )
