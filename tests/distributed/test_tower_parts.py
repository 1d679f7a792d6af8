"""Towers on hosts of their own: what is computed, and what crosses."""

import functools

import jax
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.engine.mesh import on_first

BATCH, PARTS, DIM, STEPS = 32, 8, 8, 5
SIZES = {'a': 90, 'b': 37, 'c': 8, 'd': 120, 'e': 3}
TOWERS = {
  1: (),
  2: ((4, 0), (1, 3, 2)),
  4: ((4, 0), (3,), (1,), (2,)),
}
MODEL = {'bottom': (6, DIM), 'top': (9,)}


def features():
  """Bags of several kinds, and two features of one table."""
  return {
    'a': slip.Feature('a'),
    'b': slip.Feature('b', 'mean', 3, weighted=True),
    'c': slip.Feature('c', 'sqrtn', 2),
    'd': slip.Feature('d', max_length=4),
    'e': slip.Feature('a', max_length=2),
  }


def trained(hosts, devices, model, kind=None, **how):
  """All rows and parameters, the losses and the counts of a short run."""
  tables = {
    name: slip.Table(size, DIM, optimizer=kind if name in 'bd' else None)
    for name, size in SIZES.items()
    if name != 'e'
  }
  trainer = slip.Trainer(
    model,
    tables,
    features=features(),
    dense_optimizer=optax.adam(0.01),
    devices=devices,
    parts=PARTS,
    hosts=hosts,
    **how,
  )
  rng = np.random.default_rng(0)
  count = BATCH * STEPS
  data = {'label': (rng.random(count) < 0.4).astype(np.float32)}
  data['x'] = rng.standard_normal((count, 3)).astype(np.float32)
  for name, feature in features().items():
    size, length = SIZES[feature.table], feature.max_length
    ids = rng.zipf(1.3, (count, length)) % (size + 1) - 1
    data[name] = ids if length > 1 else np.maximum(ids[:, 0], 0)
  data['w'] = rng.random((count, 3)).astype(np.float32)
  source = slip.batches(
    data, batch_size=BATCH, epochs=1, dense=['x'], lookup_weights={'b': 'w'} if features()['b'].weighted else None
  )
  with trainer:
    history = trainer.train(source, progress=False)
    rows = {name: trainer.rows(name) for name in tables}
    params = jax.tree.map(np.asarray, on_first(trainer.parts.state.params))
    return (rows, params, history.losses), trainer.parts.engine.counters


@functools.cache
def flat(hosts, **how):
  """A DLRM on one device."""
  model = slip.DMT(**MODEL, towers=TOWERS[hosts], form='identity')
  return trained(1, 1, model, **how)[0]


@pytest.mark.parametrize('hosts', [2, 4])
def test_identities_are_the_flat_model_to_the_bit(hosts):
  model = slip.DMT(**MODEL, towers=TOWERS[hosts], form='identity')
  got, _ = trained(hosts, 8, model)
  jax.tree.map(np.testing.assert_array_equal, got, flat(hosts))
