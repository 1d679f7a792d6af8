"""Towers on hosts of their own: what is computed, and what crosses."""

import contextlib
import functools
import json
import re

import jax
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.engine.mesh import on_first
from slipstream_jax.training.tower_parts import TowersStep

BATCH, PARTS, DIM, STEPS = 32, 8, 8, 9
SIZES = {'a': 90, 'b': 37, 'c': 8, 'd': 120}
TOWERS = {2: ((4, 0), (1, 3, 2)), 4: ((4, 0), (3,), (1,), (2,))}
FEATURES = {
  'a': slip.Feature('a'),
  'b': slip.Feature('b', 'mean', 3, weighted=True),
  'c': slip.Feature('c', 'sqrtn', 2),
  'd': slip.Feature('d', max_length=4),
  'e': slip.Feature('a', max_length=2),
}
SKIP = slip.Skip(0.6, mode='rows', phases=slip.Phases(1, 2, 1, 6))


def dmt(hosts, form, width=None, **more):
  how = {'bottom': (6, DIM), 'top': (9,), 'form': form, 'width': width} | more
  return slip.DMT(**how, towers=TOWERS[hosts])


def source():
  rng, count = np.random.default_rng(0), BATCH * STEPS
  data = {'label': (rng.random(count) < 0.4).astype(np.float32)}
  data['x'] = rng.standard_normal((count, 3)).astype(np.float32)
  data['w'] = rng.random((count, 3)).astype(np.float32)
  for name, feature in FEATURES.items():
    size, length = SIZES[feature.table], feature.max_length
    ids = rng.zipf(1.3, (count, length)) % (size + 1) - 1
    data[name] = ids if length > 1 else np.maximum(ids[:, 0], 0)
  weights = {'b': 'w'}
  return slip.batches(
    data, batch_size=BATCH, epochs=1, dense=['x'], lookup_weights=weights
  )


def made(model, hosts=1, devices=1, dtype='float32', order=FEATURES, **how):
  other = slip.sgd(0.3)  # two groups
  tables = {
    name: slip.Table(
      size, DIM, dtype, optimizer=other if name in 'bd' else None
    )
    for name, size in SIZES.items()
  }
  how = {'dense_optimizer': optax.adam(0.01), 'parts': PARTS} | how
  return contextlib.closing(
    slip.Trainer(
      model,
      tables,
      features={name: FEATURES[name] for name in order},
      devices=devices,
      hosts=hosts,
      **how,
    )
  )


def all_of(trainer):
  """All rows and parameters, and predictions."""
  rows = {name: trainer.rows(name) for name in SIZES}
  params = jax.tree.map(np.asarray, on_first(trainer.parts.state.params))
  return rows, params, trainer.predict(source())


@functools.cache
def trained(model, hosts=1, devices=1, skip=None, **how):
  with made(model, hosts, devices, **how) as trainer:
    history = trainer.train(source(), skip=skip, progress=False)
    counts = trainer.parts.engine.counters
    return (*all_of(trainer), history.losses), counts


def assert_same(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


hosts_of_two = pytest.mark.parametrize(
  'hosts', [2, pytest.param(4, marks=pytest.mark.slow)]
)
FORMS = [('identity', None), ('linear', 4), ('cross', 4), ('linear', None)]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('hosts', 'devices', 'form', 'width'),
  [(*sizes, *form) for sizes in ((2, 4), (2, 8), (4, 8)) for form in FORMS],
)
def test_devices_of_a_host_change_no_number(hosts, devices, form, width):
  model = dmt(hosts, form, width)
  found, _ = trained(model, hosts, devices)
  assert_same(found, trained(model, hosts, hosts)[0])
  # XLA may round otherwise what it compiles as one program.
  flat, _ = trained(model)
  jax.tree.map(
    lambda *pair: np.testing.assert_allclose(*pair, 1e-4, 1e-6), *(found, flat)
  )


