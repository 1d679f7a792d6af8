"""What `PackedBatches` refuses: arguments, states, folders, flipped bytes."""

import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.packed.batches import PackedBatches
from slipstream_jax.packed.columns import MANIFEST, open_packed
from slipstream_jax.table_set import features_of
from slipstream_jax.tables import Feature
from tests.support import small
from tests.support.packed_folders import (
  features_facts,
  write_columns,
  write_folder,
)

EXAMPLES = 300


def columns_of():
  return small.columns(EXAMPLES)


@pytest.fixture(scope='module')
def packed(tmp_path_factory):
  base = tmp_path_factory.mktemp('packed')
  return open_packed(write_folder(base, columns_of(), small.ROWS))


@pytest.mark.parametrize(
  ('arguments', 'named'),
  [
    ({'batch_size': 0}, 'a batch must hold at least one example, a whole'),
    ({'batch_size': 301}, 'for a batch of 301 each, got 300'),
    ({'batch_size': 200, 'shard': (0, 2)}, '2 shards need examples'),
    ({'first': -1}, r'\[0, 300\), got \[-1, 300\)'),
    ({'first': 7, 'end': 7}, r'got \[7, 7\)'),
    ({'end': 301}, r'got \[0, 301\)'),
    ({'shuffle_seed': -1}, r'whole number in \[0, 2\*\*63\), got -1'),
    ({'shard': (2, 2)}, r'got \(2, 2\)'),
    ({'shard': (0, 0)}, r'got \(0, 0\)'),
    ({'block': 0}, 'a block must hold at least one example, got 0'),
    ({'buffer_bytes': 70}, 'a buffer must hold at least two examples, got 0'),
  ],
)
def test_bad_arguments_are_named(packed, arguments, named):
  with pytest.raises(UserError, match=named):
    PackedBatches(packed, **{'batch_size': 10} | arguments)


def test_a_bad_remainder_is_named(packed):
  with pytest.raises(
    Exception, match='Pad'
  ):  # by the type, where it is checked
    PackedBatches(packed, 10, remainder='Pad')


@pytest.mark.parametrize(
  ('change', 'arguments'),
  [
    ({}, {'shuffle_seed': 2}),
    ({}, {'batch_size': 20}),
    ({}, {'end': 299}),
    ({}, {'shard': (1, 2)}),
    ({'labels': 1}, {}),
  ],
)
def test_a_state_of_another_order_is_refused(tmp_path, change, arguments):
  columns = columns_of()
  state = None
  for number, changed in enumerate((False, True)):
    if changed and change:
      columns = columns._replace(labels=1 - columns.labels)
    folder = write_folder(tmp_path / str(number), columns, small.ROWS)
    given = {'batch_size': 10, 'shuffle_seed': 1}
    given |= arguments if changed else {}
    source = PackedBatches(open_packed(folder), **given)
    if state is None:
      state = source.get_state()
    else:
      with pytest.raises(UserError, match='same examples in the same order'):
        source.set_state(state)
    source.close()


@pytest.mark.parametrize(
  ('facts', 'arrays', 'named'),
  [
    ({'tables': None}, {}, 'the manifest must have tables'),
    ({'dense_features': 4}, {}, r'column dense must be float32 of shape'),
    (
      features_facts(features_of('a', 2)),
      {},
      r'column a must be .*\(5, 2\), got uint8'
      r' \(5,\)',
    ),
    ({}, {'labels': np.zeros(5, np.float32)}, 'labels must be uint8'),
    ({}, {'a': np.zeros(5, np.int8)}, 'got int8'),
    ({'examples': 6}, {}, r'column labels must be uint8 of shape \(6,\)'),
    (
      {
        'tables': [{'name': 'b', 'rows': 2}],
        **features_facts(features_of('b')),
      },
      {},
      'column b .* got no column',
    ),
    ({'features': [{'name': 'a'}]}, {}, 'must have tables.* KeyError..table'),
    (
      features_facts({'a': Feature('a', weighted=True)}),
      {},
      'column weights_a must be float32',
    ),
  ],
)
def test_columns_that_are_none_of_a_packed_data_set(
  tmp_path, facts, arrays, named
):
  good = {
    'dense_features': 3,
    'examples': 5,
    'tables': [{'name': 'a', 'rows': 2}],
    **features_facts(features_of('a')),
  }
  columns = {
    'labels': np.zeros(5, np.uint8),
    'dense': np.zeros((5, 3), np.float32),
    'a': np.zeros(5, np.uint8),
  }
  folder = write_columns(tmp_path, columns | arrays, good | facts)
  assert (folder / MANIFEST).exists()
  with pytest.raises(UserError, match=named):
    PackedBatches(open_packed(folder), 2)


@pytest.mark.parametrize('batch_size', [10, 32])
@pytest.mark.parametrize('at', [0, 17, 59])
@pytest.mark.parametrize('value', [2, 128, 255])
def test_a_flipped_label_byte_is_found_when_it_is_read(
  tmp_path, batch_size, at, value
):
  folder = write_folder(tmp_path, small.columns(60), small.ROWS)
  path = folder / 'labels.uint8'
  data = bytearray(path.read_bytes())
  data[at] = value
  path.write_bytes(data)
  packed = open_packed(folder)
  said = rf'0 or 1, got {value} \(.*labels.uint8, example {at}\)'
  source = PackedBatches(packed, batch_size, epochs=1, remainder='pad')
  with pytest.raises(UserError, match=said):
    list(source)
  source.close()
