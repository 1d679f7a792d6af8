"""The contract of a source of batches, and of examples that become batches.

A trainer takes a `Source`. `bound_to` turns any into a `BatchSource`, which is
all that the rest of the package sees.
"""

import abc
from collections.abc import Callable, Iterator, Mapping
import types
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Integer
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.tables import Feature, TableSet
from slipstream_jax.types import Batch, TableVocabulary

WidthByName = Mapping[str, int | None]
"""Width of each name, in order. None for one number per example. It is empty
where the columns have no names."""


class ColumnNames(NamedTuple):
  """Names of columns. None: not known yet."""

  dense: WidthByName | None = None
  """Columns of `Batch.dense`."""
  labels: WidthByName | None = None
  """Columns of `Batch.labels` of several heads."""


class Widths(NamedTuple):
  """The numbers of columns that a trainer takes."""

  dense: int
  labels: int
  """1 for labels [B]."""


@runtime_checkable
class CheckpointableIterator(Protocol):
  """The five methods that a user's own source of batches must have.

  The contract is grain's. Arrays of a batch may be reused as soon as the next
  batch is asked for, because a trainer copies them. With an attribute
  `endless = True`, a pass over all batches is refused rather than begun.
  """

  def __iter__(self) -> Iterator[Batch]: ...

  def __next__(self) -> Batch: ...

  def get_state(self) -> dict[str, Any]:
    """See `BatchSource.get_state`."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """See `BatchSource.set_state`."""
    ...

  def close(self) -> None:
    """See `BatchSource.close`."""
    ...


class BatchSource(abc.ABC):
  """An iterator of batches whose position can be saved and restored.

  Only `__next__`, `get_state` and `set_state` must be written. The other
  members suit a source that reads nothing ahead and has no vocabularies.

  Attributes:
    batches_per_epoch: number of batches in one pass, or None if not known.
  """

  batches_per_epoch: int | None = None

  @property
  def endless(self) -> bool:
    """Whether the batches never end."""
    return False

  @property
  def is_lent(self) -> bool:
    """Whether the user holds the iterator that this source reads.

    When training leaves it, it is set back to the last batch trained.
    """
    return False

  def __iter__(self) -> Iterator[Batch]:
    return self

  @abc.abstractmethod
  def __next__(self) -> Batch:
    """Returns the next batch. After an error the same batch is asked for."""

  @abc.abstractmethod
  def get_state(self) -> dict[str, Any]:
    """Returns the position after the last batch delivered, as plain JSON.

    A source with growing vocabularies adds cursors of them, by table, under
    'vocabularies'. `Checkpoints` saves the states that they refer to.
    """

  @abc.abstractmethod
  def set_state(self, state: dict[str, Any]) -> None:
    """Continues as if the batches up to `state` had just been delivered."""

  def close(self) -> None:
    """Releases threads and files. May be called more than once."""
    return

  def arrange(self, known: ColumnNames, widths: Widths) -> ColumnNames:
    """Puts columns in the order of a trainer's names from here on.

    Called before batches are trained or scored.

    Args:
      known: names that the trainer learned.
      widths: the columns that it takes.

    Returns:
      `known` with the names that the trainer learns from this source.

    Raises:
      UserError: names that the trainer does not know, or lacks.
    """
    del widths
    return known

  def set_vocabularies(self, trained: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sets growing vocabularies to the state in which training has them.

    Called when training begins, and when it ends, before `close`.

    Args:
      trained: by table, a cursor or saved state of its vocabulary as trained.

    Returns:
      By table, a cursor of each vocabulary that the source grows.

    Raises:
      UserError: another source grows one, or another one was trained. Nothing
        has changed then.
    """
    del trained
    return {}

  # The members below are for iterators that cannot be set back.

  def check_can_go_back(self) -> None:
    """Checks that the next batches can be read twice, before they are sampled.

    Raises:
      UserError: they cannot.
    """
    return

  def keep_from(self, state: dict[str, Any]) -> None:
    """Keeps the batches after a position, and forgets those before.

    Called when training begins and after each step. Before, none is kept.
    """
    del state

  def unused(self) -> Any | None:
    """Returns what was read and not trained, or None if it can be read again.

    Called when training leaves a source that is lent.
    """
    return None

  def put_back(self, unused: Any, state: dict[str, Any]) -> None:
    """Continues from a position with what `unused` of another source returned.

    Called before training resumes an iterator.
    """
    del unused, state