@hosts_of_two
def test_identities_on_hosts_are_the_flat_model_to_the_bit(hosts):
  model = dmt(hosts, 'identity')
  found, counts = trained(model, hosts, 8)
  expected, flat = trained(model)
  assert_same(found, expected)
  away = BATCH * STEPS * (hosts - 1) // hosts
  assert counts.bytes_between_hosts == 2 * away * len(FEATURES) * DIM * 4
  assert not flat.bytes_between_hosts


@pytest.mark.slow
def test_identities_on_hosts_are_a_dlrm_to_the_bit():
  """The DLRM has its features in the order of the towers."""
  sizes, towers = {'bottom': (6, DIM), 'top': (9,)}, ((0, 4), (1, 3, 2))
  model = slip.DMT(**sizes, towers=towers, form='identity')
  names = [*FEATURES]
  order = tuple(names[i] for own in towers for i in own)
  found, _ = trained(model, 2, 8)
  assert_same(found, trained(slip.DLRM(**sizes), order=order)[0])


@pytest.mark.parametrize(
  ('hosts', 'placement', 'dtype', 'exchange', 'skip'),
  [
    (2, 'cached', 'bfloat16', 'bfloat16', SKIP),
    *(
      pytest.param(*how, marks=pytest.mark.slow)
      for how in (
        (4, 'streamed', 'float32', 'float32', SKIP),
        (2, 'pinned', 'float16', 'bfloat16', SKIP),
        (2, 'resident', 'float32', 'bfloat16', None),
        (4, 'cached', 'bfloat16', 'float32', None),
      )
    ),
  ],
)
def test_towers_on_hosts_fit_all_else(hosts, placement, dtype, exchange, skip):
  """Placements, half precision, exchanges in it, and frozen rows."""
  placing = slip.cached(12, 'lru') if placement == 'cached' else placement
  how = {'dtype': dtype, 'exchange': exchange, 'hot_bytes': 1500}
  model = dmt(hosts, 'linear', 4)
  found, _ = trained(model, hosts, 8, skip, placement=placing, **how)
  assert_same(found, trained(model, hosts, hosts, skip, **how)[0])


@pytest.mark.parametrize(
  ('before', 'after'), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)]
)
def test_a_run_is_resumed_with_other_hosts(before, after, tmp_path):
  model = dmt(2, 'identity')
  with made(model, before, 2 * before) as first:
    first.train(source(), 4, progress=False)
    first.save(tmp_path)
  with made(model, after, 4) as last:
    last.restore(tmp_path)
    last.train(source(), STEPS - 4, progress=False)
    found = all_of(last)
  assert_same(found, trained(model)[0][:3])


