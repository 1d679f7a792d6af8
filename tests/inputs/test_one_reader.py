"""A frame has the same examples in memory and packed, or is refused by both."""

from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import polars as pl
import pytest

from slipstream_jax.columns.ids import packed_ids
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.batches import batches
from slipstream_jax.packed.pack import pack
from slipstream_jax.tables import Feature, Table, TableSet

SIZES = {'t': 40, 'u': 40}


class PackedWords:
  """The vocabulary of a packed folder, for one table."""

  def __init__(self, data, table):
    self.data, self.table = data, table

  def rows(self, ids):
    codes = packed_ids(ids, 'ids')
    if self.data is None:  # refused before: any rows will do
      return codes % 7
    number = [*self.data.sizes].index(self.table)
    return self.data.vocabulary()[number].rows(codes)


class Case(NamedTuple):
  """A frame as columns of plain Python, and what each column is."""

  columns: dict[str, Any]
  features: dict[str, Feature]
  arguments: dict[str, Any]


numbers = st.integers(-3, 9)
texts = st.sampled_from(['', 'a', 'b', '7', '007', '-2', 'ä', 'a|b', '|'])
wrong = st.sampled_from([0.5, 2.5])


def columns_of(values, count, missing):
  values = st.none() | values if missing else values
  return st.lists(values, min_size=count, max_size=count)


@st.composite
def cases(draw):
  count = draw(st.integers(2, 7))
  ids = draw(st.sampled_from([numbers, texts]))
  if draw(st.integers(0, 19)) == 7:
    ids = wrong
  of_bags = draw(st.sampled_from([numbers, texts.filter(bool)]))
  lists = st.lists(
    st.none() | of_bags if draw(st.booleans()) else of_bags, max_size=4
  )
  bags = draw(columns_of(lists, count, draw(st.booleans())))
  if draw(st.booleans()):  # single ids, or texts that hold lists
    bags = draw(columns_of(of_bags, count, draw(st.booleans())))
  weighted = draw(st.booleans()) and any(isinstance(x, list) for x in bags)
  columns = {
    'user': draw(columns_of(ids, count, draw(st.booleans()))),
    'bag': bags,
    'age': draw(columns_of(st.integers(-9, 9), count, draw(st.booleans()))),
    'price': draw(
      columns_of(
        st.sampled_from([0.5, 1e-3, 16777217.0, float('nan'), 1e39])
        if draw(st.integers(0, 9)) == 7
        else st.floats(-9, 9, width=32),
        count,
        draw(st.booleans()),
      )
    ),
    'click': draw(columns_of(st.integers(0, 1), count, False)),
    'buy': draw(columns_of(st.sampled_from([0.0, 0.25, 1.0]), count, False)),
  }
  if draw(st.integers(0, 19)) == 7:
    columns['click'][-1] = draw(st.sampled_from([None, 2, -1]))
  features = {
    'user': Feature('u'),
    'bag': Feature(
      draw(st.sampled_from(['t', 'u'])), 'mean', 3, weighted=weighted
    ),
  }
  arguments = {
    'label': draw(st.sampled_from(['click', ['click'], ['buy', 'click']])),
    'dense': draw(st.sampled_from([['age'], ['price', 'age']])),
    'fill': draw(st.sampled_from([0.0, -1.0, {'age': 2.0}])),
    'too_long': draw(st.sampled_from(['error', 'first', 'last'])),
  }
  if weighted:
    short = draw(st.integers(0, 9)) == 7
    columns['weight'] = [
      None
      if bag is None
      else draw(
        st.lists(
          st.sampled_from([0.5, 2.0, -1.0]),
          min_size=max(len(bag) - short, 0),
          max_size=len(bag),
        )
      )
      for bag in bags
    ]
    arguments['lookup_weights'] = {'bag': 'weight'}
  return Case(columns, features, arguments)


def as_lists(columns):
  return columns


def as_polars(columns):
  return pl.DataFrame(columns, strict=False)


def as_arrow(columns):
  return as_polars(columns).to_arrow()


def as_arrays(columns):
  """Arrays of objects where values are missing, and ragged tuples."""
  result = {}
  for name, values in columns.items():
    series = pl.Series(values, strict=False)
    if isinstance(series.dtype, pl.List):
      flat = [x for bag in values for x in bag or []]
      splits = np.cumsum([0, *(len(bag or []) for bag in values)])
      result[name] = pl.Series(flat, dtype=series.dtype.inner), splits
    elif series.null_count():
      result[name] = np.array(values, object)
    else:
      result[name] = series.to_numpy()
  return result


def as_matrices(columns):
  """Lists of integers as arrays that -1 pads, their weights likewise."""
  result = as_arrays(columns)
  if not all(isinstance(bag, list) for bag in columns['bag']):
    return result
  if any(isinstance(x, str | None) for bag in columns['bag'] for x in bag):
    return result
  for name, fill in ('bag', -1), ('weight', 0.0):
    if name in columns:
      width = max(1, *map(len, columns['bag']))
      lines = [bag + [fill] * (width - len(bag)) for bag in columns[name]]
      result[name] = np.array(lines)
  return result


LIBRARIES = [as_lists, as_polars, as_arrow, as_arrays, as_matrices]


def in_memory(frame, case, data):
  words = {table: PackedWords(data, table) for table in SIZES}
  sizes = SIZES if data is None else data.sizes
  known = {f.table for f in case.features.values()}
  tables = {name: Table(sizes[name]) for name in sizes if name in known}
  source = batches(
    frame,
    [*case.features],
    batch_size=len(case.columns['user']),
    epochs=1,
    vocabularies={name: words[name] for name in tables},
    **case.arguments,
  )
  return next(source.bind(TableSet(tables, case.features)))


def from_folder(data):
  """All examples of a folder, in order."""
  count = data.train_examples
  source = data.train(count)
  parts = [next(source), *data.test(1)]
  source.close()
  return [
    None if column[0] is None else np.concatenate(column)
    for column in zip(*parts, strict=True)
  ]


def refused(call):
  try:
    return call(), None
  except UserError as error:
    return None, error


@pytest.mark.parametrize('library', LIBRARIES)
@settings(max_examples=25, deadline=None)
@given(cases())
def test_both_give_the_same_examples_or_refuse(library, tmp_path_factory, case):
  frame = library(case.columns)
  folder = tmp_path_factory.mktemp('packed') / 'data'
  data, error = refused(
    lambda: pack(
      frame, folder, features=case.features, test_share=0.5, **case.arguments
    )
  )
  batch, other = refused(lambda: in_memory(frame, case, data))
  assert (error is None) == (other is None), f'{error}\n{other}'
  if batch is None:
    return
  for name, ours, theirs in zip(
    batch._fields, batch, from_folder(data), strict=True
  ):
    assert (ours is None) == (theirs is None), name
    if ours is not None:
      assert ours.dtype == theirs.dtype, name
      assert ours.tobytes() == theirs.tobytes(), name
