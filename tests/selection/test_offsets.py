"""Offsets of logits: in training alone, whatever lies between."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.data.source import SourceWrapper
from slipstream_jax.errors import UserError
from slipstream_jax.models.adapters import Functions
from slipstream_jax.schedules.fae import Rate
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.schedules.systems import SCHEDULES
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.evaluate import evaluate, predict
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import (
  is_logistic,
  make_parts,
  planned,
  scheduled,
  slipstream,
)
from tests.support import small
from tests.support.small import assert_same_bits, everything

COLUMNS = small.columns(32 * 12)
HOT = small.hot(COLUMNS)
SKIP = Skip(0.5, 'surprise_offset', 'examples', Phases(2, 2, 2, 0), refill=True)
bce = optax.sigmoid_binary_cross_entropy


class Offset(SourceWrapper):
  """Batches of another source, each with an offset."""

  def __init__(self, source, offset):
    super().__init__(source)
    self._offset = offset

  def __next__(self):
    batch = super().__next__()
    return batch._replace(offset=self._offset(batch))


def source(offset=None, columns=COLUMNS, epochs=2):
  batches = ColumnBatches(columns, 32, shuffle_seed=1, epochs=epochs)
  return batches if offset is None else Offset(batches, offset)


def some(batch):
  return (batch.dense[:, 0] - 1).astype(np.float32)


def zeros(batch):
  return np.zeros(len(batch.labels), np.float32)


def trainer_of(recipe, where='streamed', **how):
  return make_parts(recipe, where, small.DENSE, 3, HOT, **how)


def trained(offset, recipe=None, **how):
  trainer = trainer_of(recipe or small.recipe('adagrad'), **how)
  with planned(trainer, source(offset)) as batches:
    losses = [record.loss for record in train(trainer, batches, 100)]
  return trainer, losses


def test_an_offset_of_0_changes_no_bit():
  plain, losses = trained(None)
  other, others = trained(zeros)
  assert losses == others
  assert_same_bits(everything(plain), everything(other))


def test_an_offset_is_part_of_the_model_while_it_is_trained():
  """As a model that reads it as a feature, and has no other use for it."""
  recipe = small.recipe('adagrad')._replace(model=linear(0.0))
  own, losses = trained(some, recipe)
  knows = small.recipe('adagrad')._replace(model=linear(1.0))
  expected, others = trained(None, knows)
  np.testing.assert_allclose(losses, others, rtol=1e-5)
  leaves = zip(
    *(jax.tree.leaves(everything(t)[0]) for t in (own, expected)),
    strict=True,
  )
  for one, other in leaves:
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@functools.cache
def linear(known):
  """Rows' sums, and so many times what `some` gives."""
  return Functions(
    init=lambda key, dense, embeddings: {'bias': jnp.zeros(())},
    apply=lambda params, dense, embeddings: (
      sum(x.sum(1) for x in embeddings.values())
      + params['bias']
      + known * (dense[:, 0] - 1)
    ),
  )


@pytest.mark.parametrize('rows', ['parameter_server', 'pooled'])
def test_rows_on_the_host_are_updated_by_the_same_gradients(rows):
  _, losses = trained(some)
  _, others = trained(some, rows=rows)
  np.testing.assert_allclose(losses, others, rtol=2e-5)


def test_parts_of_a_batch_take_their_part_of_the_offset():
  _, losses = trained(some)
  parts = small.recipe('adagrad')._replace(microbatches=4)
  _, others = trained(some, parts)
  np.testing.assert_allclose(losses, others, rtol=2e-5)


def test_evaluation_and_prediction_are_without_it():
  trainer, _ = trained(some)
  plain, other = (
    predict(trainer, source(offset, epochs=1)) for offset in (None, some)
  )
  np.testing.assert_array_equal(plain.logits, other.logits)
  metrics = [
    evaluate(trainer, source(offset, epochs=1)) for offset in (None, some)
  ]
  assert metrics[0] == metrics[1]


def test_held_out_examples_that_decide_are_scored_without_it():
  held_out = next(source())

  def losses(batch):
    trainer = trainer_of(small.recipe('adagrad'), 'swapped')
    spec = SCHEDULES['fae'](12, batch, Rate(40), 2)
    with scheduled(trainer, source(), spec, 2) as batches:
      list(train(trainer, batches, 100))
    told = trainer.probe.losses.all()
    assert told
    return {n: float(loss) for n, loss in told.items()}

  assert losses(held_out) == losses(
    held_out._replace(offset=np.full(32, 3, np.float32))
  )


