"""What a prompt or a notebook shows of the things that users hold."""

import copy
import pickle
import re

from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st
import jax
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.errors import UserError
from tests.api import shop


class Alike(nn.Module):
  @nn.compact
  def __call__(self, dense, e):
    return (e['user'] * e['item']).sum(-1) + nn.Dense(1)(dense)[:, 0]


PLAIN = {'slip': slip, **{name: getattr(slip, name) for name in slip.__all__}}


@given(
  size=st.integers(1, 10**9),
  dim=st.sampled_from([16, 8]),
  dtype=st.sampled_from(['float32', 'bfloat16']),
  how=st.sampled_from([None, slip.Uniform(0.1), slip.Constant(0.0)]),
  unknown=st.sampled_from(['error', 'row']),
)
def test_a_table_shows_what_makes_it(size, dim, dtype, how, unknown):
  table = slip.Table(size, dim, dtype, how, None, unknown)
  assert eval(repr(table), PLAIN) == table
  assert ('bfloat16' in repr(table)) == (dtype == 'bfloat16')


@given(
  drop=st.sampled_from([0.3, 0.5, 'auto']),
  policy=st.sampled_from(['surprise', *slip.POLICIES]),
  phases=st.sampled_from([slip.Phases(), shop.PHASES]),
  alpha=st.sampled_from([None, 2, (1, 2)]),
  refill=st.booleans(),
)
def test_a_skip_and_a_feature_show_what_makes_them(
  drop, policy, phases, alpha, refill
):
  skip = slip.Skip(drop, policy, phases=phases, alpha=alpha, refill=refill)
  assert eval(repr(skip), PLAIN) == skip
  by_value = skip._replace(policy=slip.POLICIES[policy])
  assert eval(repr(by_value), PLAIN).chosen_policy == by_value.policy
  feature = slip.Feature(policy, 'mean', 2 if refill else 1)
  assert eval(repr(feature), PLAIN) == feature


def test_defaults_are_left_out():
  assert repr(slip.Skip(float('0.3'))) == 'Skip()'
  assert repr(slip.Table(60, 16, 'float32')) == 'Table(60)'
  assert repr(slip.Feature('item', 'sum', 1)) == "Feature('item')"


def test_nothing_dumps_an_array_or_a_closure():
  rows = np.zeros((60, 4), np.float32)
  faces = [
    (slip.Table(60, 4, initializer=rows), 'initializer=float32[60, 4]'),
    (slip.Table(60, 4, initializer={1: rows[0]}), 'initializer=dict of 1'),
    (slip.Table(60, initializer=jax.nn.initializers.normal()), '=normal)'),
    (slip.Table(60, optimizer=optax.chain(optax.adam(0.1))), '=chain)'),
    (slip.Skip(scorer=slip.SCORERS['linear']), 'scorer='),
  ]
  for value, part in faces:
    text = repr(value)
    assert part in text
    assert len(text) < 100
    assert not re.search(r'<|0x|\n', text), text
  bound = slip.TableSet({'a': slip.Table(60, 4, initializer=rows)})
  assert 'initializer=float32[60, 4]' in repr(bound)


def test_a_table_is_copied_as_before():
  table = slip.Table(60, dtype='bfloat16')
  for other in (
    pickle.loads(pickle.dumps(table)),
    copy.copy(table),
    slip.Table(**table._asdict()),
    table._replace(dtype='float16')._replace(dtype='bfloat16'),
  ):
    assert other == table
    assert type(other) is slip.Table
  with pytest.raises(TypeError, match='vocabulary_size'):
    slip.Table()


OTHERS = {
  'keras': (lambda: slip.Table(9, combiner='mean'), "slip.Feature('item', com"),
  'torchrec': (
    lambda: slip.Table(9, pooling='mean'),
    'give combiner to a feat',
  ),
  'rows of torch': (
    lambda: slip.Table(num_embeddings=9, embedding_dim=4),
    'name it vocabulary_size',
  ),
  'name': (lambda: slip.Table(name='item', vocabulary_size=9), 'by name'),
  'pooling': (lambda: slip.Feature('item', pooling='mean'), 'name it combiner'),
  'average': (
    lambda: slip.TableSet(
      {'a': slip.Table(9)}, {'a': slip.Feature('a', 'avg')}
    ),
    'one of sum, mean, sqrtn, none',
  ),
  'rate': (lambda: slip.Skip(rate=0.5), 'Skip takes drop, policy, '),
}


@pytest.mark.parametrize('case', OTHERS)
def test_words_of_other_libraries_are_one_sentence_that_names_ours(case):
  make, says = OTHERS[case]
  with pytest.raises(UserError, match=re.escape(says)) as error:
    make()
  assert '\n' not in str(error.value)


def test_a_combiner_of_a_feature_works():
  features = {
    'user': slip.Feature('user'),
    'item': slip.Feature('item', combiner='mean', max_length=3),
  }
  items = [[item, item] for item in shop.ITEMS.tolist()]
  ids = {'user': shop.USERS, 'item': items}
  source = slip.batches(shop.DENSE, ids, shop.CLICKS, batch_size=16, seed=1)
  with shop.trainer(features=features) as trainer, shop.trainer() as other:
    trainer.train(source, 3)
    other.train(shop.source(), 3)
    np.testing.assert_allclose(
      trainer.rows('user'), other.rows('user'), rtol=1e-5, atol=1e-7
    )


