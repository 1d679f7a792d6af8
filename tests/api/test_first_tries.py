"""What a stranger tries first works, or ends in one sentence."""

from flax import linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slip_serve
import slipstream_jax as slip
from slipstream_jax.errors import UserError
from tests.api import shop


class OneFeature(nn.Module):
  heads: int | None = None

  @nn.compact
  def __call__(self, dense, e):
    parts = [*dense.values()] if isinstance(dense, dict) else [dense]
    columns = [jnp.reshape(p, (len(e['user']), -1)) for p in parts]
    x = jnp.concatenate([e['user'], *columns], axis=1)
    logits = nn.Dense(self.heads or 1)(x)
    return logits if self.heads else logits[:, 0]


ONE, TWO = OneFeature(), OneFeature(2)
USER = {'user': slip.Table(60, embedding_dim=4)}


@pytest.mark.parametrize(
  ('dense', 'heads'),
  [('none', None), ('an array', 2), ('by name', None), ('a column', 2)],
)
def test_one_feature_and_any_dense_ones(dense, heads, tmp_path):
  given = {
    'none': None,
    'an array': shop.DENSE,
    'by name': {'age': shop.DENSE[:, 0], 'place': shop.DENSE[:, 1:]},
    'a column': shop.DENSE[:, 0],
  }[dense]
  labels = np.stack([shop.CLICKS] * 2, 1) if heads else shop.CLICKS
  ids = {'user': shop.USERS}

  def source(labels=labels, **arguments):
    arguments = {'batch_size': shop.BATCH} | arguments
    return slip.batches(given, ids, labels, **arguments)

  with slip.Trainer(TWO if heads else ONE, USER) as trainer:
    trainer.train(source(), 5)
    metrics = trainer.evaluate(source(epochs=1))
    assert metrics.examples == shop.EXAMPLES
    assert len(metrics.heads) == (heads or 0)
    logits = trainer.predict(source(None, epochs=1))
    assert logits.shape == (shop.EXAMPLES, *([heads] if heads else []))
    trainer.save(tmp_path)
  other = slip.Trainer(TWO if heads else ONE, USER)
  other.restore(tmp_path, resume=False)
  np.testing.assert_array_equal(other.predict(source(None, epochs=1)), logits)
  wrong = shop.CLICKS if heads else np.stack([shop.CLICKS] * 2, 1)
  with pytest.raises(UserError, match='labels of a batch must be'):
    other.train(source(wrong), 1)


def test_a_source_without_end_or_at_its_end():
  with shop.trainer() as trainer:
    for call in trainer.evaluate, trainer.predict:
      with pytest.raises(UserError, match='a pass over a source must end'):
        call(shop.source())
    assert trainer.evaluate(shop.source(), max_batches=2).examples == 32
    with pytest.raises(UserError, match='needs an end, got no steps'):
      trainer.train(shop.source())
    once = shop.held_out()
    assert len(trainer.train(once).losses) == 21
    with pytest.raises(UserError, match='a source that has ended'):
      trainer.train(once)
    assert len(trainer.train(once, 0).losses) == 0
    assert trainer.train(once, 0).counters.examples_trained == shop.EXAMPLES
    assert len(trainer.train(shop.held_out(), 100).losses) == 21
    stream = shop.dicts(5)
    assert len(trainer.train(stream).losses) == 5
    with pytest.raises(UserError, match='a source that has ended'):
      trainer.train(stream)
    with pytest.raises(UserError, match='must have labels'):
      trainer.train(shop.source(None), 1)
    with pytest.raises(UserError, match='without labels'):
      trainer.evaluate(shop.held_out(None))


def test_columns_are_no_batches():
  columns = {'user': shop.USERS, 'item': shop.ITEMS}
  wrong = columns, (columns, shop.CLICKS), shop.CLICKS
  with shop.trainer() as trainer:
    for given in wrong:
      for call in (
        trainer.train,
        trainer.evaluate,
        trainer.predict,
        lambda given: trainer.train(shop.held_out(), validation=given),
      ):
        with pytest.raises(UserError, match=r'of columns .*give slip.batches'):
          call(given)


