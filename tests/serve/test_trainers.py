"""What a trainer of the API exports scores raw ids as the trainer predicts."""

import itertools
import json
import os
import pathlib
import subprocess
import sys

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import polars as pl
import pytest

import slip_serve
from slip_serve import ServeError
import slipstream_jax as slip
from tests.serve.raw import answered, posted
from tests.support.programs import finished, started

BATCH = 16
ITEMS = [f'item-{number}' for number in range(30)] + ['7', '-1', '007', 'é', '']
RNG = np.random.default_rng(0)


class Towers(nn.Module):
  """Pools all embeddings; dense features by name or not."""

  heads: int = 0

  @nn.compact
  def __call__(self, dense, embeddings):
    if isinstance(dense, dict):
      dense = jnp.stack([*dense.values()], axis=1)
    parts = [e.reshape(len(dense), -1) for e in embeddings.values()]
    whole = jnp.concatenate([dense, *parts], axis=1)
    logits = nn.Dense(max(self.heads, 1))(whole)
    return logits if self.heads else logits[:, 0]


class Linear(nnx.Module):
  def __init__(self, rngs):
    self.out = nnx.Linear(8, 1, rngs=rngs)

  def __call__(self, embeddings):
    return self.out(sum(embeddings.values()))[:, 0]


def texts(count, missing=True):
  values = RNG.choice(ITEMS, count).tolist()
  return [None if missing and i % 11 == 3 else v for i, v in enumerate(values)]


def check(folder, trainer, source, dense, ids, weights=None, memory='dram'):
  """An export scores as `predict`; returns the number of logits."""
  expected = trainer.predict(source)
  with slip_serve.load(folder, memory, 8) as scorer:
    query = scorer.query(dense, ids, weights)
    logits = scorer.logits(query)
    np.testing.assert_array_equal(
      logits.view(np.uint32), expected.view(np.uint32)
    )
    chances = scorer.probabilities(dense, ids, weights)
  np.testing.assert_allclose(chances, 1 / (1 + np.exp(-expected)), rtol=1e-5)
  return len(logits)


@pytest.mark.parametrize('learned', [False, True])
@pytest.mark.parametrize('admit_after', [1, 3])
def test_growing_vocabularies_are_exported_as_trained(
  tmp_path, admit_after, learned
):
  words = {'item': slip.GrowingVocabulary(20, admit_after=admit_after)}
  users = RNG.integers(-3, 40, 200)
  known = slip.Vocabulary.fit(
    users[:100], hash_rows=0 if learned else 3, min_count=2
  )
  if learned:
    counts = np.bincount(known.rows(users), minlength=known.size)
    vectors = RNG.normal(size=(known.size, 2))
    known = slip.learned_hash(known, counts, vectors, 12, private=0.5)
  data = {'user': users, 'item': texts(200), 'label': users % 2}
  words |= {'user': known}
  tables = {
    'user': slip.Table(known.size, 8),
    'item': slip.Table(20, 4),
  }
  source = slip.batches(data, batch_size=BATCH, seed=0, vocabularies=words)
  with slip.Trainer(nn_of(), tables) as trainer:
    trainer.train(source, steps=20)
    trainer.export(tmp_path / 'x', batch_sizes=(BATCH,))
    ids = {'user': RNG.integers(-50, 90, 48), 'item': [*texts(47), 'unseen']}
    new = slip.batches(
      None, ids, batch_size=BATCH, epochs=1, vocabularies=words
    )
    for memory in 'dram', 'ssd':
      check(tmp_path / 'x', trainer, new, None, ids, memory=memory)


def nn_of():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, embeddings):
      return nn.Dense(1)(jnp.concatenate([*embeddings.values()], 1))[:, 0]

  return Model()


class Rater(nn.Module):
  """Returns [B, 1], as a layer of one output does."""

  @nn.compact
  def __call__(self, embeddings):
    return nn.Dense(1)(jnp.concatenate([*embeddings.values()], 1))


def test_ratings_of_a_model_with_an_axis_of_its_own_are_exported(tmp_path):
  users = RNG.integers(0, 40, 96)
  data = {'user': users, 'label': 1.0 + users % 5}
  tables = {'user': slip.Table(40, 4)}
  with slip.Trainer(Rater(), tables, loss=optax.squared_error) as trainer:
    trainer.train(slip.batches(data, batch_size=BATCH, seed=0), steps=10)
    trainer.export(tmp_path / 'x', batch_sizes=(BATCH,))
    ids = {'user': users}
    new = slip.batches(None, ids, batch_size=BATCH, epochs=1)
    ratings = trainer.predict(new)
    assert ratings.shape == (96,)
    with slip_serve.load(tmp_path / 'x') as scorer:
      np.testing.assert_array_equal(scorer.predictions(None, ids), ratings)
      with pytest.raises(ServeError, match=r'predict clicks .*use pred'):
        scorer.probabilities(None, ids)


