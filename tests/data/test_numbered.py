"""Sources that are a function of a batch's number: ends, states, arguments."""

import contextlib
import functools
import itertools
import json
import re

import jax
import numpy as np
import pytest

from slipstream_jax.data.numbered import (
  ColumnBatches,
  NumberedBatches,
  to_batch,
)
from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.batches import batches
from slipstream_jax.packed.batches import PackedBatches
from slipstream_jax.packed.columns import open_packed
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.synthetic.clicks import examples_at
from slipstream_jax.synthetic.proxies import proxy_dataset
from slipstream_jax.synthetic.sequence_log import sequence_at
from slipstream_jax.synthetic.spec import SequenceSpec, SyntheticSpec
from slipstream_jax.synthetic.stream import stream_batches, stream_dataset
from slipstream_jax.tables import Feature, Table, TableSet
from slipstream_jax.training.trainer_parts import make_parts
from tests.support import small
from tests.support.packed_folders import write_folder

CLICKS = SyntheticSpec(rows=small.ROWS, dense_features=small.DENSE)
SHOP = SequenceSpec(rows=(50, 60, 7))


def own(batches):
  """A user's own function, of which every other call fails."""
  calls = itertools.count()
  columns = small.columns(320)

  def batch_at(number):
    if next(calls) % 2:
      raise OSError('a disk that is busy')
    return to_batch(columns.take(slice(32 * number, 32 * number + 32)), 32)

  return NumberedBatches(batch_at, batches, 'mine', reads='my examples')


def named(columns, ends):
  """The same examples by name, some of their ids as lists."""
  tables = small.tables()
  local = columns.lookups - tables.offsets[:-1]
  ids = {name: local[:, i] for i, name in enumerate(tables.features)}
  ids['t1'] = (local[:, 1], np.arange(len(local) + 1))
  return batches(
    *(columns.dense, ids, columns.labels),
    batch_size=32,
    seed=1,
    epochs=2 if ends else None,
  ).bind(tables)


@pytest.fixture(scope='module')
def kinds(tmp_path_factory):
  """A function to every kind of source: of 10 batches, or endless."""
  columns = small.columns(155)
  folder = tmp_path_factory.mktemp('packed')
  packed = open_packed(write_folder(folder, columns, small.ROWS))

  def stream(law, spec, ends):
    return stream_batches(law, spec, 32, examples=310 if ends else None)

  return {
    'columns': lambda ends: ColumnBatches(
      *(columns, 32),
      shuffle_seed=1,
      epochs=2 if ends else None,
      pad_remainder=True,
    ),
    'packed': lambda ends: PackedBatches(
      *(packed, 32),
      shuffle_seed=1,
      epochs=2 if ends else None,
      pad_remainder=True,
      buffer_bytes=2 * 60 * 50,
    ),
    'named': functools.partial(named, columns),
    'clicks': functools.partial(stream, examples_at, CLICKS),
    'shop': functools.partial(stream, sequence_at, SHOP),
    'own': lambda ends: own(10 if ends else None),
  }


KINDS = ('columns', 'named', 'packed', 'clicks', 'shop', 'own')


def patient(source):
  """All batches of a source, each asked for again until it comes."""
  batches = []
  while True:
    with contextlib.suppress(OSError):
      batch = next(source, None)
      if batch is None:
        return batches
      batches.append(batch)