def test_mistakes_of_arguments():
  for arguments, message in (
    ({'placement': 'fast'}, r'one of resident, .*, or cached\(rows\), got'),
    ({'loss': ()}, r'a loss must be a function .*, got \(\)'),
    ({'placement': {'user': 'resident'}}, 'item'),
    ({'seed': -1}, 'seed'),
    ({'hot_bytes': 0}, 'hot_bytes'),
    ({'prefetch': -1}, 'prefetch'),
    ({'workers': 0}, 'Trainer, workers'),
    ({'features': {'user': slip.Feature('who')}}, 'who'),
    ({'microbatches': 0}, 'microbatches'),
  ):
    with pytest.raises(UserError, match=message):
      shop.trainer(**arguments)
  with shop.trainer() as trainer:
    with pytest.raises(UserError, match='steps'):
      trainer.train(shop.source(), -1)
    with pytest.raises(UserError, match='max_batches'):
      trainer.evaluate(shop.held_out(), max_batches=0)
    with pytest.raises(UserError, match='user, item'):
      trainer.rows('users')


def test_a_generator_that_cannot_be_set_back_says_so_where_it_must_be(tmp_path):
  skip = slip.Skip(0.3, 'surprise', phases=shop.PHASES)
  with shop.trainer() as trainer:
    with pytest.raises(UserError, match='can be set to a position'):
      trainer.train(shop.dicts(), 2, skip=skip)  # hot rows want a look ahead
    stream = shop.dicts()
    trainer.train(shop.source(), 1, skip=skip)  # now they are chosen
    trainer.train(stream, 2)
    trainer.train(stream, 2, skip=skip)  # what was read ahead is lost
    trainer.save(tmp_path)
    trainer.restore(tmp_path)
    with pytest.raises(UserError, match='resume=False'):
      trainer.train(shop.dicts(), 2, skip=skip)
    trainer.restore(tmp_path, resume=False)
    trainer.train(shop.dicts(), 2, skip=skip)


def no_chain(*wrong):
  return optax.GradientTransformation(*wrong)


@pytest.mark.parametrize(
  'wrong',
  [
    no_chain(lambda: 0, lambda: 0),
    no_chain(lambda p: (), lambda g, s: (g, s)),
    no_chain(lambda p: (), lambda g, s, p: ()),
    optax.sgd(lambda: 0.1),
    optax.sgd(lambda step: 'fast'),
    optax.sgd(np.ones(3)),
    optax.adam(0.1, eps={}),
  ],
)
def test_optimizers_that_cannot_run_are_one_sentence(wrong):
  tables = {'user': slip.Table(60, optimizer=wrong), 'item': slip.Table(20)}
  for arguments, where in (
    ({'row_optimizer': wrong}, 'Trainer, row_optimizer'),
    ({'dense_optimizer': wrong}, 'Trainer, dense_optimizer'),
    ({'tables': tables}, "Table 'user', optimizer"),
  ):
    with (
      shop.trainer(**arguments) as trainer,
      pytest.raises(UserError) as error,
    ):
      trainer.train(shop.source(), 1)
    assert error.value.where == where
    assert '\n' not in str(error.value)


def test_one_logit_or_label_on_an_axis_of_its_own():
  column, by_name = shop.CLICKS[:, None], {'click': shop.CLICKS}
  ends = []
  for heads in None, 1:
    for labels in shop.CLICKS, column, by_name:

      def source(labels=labels, **given):
        ids = {'user': shop.USERS}
        return slip.batches(None, ids, labels, batch_size=16, **given)

      with slip.Trainer(OneFeature(heads), USER) as trainer:
        trainer.train(source(seed=0), 5)
        ends.append((trainer.predict(source(epochs=1)), trainer))
        assert trainer.evaluate(source(epochs=1)).heads == ()
  for logits, trainer in ends:
    assert logits.shape == (shop.EXAMPLES,)
    np.testing.assert_array_equal(logits, ends[0][0])
    shop.assert_same(trainer, ends[0][1])


def test_one_logit_on_an_axis_of_its_own_is_skipped_by_the_best_policy():
  skip = slip.Skip(0.3, 'surprise_offset', phases=shop.PHASES)
  ends = []
  for heads in None, 1:
    with slip.Trainer(OneFeature(heads), USER, hot_bytes=600) as trainer:
      ids = {'user': shop.USERS}
      source = slip.batches(None, ids, shop.CLICKS, batch_size=16, seed=0)
      trainer.train(source, 40, skip=skip)
      ends.append(trainer)
  assert trainer.parts.engine.counters.examples_dropped
  shop.assert_same(*ends)