def test_bags_weights_heads_and_shared_tables_are_exported(tmp_path):
  lists = [texts(int(n), False) for n in RNG.integers(0, 4, 96)]
  rows = RNG.integers(-1, 9, (96, 2))
  weights = [RNG.normal(size=len(one)).tolist() for one in lists]
  words = slip.Vocabulary.fit(
    ['a', *itertools.chain(*lists)], hash_rows=4, max_size=20
  )
  tables = {
    'item': slip.Table(words.size, 8),
    'shop': slip.Table(9, 4, unknown='row', optimizer=optax.sgd(0.1)),
  }
  features = {
    'bought': slip.Feature('item', 'mean', 3, weighted=True),
    'seen': slip.Feature('item'),
    'shops': slip.Feature('shop', 'none', 2),
  }

  def of(data, labels=None, **how):
    return slip.batches(
      {'age': data['age'], 'price': data['price']},
      {name: data[name] for name in features},
      labels,
      batch_size=BATCH,
      lookup_weights={'bought': data['weights']},
      vocabularies={'item': words},
      **how,
    )

  data = {
    'bought': lists,
    'seen': texts(96),
    'shops': rows,
    'weights': weights,
    'age': RNG.normal(size=96).astype(np.float32),
    'price': RNG.normal(size=96).astype(np.float32),
  }
  labels = (RNG.random((96, 2)) < 0.5).astype(np.float32)
  loss = (optax.sigmoid_binary_cross_entropy,) * 2
  with slip.Trainer(Towers(2), tables, features=features, loss=loss) as trainer:
    trainer.train(of(data, labels, seed=0), steps=10)
    trainer.export(tmp_path / 'x', batch_sizes=(BATCH,))
    data['shops'] = np.where(rows == 3, 1000, rows)  # beyond the table
    dense = {'price': data['price'], 'age': data['age']}
    ids = {name: data[name] for name in features}
    own = {'bought': weights}
    new = of(data, epochs=1)
    assert check(tmp_path / 'x', trainer, new, dense, ids, own) == 96
    with slip_serve.load(tmp_path / 'x') as scorer:
      for change, match in (
        ({'ids': ids | {'seen': [7] * 96}}, 'must be a text'),
        ({'ids': ids | {'more': [7] * 96}}, 'ids by name'),
        ({'ids': ids | {'bought': [['a'] * 4] * 96}}, 'has 3 columns'),
        ({'ids': ids | {'seen': ['a']}}, 'as many examples'),
        ({'dense': {'age': data['age']}}, 'dense by name'),
        ({'dense': dense | {'age': ['x'] * 96}}, 'dense must be numbers'),
        ({'weights': {'bought': weights[:5]}}, 'shaped as its ids'),
        ({'weights': {'buy': weights}}, 'weights by name'),
      ):
        given = {'dense': dense, 'ids': ids, 'weights': own} | change
        with pytest.raises(ServeError, match=match):
          scorer.query(**given)


def test_a_packed_folder_s_vocabulary_and_fills_are_exported(tmp_path):
  frame = pl.DataFrame(
    {
      'user': [str(n) for n in RNG.integers(0, 40, 300)],
      'item': texts(300),
      'age': [None if i % 7 == 2 else float(i % 13) for i in range(300)],
      'label': RNG.integers(0, 2, 300),
    }
  )
  folder = tmp_path / 'packed'
  how = {'features': ['user', 'item'], 'dense': ['age'], 'fill': -1.5}
  data = slip.pack(frame, folder, **how)
  tables = {name: slip.Table(size, 8) for name, size in data.sizes.items()}
  with slip.Trainer(Towers(), tables) as trainer:
    trainer.train(slip.batches(folder, batch_size=BATCH, seed=0), steps=10)
    trainer.export(tmp_path / 'x', batch_sizes=(BATCH,))
    last = frame[-60:]
    held_out = slip.batches(folder, batch_size=BATCH, epochs=1, split='test')
    ids = {name: last[name].to_list() for name in ('user', 'item')}
    dense = {'age': last['age'].to_list()}
    assert check(tmp_path / 'x', trainer, held_out, dense, ids) == 60