@pytest.mark.parametrize(
  ('hosts', 'devices'),
  [
    (2, 8),
    *(pytest.param(4, n, marks=pytest.mark.slow) for n in (4, 8)),
  ],
)
def test_vectors_arrive_where_their_example_is(hosts, devices, monkeypatch):
  """Each number says its feature, example and place in the vector."""
  names = [*'abcde']
  code = np.arange(BATCH)[:, None] * 100.0 + np.arange(DIM)
  tables = {
    name: slip.Table(
      BATCH, DIM, initializer=(10_000.0 * i + code).astype(np.float32)
    )
    for i, name in enumerate(names)
  }
  seen, compute = [], TowersStep.vectors

  def spy(*arguments):
    seen.append(compute(*arguments))
    return seen[-1]

  monkeypatch.setattr(TowersStep, 'vectors', spy)
  ids = np.arange(BATCH)
  data = dict.fromkeys(names, ids) | {'label': np.ones(BATCH, np.float32)}
  data['x'] = np.ones((BATCH, 3), np.float32)
  how = {'devices': devices, 'parts': PARTS, 'hosts': hosts}
  with slip.Trainer(dmt(hosts, 'identity'), tables, **how) as trainer:
    one = slip.batches(data, batch_size=BATCH, epochs=1, dense=['x'])
    trainer.train(one, 1, progress=False)
  (vectors,) = jax.device_get(seen)
  vectors = vectors.reshape(devices, PARTS, *vectors.shape[1:])
  own = vectors[:, : PARTS // devices].reshape(PARTS, *vectors.shape[2:])
  examples = ids.reshape(PARTS, -1)
  for tower, features in enumerate(TOWERS[hosts]):
    for place, feature in enumerate(features):
      expected = 10_000.0 * feature + code[examples]
      np.testing.assert_array_equal(own[:, tower, :, place], expected)


@pytest.mark.slow
@pytest.mark.parametrize('hosts', [2, 4])
def test_bytes_between_hosts_are_those_of_identities_by_r(hosts):
  whole = trained(dmt(hosts, 'identity'), hosts, 8)[1].bytes_between_hosts
  for width, r in (4, 2), (2, 4):
    counts = trained(dmt(hosts, 'linear', width), hosts, 8)[1]
    assert whole == r * counts.bytes_between_hosts


def groups_of(program, devices):
  """The devices that exchange with each other, in each compiled program."""
  # As lists or, since JAX 0.12, by an axis of the mesh.
  named = {'of_host': devices.tolist(), 'hosts': devices.T.tolist()}
  found = []
  for one in program.compiled.values():
    pattern = r"all-to-all.*replica_groups=(\{\{.*?\}\}|mesh.*?\{'\w+'\})"
    for groups in re.findall(pattern, one.as_text()):
      axis = re.search(r"\{'(\w+)'\}", groups)
      lists = groups.replace('{', '[').replace('}', ']')
      found.append(named[axis[1]] if axis else json.loads(lists))
  assert found
  return found


@hosts_of_two
def test_a_device_exchanges_with_its_host_and_its_peers_alone(hosts):
  """So it sends H - 1 + L - 1 messages, where it sent H L - 1."""
  with made(dmt(hosts, 'identity'), hosts, 8) as trainer:
    trainer.train(source(), 1, progress=False)
    parts = trainer.parts
    step = parts.programs.over(parts.engine.devices, parts.over)
  devices = np.arange(8).reshape(hosts, -1)
  for program in step._send, step._add_towers:
    for groups in groups_of(program, devices):
      assert groups == devices.tolist()
  for program in step._cross, step._cross_back:
    for groups in groups_of(program, devices):
      assert groups == devices.T.tolist()


@pytest.mark.parametrize(
  ('model', 'how', 'rule'),
  [
    (dmt(4, 'linear'), {}, 'need a DMT of 2 towers.*4 towers'),
    (
      slip.DMT(bottom=(6, DIM), towers=((0, 1, 2), (3, 4))),
      {},
      "one tower alone.*table 'a' in towers 0 and 1",
    ),
    (
      slip.DMT(bottom=(6, DIM), towers=((0, 4), (1, 2))),
      {},
      'each of the 5 features must be in one tower',
    ),
    (dmt(2, 'linear', padded=True), {}, 'padded'),
    (dmt(2, 'linear'), {'replicas': 2}, 'no replicas of rows, got 2'),
    (dmt(2, 'linear'), {'devices': 1}, 'divide its 1 devices, got 2'),
    (dmt(2, 'linear'), {'hosts': 0}, 'hosts'),
    (slip.DLRM(bottom=(6, DIM)), {'hosts': 3}, 'power of two.*got 3'),
    (
      slip.DLRM(bottom=(6, DIM)),
      {'hosts': 4, 'replicas': 4},
      'divide its 2 devices, got 4',
    ),
  ],
)
def test_hosts_that_cannot_be_are_refused(model, how, rule):
  with pytest.raises(slip.UserError, match=rule):
    made(model, **{'hosts': 2, 'devices': 8} | how).__enter__()
