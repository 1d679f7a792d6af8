"""Shampoo against numpy in float64, and in trainers."""

import functools

import jax
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.host_roots import inverse_root
from tests.support import market

STEPS = 7
ADAGRAD = {'b1': 0.0, 'b2': 1.0, 'graft': optax.scale_by_rss()}


def directions(gradients, **arguments):
  """The direction of each step, of gradients [steps, ...]."""
  tx = slip.scale_by_shampoo(**arguments)
  found = []
  with jax.transfer_guard('allow'):
    update, state = jax.jit(tx.update), tx.init(gradients[0])
    for gradient in gradients:
      direction, state = update(gradient, state)
      found.append(np.asarray(direction))
  return np.stack(found)


def drawn(*shape, seed=0):
  values = np.random.default_rng(seed).normal(size=(STEPS, *shape))
  return values.astype(np.float32)


def adam(gradients):
  mu = nu = 0.0
  for t, g in enumerate(gradients.astype(np.float64), 1):
    mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g * g
    yield mu / (1 - 0.9**t) / (np.sqrt(nu / (1 - 0.999**t)) + 1e-8)


def by_numpy(gradients, every, slices, shape, b2=0.999, eps=1e-6):
  """Shampoo of blocks, `slices` of leaves that have been reshaped."""
  order, lag = len(shape), every // 5
  like = [d.reshape(shape) for d in adam(gradients)]
  mu = np.zeros(shape)
  own = [[0.0] * order for _ in slices]
  roots = [[None] * order for _ in slices]
  for t, g in enumerate(gradients.astype(np.float64), 1):
    rests = t > every and 0 < t % every <= lag
    g = g.reshape(shape)
    mu = 0.9 * mu + 0.1 * g
    step = like[t - 1].copy()
    for at, stats, root in zip(slices, own, roots, strict=True):
      result = mu[at]
      for axis in range(order):
        others = [i for i in range(order) if i != axis]
        product = np.tensordot(g[at], g[at], (others, others))
        if not rests:
          stats[axis] = b2 * stats[axis] + (1 if b2 == 1 else 1 - b2) * product
        if t >= every and t % every == lag:
          values, vectors = np.linalg.eigh(stats[axis])
          values = values / values[-1] + eps
          power = values ** (-1 / (2 * order))
          root[axis] = vectors @ np.diag(power) @ vectors.T
        if t >= every + lag:
          turned = np.tensordot(root[axis], result, (1, axis))
          result = np.moveaxis(turned, 0, axis)
      if t >= every + lag:
        norm = np.linalg.norm(result)
        step[at] = result * np.linalg.norm(step[at]) / norm
    yield step.reshape(gradients.shape[1:])


CASES = {
  'a matrix is one block': ((4, 3), 4, (4, 3), [np.s_[:, :]]),
  'a matrix is cut': (
    (5, 4),
    3,
    (5, 4),
    [
      np.s_[a, b]
      for a in (np.s_[:3], np.s_[3:])
      for b in (np.s_[:2], np.s_[2:])
    ],
  ),
  'small axes are merged': ((2, 1, 3, 5), 6, (6, 5), [np.s_[:, :]]),
  'a small matrix is a vector': ((2, 3), 6, (6,), [np.s_[:]]),
  'a vector is cut': ((5,), 3, (5,), [np.s_[:3], np.s_[3:]]),
  'a number': ((), 3, (1,), [np.s_[:]]),
  'three axes': ((3, 4, 2), 4, (3, 4, 2), [np.s_[:, :, :]]),
}


@pytest.mark.parametrize('case', [*CASES])
def test_steps_are_those_of_numpy(case):
  shape, size, merged, slices = CASES[case]
  gradients = drawn(*shape)
  found = directions(gradients, every=2, block_size=size, eps=1e-3)
  expected = np.stack([*by_numpy(gradients, 2, slices, merged, eps=1e-3)])
  np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


def test_statistics_rest_while_a_thread_computes_roots():
  """From step 5 to 6, and from 10 to 11."""
  gradients = np.concatenate([drawn(4, 3), drawn(4, 3, seed=1)])
  found = directions(gradients, every=5, block_size=4, eps=1e-3)
  slices = [np.s_[:, :]]
  expected = np.stack([*by_numpy(gradients, 5, slices, (4, 3), eps=1e-3)])
  np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_devices_share_blocks():
  """Their directions are those of one device that computes all."""
  gradients = [drawn(7, 5), drawn(4), drawn(2, 3, 4)]
  tx = slip.scale_by_shampoo(every=2, block_size=3, eps=1e-3)
  mesh = jax.make_mesh((4,), ('x',))
  with jax.transfer_guard('allow'):
    state = tx.init([leaf[0] for leaf in gradients])
    shared = jax.jit(
      jax.shard_map(
        functools.partial(tx.update, axis_name='x'),
        mesh=mesh,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
      )
    )
    states = [state, state]
    for step in zip(*gradients, strict=True):
      one, states[0] = tx.update([*step], states[0])
      other, states[1] = shared([*step], states[1])
      jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        (one, states[0]),
        (other, states[1]),
      )


