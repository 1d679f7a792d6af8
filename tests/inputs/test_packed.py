"""A packed folder as a source for the tables it was packed for."""

import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.inputs.arrays import UnboundExamples
from slipstream_jax.inputs.batches import batches
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.tables import Feature, Table, TableSet
from tests.support import small
from tests.support.packed_folders import write_folder

EXAMPLES = 200


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  columns = small.columns(EXAMPLES)
  return write_folder(tmp_path_factory.mktemp('packed'), columns, small.ROWS)


def sized():
  return {f't{i}': Table(rows) for i, rows in enumerate(small.ROWS)}


def test_batches_are_those_of_the_data_set(folder):
  dataset, tables = packed_dataset(folder, shuffle_seed=3), TableSet(sized())
  source = batches(folder, batch_size=16, seed=3)
  assert isinstance(source, UnboundExamples)
  assert source.form.dense_features == small.DENSE
  assert source.form.has_labels
  bound, direct = source.bind(tables), dataset.train(16)
  assert source.endless
  assert bound.endless
  for _ in range(20):
    for ours, theirs in zip(next(bound), next(direct), strict=True):
      if theirs is not None:
        np.testing.assert_array_equal(ours, theirs)
  state = bound.get_state()
  again = batches(str(folder), batch_size=16, seed=3).bind(tables)
  again.set_state(state)
  np.testing.assert_array_equal(next(again).lookups, next(bound).lookups)
  for opened in (bound, direct, again):
    opened.close()
  held_out = batches(folder, batch_size=16, epochs=1, split='test')
  assert not held_out.endless
  test = list(held_out.bind(tables))
  for ours, theirs in zip(test, dataset.test(16), strict=True):
    np.testing.assert_array_equal(ours.lookups, theirs.lookups)
  assert sum(batch.weights.sum() for batch in test) == EXAMPLES / 5


def test_passes_over_the_training_part_leave_nothing_out(folder):
  source = batches(folder, batch_size=48, seed=0, epochs=2)
  passes = list(source.bind(TableSet(sized())))
  assert sum(batch.weights.sum() for batch in passes) == 2 * EXAMPLES * 4 / 5


def bind(folder, tables=None, features=None, **arguments):
  tables = TableSet(sized() if tables is None else tables, features or {})
  return batches(folder, **({'batch_size': 8} | arguments)).bind(tables)


def test_a_file_that_nobody_packed_says_so(tmp_path):
  raw = tmp_path / 'clicks.csv'
  raw.write_text('user,click\n1,0\n')
  with pytest.raises(UserError, match='must be a folder, got a file') as error:
    batches(raw, batch_size=8)
  assert 'delete' not in error.value.hint  # it may be all that there is


def swapped():
  tables = sized()
  return {'t1': tables.pop('t1')} | tables


SENTENCES = {
  'a table enlarged': (
    lambda folder: bind(folder, sized() | {'t0': Table(51)}),
    'tables must be those of',
  ),
  'a row of unknown ids': (
    lambda folder: bind(folder, sized() | {'t0': Table(50, unknown='row')}),
    'rows of unknown ids included',
  ),
  'another order': (
    lambda folder: bind(folder, swapped()),
    'in their order',
  ),
  'longer lists': (
    lambda folder: bind(
      folder, features={n: Feature(n, max_length=2) for n in sized()}
    ),
    'features must be those of',
  ),
  'no such split': (
    lambda folder: bind(folder, split='tset'),
    "split 'tset'",
  ),
  'no batch size': (lambda folder: bind(folder, batch_size=None), 'batch_size'),
  'names': (
    lambda folder: bind(folder, label='click'),
    'knows which of its columns is what',
  ),
  'a file of text': (
    lambda folder: bind('ratings.csv', label='click'),
    'read a file with polars',
  ),
  'no folder': (lambda folder: bind(folder / 'other'), 'other'),
}


@pytest.mark.parametrize('name', SENTENCES)
def test_what_cannot_be_ends_in_a_sentence(folder, name):
  give, text = SENTENCES[name]
  with pytest.raises(UserError) as caught:
    give(folder)
  assert text in str(caught.value)
  assert '\n' not in str(caught.value)
