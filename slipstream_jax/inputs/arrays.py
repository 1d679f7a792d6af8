"""Examples in memory or in a packed folder: any order, and any position."""

import abc
from collections.abc import Callable, Iterator, Mapping
import copy
from typing import Any, cast, NamedTuple, NoReturn

from jaxtyping import Int, Integer
import numpy as np

from slipstream_jax.columns.lists import ListRules
from slipstream_jax.columns.read import frozen, Lists
from slipstream_jax.data.interrupts import held
from slipstream_jax.data.numbered import (
  batches_of,
  batches_per_epoch,
  NumberedBatches,
  order_of_epochs,
  pad_batch,
)
from slipstream_jax.data.source import (
  BatchSource,
  Bindable,
  ColumnNames,
  Dataset,
  SourceWrapper,
  Widths,
)
from slipstream_jax.errors import UserError
from slipstream_jax.files import Path
from slipstream_jax.inputs.bind import (
  Examples,
  examples_of,
  Growth,
  IdRules,
  Replace,
  words_of,
)
from slipstream_jax.inputs.fields import (
  check_names,
  completed,
  NamedColumns,
  Numbers,
  Order,
  orders_of,
  read_features,
  read_numbers,
)
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.tables import TableSet
from slipstream_jax.types import Batch
from slipstream_jax.vocabulary.growing import Cursor, GrowingVocabulary
from slipstream_jax.vocabulary.growing import Position as VocabularyState

WHERE = 'batches'


class Form(NamedTuple):
  """Facts about examples that a model needs before it sees any."""

  dense_features: int
  """I, or 0 if there are none."""
  dense_columns: dict[str, int | None]
  """As in `Recipe`. Empty if the model does not get them by name."""
  labels: int
  """Labels of an example. Without any, it can only be predicted."""
  names: ColumnNames
  """Names of dense features and labels, as far as they have some."""

  @property
  def has_labels(self) -> bool:
    """Whether there are labels."""
    return self.labels > 0


class BatchSettings(NamedTuple):
  """Settings that cut examples into batches."""

  batch_size: int
  seed: int | None
  epochs: int | None
  pad: bool
  """Whether the last batch of an epoch is padded instead of dropped."""


class UnboundExamples(Bindable):
  """Examples by name, whose form is known before their tables are."""

  # Not a protocol, because a check against one would compute `form`, which may
  # read examples.

  def __init__(self, rules: IdRules, cut: BatchSettings | None) -> None:
    """Sets how ids are read, and how batches are cut if they are."""
    self._rules, self._cut = rules, cut

  @property
  @abc.abstractmethod
  def form(self) -> Form:
    """Facts about the examples that a model needs."""

  @property
  def endless(self) -> bool:
    """Whether the batches never end. False if that is not known."""
    return self._cut is not None and self._cut.epochs is None

  @property
  def epochs(self) -> int | None:
    """Passes before the batches end. None: without end, or not known."""
    return None if self._cut is None else self._cut.epochs

  def in_order(self) -> 'UnboundExamples':
    """Returns the same examples without a shuffle. None is left out."""
    if self._cut is None:  # an iterator has its own order, and one reader
      return self
    same = copy.copy(self)
    same._cut = self._cut._replace(seed=None, pad=True)
    return same

  def vocabulary_of(
    self, table: str, tables: TableSet, where: str, replace: Replace | None
  ) -> Any:
    """Returns the vocabulary of raw ids of a table, or None if ids are rows.

    Args:
      table: its name.
      tables: all tables.
      where: names the argument that needs it, for the error.
      replace: as in `Bindable.bind`.

    Raises:
      UserError: features of the table have different vocabularies.
    """
    rules, _ = words_of(self._rules, tables, replace, WHERE)
    first, *others = [
      rules.vocabularies.get(name)
      for name, feature in tables.features.items()
      if feature.table == table
    ]
    if any(other is not first for other in others):
      raise UserError(
        'features that share a table must share its vocabulary to have rows by'
        ' id',
        got='two vocabularies',
        where=where,
        hint='give one vocabulary by the name of the table',
      )
    return first

  # Raise an error that says how to get batches.
  def __iter__(self) -> Iterator[Batch]:
    return next(self)

  def __next__(self) -> NoReturn:
    raise UserError(
      'examples by name have batches only once their tables are known',
      got='none so far',
      where=WHERE,
      hint='give them to a trainer, or iterate over bind(tables)',
    )


