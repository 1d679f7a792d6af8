"""Several heads: a loss for each, and metrics of each."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.tables import Table, TableSet
from slipstream_jax.training import metrics
from slipstream_jax.training.metrics import Predictions
from slipstream_jax.training.recipe import Recipe
from tests.support import by_hand, small

TABLES = TableSet({'a': Table(20, 4), 'b': Table(9, 4)})
bce = optax.sigmoid_binary_cross_entropy


def squared(logits, labels):
  return (logits - labels) ** 2


class Heads(nn.Module):
  count: int = 3

  @nn.compact
  def __call__(self, embeddings):
    x = jnp.concatenate(list(embeddings.values()), axis=1)
    return nn.Dense(self.count, use_bias=False)(x)


def recipe_of(**changes):
  optimizers = optax.sgd(0.5), optax.sgd(0.5)
  return Recipe(Heads(), TABLES, *optimizers)._replace(**changes)


def step(recipe, batch):
  return by_hand.train(recipe, *by_hand.start(recipe), [batch])


def step_from(recipe, batch):
  """The start of the parameters and rows, too."""
  start = by_hand.start(recipe)
  kernel = jax.device_get(start[0].params)['Dense_0']['kernel'].astype(float)
  # By group; here there is one, of both tables.
  (before,) = jax.device_get([b.rows for b in start[1]])
  return kernel, before.astype(float), by_hand.train(recipe, *start, [batch])


LOSSES = {
  'one for all': (bce, None),
  'one for each': ([bce, squared, bce], None),
  'weighed': ((bce, squared, bce), (2.0, 0.0, -0.5)),
}


@pytest.mark.parametrize('case', LOSSES)
def test_a_step_is_that_of_the_sum_of_losses(case):
  """Against float64, of which the gradients are written by hand."""
  loss, factors = LOSSES[case]
  batch = by_hand.draw(TABLES, 24, heads=3)
  batch = batch._replace(weights=np.linspace(0, 2, 24, dtype=np.float32))
  recipe = recipe_of(loss=loss, loss_weights=factors)
  kernel, rows, (state, blocks, losses) = step_from(recipe, batch)
  places = by_hand.inverses(TABLES, batch.lookups)[0]
  x = rows[places].reshape(24, -1)
  logits, labels = x @ kernel, batch.labels.astype(float)
  factors = np.ones(3) if factors is None else np.array(factors)
  kinds = [loss] * 3 if callable(loss) else loss
  values, slopes = np.zeros((2, 24, 3))
  for head, kind in enumerate(kinds):
    z, y = logits[:, head], labels[:, head]
    if kind is bce:
      values[:, head], slopes[:, head] = (
        np.logaddexp(0, z) - y * z,
        1 / (1 + np.exp(-z)) - y,
      )
    else:
      values[:, head], slopes[:, head] = (z - y) ** 2, 2 * (z - y)
  weights = batch.weights.astype(float)
  expected = (weights * (values @ factors)).sum() / weights.sum()
  np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
  slopes = slopes * factors * weights[:, None] / 24
  new = jax.device_get(state.params)['Dense_0']['kernel']
  np.testing.assert_allclose(
    new, kernel - 0.5 * x.T @ slopes, rtol=1e-4, atol=1e-5
  )
  gradient = np.zeros_like(rows)
  np.add.at(gradient, places, (slopes @ kernel.T).reshape(24, 2, 4))
  np.testing.assert_allclose(
    jax.device_get(blocks[0].rows), rows - 0.5 * gradient, rtol=1e-4, atol=1e-5
  )


class One(nn.Module):
  @nn.compact
  def __call__(self, embeddings):
    x = jnp.concatenate(list(embeddings.values()), axis=1)
    return nn.Dense(1, use_bias=False)(x)[:, 0]


@pytest.mark.parametrize('loss', [bce, (bce,), squared])
def test_one_logit_on_an_axis_of_its_own_is_the_same(loss):
  batch = by_hand.draw(TABLES, 24)
  ends = [
    step(recipe_of(model=model, loss=loss), batch)
    for model in (Heads(1), One())
  ]
  assert ends[0][2] == ends[1][2]
  small.assert_same_bits(*(by_hand.bits(*end[:2]) for end in ends))


class Returning(nn.Module):
  """A model that returns no array."""

  kind: type

  @nn.compact
  def __call__(self, embeddings):
    x = Heads(1)(embeddings)[:, 0]
    return {tuple: (x, {}), list: [x], dict: {'x': x}}[self.kind]


def one_logit(loss):
  return {'model': One(), 'loss': loss}


MISFITS = [
  ({}, None, r'one logit per label, \[8\], got \[8, 3\]', 'Trainer, model'),
  ({}, 2, r'one logit per label, \[8, 2\]', 'Trainer, model'),
  ({'model': Heads(2)}, 3, r'got \[8, 2\]', 'Trainer, model'),
  ({'model': Heads(1)}, 3, r'got \[8\]', 'Trainer, model'),
  (
    {'model': One(), 'loss': (bce, bce)},
    None,
    'as many losses',
    'Trainer, loss',
  ),
  ({'model': Returning(tuple)}, None, 'got a tuple', 'Returning'),
  ({'model': Returning(list)}, None, 'got a list', 'Returning'),
  ({'model': Returning(dict)}, None, 'got a dict', 'Returning'),
  ({'loss': [bce, bce]}, 3, 'as many losses .* 3, got', 'Trainer, loss'),
  (
    {'loss_weights': (1.0,)},
    3,
    'as many weights .* 3, got a sequence of 1',
    'Recipe.loss_weights',
  ),
  (
    {'loss': lambda z, y: bce(z, y).mean()},
    3,
    r'one value per example, \[8\], got \[\]',
    'Trainer, loss',
  ),
  (
    one_logit(lambda z, y: bce(z, y)[:, None]),
    None,
    r'got \[8, 1\]',
    'Trainer, loss',
  ),
  (
    one_logit(lambda z, y: bce(z[:, None], y[None])),
    None,
    r'got \[8, 8\]',
    'Trainer, loss',
  ),
  (
    one_logit(lambda z, y: (bce(z, y), {})),
    None,
    'got a tuple',
    'Trainer, loss',
  ),
  (one_logit(lambda z, y: 0.5), None, 'got a float', 'Trainer, loss'),
]


@pytest.mark.parametrize(('changes', 'heads', 'says', 'where'), MISFITS)
def test_what_does_not_fit_is_told(changes, heads, says, where):
  recipe = recipe_of(**changes)
  batch = by_hand.draw(TABLES, 8, heads=heads)
  with pytest.raises(UserError, match=says) as error:
    step(recipe, batch)
  assert error.value.where == where


def test_metrics_of_each_head():
  rng = np.random.default_rng(0)
  labels = (rng.random((200, 3)) < [0.1, 0.5, 0.9]).astype(np.float32)
  logits = (rng.normal(size=(200, 3)) + labels).astype(np.float32)
  found = metrics.compute(Predictions(labels, logits))
  assert found.examples == 200
  assert len(found.heads) == 3
  for head, one in enumerate(found.heads):
    assert one == metrics.compute(Predictions(labels[:, head], logits[:, head]))
  aucs = [one.auc for one in found.heads]
  assert len(set(aucs)) == 3
  assert found.auc == pytest.approx(np.mean(aucs))
  assert found.log_loss == pytest.approx(
    np.mean([one.log_loss for one in found.heads])
  )
  labels[:, 1] = 1  # of which there is no AUC
  found = metrics.compute(Predictions(labels, logits))
  assert found.auc is None
  assert found.heads[0].auc is not None
