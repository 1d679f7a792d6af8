"""What labels mean is read off the loss: its range, metrics, probabilities."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.data.admission import admit, ExampleShape
from slipstream_jax.errors import UserError
from slipstream_jax.training.loss_kinds import kind_of, kinds_of
from tests.support import by_hand, small

bce = optax.sigmoid_binary_cross_entropy
KINDS = {
  'clicks': [
    bce,
    lambda z, y: 3 * bce(z, y),
    lambda z, y: (1 + 9 * y) * bce(z, y),
    lambda z, y: bce(z, 0.9 * y + 0.05),
    lambda z, y: jax.nn.softplus((1 - 2 * y) * z),
    lambda z, y: optax.sigmoid_focal_loss(z, y, gamma=1.5),
    functools.partial(optax.sigmoid_focal_loss, gamma=2.0),
  ],
  'numbers': [
    optax.squared_error,
    optax.l2_loss,
    optax.huber_loss,
    optax.log_cosh,
    lambda z, y: abs(z - y),
    lambda z, y: jnp.maximum(0.9 * (y - z), 0.1 * (z - y)),
    lambda z, y: ((z - y) / 5) ** 2,
  ],
  'unknown': [
    optax.hinge_loss,
    lambda z, y: jnp.exp(z) - y * z,
    lambda z, y: (jax.nn.sigmoid(z) - y) ** 2,
    lambda z, y: -bce(z, y),
    lambda z, y: bce(z, y).mean(),
    lambda z, y: 0 * z,
    lambda z: z,
    None,
  ],
}


@pytest.mark.parametrize('kind', KINDS)
def test_a_loss_is_known_by_its_values(kind):
  assert [kind_of(loss) for loss in KINDS[kind]] == [kind] * len(KINDS[kind])


def test_each_head_has_the_kind_of_its_loss():
  assert kinds_of(bce, None) == ('clicks',)
  assert kinds_of(bce, 2) == ('clicks', 'clicks')
  assert kinds_of((bce, optax.l2_loss), 2) == ('clicks', 'numbers')
  assert (
    kinds_of((bce, bce), 3) == ('unknown',) * 3
  )  # a step says what is wrong


NUMBERS = np.array([[0, 1], [0.5, -3], [1, 1e6]])


def test_only_labels_of_clicks_have_a_range():
  tables = small.tables()
  batch = by_hand.draw(tables, 3, 2)

  def shape(*clicks):
    return ExampleShape(tables, 2, len(clicks), clicks)

  admitted = admit(batch._replace(labels=NUMBERS), shape(True, False))
  np.testing.assert_array_equal(admitted.labels, NUMBERS.astype('f4'))
  for clicks, got in ((False, True), '-3.0'), ((True, True), '-3.0'):
    with pytest.raises(UserError, match=rf'got {got} .*labels\[1, 1\]') as said:
      admit(batch._replace(labels=NUMBERS), shape(*clicks))
    assert 'optax.squared_error' in said.value.hint
  for bad in np.nan, np.inf, -np.inf:
    labels = np.where(NUMBERS == 0.5, bad, NUMBERS)
    with pytest.raises(UserError, match=r'finite, got .*labels\[1, 0\]'):
      admit(batch._replace(labels=labels), shape(False, False))


class Score(nn.Module):
  heads: int | None = None

  @nn.compact
  def __call__(self, embeddings):
    x = jnp.concatenate([*embeddings.values()], axis=1)
    return nn.Dense(self.heads or 1)(x)


TABLES = {'user': slip.Table(40, 4), 'item': slip.Table(30, 4)}
_rng = np.random.default_rng(0)
N = 320
IDS = {'user': _rng.integers(0, 40, N), 'item': _rng.integers(0, 30, N)}
STARS = (1 + (IDS['user'] + IDS['item']) % 5).astype(np.float32)
CLICKS = (STARS > 3).astype(np.float32)


def source(labels, **given):
  return slip.batches(None, IDS, labels, **{'batch_size': 32} | given)


def held_out(labels):
  return source(labels, epochs=1)


def trainer(**given):
  return slip.Trainer(Score(given.pop('heads', None)), TABLES, **given)


def test_ratings_are_trained_by_their_squared_error():
  with trainer(loss=optax.squared_error) as rater:
    losses = rater.train(source(STARS, seed=0), 60).losses
    assert losses[-1] < losses[0] / 2
    metrics = rater.evaluate(held_out(STARS))
    stars = rater.predict(held_out(None))
    error = stars.astype(float) - STARS
    assert metrics.rmse == pytest.approx(np.sqrt((error**2).mean()), rel=1e-12)
    assert metrics.mae == pytest.approx(abs(error).mean(), rel=1e-12)
    assert list(metrics.values) == ['rmse', 'mae']
    with pytest.raises(AttributeError, match="one of rmse, mae, got 'auc'"):
      metrics.auc  # noqa: B018
    with pytest.raises(
      UserError, match=r'probabilities come from .* of numbers'
    ):
      rater.predict(held_out(None), probabilities=True)


def test_ratings_and_the_default_loss_are_one_sentence_that_names_another():
  with (
    trainer() as clicker,
    pytest.raises(UserError, match=r'got [2-5]\.0 .*loss=optax.squared_error'),
  ):
    clicker.train(source(STARS), 1)


def test_probabilities_are_those_of_the_logits():
  with trainer() as clicker:
    clicker.train(source(CLICKS, seed=0), 20)
    logits = clicker.predict(held_out(None)).astype(float)
    chances = clicker.predict(held_out(None), probabilities=True)
  assert chances.dtype == np.float32
  np.testing.assert_array_equal(
    chances, np.exp(-np.logaddexp(0, -logits)).astype('f4')
  )


def poisson(logits, labels):
  return jnp.exp(logits) - labels * logits


def deviance(labels, logits):
  return 2 * np.mean(np.exp(logits) - labels * logits)


def test_metrics_of_another_loss_are_those_that_are_given():
  with trainer(loss=poisson) as counter:
    counter.train(source(STARS, seed=0), 10)
    with pytest.raises(UserError, match=r'must be given .*metrics=') as said:
      counter.evaluate(held_out(STARS))
    assert said.value.where == 'Trainer, metrics'
    assert counter.evaluate(held_out(CLICKS)).auc is not None
  with trainer(loss=poisson, metrics=[deviance]) as counter:
    counter.train(source(STARS, seed=0), 10)
    found = counter.evaluate(held_out(STARS))
    logits = counter.predict(held_out(None)).astype(float)
    assert found.deviance == deviance(STARS.astype(float), logits)
    with pytest.raises(UserError, match='got a loss of unknown'):
      counter.predict(held_out(None), probabilities=True)
  signs = np.where(CLICKS > 0, 1.0, -1.0)
  with trainer(loss=optax.hinge_loss, metrics=['auc']) as margin:
    margin.train(source(signs, seed=0), 10)
    assert margin.evaluate(held_out(signs)).auc > 0.5


def test_a_head_of_clicks_beside_one_of_stars():
  labels = np.stack([CLICKS, STARS], 1)
  losses = optax.sigmoid_binary_cross_entropy, optax.squared_error
  with trainer(heads=2, loss=losses) as both:
    both.train(source(labels, seed=0), 20)
    metrics = both.evaluate(held_out(labels))
    with pytest.raises(UserError, match='got a loss of clicks, numbers'):
      both.predict(held_out(None), probabilities=True)
    with pytest.raises(UserError, match=r'got -3.0 .*labels\[\d+, 0\]'):
      both.train(source(np.stack([np.full(N, -3.0), STARS], 1)), 1)
  clicks, stars = metrics.heads
  assert clicks.auc is not None
  assert list(stars.values) == ['rmse', 'mae']
  assert metrics.values == {}  # nothing that both have


@pytest.mark.parametrize('policy', slip.POLICIES)
def test_a_policy_takes_any_label_or_says_that_it_reads_clicks(policy):
  reads = slip.POLICIES[policy]
  skip = slip.Skip(0.3, policy, phases=slip.Phases(2, 3, 2, 12))
  says = None
  with trainer(loss=optax.squared_error, hot_bytes=900) as rater:
    try:
      rater.train(source(STARS, seed=0), 30, skip=skip)
    except UserError as error:
      says = str(error)
    whole = rater.parts.engine.counters.examples_trained
  if reads.correction == 'offset':
    assert 'logistic loss alone' in says
  elif reads.scored or 'negatives' in policy:
    assert 'labels of clicks, which are in [0, 1], got' in says
    assert '\n' not in says
  else:
    assert says is None
    assert whole > 20 * 30


def test_a_packed_table_of_ratings(tmp_path):
  columns = {k: v.tolist() for k, v in IDS.items()} | {'stars': STARS - 3.5}
  data = slip.pack(columns, tmp_path, features=['user', 'item'], label='stars')
  tables = {name: slip.Table(rows, 4) for name, rows in data.sizes.items()}
  with slip.Trainer(Score(), tables, loss=optax.squared_error) as rater:
    rater.train(slip.batches(str(tmp_path), batch_size=32, epochs=1))
    packed = rater.evaluate(data.test(64))
  test = next(data.test(64))
  assert test.labels.tolist() == (STARS - 3.5)[-64:].tolist()
  assert packed.rmse > 0
  with (
    slip.Trainer(Score(), tables) as clicker,
    pytest.raises(UserError, match=r'must be in \[0, 1\] for a loss of clicks'),
  ):
    clicker.train(slip.batches(str(tmp_path), batch_size=32, epochs=1))


def of_half(labels, predictions):
  return np.mean(abs(labels - predictions) < 0.5)


def test_early_stopping_watches_what_the_loss_or_the_user_says():
  own = [of_half, 'mae']
  for metrics, name in (None, 'rmse'), (own, 'mae'), ([slip.auc], 'auc'):
    with trainer(loss=optax.squared_error, metrics=metrics) as rater:
      history = rater.train(
        source(CLICKS, seed=0), 60, validation=held_out(CLICKS), every=10
      )
    curve = history.curve(name) * (-1 if name == 'auc' else 1)
    best = [one.best for one in history.validations]
    low = np.minimum.accumulate(np.append(np.inf, curve[:-1]))
    assert best == [*(curve < low)]
    assert any(best)


def test_early_stopping_of_heads_that_share_no_metric_watches_their_sum():
  labels = np.stack([CLICKS, STARS], 1)
  with trainer(heads=2, loss=(bce, optax.l2_loss)) as both:
    history = both.train(
      source(labels, seed=0), 30, validation=held_out(labels), every=10
    )
  sums = [
    v.metrics.heads[0].log_loss + v.metrics.heads[1].rmse
    for v in history.validations
  ]
  assert np.argmin(sums) == max(
    number for number, v in enumerate(history.validations) if v.best
  )


def test_early_stopping_cannot_watch_what_has_no_direction():
  with (
    trainer(loss=optax.squared_error, metrics=[of_half]) as rater,
    pytest.raises(UserError, match=r'patience watches .*got of_half'),
  ):
    rater.train(
      source(STARS), 9, validation=held_out(STARS), every=3, patience=1
    )
