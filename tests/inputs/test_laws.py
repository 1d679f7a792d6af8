"""Whatever form examples come in, their batches are those of a plain loop."""

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from slipstream_jax.columns.read import Ragged
from slipstream_jax.inputs.batches import batches
from slipstream_jax.tables import Feature, row_dtype, Table, TableSet
from tests.inputs.examples import (
  assert_batches,
  expected,
  padded,
  ragged,
  worlds,
)

DTYPES = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint64]


def weighted(world):
  return [n for n, f in world.parts[1].items() if f.weighted]


def as_ragged(world, draw):
  def column(name):
    values, splits = ragged(world.bags[name], draw(st.sampled_from(DTYPES)))
    if name not in weighted(world):
      return draw(st.sampled_from([Ragged(values, splits), (values, splits)]))
    return (values.tolist(), splits, ragged(world.weights[name], np.float64)[0])

  return {name: column(name) for name in world.bags}, {}


def as_lists(world, draw):
  return world.bags, {name: world.weights[name] for name in weighted(world)}


def as_padded(world, draw):
  dtypes = st.sampled_from(DTYPES[:4])
  extra = draw(st.integers(0, 2))  # more padding than the longest list needs
  widths = {n: max(map(len, bags)) + extra for n, bags in world.bags.items()}
  return (
    {n: padded(b, -1, widths[n], draw(dtypes)) for n, b in world.bags.items()},
    {
      name: padded(world.weights[name], np.nan, widths[name], np.float64)
      for name in weighted(world)
    },
  )


def as_series(world, draw):
  kind = pl.List(pl.Int64)
  bags = {n: pl.Series(bags, dtype=kind) for n, bags in world.bags.items()}
  return bags, {
    name: pl.Series(world.weights[name], dtype=pl.List(pl.Float32))
    for name in weighted(world)
  }


def as_arrow(world, draw):
  kind = draw(st.sampled_from([pa.list_(pa.int32()), pa.large_list(pa.int8())]))
  # A slice starts in the midst of its buffer.
  bags = {
    name: pa.array([[3], *bags], kind)[1:] for name, bags in world.bags.items()
  }
  return bags, {
    name: pa.chunked_array(
      [pa.array(world.weights[name], pa.list_(pa.float64()))]
    )
    for name in weighted(world)
  }


ARRAYS = [as_ragged, as_lists, as_padded, as_series, as_arrow]


DENSE = [
  lambda rows: rows,
  lambda rows: rows.tolist(),
  lambda rows: {'a': rows[:, 0].tolist(), 'b': rows[:, 1:]},
  lambda rows: {f'{i}': pl.Series(x) for i, x in enumerate(rows.T)},
  lambda rows: pl.DataFrame({f'{i}': x for i, x in enumerate(rows.T)}),
  lambda rows: rows.astype(np.int32),
]
LABELS = [
  *(list, pl.Series, lambda labels: pl.Series(labels).cast(pl.Boolean)),
  *(lambda labels, t=t: np.array(labels, t) for t in (bool, 'f8', 'u1', 'O')),
]


@pytest.mark.parametrize('form', ARRAYS)
@settings(max_examples=30)
@given(st.data())
def test_any_form_of_ids_gives_the_batches_of_a_loop(form, data):
  world = data.draw(worlds())
  features, bags = form(world, data.draw)
  size = data.draw(st.integers(1, 14))
  seed = data.draw(st.none() | st.integers(0, 5))
  count, epochs = len(world.labels), data.draw(st.integers(1, 2))
  dense = np.array(world.dense).reshape(count, -1)
  if dense.shape[1] > 1:
    dense = data.draw(st.sampled_from(DENSE))(dense)
  by_name = data.draw(st.booleans())
  source = batches(
    None if by_name else dense,
    features,
    data.draw(st.sampled_from(LABELS))(world.labels),
    dense=dense if by_name else None,
    batch_size=size,
    seed=seed,
    epochs=epochs,
    lookup_weights=bags,
  )
  wanted = []
  for epoch in range(epochs):
    order = np.arange(count)
    if seed is not None:
      np.random.default_rng((seed, epoch)).shuffle(order)
    wanted += expected(world, size, order)
  bound = source.bind(world.tables)
  assert_batches(bound, wanted)
  assert bound.get_state()['delivered'] == len(wanted)
  assert_batches(source.bind(world.tables), wanted)  # from the start again