class Bindable(abc.ABC):
  """Examples by name: a source of batches once their tables are known."""

  @property
  @abc.abstractmethod
  def endless(self) -> bool:
    """Whether the batches never end, as far as that is known."""

  @property
  def in_use(self) -> bool:
    """Whether it has read more of an iterator than it has delivered."""
    return False

  @abc.abstractmethod
  def bind(
    self, tables: TableSet, replace: Callable[..., Any] | None = None
  ) -> BatchSource:
    """Returns batches of the examples, from the start, in global rows.

    Args:
      tables: the tables whose rows are looked up.
      replace: maps a table and its growing vocabulary to the one to use in its
        place. None uses the vocabulary itself.
    """

  def in_order(self) -> 'Bindable':
    """Returns the same examples without a shuffle."""
    return self


Source = CheckpointableIterator | Bindable
"""What a trainer takes."""


class SourceWrapper(BatchSource):
  """A source that reads another one: a base of those that change batches."""

  def __init__(self, source: CheckpointableIterator) -> None:
    """Takes over `source`."""
    self._source = source

  @property
  def endless(self) -> bool:
    """Whether the batches never end."""
    return is_endless(self._source)

  def __next__(self) -> Batch:
    return next(self._source)

  def get_state(self) -> dict[str, Any]:
    """Returns the position of the source."""
    return self._source.get_state()

  def set_state(self, state: dict[str, Any]) -> None:
    """Sets the position of the source."""
    self._source.set_state(state)

  def close(self) -> None:
    """Closes the source."""
    self._source.close()


def is_endless(source: object) -> bool:
  """Whether a source of any kind says that it never ends."""
  return bool(getattr(source, 'endless', False))


def bound_to(
  source: Source, tables: TableSet, replace: Callable[..., Any] | None = None
) -> BatchSource:
  """Returns the batches of a source, with all members of the contract.

  Args:
    source: batches, or examples by name.
    tables: the tables whose rows are looked up.
    replace: see `Bindable.bind`.

  Raises:
    UserError: `source` is none, or its examples do not fit the tables.
  """
  if isinstance(source, Bindable):
    return source.bind(tables, replace)
  if isinstance(source, BatchSource):
    return source
  wanted = ('__next__', 'get_state', 'set_state', 'close')
  missing = [name for name in wanted if not hasattr(source, name)]
  if missing:
    raise UserError(
      f'a batch source must have {", ".join(wanted)}',
      got=f'{type(source).__name__} without {", ".join(missing)}',
      where='source',
      hint='give examples to batches(...), or write these methods',
    )
  return SourceWrapper(source)


def bound_in_order(
  source: Source, tables: TableSet, replace: Callable[..., Any] | None = None
) -> BatchSource:
  """Binds as `bound_to` does, but never shuffles examples by name."""
  ordered = source.in_order() if isinstance(source, Bindable) else source
  return bound_to(ordered, tables, replace)


class Dataset(NamedTuple):
  """A data set: what its batches look like, and where they come from."""

  name: str
  """Names the file in summaries, or says that the data are synthetic."""
  sizes: Mapping[str, int]
  """Rows of each table by its name, in the order of the global row space."""
  features: Mapping[str, Feature]
  """By name, in the order of the lookups' columns."""
  dense_features: int
  """I, columns of `Batch.dense`."""
  train: Callable[[int], BatchSource]
  """Batch size to the batches to train on."""
  test: Callable[[int], BatchSource]
  """Batch size to one pass over the held-out examples, last batch padded."""
  known: tuple[Callable[[int], BatchSource], ...] = ()
  """Batch size to one pass over each part that a ranking leaves out: the
  examples to train on, and a validation part that is not tested on."""
  profile: Callable[[int], BatchSource] | None = None
  """Batch size to batches that tell which rows are popular. They are like those
  to train on, but others: else every row trained would count as popular. None
  if a run trains on the same examples again and again, or has no others."""
  train_examples: int | None = None
  """Examples of one epoch. None for an endless stream."""
  bayes_auc: float | None = None
  """AUC of the true click probabilities, if they are known."""
  base_rate: float | None = None
  """Share of clicks among the examples to train on, if it is known."""
  counts: Callable[[], Integer[np.ndarray, ' N']] | None = None
  """Uses of each global row by the examples to train on, if they were counted
  when the data set was made. Then no profile is read."""
  vocabulary: Callable[[], tuple[TableVocabulary, ...]] | None = None
  """Maps raw ids to the rows that they have here. None if examples come with
  rows."""
  names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
  """Names of the dense features, and of the labels of several heads."""
  heads: int | None = None
  """T, of labels [B, T]. None: they are [B]."""
  format: str = ''
  """Name of the format that it was read from, if it is one of the library."""
  settings: Mapping[str, Any] = types.MappingProxyType({})
  """Settings of the format that affect the examples."""
  bayes_log_loss: float | None = None
  """Log loss of the true click probabilities, if they are known."""
