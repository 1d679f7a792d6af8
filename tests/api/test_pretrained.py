"""A trainer that starts from given rows, as users try it first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slip_serve
import slipstream_jax as slip
from slipstream_jax.columns.ids import packed_ids
from slipstream_jax.errors import UserError
from slipstream_jax.tables import TableSet
from tests.api import shop

RNG = np.random.default_rng(3)
NAMES = [f'item {number}' for number in shop.ITEMS]
USERS = RNG.normal(size=(60, 4)).astype(np.float32)


def trainer(user=None, item=None, items=20, **arguments):
  tables = {
    'user': slip.Table(60, embedding_dim=4, initializer=user),
    'item': slip.Table(items, embedding_dim=3, initializer=item),
  }
  return shop.trainer(tables=tables, **arguments)


def source(words=None, **arguments):
  ids = {'user': shop.USERS, 'item': NAMES}
  words = slip.Vocabulary.fit(NAMES) if words is None else words
  arguments = {'batch_size': shop.BATCH, 'epochs': 1} | arguments
  labels = arguments.pop('labels', shop.CLICKS)
  vocabularies = {'item': words}
  return slip.batches(
    shop.DENSE, ids, labels, vocabularies=vocabularies, **arguments
  )


def rows_before(trainer, table='user'):
  trainer.predict(shop.held_out())
  return trainer.rows(table)


@pytest.mark.parametrize('form', ['numpy', 'float64', 'jax', 'memmap', 'views'])
def test_an_array_of_any_kind(form, tmp_path):
  np.save(tmp_path / 'rows.npy', USERS)
  array = {
    'numpy': lambda: USERS.copy(),
    'float64': lambda: USERS.astype(np.float64),
    'jax': lambda: jax.device_put(USERS),
    'memmap': lambda: np.load(tmp_path / 'rows.npy', mmap_mode='r'),
    'views': lambda: np.repeat(USERS, 2, axis=0)[::2],
  }[form]()
  with trainer(array) as one:
    if isinstance(array, np.ndarray) and array.flags.writeable:
      array[:] = 0  # a change changes nothing any more
    np.testing.assert_array_equal(rows_before(one), USERS)


def test_a_file_is_not_copied(tmp_path):
  np.save(tmp_path / 'rows.npy', USERS)
  array = np.load(tmp_path / 'rows.npy', mmap_mode='r')
  with trainer(array) as one:
    assert one.tables.tables['user'].initializer.array is array


@pytest.mark.parametrize('rows', [60, 61])
def test_the_row_of_unknown_ids_may_be_left_out(rows):
  array = RNG.normal(size=(rows, 4)).astype(np.float32)
  tables = shop.TABLES | {
    'user': slip.Table(60, 4, initializer=array, unknown='row'),
  }
  with shop.trainer(tables=tables) as one:
    got = rows_before(one)
    np.testing.assert_array_equal(got[:rows], array)
    if rows == 60:
      assert 0 < np.abs(got[60]).max() <= 60**-0.5


@pytest.mark.parametrize(
  'name', ['normal', 'zeros', 'glorot_uniform', 'lecun_normal', 'uniform']
)
def test_functions_of_jax(name):
  function = getattr(jax.nn.initializers, name)
  function = function if name == 'zeros' else function()
  with trainer(item=function) as one:
    got = rows_before(one, 'item')
  with jax.transfer_guard('allow'):
    whole = function(jax.random.key(0), (20, 3))
  size, wanted = np.abs(got).mean(), np.abs(whole).mean()
  assert size == wanted == 0 or 0.5 < size / wanted < 2


@pytest.mark.parametrize('hash_rows', [0, 2])
def test_vectors_by_raw_id(hash_rows, tmp_path):
  words = slip.Vocabulary.fit(NAMES, hash_rows=hash_rows, min_count=2)
  vectors = {name: RNG.normal(size=3) for name in [*set(NAMES), 'never seen']}
  with trainer(None, vectors, words.size) as one:
    one.predict(source(words))
    got = one.rows('item')
    for name, vector in vectors.items():
      if name in words.known:
        np.testing.assert_array_equal(
          got[words.rows([name])[0]], np.float32(vector)
        )
    with trainer(None, None, words.size) as plain:
      plain.predict(source(words))
      shared = slice(0, 1 + hash_rows)
      np.testing.assert_array_equal(got[shared], plain.rows('item')[shared])
    one.train(source(words), 5)
    one.save(tmp_path)
    logits = one.predict(source(words))
  with trainer(None, vectors, words.size) as other:
    other.restore(tmp_path)
    np.testing.assert_array_equal(other.predict(source(words)), logits)
    other.train(source(words))
    rows = other.rows('item')
  with trainer(None, vectors, words.size) as whole:
    whole.train(source(words))
    np.testing.assert_array_equal(whole.rows('item'), rows)


@pytest.mark.parametrize('hash_rows', [None, 9])
def test_ids_of_a_packed_folder(hash_rows, tmp_path):
  columns = {'user': shop.USERS, 'item': NAMES, 'label': shop.CLICKS}
  columns |= {f'd{i}': shop.DENSE[:, i] for i in range(3)}
  data = slip.pack(
    [columns],
    tmp_path,
    features=['user', 'item'],
    dense=['d0', 'd1', 'd2'],
    hash_rows=hash_rows,
  )
  vectors = {name: RNG.normal(size=3) for name in [*set(NAMES), 'never seen']}
  tables = {
    'user': slip.Table(data.sizes['user'], 4),
    'item': slip.Table(data.sizes['item'], 3, initializer=vectors),
  }
  examples = slip.batches(tmp_path, batch_size=shop.BATCH, epochs=1)
  with shop.trainer(tables=tables) as one:
    if hash_rows:
      with pytest.raises(UserError, match='only in a Vocabulary or Growing'):
        one.predict(examples)
      return
    one.predict(examples)
    _, known = data.vocabulary()
    ids = packed_ids(list(vectors), 'test')
    rows, given = known.rows(ids), 0
    for row, vector in zip(rows, vectors.values(), strict=True):
      if row:
        np.testing.assert_array_equal(one.rows('item')[row], np.float32(vector))
        given += 1
    assert given >= len(known.known) - 1
    one.set_rows('item', [NAMES[0]], [[1, 2, 3]], examples)
    changed = known.rows(packed_ids(NAMES[:1], 'test'))[0]
    assert one.rows('item')[changed].tolist() == [1, 2, 3]


def test_a_restored_trainer_asks_for_the_source_of_ids(tmp_path):
  with trainer() as one:
    one.train(shop.source(), 2)
    one.save(tmp_path)
  with trainer() as two:
    two.restore(tmp_path)
    with pytest.raises(UserError, match='source must say which id has which'):
      two.set_rows('user', [1], USERS[:1])
    two.set_rows('user', [1], USERS[:1], shop.source())
    np.testing.assert_array_equal(two.rows('user')[1], USERS[0])
    two.train(shop.source(), 2)


def test_rows_are_set_by_raw_id():
  words = slip.Vocabulary.fit(NAMES)
  known = words.known[:4].tolist()
  values = RNG.normal(size=(4, 3)).astype(np.float32)
  with trainer(items=words.size) as one:
    one.set_rows('item', known, values, source(words))
    np.testing.assert_array_equal(one.rows('item')[words.rows(known)], values)
    before = one.rows('item')
    one.train(source(words), 5)
    for ids in (['never seen'], [known[0], None]):
      with pytest.raises(UserError, match='a row of its own to be set, got'):
        one.set_rows('item', ids, values[: len(ids)])
    one.set_rows('user', [5, 59], np.ones((2, 4)))
    one.set_rows('item', known[:1], [[1, 2, 3]])
    assert one.rows('item')[words.rows(known[:1])].tolist() == [[1, 2, 3]]
    assert one.rows('user')[[5, 59]].tolist() == [[1] * 4] * 2
    assert not np.array_equal(before, one.rows('item'))


def test_rows_of_a_growing_vocabulary_are_set_as_trained():
  words = slip.GrowingVocabulary(30)
  with trainer(items=30) as one:
    one.train(source(words), 5)
    ids = [NAMES[0], NAMES[3 * shop.BATCH]]
    values = RNG.normal(size=(len({*ids}), 3)).astype(np.float32)
    one.set_rows('item', [*dict.fromkeys(ids)], values)
    rows = one.vocabulary('item').rows([*dict.fromkeys(ids)])
    np.testing.assert_array_equal(one.rows('item')[rows], values)
    ahead = {*NAMES} - {*one.vocabulary('item').known.tolist()}
    for name in ahead:
      with pytest.raises(UserError, match='a row of its own'):
        one.set_rows('item', [name], values[:1])


def test_rows_are_set_between_any_two_steps():
  values = RNG.normal(size=(2, 4)).astype(np.float32)
  seen = []

  def change(record):
    if record.step == 3:
      one.set_rows('user', [0, 9], values)
      seen.append(one.rows('user')[[0, 9]])

  with trainer() as one:
    one.train(shop.source(), 8, on_step=change)
    np.testing.assert_array_equal(seen[0], values)
  with trainer() as two:
    two.train(shop.source(), 3)
    two.set_rows('user', [0, 9], values)
    two.train(shop.source(), 0)
  with trainer() as other:
    batches = shop.source()
    other.train(batches, 3)
    other.set_rows('user', [0, 9], values)
    other.train(batches, 5)
    shop.assert_same(one, other)


def test_an_export_scores_as_the_trainer(tmp_path):
  words = slip.Vocabulary.fit(NAMES)
  vectors = {name: RNG.normal(size=3) for name in NAMES[:9]}
  with trainer(USERS, vectors, words.size) as one:
    one.train(source(words), 3)
    one.set_rows('item', NAMES[9:10], [[3, 2, 1]])
    expected = one.predict(source(words))
    one.export(tmp_path / 'export', batch_sizes=[64])
  with slip_serve.load(tmp_path / 'export') as scorer:
    ids = {'user': shop.USERS, 'item': NAMES}
    logits = scorer.logits(scorer.query(shop.DENSE, ids))
  np.testing.assert_array_equal(
    logits.view(np.uint32), expected.view(np.uint32)
  )


def test_a_checkpoint_needs_the_same_array(tmp_path):
  with trainer(USERS) as one:
    one.train(shop.source(), 3)
    one.save(tmp_path)
  with trainer(USERS.astype(np.float64)) as same:  # the same values
    same.restore(tmp_path)
  other = USERS.copy()
  other[59, 3] += 1
  for array in (other, None):
    with (
      trainer(array) as two,
      pytest.raises(UserError, match=r'rows \[60, 4\], check.*same values'),
    ):
      two.restore(tmp_path)


def test_equal_tables_are_known_without_their_checksum():
  array = USERS.copy()
  array.flags.writeable = False

  def made(array):
    return TableSet({'user': slip.Table(60, 4, initializer=array)})

  one, two, copy, other = map(made, (array, array, USERS, USERS + 1))
  assert one == two
  assert hash(one) == hash(two) == hash(other)
  assert not [
    set_
    for set_ in (one, two, other)
    if 'checksum' in vars(set_.tables['user'].initializer)
  ]
  assert one == copy
  assert one != other
  assert hash(one) == hash(copy)


def test_a_value_in_a_file_is_checked_as_it_is_read(tmp_path):
  np.save(tmp_path / 'rows.npy', np.where(USERS > 2, np.nan, USERS))
  array = np.load(tmp_path / 'rows.npy', mmap_mode='r')
  said = r"float32, got nan \(Table 'user'"
  with trainer(array) as one, pytest.raises(UserError, match=said):
    one.train(shop.source(), 1)


class OddKey:
  """Not an array, a function or a mapping."""


class Tensor:
  """One of another library, which is being trained."""

  def __array__(self, dtype=None, copy=None):
    raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


WRONG = {
  'shape': (USERS[:50], r'shape of the table, \[60, 4\], got \[50, 4\]'),
  'one dim': (USERS[0], r'must be \[R, D\]'),
  'text': (np.full((60, 4), 'a'), 'of real numbers, got <U1'),
  'NaN': (np.where(USERS > 2, np.nan, USERS), 'finite in float32, got nan'),
  'huge': (USERS.astype(np.float64) * 1e300, 'finite in float32'),
  'object': (OddKey(), 'an initializer must be Uniform'),
  'tensor': (Tensor(), r'got Can.t call numpy.*detach'),
  'class': (OddKey, 'an initializer must be Uniform'),
  'lists': ([[0.0] * 4] * 60, 'an initializer must be Uniform'),
  'masked': (np.ma.masked_equal(USERS, 0), 'must not be masked'),
  'no key': (lambda shape: jnp.zeros(shape), 'is called as initializer'),
  'other shape': (lambda *_: jnp.zeros(3), r'float32\[1, 4\].*got float32\[3'),
  'short': ({3: [1, 2, 3]}, r'vector of an id must be \[4\].*id 3'),
  'uneven': ({3: [[1], [2, 3]]}, 'lists that make one'),
  'infinite': ({3: [1, 2, 3, np.inf]}, 'finite in float32, got inf'),
}


@pytest.mark.parametrize('name', WRONG)
def test_a_wrong_initializer_is_one_sentence(name):
  given, said = WRONG[name]
  with pytest.raises(UserError, match=said):
    trainer(given)


def test_a_table_may_be_too_large_to_be_drawn_at_once():
  tables = {
    'user': slip.Table(
      10**8, 4, initializer=jax.nn.initializers.glorot_normal()
    )
  }
  tables = shop.TABLES | tables
  with pytest.raises(UserError, match=r'at most 1 GiB in f32, got 1\.49 '):
    shop.trainer(tables=tables)


class Hashed:
  """Somebody's own vocabulary."""

  def rows(self, ids):
    return np.array([len(name) for name in ids])