def test_one_program_trains_a_whole_run():
  """Nothing is compiled as skipping begins: the offset was there before."""
  recipe = small.recipe('adagrad')._replace(loss=lambda *args: bce(*args))
  trainer = trainer_of(recipe)
  with slipstream(trainer, source(), SKIP) as batches:
    sizes, begun = set(), []
    while (item := batches.peek()) is not None:
      sizes |= {len(item.row_weights[0])}
      begun.append(item.batch.offset.any())
      list(train(trainer, batches, 1))
  assert not begun[0]
  assert begun[-1]
  assert compiled_of(recipe).step._cache_size() == len(sizes)
  assert trainer.engine.counters.examples_dropped > 50


# What an offset cannot be added to, in one sentence.


def heads(count):
  return Functions(
    init=lambda key, embeddings: {'factor': jnp.ones((1, count))},
    apply=lambda params, embeddings: (
      sum(x.sum(1) for x in embeddings.values())[:, None] * params['factor']
    ),
  )


def test_several_heads_are_refused():
  recipe = small.recipe('adagrad')._replace(model=heads(2))
  columns = COLUMNS._replace(labels=np.ones((32 * 12, 2), np.float32))
  trainer = trainer_of(recipe)
  with pytest.raises(UserError, match=r'one logit.*got a model with 2 heads'):
    slipstream(trainer, source(columns=columns), SKIP)
  batches = planned(trainer, source(zeros, columns=columns), 0)
  with batches, pytest.raises(UserError, match=r'2 heads \(Batch.offset'):
    next(batches)


def smoothed(logits, labels):
  return bce(logits, 0.98 * labels + 0.01)


def squared(logits, labels):
  return (logits - labels) ** 2


def focal(logits, labels):
  return optax.sigmoid_focal_loss(logits, labels, gamma=2.0)


OWN_LOSSES = {
  'its own logistic': (lambda z, y: jnp.logaddexp(0, z) - y * z, True),
  'logistic of a sign': (lambda z, y: jax.nn.softplus((1 - 2 * y) * z), True),
  'twice': (lambda z, y: 2 * bce(z, y), True),
  'partial': (functools.partial(lambda a, z, y: bce(z, y), 1), True),
  'smoothed': (smoothed, False),
  'squared': (squared, False),
  'focal': (focal, False),
  'clicks count more': (lambda z, y: (1 + y) * bce(z, y), False),
  'a mean': (lambda z, y: bce(z, y).mean(), False),
  'turned round': (lambda z, y: -bce(z, y), False),
  'of other arguments': (lambda z: z, False),
  'several': ([bce, bce], False),
}


@pytest.mark.parametrize('name', OWN_LOSSES)
def test_a_loss_is_known_by_its_values(name):
  loss, logistic = OWN_LOSSES[name]
  assert is_logistic(loss) == logistic


def test_a_loss_that_is_not_logistic_is_refused():
  recipe = small.recipe('adagrad')._replace(loss=smoothed)
  with pytest.raises(UserError, match='logistic loss alone, got another loss'):
    slipstream(trainer_of(recipe), source(), SKIP)
  weighted = SKIP._replace(policy='surprise')
  slipstream(trainer_of(recipe), source(), weighted).close()
  by_model = weighted._replace(scorer='model')
  with pytest.raises(UserError, match=r"scorer 'model' takes .* logistic"):
    slipstream(trainer_of(recipe), source(), by_model)


def test_labels_that_are_no_clicks_are_refused_with_the_first_batch():
  columns = COLUMNS._replace(labels=COLUMNS.labels / 2)
  trainer = trainer_of(small.recipe('adagrad'))
  batches = slipstream(trainer, source(columns=columns), SKIP, depth=0)
  rule = r'labels that are 0 or 1, got 0\.5'
  with batches, pytest.raises(UserError, match=rule):
    next(batches)


SPOILT = {
  'not finite': (lambda b: some(b) * np.nan, 'offsets of logits must be fin'),
  'too few': (lambda b: some(b)[1:], r'must be \[32\], got \[31\]'),
  'of text': (lambda b: ['0'] * 32, 'offset must be real numbers'),
  'in some': (
    functools.partial(lambda left, b: next(left, some(b)), iter([None])),
    'all batches.*got one with an offset',
  ),
}


@pytest.mark.parametrize('case', SPOILT)
def test_an_offset_of_the_users_own_is_looked_at(case):
  offset, said = SPOILT[case]
  trainer = trainer_of(small.recipe('adagrad'))
  batches = planned(trainer, source(offset), 0)
  with batches, pytest.raises(UserError, match=said):
    list(batches)