def test_a_trainer_and_its_history_say_how_far_they_are():
  with shop.trainer() as trainer:
    assert repr(trainer) == (
      'Trainer(Recommender, 2 tables with 80 rows, streamed, before its first'
      ' source)'
    )
    seen = []
    source = shop.source()
    trainer.train(source, 2, on_step=lambda _: seen.append(repr(trainer)))
    assert [text[-20:-1] for text in seen] == [
      ', 16 examples trained'[-19:],
      ', 32 examples trained'[-19:],
    ]
    history = trainer.train(source, 20, validation=shop.held_out(), every=10)
    text = repr(history)
    first, last = history.losses[0], history.losses[-1]
    assert text.startswith(
      f'History(20 steps, loss {first:.4g} to {last:.4g}, 2 validations, the'
      f' best after step {history.best.step}'
    )
    assert repr(trainer.train(source, 0)) == 'History(0 steps)'


def cells(trainer):
  """The title, the table by name and column, and the last line."""
  title, _, head, *lines, _, model = trainer.summary().split('\n')
  assert len({len(line) for line in lines}) == 1  # aligned
  rows = [re.split(r'  +', line) for line in lines]
  assert [len(row) for row in rows[:-1]] == [len(head.split())] * 2
  return title, {row[0]: row for row in rows}, model


def nbytes(text):
  number, unit = text.split()
  return float(number) * {'B': 1, 'kB': 1e3, 'MB': 1e6}[unit]


@pytest.mark.parametrize('placing', shop.PLACINGS)
def test_a_summary_adds_up_to_what_the_engine_has(placing):
  with shop.trainer(placement=shop.PLACINGS[placing]) as trainer:
    title, table, model = cells(trainer)
    assert title == 'Recommender, before its first source'
    assert [row[-2:] for row in table.values()] == [['-', '-']] * 3
    assert model == 'parameters: not yet known'
    trainer.train(shop.source(), 12)
    title, table, model = cells(trainer)
    assert title == 'Recommender, after 12 steps'
    assert model.startswith('parameters: 19, 76 B on the device')
    engine = trainer.parts.engine
    sizes = [4 * 4 + 4, 3 * 4 + 4]  # with a sum of squares
    device = host = 0
    for group, size in zip(engine.groups, sizes, strict=True):
      kept = group.kept.rows
      many = group.num_rows if kept is None else np.count_nonzero(kept >= 0)
      device += many * size
      host += 0 if kept is None else group.num_rows * size
    assert nbytes(table['all'][-2]) == pytest.approx(device, rel=5e-3)
    assert nbytes(table['all'][-1]) == pytest.approx(host, rel=5e-3)
    for name, chosen in trainer.tables.tables.items():
      assert table[name][:4] == [
        name,
        str(chosen.rows),
        str(chosen.embedding_dim),
        'float32',
      ]
    assert repr(trainer.summary()) == trainer.summary()


def test_a_summary_tells_tables_of_a_group_apart():
  alike = {'user': slip.Table(60, 4), 'item': slip.Table(20, 4)}
  with shop.trainer(
    tables=alike, model=Alike(), placement='pinned', hot_bytes=20 * 25
  ) as trainer:
    trainer.train(shop.source(), 2)
    _, table, _ = cells(trainer)
    hot = trainer.parts.engine.hot.rows
  of_users = int((hot < 60).sum())
  assert 0 < of_users < len(hot)
  assert nbytes(table['user'][-2]) == of_users * 20
  assert nbytes(table['item'][-2]) == (len(hot) - of_users) * 20


def test_rows_on_a_disk_are_said_to_be_there(tmp_path):
  with shop.trainer(store=slip.tiered(1 << 14, tmp_path)) as trainer:
    trainer.train(shop.source(), 2)
    head = trainer.summary().split('\n')[2]
  assert head.split()[-1] == 'disk'


def test_to_look_at_a_trainer_changes_nothing():
  with shop.trainer() as looked, shop.trainer() as other:
    with pytest.raises(UserError, match='when its first source comes'):
      looked.params  # noqa: B018
    looked.train(
      shop.source(),
      20,
      on_step=lambda _: (repr(looked), looked.summary(), looked.params),
    )
    other.train(shop.source(), 20)
    shop.assert_same(looked, other)


def test_parameters_are_a_copy():
  with shop.trainer() as trainer:
    trainer.train(shop.source(), 5)
    params = trainer.params
    before = jax.tree.map(np.array, params)
    jax.tree.map(
      np.testing.assert_array_equal,
      params,
      jax.device_get(trainer.parts.state.params),
    )
    trainer.train(shop.source(), 5)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    for leaf in jax.tree.leaves(params):
      leaf += 1  # it may be written
    again = trainer.params
  assert not np.array_equal(
    again['Dense_0']['kernel'], params['Dense_0']['kernel']
  )