BAD_IDS = {
  'out of range': ({60: USERS[0]}, r'integers in \[0, 60\), got 60'),
  'negative': ({-1: USERS[0]}, r'integers in \[0, 60\), got -1'),
  'text': ({'a': USERS[0]}, r"integers in \[0, 60\), got 'a'"),
  'none': ({None: USERS[0]}, r'integers in \[0, 60\)'),
}


@pytest.mark.parametrize('name', BAD_IDS)
def test_wrong_ids_are_one_sentence(name):
  given, said = BAD_IDS[name]
  with trainer(given) as one, pytest.raises(UserError, match=said):
    one.train(shop.source(), 1)


@pytest.mark.parametrize(
  ('words', 'said'),
  [
    (slip.GrowingVocabulary(20), 'ids must be int64, as the first were'),
    (Hashed(), 'only in a Vocabulary or GrowingVocabulary, got Hashed'),
    (slip.Vocabulary.fit(['b']), 'one of the vocabulary, got none of 1'),
  ],
)
def test_vocabularies_that_say_no_row_of_an_id(words, said):
  with (
    trainer(item={3 if 'int64' in said else 'a': np.ones(3)}) as one,
    pytest.raises(UserError, match=said),
  ):
    one.train(source(words), 1)


def test_what_cannot_be_set_is_one_sentence():
  with trainer() as one:
    with pytest.raises(UserError, match='which id has which row, got none'):
      one.set_rows('user', [1], USERS[:1])
    one.train(shop.source(), 2)
    before = shop.state_of(one)
    for table, ids, values, said in (
      ('shop', [1], USERS[:1], 'table must be one of user, item'),
      ('user', [60], USERS[:1], r'integers in \[0, 60\), got 60'),
      ('user', [1, 1], USERS[:2], 'each id must be given once'),
      ('user', [1, 2], USERS[:1], r'\[2, 4\], of real numbers, got float32\[1'),
      ('user', [1], np.full((1, 4), np.nan), 'finite in float32, got nan'),
      ('user', [1], [[None] * 4], 'of real numbers, got object'),
      ('user', [1.5], USERS[:1], 'integers or text'),
    ):
      with pytest.raises(UserError, match=said):
        one.set_rows(table, ids, values)
    for mine, other in zip(before, shop.state_of(one), strict=True):
      np.testing.assert_array_equal(mine, other)
    one.set_rows('user', [], np.empty((0, 4)))

    def model_calls():
      one.set_rows('user', [1], USERS[:1])
      yield from shop.dicts(1)

    with pytest.raises(UserError, match='must not train, restore or close'):
      one.train(slip.batches(model_calls), 1)
