"""What a stranger tries first works, or ends in one sentence."""

from flax import linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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