@pytest.mark.parametrize('order', [2, 4, 6])
def test_roots_are_roots(order):
  """With errors of 1e-4 for statistics of float32, also of low rank."""
  rows = np.random.default_rng(order).normal(size=(3, 40, 20))
  rows = rows.astype(np.float32)
  full = rows @ np.swapaxes(rows, 1, 2)
  root = inverse_root(full, order, 1e-3)
  exact = np.float64(rows) @ np.swapaxes(np.float64(rows), 1, 2)
  largest = np.linalg.eigvalsh(exact)[:, -1, None, None]
  shifted = exact / largest + 1e-3 * np.eye(40)
  back = np.linalg.matrix_power(root, order) @ shifted
  np.testing.assert_allclose(back, np.tile(np.eye(40), (3, 1, 1)), atol=1e-3)
  values, vectors = np.linalg.eigh(shifted)
  true = vectors * values[:, None] ** (-1 / order) @ np.swapaxes(vectors, 1, 2)
  assert np.abs(root - true).max() < 1e-4 * np.abs(true).max()


def test_roots_of_zeros_and_of_nan():
  found = inverse_root(
    np.stack([np.zeros((2, 2)), [[np.nan, 0], [0, 1]]]), 4, 0.0
  )
  np.testing.assert_array_equal(found[0], np.eye(2))
  assert np.isnan(found[1]).all()


def test_before_the_first_roots_it_is_the_grafted_method():
  """To the bit, as these steps run one operation after another."""
  gradients, tx = drawn(5, 4), optax.scale_by_adam()
  own = slip.scale_by_shampoo(every=STEPS + 1, block_size=3)
  with jax.transfer_guard('allow'):
    gradients = jax.numpy.asarray(gradients)
    states = [tx.init(gradients[0]), own.init(gradients[0])]
    for gradient in gradients:
      one, states[0] = tx.update(gradient, states[0])
      other, states[1] = own.update(gradient, states[1])
      np.testing.assert_array_equal(one, other)


def test_diagonal_gradients_give_adagrads_direction():
  gradients = np.stack([np.diag(row) for row in drawn(4)])
  found = directions(gradients, every=1, eps=0.0, block_size=4, **ADAGRAD)
  squares = np.cumsum(np.float64(gradients) ** 2, 0)
  expected = gradients / np.sqrt(np.where(squares > 0, squares, 1))
  units = [
    x / np.linalg.norm(x, axis=(1, 2), keepdims=True) for x in (found, expected)
  ]
  np.testing.assert_allclose(*units, atol=1e-4)


def test_a_rotation_of_gradients_rotates_directions():
  gradients = drawn(4, 6)
  turn, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))
  turn = turn.astype(np.float32)
  arguments = {'every': 1, 'eps': 1e-3, 'block_size': 6}
  one = turn @ directions(gradients, **arguments)
  other = directions(turn @ gradients, **arguments)
  units = [
    x / np.linalg.norm(x, axis=(1, 2), keepdims=True) for x in (one, other)
  ]
  np.testing.assert_allclose(*units, atol=1e-3)


@pytest.mark.parametrize('name', ['every', 'block_size'])
def test_sizes_are_whole_numbers(name):
  with pytest.raises(slip.UserError, match=f'{name} must be a whole number'):
    slip.shampoo(0.1, **{name: 0})


OPTIMIZER = slip.shampoo(1e-2, every=5, block_size=4, weight_decay=1e-3)


@pytest.mark.parametrize(
  ('skip', 'microbatches'), [('none', 1), ('none', 2), ('random', 1)]
)
def test_a_run_resumed_while_a_thread_computes_roots_has_the_same_bits(
  skip, microbatches, tmp_path
):
  """Under another placement, too. The other run has taken the thread's roots.

  They are computed from step 5 on, and taken in step 6.
  """
  skip = market.SKIPS[skip]

  def trainer(placement):
    return market.trainer(
      dense_optimizer=OPTIMIZER, placement=placement, microbatches=microbatches
    )

  with trainer('resident') as first, trainer('streamed') as one:
    first.train(market.source(), steps=5, skip=skip)
    first.save(tmp_path)
    one.train(market.source(), steps=8, skip=skip)
  with trainer('streamed') as other:
    other.restore(tmp_path)
    other.train(market.source(), steps=3, skip=skip)
    market.assert_same(one, other)