def form_of(numbers: Numbers, by_name: bool = False) -> Form:
  """Returns the facts that a model needs. `by_name`: it gets names, too."""
  width = 0 if numbers.dense is None else numbers.dense.shape[1]
  columns = dict(numbers.names.dense or {}) if by_name else {}
  labels = 0 if numbers.labels is None else numbers.labels[:1].size
  return Form(width, columns, labels, numbers.names)


class ArrayExamples(UnboundExamples):
  """Examples in memory, by name."""

  def __init__(
    self, given: NamedColumns, rules: IdRules, cut: BatchSettings
  ) -> None:
    """Checks what can be checked without tables.

    Raises:
      UserError: columns of unequal lengths, invalid values, or no examples.
    """
    super().__init__(rules, cut)
    self._numbers, self._count = read_numbers(given, WHERE, copied=True)
    # The copies are used from here on.
    self._given = given._replace(dense=None, labels=None, weights=None)
    self._lists: dict[str, Lists] = {}
    # At most one. Sources of the same examples share the list.
    self._bound: list[Examples] = []
    if given.all_features:
      self._read([*given.features])
      self._given = self._given._replace(
        features=dict.fromkeys(given.features), lookup_weights={}
      )

  @property
  def form(self) -> Form:
    """Facts about the examples that a model needs."""
    return form_of(self._numbers, self._given.dense_by_name)

  def bind(
    self, tables: TableSet, replace: Replace | None = None
  ) -> 'ArrayBatches':
    """Returns batches of the examples, from the start, in global rows.

    All ids are checked when they are first bound to these tables, and kept as
    rows: 4 bytes each, 8 above 2**31 rows. Ids of growing vocabularies get
    their rows batch by batch, and take 8 bytes more.

    Raises:
      UserError: a feature has no ids or no table, an id is not in its table or
        is no whole number, or a list is too long.
    """
    assert self._cut is not None
    rules, growing = words_of(self._rules, tables, replace, WHERE)
    given = self._rules.vocabularies.values()
    grows = any(isinstance(words, GrowingVocabulary) for words in given)
    is_frozen = grows and not growing
    examples = self._bound[0] if self._bound else None
    if examples is None or examples.tables != tables or is_frozen:
      check_names(self._given, tables, WHERE)
      if not self._given.all_features:
        self._read([*tables.features])
      assert self._count is not None
      examples = examples_of(
        self._numbers, self._lists, self._count, tables, rules, WHERE
      )
    if not is_frozen:  # rows of frozen vocabularies are of this call alone
      self._bound[:] = [examples]
    return ArrayBatches(examples, self._cut, Growth(growing, tables))

  def _read(self, names: list[str]) -> None:
    lists, self._count = read_features(self._given, names, self._count, WHERE)
    self._lists = {name: frozen(values) for name, values in lists.items()}
    if not self._count:
      raise UserError(
        'there must be examples',
        got='none',
        where=WHERE,
        hint='give columns of at least one entry',
      )


