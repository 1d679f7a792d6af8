"""Whatever stands in the place of an argument, it works or is one sentence.

The arguments are given in a process of their own: here the types are checked
by another library, before ours sees them.
"""

import sys

import pytest

from tests.support.programs import finished

SCRIPT = """
import os, tempfile
import numpy as np
import polars as pl
import slipstream_jax as slip
from flax import linen as nn
from slipstream_jax.schedules.settings import check_settings

THINGS = [
  [], ['x'], {}, {'a': 1}, {1: 2}, set(), object(), None, 'nothing', '', b'x',
  float('nan'), float('inf'), -1, 0, 2.5, True, 1 << 70, (), (1, 'x'), type,
  lambda x: x, np.array([1, 2]), np.array(['a']), np.float32(1),
]

class Model(nn.Module):
  @nn.compact
  def __call__(self, dense, embeddings):
    return embeddings['a'].sum(-1) + nn.Dense(1)(dense)[:, 0]

def source(**given):
  first = {'dense': np.zeros((64, 3)), 'features': {'a': np.arange(64) % 10}}
  first |= {'label': np.zeros(64), 'batch_size': 8}
  return slip.batches(**first | given)

def packed(**given):
  given = {'source': frame, 'features': ['u'], 'folder': next(names)} | given
  slip.pack(**given)

tables = {'a': slip.Table(10, 4)}
bound = slip.TableSet(tables)
frame = pl.DataFrame({'u': [1, 2, 3, 4, 5] * 4, 'label': [0, 1] * 10})
names = iter(f'packed-{n}' for n in range(10**6))
words = slip.Vocabulary.fit(np.arange(5))
os.chdir(tempfile.mkdtemp())
slip.pack(frame, 'packed', features=['u'])
trainer = slip.Trainer(Model(), tables)
trainer.train(source(epochs=1), 1)

def table(**given):
  sizes = {'vocabulary_size': 10, 'embedding_dim': 4}
  slip.TableSet({'a': slip.Table(**sizes | given)})

def feature(**given):
  slip.TableSet(tables, {'a': slip.Feature(**{'table': 'a'} | given)})

CALLS = {
  'skip': (lambda **k: check_settings(slip.Skip(**k)), slip.Skip._fields),
  'phases': (
    lambda **k: check_settings(slip.Skip(phases=slip.Phases(**k))),
    slip.Phases._fields,
  ),
  'table': (table, slip.Table._fields),
  'feature': (feature, slip.Feature._fields),
  'set': (
    lambda **k: slip.TableSet(**{'tables': tables} | k),
    ('tables', 'features'),
  ),
  'batches': (
    lambda **k: source(**k).bind(bound),
    ('dense', 'features', 'label', 'batch_size', 'seed', 'epochs', 'weights',
     'lookup_weights', 'vocabularies', 'too_long'),
  ),
  'trainer': (
    lambda **k: slip.Trainer(**{'model': Model(), 'tables': tables} | k),
    ('tables', 'features', 'row_optimizer', 'dense_optimizer', 'loss',
     'placement', 'hot_bytes', 'metrics',
     'microbatches', 'prefetch', 'seed', 'watched',
     'workers'),
  ),
  'train': (
    lambda **k: trainer.train(**{'source': source(epochs=1), 'steps': 0} | k),
    ('skip', 'steps', 'epochs', 'callbacks'),
  ),
  'validate': (
    lambda **k: trainer.train(
      **{'source': source(epochs=1), 'steps': 0} | k,
      validation=source(epochs=1),
    ),
    ('every', 'patience'),
  ),
  'evaluate': (
    lambda **k: trainer.evaluate(source(epochs=1), **k),
    ('max_batches',),
  ),
  'rows': (trainer.rows, ('table',)),
  'cached': (
    lambda **k: slip.cached(**{'capacity': 5} | k),
    ('capacity', 'eviction', 'look_ahead'),
  ),
  'fit': (
    lambda **k: slip.Vocabulary.fit(**{'ids': np.arange(5)} | k),
    ('min_count', 'hash_rows', 'max_size'),
  ),
  'learned': (
    lambda **k: slip.learned_hash(
      **{
        'words': words,
        'counts': np.ones(6, int),
        'vectors': np.zeros((6, 2)),
        'size': 4,
      } | k
    ),
    ('words', 'counts', 'vectors', 'size', 'private', 'seed'),
  ),
  'save': (words.save, ('path',)),
  'load': (slip.Vocabulary.load, ('path',)),
  'checkpoints': (slip.Checkpoints, ('folder',)),
  'pack': (
    packed,
    ('features', 'dense', 'label', 'folder', 'too_long', 'separator',
     'min_count', 'hash_rows'),
  ),
  'packed_dataset': (slip.packed_dataset, ('folder',)),
}

wrong = []
for name, (call, arguments) in CALLS.items():
  for argument in arguments:
    for thing in THINGS:
      try:
        call(**{argument: thing})
      except slip.UserError as error:
        if '\\n' in str(error).replace(repr(thing), ''):
          wrong.append(f'{name}, {argument}: {error}')
      except Exception as error:
        wrong.append(f'{name}, {argument}={thing!r}: {error!r}')
print(len(wrong))
print('\\n'.join(wrong))
"""


def test_anything_in_the_place_of_an_argument():
  done = finished([sys.executable, '-c', SCRIPT])
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[0] == '0', done.stdout


def test_to_look_whether_a_source_is_bound_reads_nothing():
  from slipstream_jax.api.making import opened
  from slipstream_jax.inputs.arrays import UnboundExamples
  from slipstream_jax.inputs.batches import batches

  def never():
    pytest.fail('somebody read a batch')
    yield {}

  source = batches(never, ['a'], 'y')
  assert isinstance(source, UnboundExamples)
  assert opened(source) is source


MODELS = """
import numpy as np
import slipstream_jax as slip
from flax import linen as nn

class WantsDense(nn.Module):
  @nn.compact
  def __call__(self, dense, embeddings):
    return embeddings['a'].sum(-1) + nn.Dense(1)(dense)[:, 0]

class Draws(nn.Module):
  @nn.compact
  def __call__(self, embeddings):
    rows = nn.Dropout(0.5, deterministic=False)(embeddings['a'])
    return nn.Dense(1)(rows)[:, 0]

ids = {'a': np.arange(64) % 10}
source = slip.batches(None, ids, np.zeros(64), batch_size=8, epochs=1)
for model in WantsDense(), Draws():
  try:
    slip.Trainer(model, {'a': slip.Table(10, 4)}).evaluate(source)
    print('works')
  except slip.UserError as error:
    print(error)
"""


def test_models_that_cannot_be_evaluated_are_told_why():
  done = finished([sys.executable, '-c', MODELS])
  assert done.returncode == 0, done.stderr
  dense, draws = done.stdout.splitlines()
  # In some versions of Flax a layer may have no inputs.
  said = 'a model that uses dense features needs'
  assert dense == 'works' or dense.startswith(said)
  assert draws.startswith('a model must draw nothing outside')
