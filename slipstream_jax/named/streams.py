"""Batches that come from an iterator of dicts: a pipeline, or a generator."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from slipstream_jax.data.base import pad_batch
from slipstream_jax.data.interrupts import held
from slipstream_jax.data.numbered import check_batch_size, checksum
from slipstream_jax.errors import UserError
from slipstream_jax.named.examples import (
  Examples,
  examples_of,
  Rules,
  words_of,
)
from slipstream_jax.named.given import (
  check_names,
  Fields,
  Given,
  Numbers,
  read_features,
  read_numbers,
)
from slipstream_jax.named.growing import Growing, Growth, Instead
from slipstream_jax.named.items import (
  from_json,
  Items,
  open_items,
  Opened,
  refuse_others,
  skip_items,
  state_of,
)
from slipstream_jax.named.known import ByName, completed, Known, Widths
from slipstream_jax.named.sources import Form, form_of, Unbound, WHERE
from slipstream_jax.table_set import TableSet
from slipstream_jax.types import Batch


class StreamExamples(Unbound):
  """Batches by name as an iterator gives them."""

  endless = False
  """As far as is known: an iterator does not say whether it ends."""

  def __init__(
    self, items: Items, fields: Fields, rules: Rules, batch_size: int | None
  ) -> None:
    """Reads nothing yet.

    Args:
      items: an iterator, or what makes one each time it is bound.
      fields: which key is what.
      rules: how ids are read.
      batch_size: B; None: as many examples as the first batch has.

    Raises:
      UserError: a batch size out of range.
    """
    if batch_size is not None:
      check_batch_size(batch_size, f'{WHERE}, batch_size')
    self._items, self._fields, self._rules = items, fields, rules
    self._batch_size, self.grows = batch_size, rules.grow
    self._form: Form | None = None
    self._opened: Opened | None = None

  @property
  def form(self) -> Form:
    """What a model must know of the examples; reads the first batch.

    Raises:
      UserError: there is none, or one of which nothing can be made.
    """
    if self._form is None:
      if self._opened is None:
        self._opened = open_items(self._items)
      if self._opened.pending is None:
        item = next(self._opened.iterator, None)
        self._opened = self._opened._replace(pending=item)
      if self._opened.pending is None:
        raise UserError(
          'there must be a batch',
          got='an iterator that has ended',
          where=WHERE,
          hint='give a list, or a function that makes the iterator anew',
        )
      where = f'{WHERE}, batch 0'
      given = self._fields.sort(self._opened.pending, where)
      self._form = form_of(read_numbers(given, where)[0])
    return self._form

  def bind(
    self, tables: TableSet, instead: Instead | None = None
  ) -> 'StreamBatches':
    """The batches in the tables' global rows, each looked at when it comes.

    An iterator goes on where it is; what makes iterators begins anew.

    Args:
      tables: whose rows they are.
      instead: what to use in place of vocabularies that grow.

    Raises:
      UserError: a vocabulary of no feature and no table.
    """
    rules, growing = words_of(self._rules, tables, instead, WHERE)
    opened, self._opened = self._opened, None
    if opened is None:
      opened = open_items(self._items)
    growth = Growth(growing, tables)
    return StreamBatches(
      opened, self._fields, rules, tables, self._batch_size, growth
    )


class StreamBatches(Growing, ByName):
  """Batches of an iterator of dicts; a `BatchSource`.

  One with fewer examples than the others is padded with examples of weight 0.
  """

  endless = False

  def __init__(
    self,
    opened: Opened,
    fields: Fields,
    rules: Rules,
    tables: TableSet,
    batch_size: int | None,
    growth: Growth,
  ) -> None:
    """Takes over the iterator."""
    self._iterator: Iterator[Any] = opened.iterator
    self._ours, self._pending, self._position, self._again = opened[1:]
    # A checksum of the last batch, where only that tells positions apart.
    self._last: int | None = None
    self._fields, self._rules, self._tables = fields, rules, tables
    self._batch_size, self._delivered = batch_size, 0
    super().__init__(growth)
    # The first batch says in which order columns come.
    self._known = Known()
    self._closed = False

  def arrange(self, known: Known, widths: Widths) -> Known:
    """As `ByName.arrange`; reads a batch if there are names to learn.

    Batches that come later are looked at when they come.

    Raises:
      UserError: names of the batch that was read, as `ByName.arrange`.
    """
    if None in known:
      if self._pending is None and not self._closed:
        self._pending = next(self._iterator, None)
      if self._pending is not None:
        numbers, where = self._numbers(self._pending)[0], self._where
        known = completed(known, numbers.names, widths)
        numbers.arranged(known, where)
    self._known = known
    return known

  @property
  def _where(self) -> str:
    return f'{WHERE}, batch {self._delivered}'

  @property
  def is_lent(self) -> bool:
    """Whether somebody else has the iterator, which can be set back."""
    return not self._ours and self._position is not None

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    if self._closed:
      raise StopIteration
    if self._pending is None:
      self._pending = next(self._iterator)
    # One that is bad stays: asked for again, it is not left out in silence.
    with held():  # vocabularies and position move on together
      batch, examples = self._batch(self._pending)
      self._pending = None
      if self._again is not None and self._position is None:
        self._last = checksum(None, examples.arrays())
      self._delivered += 1
      self._position = state_of(self._iterator)
    return batch

  def _batch(self, item: Any) -> tuple[Batch, Examples]:
    examples, size = self._examples(item)
    batch = examples.take(np.arange(examples.count))
    batch = pad_batch(self._growth.grow(batch, examples.raw), size)
    self._batch_size = size
    return batch, examples

  def _examples(self, item: Any) -> tuple[Examples, int]:
    where = self._where
    numbers, given, count = self._numbers(item)
    check_names(given, self._tables, where)
    known = completed(self._known, numbers.names)
    numbers = numbers.arranged(known, where)
    lists, count = read_features(given, [*self._tables.features], count, where)
    size = count if self._batch_size is None else self._batch_size
    if not 0 < count <= size:
      raise UserError(
        f'a batch must have 1 to {size} examples'
        if size
        else 'a batch must have examples',
        got=count,
        where=where,
        hint='give batches of one size, of which the last may be smaller',
      )
    examples = examples_of(
      numbers, lists, count, self._tables, self._rules, where
    )
    self._known = known
    return examples, size

  def _numbers(self, item: Any) -> tuple[Numbers, Given, int | None]:
    given = self._fields.sort(item, self._where)
    numbers, count = read_numbers(given, self._where)
    return numbers, given, count

  def get_state(self) -> dict[str, Any]:
    """Batches delivered, and where the iterator is if it can tell."""
    return self._here() | self._growth.get_state()

  def _here(self) -> dict[str, Any]:
    own = {'delivered': self._delivered, 'source': self._position}
    # Else the last batch, if it is smaller, would not be padded after a resume.
    return own | {'batch_size': self._batch_size, 'last': self._last}

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues after the batches that `state` counts.

    An iterator that cannot be set to a position, but made anew, is read again.

    Raises:
      UserError: neither can be done, or what is read again is something else.
    """
    if all(state.get(name) == value for name, value in self._here().items()):
      self._growth.set_state(state)
      return
    position = state.get('source')
    if position is None and self._position is None and self._again is not None:
      self._read_again(state)
      return
    if position is None or not hasattr(self._iterator, 'set_state'):
      raise UserError(
        'only a source that can be set to a position can be continued',
        got=type(self._iterator).__name__,
        where='set_state, state',
        hint="give an iterator with grain's get_state and set_state, or arrays",
      )
    self._growth.set_state(state)
    self._iterator.set_state(from_json(position))
    self._pending, self._position = None, position
    self._delivered = int(state['delivered'])
    self._batch_size = state.get('batch_size', self._batch_size)

  def _read_again(self, state: dict[str, Any]) -> None:
    assert self._again is not None
    iterator, count = self._again(), int(state['delivered'])
    last = state.get('last')
    if count:
      item = skip_items(iterator, count)
      examples, _ = self._examples(item)
      if checksum(None, examples.arrays()) != last:
        refuse_others(f'another batch {count - 1}')
    self._growth.set_state(state)
    getattr(self._iterator, 'close', lambda: None)()
    self._iterator, self._pending = iterator, None
    self._delivered, self._last = count, last
    self._batch_size = state.get('batch_size', self._batch_size)

  def close(self) -> None:
    """Ends the batches; and the iterator, unless somebody else has it."""
    self._closed, self._pending = True, None
    self._growth.close()
    if self._ours:
      getattr(self._iterator, 'close', lambda: None)()