class ArrayBatches(NumberedBatches):
  """Batches of examples in memory, shuffled by (seed, epoch) or in order."""

  def __init__(
    self, examples: Examples, cut: BatchSettings, growth: Growth
  ) -> None:
    """Cuts batches from `examples`, which grow the vocabularies of `growth`.

    Raises:
      UserError: too few examples for a single batch.
    """
    size, seed, epochs, pad = cut
    count = examples.size
    per_epoch = batches_per_epoch(count, size, pad, f'{WHERE}, batch_size')
    order_of = order_of_epochs(count, seed)

    def batch_at(number: int) -> Batch:
      epoch, step = divmod(number, per_epoch)
      index: Int[np.ndarray, ' m']
      index = order_of(epoch)[step * size : (step + 1) * size]
      some = self._examples.take(index)
      return pad_batch(growth.grow(some, examples.raw), size)

    self._growth = growth
    self._own = self._examples = examples
    self.batches_per_epoch = per_epoch
    super().__init__(
      batch_at,
      batches_of(epochs, per_epoch, WHERE),
      ('named', size, pad, seed, examples.tables.example_shape),
      examples.arrays(),
      reads=f'{count} examples by {size}',
    )

  def arrange(self, known: ColumnNames, widths: Widths) -> ColumnNames:
    """Puts columns in the order of a trainer's names."""
    numbers = self._own.numbers
    known = completed(known, numbers.names, widths)
    arranged = numbers.arranged(known, WHERE)
    self._examples = self._own._replace(numbers=arranged)
    # Positions have a checksum of the values in this order.
    self.recheck(self._examples.arrays())
    return known

  def set_vocabularies(
    self, trained: Mapping[str, VocabularyState]
  ) -> dict[str, Cursor]:
    """Sets growing vocabularies to the state in which training has them."""
    return self._growth.set_vocabularies(trained)

  def __next__(self) -> Batch:
    with held():  # vocabularies and position change together
      return super().__next__()

  def get_state(self) -> dict[str, Any]:
    """Returns the position, with cursors of growing vocabularies."""
    return super().get_state() | self._growth.get_state()

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues after the batches that `state` counts.

    Raises:
      UserError: the state has other examples, order or vocabularies.
    """
    before = self._delivered
    super().set_state(state)
    try:
      self._growth.set_state(state)
    except BaseException:
      self._delivered = before
      raise

  def close(self) -> None:
    """Releases the vocabularies, so that other sources can grow them."""
    self._growth.close()


class PackedExamples(UnboundExamples):
  """Examples of one split of a packed folder.

  Attributes:
    folder: path of the folder.
    dataset: its data set.
  """

  def __init__(self, folder: Path, split: str, cut: BatchSettings) -> None:
    """Opens a finished packed folder.

    Raises:
      UserError: the folder is not finished, or it has no such split.
    """
    super().__init__(IdRules({}, ListRules()), cut)
    held_out = 'test' if split == 'train' else split
    self.folder, self._split = str(folder), split
    self.dataset: Dataset = packed_dataset(
      folder, shuffle_seed=cut.seed, test_split=held_out
    )

  @property
  def form(self) -> Form:
    """Facts about the examples that a model needs."""
    dense, labels = self.dataset.names
    names = ColumnNames(
      dict.fromkeys(dense) or None, dict.fromkeys(labels) or None
    )
    return Form(self.dataset.dense_features, {}, len(labels) or 1, names)

  def row_counts(self) -> Integer[np.ndarray, ' N'] | None:
    """Returns the uses of each row by the examples to train on.

    None if this is another split.
    """
    counts = self.dataset.counts
    return counts() if counts and self._split == 'train' else None

  def bind(
    self, tables: TableSet, replace: Replace | None = None
  ) -> BatchSource:
    """Returns batches of the examples, from the start.

    A folder has no growing vocabularies that `replace` could replace.

    Raises:
      UserError: the tables or features are not those that were packed.
    """
    del replace
    sizes = {name: table.rows for name, table in tables.tables.items()}
    _check_same('tables', sizes, dict(self.dataset.sizes), self.folder)
    lengths, packed = (
      {name: (f.table, f.max_length) for name, f in features.items()}
      for features in (tables.features, self.dataset.features)
    )
    _check_same('features', lengths, packed, self.folder)
    assert self._cut is not None
    size, seed, epochs, pad = self._cut
    # Both make `PackedBatches`, which takes these arguments as well.
    how = {'epochs': epochs, 'pad_remainder': pad}
    if self._split == 'train':
      how['shuffle_seed'] = seed
    make = self.dataset.train if self._split == 'train' else self.dataset.test
    batches = cast(Callable[..., BatchSource], make)(size, **how)
    if not any(self.dataset.names):
      return batches
    names = ColumnNames(*map(dict.fromkeys, self.dataset.names))
    return NamedPackedBatches(batches, names, self.folder)


class NamedPackedBatches(SourceWrapper):
  """Batches of a folder whose columns have names."""

  def __init__(
    self, source: BatchSource, names: ColumnNames, folder: str
  ) -> None:
    """Takes over `source`, whose columns have these names."""
    super().__init__(source)
    self._names, self._folder = names, folder
    self.batches_per_epoch = source.batches_per_epoch
    self._orders: tuple[Order | None, Order | None] = None, None

  def arrange(self, known: ColumnNames, widths: Widths) -> ColumnNames:
    """Puts columns in the order of a trainer's names."""
    known = completed(known, self._names, widths)
    where = f'{WHERE}, data, {self._folder}'
    self._orders = orders_of(known, self._names, where)
    return known

  def __next__(self) -> Batch:
    batch, (dense, labels) = super().__next__(), self._orders
    if dense is not None:
      batch = batch._replace(dense=batch.dense[:, dense])
    if labels is not None and batch.labels is not None:
      batch = batch._replace(labels=batch.labels[:, labels])
    return batch


def _check_same(
  what: str, given: dict[str, Any], packed: dict[str, Any], folder: str
) -> None:
  if [*given.items()] != [*packed.items()]:
    raise UserError(
      f'the {what} must be those of {folder}, in their order: {packed}',
      got=given,
      where=f'{WHERE}, data',
      hint='make them by its sizes, rows of unknown ids included',
    )