@pytest.mark.parametrize('kind', KINDS)
def test_every_source_resumes_anywhere_and_knows_its_end(kinds, kind):
  source = kinds[kind](True)
  assert isinstance(source, BatchSource)
  assert not source.endless
  assert kinds[kind](False).endless
  whole = patient(source)
  assert len(whole) == 10
  assert source.get_state()['delivered'] == 10
  for at in (10, 7, 0):
    state = json.loads(json.dumps(source.get_state() | {'delivered': at}))
    fresh = kinds[kind](True)
    for resumed in (source, fresh):
      resumed.set_state(state)
      assert resumed.get_state() == state
      rest = patient(resumed)
      assert len(rest) == 10 - at
      for ours, theirs in zip(rest, whole[at:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    for refused in ({'delivered': at}, state | {'delivered': -1}):
      with pytest.raises(UserError, match='same examples in the same order'):
        fresh.set_state(refused)
    fresh.close()
  for endless in (source, kinds[kind](False)):
    said = endless.endless
    endless.close()
    endless.close()
    assert endless.endless == said


def of_columns(folder, data=0, **changes):
  how = {'batch_size': 16, 'shuffle_seed': 1} | changes
  return ColumnBatches(small.columns(64, seed=data), **how)


def of_a_folder(folder, data=0, **changes):
  if not (folder / f'{data}').exists():
    columns = small.columns(64, seed=data)
    write_folder(folder / f'{data}', columns, small.ROWS)
  how = {'batch_size': 16, 'shuffle_seed': 1} | changes
  return PackedBatches(open_packed(folder / f'{data}'), **how)


def of_a_stream(folder, first=0, batch_size=32, **changes):
  spec = SyntheticSpec(rows=(5, 7))._replace(**changes)
  return stream_batches(examples_at, spec, batch_size, first=first)


IDS = np.arange(64) % 7


def by_name(folder, weighted=None, **changes):
  features, ids = {'t': Feature('t')}, IDS
  if weighted is not None:
    features = {'t': Feature('t', max_length=2, weighted=True)}
    ids = IDS, np.arange(65), np.full(64, weighted)
  given = {'data': np.ones((64, 1)), 'features': {'t': ids}, 'label': IDS % 2}
  given |= {'batch_size': 16, 'seed': 1} | changes
  return batches(**given).bind(TableSet({'t': Table(9)}, features))


ORDERS = [
  (of_columns, {'data': 1}),
  (of_columns, {'batch_size': 8}),
  (of_columns, {'shuffle_seed': 2}),
  (of_columns, {'shuffle_seed': None}),
  (of_columns, {'pad_remainder': True}),
  (of_a_folder, {'data': 1}),
  (of_a_folder, {'batch_size': 20}),
  (of_a_folder, {'shuffle_seed': 2}),
  (of_a_folder, {'end': 63}),
  (of_a_folder, {'shard': (1, 2)}),
  (of_a_stream, {'seed': 1}),
  (of_a_stream, {'batch_size': 16}),
  (of_a_stream, {'first': 1}),
  (by_name, {'data': np.zeros((64, 1))}),
  (by_name, {'features': {'t': IDS[::-1].copy()}}),
  (by_name, {'label': None}),
  (by_name, {'weights': np.ones(64)}),
  (by_name, {'batch_size': 8}),
  (by_name, {'seed': 2}),
  (by_name, {'seed': None}),
  (by_name, {'epochs': 1}),  # whose last batch would be padded
  (by_name, {'weighted': 1.0}),
]


@pytest.mark.parametrize(('make', 'changes'), ORDERS)
def test_a_state_of_another_order_is_refused(tmp_path, make, changes):
  one, other = make(tmp_path), make(tmp_path, **changes)
  one.set_state(make(tmp_path).get_state())
  for source, state in (
    *((one, other.get_state()), (other, one.get_state())),
    (one, {'delivered': 2}),
  ):
    with pytest.raises(UserError, match='same examples in the same order'):
      source.set_state(state)
  one.close()
  other.close()


def test_a_state_is_of_more_epochs_and_of_other_weights(tmp_path):
  of_columns(tmp_path).set_state(of_columns(tmp_path, epochs=3).get_state())
  by_name(tmp_path).set_state(by_name(tmp_path, epochs=None).get_state())
  weighted = by_name(tmp_path, weighted=1.0)
  weighted.set_state(by_name(tmp_path, weighted=1.0).get_state())
  with pytest.raises(UserError, match='same examples in the same order'):
    weighted.set_state(by_name(tmp_path, weighted=0.0).get_state())


BAD_COLUMNS = {
  'uneven': (
    {'dense': np.ones((10, 4))},
    r'same number of examples, got \[10, 64, 64\]',
  ),
  'uneven lists': ({'dense': [[1.0], [1.0, 2.0]]}, r'Columns.dense\)'),
  'a number': (
    {'labels': 1.0},
    r'same number of examples, got \[64, 64,'
    r" 'no'\]",
  ),
}


@pytest.mark.parametrize('size', [0, -1, 100])
def test_batch_sizes_that_cannot_be(size):
  with pytest.raises(UserError, match=f'example, .* got {size} |, got 64 '):
    ColumnBatches(small.columns(64), size)


@pytest.mark.parametrize('name', BAD_COLUMNS)
def test_columns_that_cannot_be(name):
  changes, said = BAD_COLUMNS[name]
  with pytest.raises(UserError, match=said):
    ColumnBatches(small.columns(64)._replace(**changes), 8)


SEEDED = {
  'trainer': lambda seed: make_parts(
    small.recipe(), PLACEMENTS['resident'], small.DENSE, seed
  ),
  'columns': lambda seed: ColumnBatches(
    small.columns(64), 8, shuffle_seed=seed
  ),
  'stream': lambda seed: stream_batches(
    examples_at, SyntheticSpec(seed=seed), 8
  ),
  'population': lambda seed: stream_batches(
    examples_at, SyntheticSpec(teacher_seed=seed), 8
  ),
  'sequence_length': lambda seed: stream_dataset(
    sequence_at, SequenceSpec(seed=seed), 8
  ),
  'proxy': lambda seed: proxy_dataset('kaggle', seed=seed),
}


@pytest.mark.parametrize('where', SEEDED)
@pytest.mark.parametrize('seed', [-1, 2**63, 0.5])
def test_what_is_no_seed(where, seed):
  named = re.escape(repr(seed)) if where in ('trainer', 'columns') else seed
  by_type = "parameter '(shuffle_)?seed'"  # where types are checked
  with pytest.raises(Exception, match=rf'seed.*2\*\*63.*got {named}|{by_type}'):
    SEEDED[where](seed)


def test_epochs_that_cannot_be():
  with pytest.raises(UserError, match=r'epochs must be a whole .* got 0'):
    ColumnBatches(small.columns(64), 8, epochs=0)