def columns(world):
  """All columns of a frame, and which is what."""
  values = {f'id {n}': bags for n, bags in world.bags.items()}
  values |= {f'weight {n}': world.weights[n] for n in weighted(world)}
  values['click'] = world.labels
  for i in range(len(world.dense[0])):
    values[f'dense {i}'] = [row[i] for row in world.dense]
  return values


def frame_of(values):
  schema = {
    name: pl.List(pl.Int64)
    if name.startswith('id')
    else pl.List(pl.Float64)
    if name.startswith('weight')
    else pl.Float64
    for name in values
  }
  return pl.DataFrame(values, schema)


def named(world):
  """Tables whose features have the names of the columns."""
  tables, features = world.tables.tables, world.tables.features
  return TableSet(tables, {f'id {n}': f for n, f in features.items()})


FRAMES = {
  'dict': lambda values: values,
  'polars': frame_of,
  'arrow': lambda values: frame_of(values).to_arrow(),
}


@pytest.mark.parametrize('kind', FRAMES)
@settings(max_examples=20)
@given(st.data())
def test_frames_and_iterators_give_the_batches_of_a_loop(kind, data):
  world = data.draw(worlds(most=6))
  size, values = data.draw(st.integers(1, 14)), columns(world)
  count, width = len(world.labels), len(world.dense[0])
  arguments = {
    'label': 'click',
    'dense': [f'dense {i}' for i in range(width)] or None,
    'lookup_weights': {f'id {n}': f'weight {n}' for n in weighted(world)},
  }
  if data.draw(st.booleans()):
    arguments['features'] = [f'id {n}' for n in world.bags]
  wanted = list(expected(world, size, np.arange(count)))
  source = batches(FRAMES[kind](values), batch_size=size, epochs=1, **arguments)
  assert_batches(source.bind(named(world)), wanted)

  def parts():
    for start in range(0, count, size):
      part = {n: v[start : start + size] for n, v in values.items()}
      yield FRAMES[kind](part)

  peeks = data.draw(st.booleans())
  for items in (parts, parts(), list(parts())):
    stream = batches(items, batch_size=size, **arguments)
    if peeks:
      assert stream.form.dense_features == width
    assert_batches(stream.bind(named(world)), wanted)


def test_rows_past_two_to_the_31_are_i64():
  tables = TableSet({'a': Table(2**31), 'b': Table(3)})
  source = batches(None, {'a': [2**31 - 1], 'b': [2]}, batch_size=1, epochs=1)
  (batch,) = source.bind(tables)
  assert row_dtype(tables.num_rows) == batch.lookups.dtype == np.int64
  np.testing.assert_array_equal(batch.lookups, [[2**31 - 1, 2**31 + 2]])


@settings(max_examples=40)
@given(st.data())
def test_of_long_lists_the_first_or_last_are_used(data):
  world = data.draw(worlds())
  name = data.draw(st.sampled_from(sorted(world.bags)))
  last = data.draw(st.booleans())
  length = data.draw(st.integers(1, 3))
  features = dict(world.tables.features)
  features[name] = features[name]._replace(max_length=length)

  def cut(bags):
    some = slice(-length, None) if last else slice(length)
    return bags | {name: [bag[some] for bag in bags[name]]}

  short = world._replace(
    parts=(world.parts[0], features),
    bags=cut(world.bags),
    weights=cut(world.weights),
  )
  form = data.draw(st.sampled_from(ARRAYS))
  ids, bags = form(world, data.draw)
  source = batches(
    np.array(world.dense).reshape(len(world.labels), -1),
    ids,
    world.labels,
    batch_size=3,
    lookup_weights=bags,
    epochs=1,
    too_long='last' if last else 'first',
  )
  order = np.arange(len(world.labels))
  assert_batches(source.bind(short.tables), expected(short, 3, order))


def test_a_feature_that_is_not_listed_is_that_of_the_table():
  frame = {'user': [1, 2], 'ignored': ['a', 'b'], 'label': [0, 1]}
  source = batches(frame, batch_size=2, epochs=1)
  (batch,) = source.bind(TableSet({'user': Table(3)}))
  np.testing.assert_array_equal(batch.lookups, [[1], [2]])
  np.testing.assert_array_equal(batch.labels, [0, 1])
  tables = TableSet({'user': Table(3)}, {'user': Feature('user', 'none', 2)})
  (batch,) = source.bind(tables)  # the same examples for other tables
  np.testing.assert_array_equal(batch.lookups, [[[1, -1]], [[2, -1]]])


