"""Devices share the examples of a prediction, too."""

import functools

from flax import linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slipstream_jax as slip

EXAMPLES, LENGTH, PARTS = 150, 4, 8
_rng = np.random.default_rng(0)
DATA = {
  'user': _rng.integers(0, 40, EXAMPLES),
  'seen': np.where(
    _rng.random((EXAMPLES, LENGTH)) < 0.3,
    -1,
    _rng.integers(0, 90, (EXAMPLES, LENGTH)),
  ),
  'label': (_rng.random((EXAMPLES, 2)) < 0.4).astype(np.float32),
}
WEIGHTS = _rng.random((EXAMPLES, LENGTH)).astype(np.float32)
TABLES = {'user': slip.Table(40, 6), 'item': slip.Table(90, 6, 'bfloat16')}


class Model(nn.Module):
  """Two heads, without dense features."""

  @nn.compact
  def __call__(self, embeddings, real):
    seen = embeddings['seen']
    seen = (
      seen
      if seen.ndim == 2
      else jnp.where(real['seen'][..., None], seen, 0).max(1)
    )
    return nn.Dense(2)(embeddings['user'] * nn.relu(nn.Dense(6)(seen)))


def source(batch_size, weighted, **more):
  data = DATA
  if weighted:
    data = {**DATA, 'weight': WEIGHTS}
    more['lookup_weights'] = {'seen': 'weight'}
  return slip.batches(data, batch_size=batch_size, **more)


def trainer(combiner, weighted, **more):
  features = {
    'user': slip.Feature('user'),
    'seen': slip.Feature(
      'item', combiner=combiner, max_length=LENGTH, weighted=weighted
    ),
  }
  return slip.Trainer(
    Model(),
    TABLES,
    features=features,
    dense_optimizer=optax.adam(0.01),
    placement=slip.cached(16, 'lru'),
    **more,
  )


@functools.cache
def trained(combiner, weighted, folder):
  """A checkpoint, and the logits of one device that computes all parts."""
  with trainer(combiner, weighted, devices=1, parts=PARTS) as one:
    one.train(source(16, weighted, seed=0), steps=12, progress=False)
    one.save(folder)
    return one.predict(source(37, weighted, epochs=1))


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  return functools.cache(lambda *of: tmp_path_factory.mktemp('of'))


@pytest.mark.parametrize('devices', [2, 8])
@pytest.mark.parametrize(
  ('combiner', 'weighted'), [('mean', False), ('sum', True), ('none', False)]
)
def test_devices_change_no_score(devices, combiner, weighted, folders):
  """Batches of 37, and of 2 at the end, that eight parts do not divide."""
  folder = folders(combiner, weighted)
  expected = trained(combiner, weighted, folder)
  assert expected.shape == (EXAMPLES, 2)
  with trainer(combiner, weighted, devices=devices, parts=PARTS) as several:
    several.restore(folder)
    held_out = functools.partial(source, 37, weighted, epochs=1)
    np.testing.assert_array_equal(several.predict(held_out()), expected)
    with trainer(combiner, weighted) as plain:
      plain.restore(folder)
      logits = plain.predict(held_out())
      np.testing.assert_allclose(logits, expected, 1e-5, 1e-6)
      one, other = (x.evaluate(held_out()) for x in (plain, several))
      assert other.log_loss == pytest.approx(one.log_loss)
      assert other.auc == pytest.approx(one.auc)


def test_each_device_computes_its_share(monkeypatch):
  """The programs of one and of eight devices get one and eight parts."""
  from slipstream_jax.training.parts import PartsStep

  rounds, score = [], PartsStep.scores

  def spy(step, *arguments):
    rounds.append(int(step.rounds))
    return score(step, *arguments)

  monkeypatch.setattr(PartsStep, 'scores', spy)
  for devices in 1, 8:
    with trainer('mean', False, devices=devices, parts=PARTS) as one:
      one.predict(source(150, False, epochs=1))
  assert rounds == [8, 1]