def test_a_restored_trainer_exports_with_the_source_it_is_given(tmp_path):
  words = {'item': slip.GrowingVocabulary(40)}
  data = {'item': texts(64, False), 'label': [0, 1] * 32}

  def trainer():
    with jax.transfer_guard('allow'):
      model = Linear(nnx.Rngs(0))
    return slip.Trainer(
      model,
      {'item': slip.Table(40, 8)},
      placement='pinned',
    )

  with trainer() as first:
    first.train(
      slip.batches(data, batch_size=BATCH, vocabularies=words), steps=8
    )
    first.save(tmp_path / 'run')
    first.export(tmp_path / 'one')
  words = {'item': slip.GrowingVocabulary(40)}
  with trainer() as second:
    with pytest.raises(slip.UserError, match='first source'):
      second.export(tmp_path / 'none', [data])
    second.restore(tmp_path / 'run')
    with pytest.raises(slip.UserError, match='trained on'):
      second.export(tmp_path / 'none')
    source = slip.batches(data, batch_size=BATCH, vocabularies=words)
    second.export(tmp_path / 'two', source)
  names = sorted(path.name for path in (tmp_path / 'one').iterdir())
  assert 'popular_0.bin' in names
  for name in names:
    one, two = ((tmp_path / f / name).read_bytes() for f in ('one', 'two'))
    assert one == two or name.endswith(('.jax', '.json'))
  assert not (tmp_path / 'none').exists()


def test_what_cannot_be_exported_is_refused(tmp_path):
  class Rows:
    def rows(self, ids):
      return np.zeros(len(ids), np.int32)

  tables = {'item': slip.Table(3, 8)}
  features = {'a': slip.Feature('item'), 'b': slip.Feature('item')}
  ids = {'a': [1, 2] * BATCH, 'b': [1, 2] * BATCH}
  for words, match in (
    ({'item': Rows()}, 'Rows'),
    ({'a': slip.Vocabulary.fit([1, 2])}, 'share its vocabulary'),
  ):
    source = slip.batches(
      None, ids, [0, 1] * BATCH, batch_size=BATCH, vocabularies=words
    )
    model = slip.Functions(
      lambda key, dense, embeddings: {},
      lambda params, dense, embeddings: sum(embeddings.values()).sum(1),
    )
    with slip.Trainer(model, tables, features=features) as trainer:
      trainer.train(source, steps=2)
      with pytest.raises(slip.UserError, match=match):
        trainer.export(tmp_path / 'x')
      with pytest.raises(slip.UserError, match='float32, float16, int8'):
        trainer.export(tmp_path / 'x', dtype='int3')
  assert [*tmp_path.iterdir()] == []


TRAIN = """
import json, sys
from flax import linen as nn
import numpy as np
import slipstream_jax as slip

class TwoTowers(nn.Module):
  @nn.compact
  def __call__(self, embeddings):
    return (nn.Dense(16)(embeddings['user']) * embeddings['item']).sum(-1)

user, item = [*range(200)] * 25, [f'item-{n}' for n in range(500)] * 10
data = {'user': user, 'item': item, 'label': [u % 2 for u in user]}
tables = {'user': slip.Table(10**5), 'item': slip.Table(400)}
words = {'item': slip.GrowingVocabulary(400)}
how = {'batch_size': 100, 'vocabularies': words}
source = slip.batches(data, seed=0, **how)
trainer = slip.Trainer(TwoTowers(), tables)
trainer.train(source, steps=60)
trainer.export('export', batch_sizes=[100])
ids = {'user': user[:100], 'item': [None, 'new', *item[2:100]]}
logits = trainer.predict(slip.batches(None, ids, epochs=1, **how))
with open('expected.json', 'w') as file:
  json.dump([ids, logits.tolist()], file)
"""


def test_what_the_wheel_holds_trains_exports_and_serves(tmp_path):
  """No other folder of the repository is needed."""
  installed = tmp_path / 'installed'
  installed.mkdir()
  root = pathlib.Path(slip.__file__).resolve().parents[1]
  for name in 'slipstream_jax', 'slip_serve':
    (installed / name).symlink_to(root / name)
  how = {'cwd': tmp_path, 'env': os.environ | {'PYTHONPATH': str(installed)}}
  done = finished([sys.executable, '-c', TRAIN], **how)
  assert done.returncode == 0, done.stderr
  ids, logits = json.loads((tmp_path / 'expected.json').read_text())
  command = [sys.executable, '-m', 'slip_serve', 'export', '--port=0']
  with started(command, **how, stdout=subprocess.PIPE) as process:
    host, port = process.stdout.readline().strip()[7:].split(':')
    lines = [*zip(ids['user'], ids['item'], strict=True)]
    body = json.dumps({'ids': lines}).encode()
    code, answer = answered((host, int(port)), posted(body))
    assert code == 200, answer
    body = json.dumps({'ids': [[1, 2]]}).encode()
    assert answered((host, int(port)), posted(body))[0] == 400
  with slip_serve.load(tmp_path / 'export') as scorer:
    own = scorer.logits(scorer.query(None, ids))
    chances = scorer.probabilities(None, ids)
  np.testing.assert_array_equal(own, np.array(logits, np.float32))
  np.testing.assert_array_equal(
    np.array(answer['probabilities'], np.float32), chances
  )
