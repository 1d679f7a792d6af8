"""Rows and gradients that devices exchange, in f32 or in half the bytes."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.distributed.lanes import even_lanes

BATCH, PARTS, DIM, ROWS = 64, 8, 4, 4096
FACTORS = np.array([0.1, -0.3, 0.7, 1.7], np.float32)
MODEL = slip.Functions(
  lambda key, dense, embeddings: {'none': jnp.zeros(())},
  lambda params, dense, embeddings: (
    embeddings['item'] @ jnp.asarray(FACTORS) + params['none']
  ),
)


def trained(items, devices=4, exchange='bfloat16', start=0.0, hosts=1):
  """All rows, the losses and the counts, after a pass over items clicked."""
  first = np.full((ROWS, DIM), start, np.float32)
  trainer = slip.Trainer(
    MODEL,
    {'item': slip.Table(ROWS, DIM, initializer=first)},
    features={'item': slip.Feature('item', max_length=items[0].size)},
    row_optimizer=slip.sgd(1.0),
    dense_optimizer=optax.sgd(0.0),
    devices=devices,
    parts=PARTS,
    exchange=exchange,
    hosts=hosts,
  )
  data = {'item': items, 'label': np.ones(len(items), np.float32)}
  source = slip.batches(data, batch_size=BATCH, epochs=1)
  with trainer:
    history = trainer.train(source, progress=False)
    counts = trainer.parts.engine.counters
    return trainer.rows('item'), history.losses, counts


def neighbours(values):
  """The numbers in bfloat16 below and above, f32."""
  bits = np.asarray(values, np.float32).view(np.uint32)
  inner = (bits & 0xFFFF0000).view(np.float32)
  outer = ((bits & 0xFFFF0000) + 0x10000).view(np.float32)
  return np.minimum(inner, outer), np.maximum(inner, outer)


def assert_unbiased(values, expected, gap):
  """Values [N, D] differ by less than 5 standard errors on average."""
  error = np.abs(values.mean(0, dtype=np.float64) - expected)
  assert (error < 5 * gap / 2 / np.sqrt(len(values))).all()


def test_a_gradient_is_rounded_to_a_neighbour_at_random():
  """Each row is looked up once, when it is 0, so that its value is known."""
  items = np.random.default_rng(0).permutation(ROWS)
  rows, _, _ = trained(items)
  got = rows * (2 * BATCH)  # the sigmoid of 0 is 1 / 2
  below, above = neighbours(FACTORS)
  assert ((got == below) | (got == above)).all()
  assert_unbiased(got, FACTORS, above - below)


@pytest.mark.parametrize('devices', [1, 8])
def test_sums_of_parts_are_rounded_without_a_bias(devices):
  """Eight rows a step, each of them looked up in each of the parts."""
  items = np.arange(1024).reshape(-1, 1, 8).repeat(PARTS, 1).reshape(-1)
  rows, _, _ = trained(items, devices)
  got = rows[:1024] * (2 * BATCH) / PARTS
  below, above = neighbours(FACTORS)
  assert (np.abs(got - FACTORS) < 3 * (above - below)).all()
  assert (got.std(0) > 0).all()
  assert_unbiased(got, FACTORS, above - below)


def test_rows_are_sent_rounded_to_nearest_and_kept_as_they_are():
  start = np.float32(1 + 2**-10)  # 1 in bfloat16
  rows, losses, _ = trained(np.arange(BATCH), start=start)
  logit = FACTORS.sum(dtype=np.float64)
  assert losses[0] == pytest.approx(np.log1p(np.exp(-logit)), abs=1e-6)
  _, plain, _ = trained(np.arange(BATCH), exchange='float32', start=start)
  expected = np.log1p(np.exp(-logit * float(start)))
  assert plain[0] == pytest.approx(expected, abs=1e-6)
  assert (rows[BATCH:] == start).all()
  moved = np.broadcast_to(FACTORS / (1 + np.exp(logit)) / BATCH, (BATCH, DIM))
  np.testing.assert_allclose(rows[:BATCH] - start, moved, rtol=0.02)


@pytest.mark.parametrize('hosts', [1, 4])
@pytest.mark.parametrize('exchange', ['float32', 'bfloat16'])
def test_a_batch_may_look_up_no_row(exchange, hosts):
  items = np.concatenate([np.full(BATCH, -1), np.arange(BATCH)])
  pairs = np.stack([items] * 2, 1)
  rows, losses, counts = trained(pairs, 8, exchange, hosts=hosts)
  expected, _, _ = trained(np.arange(BATCH), 8, exchange)
  np.testing.assert_allclose(rows, 2 * expected, rtol=0.02)
  np.testing.assert_allclose(losses, np.log(2), rtol=1e-6)
  assert counts.rows_used == BATCH


@pytest.mark.parametrize('devices', [1, 2, 8])
def test_bytes_are_those_of_rows_that_another_device_looks_up(devices):
  items = np.random.default_rng(1).zipf(1.3, 4 * BATCH) % ROWS
  sent = 0
  for batch in items.reshape(-1, BATCH):
    for number, own in enumerate(batch.reshape(devices, -1)):
      sent += (even_lanes(ROWS, devices).owners(np.unique(own)) != number).sum()
  for exchange, size in ('float32', 4), ('bfloat16', 2):
    *_, counts = trained(items, devices, exchange)
    assert counts.bytes_exchanged == sent * DIM * 2 * size


@pytest.mark.parametrize(('devices', 'hosts'), [(8, 2), (8, 8), (4, 2)])
def test_a_row_crosses_to_each_host_once(devices, hosts):
  items = np.random.default_rng(1).zipf(1.3, 4 * BATCH) % ROWS
  own, far, near = devices // hosts, 0, 0
  for batch in items.reshape(-1, BATCH):
    for host, of_host in enumerate(batch.reshape(hosts, -1)):
      rows = np.unique(of_host)
      owner = even_lanes(ROWS, devices).owners(rows)
      far += (owner // own != host).sum()
      for number, wanted in enumerate(of_host.reshape(own, -1)):
        here = np.isin(rows, wanted)
        near += (owner[here] % own != number).sum()
  for exchange, size in ('float32', 4), ('bfloat16', 2):
    *_, counts = trained(items, devices, exchange, hosts=hosts)
    assert counts.bytes_between_hosts == far * DIM * 2 * size
    assert counts.bytes_exchanged == (far + near) * DIM * 2 * size