COUNT = 24
TABLES = TableSet(
  {'user': Table(50), 'item': Table(50)},
  {
    'user': Feature('user'),
    'bag': Feature('item', max_length=3, weighted=True),
  },
)


def drawn(rng):
  """Columns, and how each is written over in place."""
  splits = np.arange(0, 3 * COUNT + 1, 3)
  return {
    'user': rng.integers(0, 50, COUNT),
    'bag': rng.integers(0, 50, (COUNT, 3)).astype(np.int32),
    'ragged': rng.integers(0, 50, 3 * COUNT),
    'splits': splits,
    'bag weights': rng.random((COUNT, 3)),
    'f32': rng.random((COUNT, 2)).astype(np.float32),
    'f64': rng.random(COUNT),
    'click': (rng.random(COUNT) < 0.5).astype(np.float32),
    'weight': rng.random(COUNT).astype(np.float32),
  }


def overwritten(values):
  for column in values.values():
    column[:] = column[::-1].copy() if column.dtype != np.int64 else 0


def given_as(kind, values):
  """Arguments of `batches` that are views of these arrays."""
  if kind == 'arrays':
    ids = {'user': values['user'], 'bag': values['bag']}
    named = {'weights': values['weight']}
    named |= {'lookup_weights': {'bag': values['bag weights']}}
    return (values['f32'], ids, values['click']), named
  if kind == 'by name':
    bag = values['ragged'], values['splits'], values['bag weights'].ravel()
    dense = {'a': values['f32'], 'b': values['f64']}
    heads = {'click': values['click'], 'weight': values['weight']}
    return (dense, {'user': values['user'], 'bag': bag}, heads), {}
  library, _, names = kind.partition(' of ')
  columns = {n: values[n] for n in values if n not in ('splits', 'ragged')}
  frame = columns
  if library == 'dict':
    for name in 'bag', 'bag weights':
      frame[name] = np.empty(COUNT, object)
      frame[name][:] = [*values[name]]  # views
  else:
    lists = pl.col('bag', 'bag weights', 'f32').arr.to_list()
    frame = pl.DataFrame(columns).with_columns(lists)
  if library == 'arrow':
    frame = frame.drop('user', 'click').to_arrow()
    for name in 'user', 'click':
      frame = frame.append_column(name, pa.array(values[name]))
  features = ['user', 'bag'] if names else None  # found later
  return (frame, features, 'click'), {
    'dense': ['f64', 'f32'],
    'weights': 'weight',
    'lookup_weights': {'bag': 'bag weights'},
  }


GIVEN = [
  *('arrays', 'by name', 'dict', 'dict of names', 'polars'),
  *('polars of names', 'arrow of names'),
]


@pytest.mark.parametrize('when', ['unbound', 'bound', 'an epoch read'])
@pytest.mark.parametrize('kind', GIVEN)
def test_what_was_given_may_change_afterwards(kind, when):
  def source(values):
    arguments, named = given_as(kind, values)
    return batches(*arguments, batch_size=6, epochs=2, seed=0, **named)

  values = drawn(np.random.default_rng(0))
  ours = source(values)
  # What is kept in memory is the same whether it is changed or not.
  wanted = list(source(drawn(np.random.default_rng(0))).bind(TABLES))
  got = []
  if when != 'unbound':
    bound = ours.bind(TABLES)
    if when == 'an epoch read':
      got += [next(bound) for _ in range(4)]
    overwritten(values)
  else:
    overwritten(values)
    bound = ours.bind(TABLES)
  got += list(bound)
  for one, other in zip(got, wanted, strict=True):
    for a, b in zip(one, other, strict=True):
      np.testing.assert_array_equal(a, b)
  again = ours.bind(TABLES)
  np.testing.assert_array_equal(next(again).dense, wanted[0].dense)


def test_arrays_that_nobody_can_write_are_not_copied():
  dense = np.zeros((1 << 18, 4), np.float32)
  ids = {'a': np.zeros(len(dense), np.int64)}
  ids['a'].flags.writeable = False

  def peak(dense):
    tracemalloc.start()
    source = batches(dense, ids, batch_size=9)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert source.form.dense_features == 4
    return most

  view = dense[:]
  view.flags.writeable = False
  assert peak(view) > dense.nbytes  # whose owner can write it
  dense.flags.writeable = False
  assert peak(dense) < dense.nbytes / 2
