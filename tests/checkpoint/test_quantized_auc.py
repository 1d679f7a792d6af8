"""What a trainer predicts after its rows were saved with fewer bits."""

import contextlib

from flax import linen as nn
import numpy as np
import optax
import pytest

from slipstream_jax import batches, rowwise_adagrad, Table, Trainer
from slipstream_jax.checkpoint.checkpoint import Checkpoints, Saving
from slipstream_jax.errors import UserError

USERS, ITEMS, TRAINED, HELD_OUT = 400, 300, 60_000, 40_000
CODECS = {'raw': 0.0, 'int8': 0.0005, 'int4': 0.005, 'int3': 0.02}
"""By how much the AUC may change."""


class Match(nn.Module):
  """A matrix factorization with a bias of each row."""

  @nn.compact
  def __call__(self, embeddings):
    user, item = embeddings['user'], embeddings['item']
    match = (user[:, 1:] * item[:, 1:]).sum(-1) * 4
    return match + user[:, 0] + item[:, 0]


def clicks(count, seed):
  """Columns of a market whose users and items have hidden tastes."""
  tastes = np.random.default_rng(0)
  of_user, of_item = (tastes.normal(size=(n, 3)) for n in (USERS, ITEMS))
  rng = np.random.default_rng(seed)
  user, item = rng.integers(USERS, size=count), rng.integers(ITEMS, size=count)
  chance = 1 / (1 + np.exp(-(of_user[user] * of_item[item]).sum(-1)))
  label = np.float32(rng.random(count) < chance)
  return {'user': user, 'item': item, 'label': label}


@pytest.fixture(scope='module')
def trained():
  """A trainer, and what it is evaluated on."""
  tables = {
    'user': Table(USERS, embedding_dim=16),
    'item': Table(ITEMS, embedding_dim=16),
  }
  trainer = Trainer(
    Match(),
    tables,
    row_optimizer=rowwise_adagrad(0.1),
    dense_optimizer=optax.sgd(0.1),
  )
  source = batches(clicks(TRAINED, 1), batch_size=500, seed=0)
  trainer.train(source, steps=800)
  test = batches(clicks(HELD_OUT, 2), batch_size=2_000, seed=None, epochs=1)
  yield trainer, test
  trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize('codec', CODECS)
def test_the_auc_stays(trained, tmp_path, codec):
  trainer, test = trained
  before = trainer.evaluate(test).auc
  assert before > 0.75  # there is something to lose
  with (
    contextlib.closing(Checkpoints(tmp_path / 'raw')) as raw,
    contextlib.closing(Checkpoints(tmp_path, Saving(codec=codec))) as lossy,
  ):
    raw.save(trainer.parts, {})
    lossy.save(trainer.parts, {})
    if codec != 'raw':
      with pytest.raises(UserError, match='in full precision'):
        lossy.restore(trainer.parts)
    lossy.restore(trainer.parts, exact=False)
    after = trainer.evaluate(test).auc
    raw.restore(trainer.parts)
  assert trainer.evaluate(test).auc == before
  assert abs(after - before) <= CODECS[codec]