ANOTHER = {
  'row': {'row_optimizer': optax.adam(1e-2)},
  'row, of its first value': {'row_optimizer': slip.rowwise_adagrad(0.1, 0.5)},
  'dense': {'dense_optimizer': optax.sgd(0.1)},
  'dense, with more state': {'dense_optimizer': optax.sgd(0.1, momentum=0.9)},
}


@pytest.mark.parametrize('case', ANOTHER)
def test_another_optimizer_is_the_reason_that_is_given(tmp_path, case):
  with shop.trainer() as trainer:
    trainer.train(shop.source(), 2)
    trainer.save(tmp_path)
  with (
    shop.trainer(**ANOTHER[case]) as other,
    pytest.raises(UserError) as raised,
  ):
    other.restore(tmp_path)
  which = case.partition(',')[0]
  argument = {'row': 'row_optimizer', 'dense': 'dense_optimizer'}[which]
  assert f'goes on with the {which} optimizer of its run' in str(raised.value)
  assert f'give {argument} of Trainer' in raised.value.hint
  tables = {**shop.TABLES, 'item': slip.Table(21, embedding_dim=3)}
  with (
    shop.trainer(tables=tables, **ANOTHER[case]) as other,
    pytest.raises(UserError, match='only into the model and tables it is of'),
  ):
    other.restore(tmp_path)


@pytest.mark.usefixtures('as_users_run_it')
@pytest.mark.parametrize(
  ('monitor', 'message'),
  [
    (slip.auc, 'monitor must map the metrics .*TypeError'),
    (lambda metrics: -metrics.auc, 'metric is None where'),
    (lambda metrics: 'low', "could not convert string to float: 'low'"),
  ],
)
def test_a_number_to_watch_that_is_none(monitor, message):
  clicks = shop.held_out(np.ones_like(shop.CLICKS))  # so there is no AUC
  with shop.trainer() as trainer:
    with pytest.raises(UserError, match=message):
      trainer.train(shop.source(), 2, validation=clicks, monitor=monitor)
    trainer.train(shop.source(), 2)  # the trainer is as good as before


@pytest.mark.usefixtures('as_users_run_it')
def test_a_class_is_no_callback():
  with (
    shop.trainer() as trainer,
    pytest.raises(UserError, match=r"got <class '.*CSVLog'>"),
  ):
    trainer.train(shop.source(), 2, callbacks=[slip.CSVLog])


def exported(folder):
  """An export of a model of users and named items, and its scorer."""
  names = [f'item {n}' for n in shop.ITEMS]
  words = slip.Vocabulary.fit(names)
  ids = {'user': shop.USERS, 'item': names}
  tables = {'user': slip.Table(60, 4), 'item': slip.Table(words.size, 4)}
  source = slip.batches(
    None, ids, shop.CLICKS, batch_size=shop.BATCH, vocabularies={'item': words}
  )
  model = slip.Functions(
    lambda key, dense, embeddings: {},
    lambda params, dense, embeddings: (
      embeddings['user'] * embeddings['item']
    ).sum(1),
  )
  with slip.Trainer(model, tables) as trainer:
    trainer.train(source, 2)
    for sizes in 8, None, [], [8.0]:
      with pytest.raises(UserError, match='batch_sizes must be a list'):
        trainer.export(folder, batch_sizes=sizes)
    trainer.export(folder, batch_sizes=[1, 8])
  return slip_serve.load(folder)


@pytest.mark.usefixtures('as_users_run_it')
def test_an_export_asked_as_users_ask(tmp_path):
  with exported(tmp_path / 'x') as scorer:
    two = scorer.probabilities(None, {'user': [3, 4], 'item': ['item 1', 'x']})
    for users, items in (
      ((3, 4), ('item 1', 'x')),
      (range(3, 5), np.array(['item 1', 'x'])),
      ((n for n in (3, 4)), [['item 1'], ['x']]),
      (np.array([[3], [4]]), ['item 1', 'never seen']),
    ):
      ids = {'user': users, 'item': items}
      np.testing.assert_array_equal(scorer.probabilities(None, ids), two)
    nobody = {'user': [], 'item': []}
    assert scorer.probabilities(None, nobody).shape == (0,)
    for user, item, got in (
      (3, ['item 1'], 'got 3'),
      # Not a character per example.
      ([3, 4, 5, 6], 'item', "'item' must be a list .* got 'item'"),
      ([3], None, 'got None'),
      ([3], {'name': 1}, 'got {'),
    ):
      with pytest.raises(slip_serve.ServeError, match=got):
        scorer.probabilities(None, {'user': user, 'item': item})
