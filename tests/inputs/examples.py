"""Examples as plain Python, and what their batches must be, by brute force."""

from typing import Any, NamedTuple

from hypothesis import strategies as st
import numpy as np

from slipstream_jax.tables import Feature, Table, TableSet


class World(NamedTuple):
  """Tables, and examples of them as lists."""

  parts: tuple[dict[str, Table], dict[str, Feature]]
  bags: dict[str, list[list[int]]]
  weights: dict[str, list[list[float]]]
  dense: list[list[float]]
  labels: list[float]

  @property
  def tables(self):
    """Not in the strategy, as checks of types draw at random themselves."""
    return TableSet(*self.parts)


@st.composite
def worlds(draw, most=12):
  """Any mix of tables, features that share them, bags and unknown ids."""
  names = [f't{i}' for i in range(draw(st.integers(1, 3)))]
  tables = {
    name: Table(
      draw(st.integers(1, 40)), unknown=draw(st.sampled_from(['error', 'row']))
    )
    for name in names
  }
  features = {name: feature(draw, name) for name in names}
  for i in range(draw(st.integers(0, 2))):
    features[f'f{i}'] = feature(draw, draw(st.sampled_from(names)))
  count = draw(st.integers(1, most))
  seed = draw(st.integers(0, 2**32 - 1))
  rng = np.random.default_rng(seed)
  bags, weights = {}, {}
  for name, f in features.items():
    table = tables[f.table]
    # Some ids are unknown, where that is no error.
    end = table.vocabulary_size + 5 * (table.unknown == 'row')
    lengths = rng.integers(0, f.max_length, count, endpoint=True)
    bags[name] = [rng.integers(0, end, n).tolist() for n in lengths]
    weights[name] = [
      rng.integers(-8, 8, n).astype(float).tolist() for n in lengths
    ]
  dense = rng.integers(-9, 9, (count, draw(st.integers(0, 3))))
  labels = rng.integers(0, 2, count)
  return World(
    (tables, features),
    bags,
    weights,
    dense.astype(float).tolist(),
    labels.astype(float).tolist(),
  )


def feature(draw, table):
  return Feature(
    table,
    max_length=draw(st.integers(1, 4)),
    weighted=draw(st.booleans()),
  )


def row_of(tables, name, wanted):
  """The global row of a local id."""
  table = tables.features[name].table
  first = sum(
    t.rows for other, t in tables.tables.items() if before(tables, other, table)
  )
  return first + min(wanted, tables.tables[table].vocabulary_size)


def before(tables, name, other):
  order = list(tables.tables)
  return order.index(name) < order.index(other)


def line(world, example):
  """Rows and weights of the lookups of one example, padded."""
  rows, weights, tables = [], [], world.tables
  for name, f in tables.features.items():
    bag = world.bags[name][example]
    pads = f.max_length - len(bag)
    rows += [row_of(tables, name, i) for i in bag] + [-1] * pads
    given = world.weights[name][example] if f.weighted else [1.0] * len(bag)
    weights += given + [0.0] * pads
  return rows, weights


def expected(world, batch_size, order):
  """Batches of the examples in this order, the last one padded."""
  for start in range(0, len(order), batch_size):
    chosen = order[start : start + batch_size]
    rows, bags = zip(*(line(world, i) for i in chosen), strict=True)
    short = batch_size - len(chosen)
    width = len(rows[0])
    shape = (batch_size, *world.tables.example_shape)
    dense = [world.dense[i] for i in chosen]
    dense += [[0.0] * len(world.dense[0])] * short
    yield (
      np.array(dense).reshape(batch_size, len(world.dense[0])),
      np.array([*rows, *[[-1] * width] * short]).reshape(shape),
      np.array([world.labels[i] for i in chosen] + [0.0] * short),
      np.array([1.0] * len(chosen) + [0.0] * short),
      np.array([*bags, *[[0.0] * width] * short]).reshape(shape)
      if world.tables.is_weighted
      else None,
      None,  # no logit is corrected
      None,  # no row got another id
      None,  # nor starts from the vector of one
    )


def assert_batches(batches, wanted):
  """The same values, and the types that a step takes."""
  batches, wanted = list(batches), list(wanted)
  assert len(batches) == len(wanted)
  for ours, theirs in zip(batches, wanted, strict=True):
    for name, values, target in zip(ours._fields, ours, theirs, strict=True):
      assert (values is None) == (target is None), name
      if values is not None:
        np.testing.assert_array_equal(values, target, name)
        assert values.dtype == (np.int32 if name == 'lookups' else np.float32)


def padded(bags, fill=-1, width=None, dtype=np.int64):
  width = max(map(len, bags)) if width is None else width
  lines = [[*bag, *[fill] * (width - len(bag))] for bag in bags]
  return np.array(lines, dtype).reshape(len(bags), width)


def ragged(bags, dtype=np.int64) -> tuple[Any, Any]:
  flat = [x for bag in bags for x in bag]
  return np.array(flat, dtype), np.cumsum([0, *map(len, bags)])
