"""What enters a trainer: clean batches train, one bad value is told exactly."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import ml_dtypes
import numpy as np
import pytest

from slipstream_jax.data.admission import admit, CheckedSource, ExampleShape
from slipstream_jax.data.numbered import ColumnBatches, Columns, pad_batch
from slipstream_jax.data.source import SourceWrapper
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.batches import batches as named_batches
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.tables import Table, tables_of, TableSet
from slipstream_jax.training import metrics
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import train
from slipstream_jax.training.metrics import Predictions
from slipstream_jax.training.trainer_parts import (
  make_parts,
  planned,
  slipstream,
)
from slipstream_jax.types import Batch
from tests.support import small

B = 16
SHAPES = {
  length: ExampleShape(small.tables(length=length), small.DENSE)
  for length in (None, 1, 3)
}
SHAPE = SHAPES[None]
OFFSETS = SHAPE.tables.offsets
FLOATS = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
INTS = (np.int32, np.int64, np.int16, np.uint16, np.uint32, np.uint64)


def clean_batch(draw):
  """A batch whose values survive the types that it is given in."""
  length = draw(st.sampled_from([None, 3]))
  examples, seed = draw(st.integers(1, 40)), draw(st.integers(0, 2**32))
  rng = np.random.default_rng(seed)
  lookups = small.columns(examples, length=length, seed=seed).lookups
  kind = draw(st.sampled_from(INTS))
  if np.dtype(kind).kind == 'u':  # which hold no padding
    firsts = OFFSETS[:-1].reshape((-1,) + (1,) * (lookups.ndim - 2))
    lookups = np.where(lookups < 0, firsts, lookups)
  dense = rng.integers(-8, 9, (examples, small.DENSE)) / 4
  labels = rng.choice([0, 0.25, 0.5, 1], examples)
  weights = rng.choice([0, 0.5, 1, 4], examples)
  layout = draw(st.sampled_from(['C', 'F', 'steps', 'lists', 'read-only']))
  columns = [
    dense.astype(draw(st.sampled_from(FLOATS))),
    lookups.astype(kind),
    labels.astype(draw(st.sampled_from(FLOATS))),
    weights.astype(draw(st.sampled_from(FLOATS))),
  ]
  return Batch(*(laid_out(column, layout) for column in columns)), SHAPES[
    length
  ]


def laid_out(column, layout):
  if layout == 'lists' and column.dtype.kind in 'fi':
    return column.tolist()
  if layout == 'F':
    return np.asfortranarray(column)
  if layout == 'steps':
    return np.repeat(column, 2, axis=0)[::2]
  if layout == 'read-only':
    column.flags.writeable = False
  return column


@settings(max_examples=100)
@given(st.data())
def test_clean_batches_enter_as_they_are(data):
  batch, shape = clean_batch(data.draw)
  own = admit(batch, shape)
  assert own.lookup_weights is None
  for name in Batch._fields[:4]:
    given_, taken = np.asarray(getattr(batch, name)), getattr(own, name)
    np.testing.assert_array_equal(taken, given_.astype(np.float64))
    assert taken.flags.c_contiguous
    assert not np.shares_memory(taken, given_)
    integer = name == 'lookups'
    assert taken.dtype in ((np.int32, np.int64) if integer else (np.float32,))
  again = admit(own, shape)
  for one, other in zip(own[:4], again, strict=False):
    np.testing.assert_array_equal(one, other)


def flawed_batch(draw):
  """A clean batch, one value to put into it, and what is to be said."""
  length = draw(st.sampled_from([None, 3]))
  examples = draw(st.integers(1, 40))
  seed = draw(st.integers(0, 2**32))
  batch = next(ColumnBatches(small.columns(examples, length=length), examples))
  rng = np.random.default_rng(seed)
  name = draw(st.sampled_from(Batch._fields[:4]))
  column = getattr(batch, name)
  if name == 'lookups':
    column = column.astype(draw(st.sampled_from([np.int32, np.int64])))
  at = tuple(int(rng.integers(size)) for size in column.shape)
  if name == 'lookups':
    first, end = int(OFFSETS[at[1]]), int(OFFSETS[at[1] + 1])
    limits = np.iinfo(column.dtype)
    bad = draw(
      st.integers(limits.min, -2)
      | st.integers(end, limits.max)
      | st.sampled_from([first - 1, end, int(OFFSETS[-1])]).filter(
        lambda row: row != -1
      )
    )
    said = [f'feature {at[1]} (t{at[1]})', f'[{first}, {end})']
  else:
    values = {
      'dense': [np.nan, np.inf, -np.inf],
      'labels': [np.nan, np.inf, -np.inf, -1, -1e-30, 1.0001, 2, 255],
      'weights': [np.nan, np.inf, -np.inf, -1, -1e-30],
    }
    bad = draw(st.sampled_from(values[name]))
    said = [name if name != 'dense' else f'column {at[1]}']
  changed = column.copy()
  changed[at] = bad
  told = [f'got {changed[at]} ', f'example {at[0]},', f'Batch.{name}{list(at)}']
  return batch._replace(**{name: changed}), SHAPES[length], said + told


@settings(max_examples=150)
@given(st.data())
def test_one_flaw_is_told_with_its_place_and_value(data):
  batch, shape, said = flawed_batch(data.draw)
  with pytest.raises(UserError) as caught:
    admit(batch, shape)
  for part in said:
    assert part in str(caught.value)


def batch_of(examples=8, **changes):
  return next(ColumnBatches(small.columns(examples), examples))._replace(
    **changes
  )


def lookups_as(dtype):
  return batch_of().lookups.astype(dtype)


WRONG = {
  'float ids': ({'lookups': lookups_as(np.float64)}, 'integer type, got float'),
  'NaN ids': ({'lookups': np.full((8, 4), np.nan)}, 'integer type, got float'),
  'bool ids': ({'lookups': lookups_as(bool)}, 'integer type, got bool'),
  'object ids': ({'lookups': lookups_as(object)}, 'integer type, got object'),
  'ids of text': ({'lookups': lookups_as(str)}, 'integer type, got <U'),
  'ids as long as can be': (
    {'lookups': np.full((8, 4), 2**64 - 1, np.uint64)},
    r'below 2\*\*63, got 18446744073709551615 \(example 0, .*\[0, 0\]\)',
  ),
  'ids too long for numpy': (
    {'lookups': [[2**70] * 4] * 8},
    'integer type, got object',
  ),
  'no examples': (
    {name: getattr(batch_of(), name)[:0] for name in Batch._fields[:4]},
    r'B of at least 1, got \[0\]',
  ),
  'no lookups': ({'lookups': np.zeros((8, 4, 0), int)}, r'got \[8, 4, 0\]'),
  'one label': ({'labels': np.float32(1)}, r'must be \[B\].*got \[\]'),
  'labels of text': ({'labels': ['0'] * 8}, 'labels must be real numbers'),
  'complex dense': ({'dense': np.ones((8, 4), complex)}, 'got complex128'),
  'dense of objects': ({'dense': np.ones((8, 4), object)}, 'got object'),
  'dates': ({'weights': np.ones(8, 'M8[s]')}, 'got datetime64'),
  'spans': ({'weights': np.ones(8, 'm8[s]')}, 'got timedelta64'),
  'uneven lists': ({'dense': [[1.0] * 4] * 7 + [[1.0]]}, 'lists that make one'),
  'too large for f32': (
    {'dense': np.full((8, 4), 1e300)},
    r'finite, column 0 too, got 1e\+300 ',
  ),
  'features': ({'lookups': np.zeros((8, 3), int)}, r'\[8, 4\], got \[8, 3\]'),
}


@pytest.mark.parametrize('name', WRONG)
def test_what_is_no_batch_is_told(name):
  changes, said = WRONG[name]
  with pytest.raises(UserError, match=said):
    admit(batch_of(**changes), SHAPE)


def test_what_is_no_source_is_told():
  said = 'list without __next__, get_state|parameter .source'
  with pytest.raises(Exception, match=said):  # by the type, where checked
    CheckedSource([batch_of()], SHAPE)
  with pytest.raises(UserError, match='must give batches, got tuple'):
    admit(tuple(batch_of()), SHAPE)
  with pytest.raises(UserError, match='must give batches, got dict'):
    admit(batch_of()._asdict(), SHAPE)


class Reusing(SourceWrapper):
  """A source with one set of arrays, which it fills for every batch."""

  _arrays = None

  def __next__(self):
    try:
      batch = super().__next__()
    except StopIteration:
      for array in self._arrays[:4]:  # nothing is left of the last one, either
        array[...] = 0
      raise
    if self._arrays is None:
      self._arrays = batch.map(np.copy)
    for array, values in zip(self._arrays[:4], batch, strict=False):
      array[...] = values
    return self._arrays


@pytest.mark.parametrize(('depth', 'skips'), [(0, False), (2, True)])
def test_a_source_may_use_its_arrays_again(depth, skips):
  columns = small.columns(32 * 12)
  fresh, reused = (
    trained_rows(wrapped(ColumnBatches(columns, 32, epochs=1)), depth, skips)
    for wrapped in (lambda source: source, Reusing)
  )
  np.testing.assert_array_equal(fresh, reused)


def trained_rows(source, depth=2, skips=False):
  """The tables after 12 steps; skipping cuts other batches."""
  trainer = make_parts(
    small.recipe(),
    PLACEMENTS['streamed'],
    small.DENSE,
    hot=small.hot(small.columns(32 * 12)),
  )
  phases = Phases(warm_up=2, window=2, settle=2, period=20)
  chosen = Skip(0.4, POLICIES['random'], 'examples', phases, refill=True)
  batches = (
    slipstream(trainer, source, chosen, depth=depth)
    if skips
    else planned(trainer, source, depth)
  )
  with batches:
    list(train(trainer, batches, 12))
  return np.array(jax.device_get(trainer.engine.read_back()[0].rows))


def test_a_flaw_is_told_before_a_schedule_sees_it():
  columns = small.columns(32 * 12)
  columns.lookups[32 * 3 + 5, 2] = sum(small.ROWS)
  columns.labels[32 * 5] = np.nan
  with pytest.raises(UserError, match=r'got 3058 \(example 5, Batch.lookups'):
    trained_rows(ColumnBatches(columns, 32), skips=True)


def test_evaluation_looks_at_batches_too():
  columns = small.columns(40)
  columns.labels[39] = 255
  trainer = untrained()
  source = ColumnBatches(columns, 32, epochs=1, pad_remainder=True)
  with pytest.raises(UserError, match=r'got 255.0 \(example 7,'):
    evaluate(trainer, source)


@functools.cache
def untrained():
  return make_parts(small.recipe(), PLACEMENTS['resident'], small.DENSE)


@pytest.mark.parametrize('dtype', [np.uint8, np.uint32, np.uint64])
def test_a_padded_remainder_of_unsigned_ids(dtype):
  lookups = np.zeros((5, 1), dtype)
  columns = Columns(np.zeros((5, 1)), lookups, np.zeros(5))
  shape = ExampleShape(tables_of({'a': 3}), 1)
  source = ColumnBatches(columns, 4, epochs=1, pad_remainder=True)
  last = [admit(batch, shape) for batch in source][-1]
  assert last.lookups[:, 0].tolist() == [0, -1, -1, -1]


def test_rows_past_i32_are_looked_for_in_lookups_of_i32():
  tables = tables_of({'a': 2**31, 'b': 10})
  lookups = np.array([[5, 7]], np.int32)
  ones = np.ones(1, np.float32)
  batch = Batch(np.ones((1, 1), np.float32), lookups, ones, ones)
  with pytest.raises(UserError, match=r'lookups\[0, 1\]'):
    admit(batch, ExampleShape(tables, 1))


USERS = TableSet({'user': Table(5)})
ONE_USER = ExampleShape(USERS, 1)


def unlabelled(**arguments):
  dense, ids = [[0.5], [1.5], [2.5]], {'user': [4, 0, 2]}
  return named_batches(dense, ids, batch_size=2, epochs=1, **arguments)


def test_they_are_admitted_to_be_predicted_alone():
  for batch in unlabelled().bind(USERS):
    assert batch.labels is None
    admitted = admit(batch, ONE_USER, labelled=False)
    assert admitted.labels is None
    np.testing.assert_array_equal(admitted.lookups, batch.lookups)
    assert admitted.lookups is not batch.lookups
    with pytest.raises(UserError, match='must have labels'):
      admit(batch, ONE_USER)
    bad = batch._replace(lookups=np.full((2, 1), 5))
    with pytest.raises(UserError, match=r'must be in \[0, 5\)'):
      admit(bad, ONE_USER, labelled=False)
    bad = batch._replace(weights=np.full(2, -1.0))
    with pytest.raises(UserError, match='weights must be finite'):
      admit(bad, ONE_USER, labelled=False)
  none = batch._replace(
    dense=batch.dense[:0], lookups=batch.lookups[:0], weights=batch.weights[:0]
  )
  with pytest.raises(UserError, match='B of at least 1'):
    admit(none, ONE_USER, labelled=False)
  assert pad_batch(none, 3).labels is None


def test_a_trainer_binds_examples_by_name():
  admitted = list(CheckedSource(unlabelled(label=[0, 1, 1]), ONE_USER))
  bound = list(unlabelled(label=[0, 1, 1]).bind(USERS))
  assert len(admitted) == len(bound) == 2
  for ours, theirs in zip(admitted, bound, strict=True):
    np.testing.assert_array_equal(ours.lookups, theirs.lookups)
    np.testing.assert_array_equal(ours.labels, theirs.labels)
  with pytest.raises(UserError, match=r"user', example 1\)"):
    CheckedSource(
      named_batches(None, {'user': [0, 7]}, [0, 1], batch_size=1), ONE_USER
    )


def test_metrics_want_labels():
  logits = np.zeros(3, np.float32)
  known = Predictions(logits, logits)
  merged = metrics.merge([known, Predictions(None, logits)])
  assert merged.labels is None
  assert len(merged.logits) == 6
  assert len(metrics.merge([known, known]).labels) == 6
  with pytest.raises(UserError, match='examples without labels'):
    metrics.compute(merged)
