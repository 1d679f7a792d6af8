"""Matrix products read from a program are those that one would write down."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import limits
from experiments.bench.contest import trainer_of
from experiments.common import datasets
from slipstream_jax.engine.buffers import to_device
from slipstream_jax.training.loop import take_step
from slipstream_jax.training.trainer_parts import planned
from tests.support.runs import smoke

B, SIZES = 8, (13, 5, 3)


def loss(weights, inputs):
  for one in weights:
    inputs = jnp.tanh(inputs @ one)
  return inputs.sum()


def arguments(dtype=np.float32):
  pairs = itertools.pairwise(SIZES)
  return [np.ones(pair, dtype) for pair in pairs], np.ones((B, SIZES[0]), dtype)


def flops(product):
  (contracting, _), _ = product.how['dimension_numbers']
  result = jax.eval_shape(product, product.left, product.right)
  depth = math.prod(product.left.shape[axis] for axis in contracting)
  return 2 * math.prod(result.shape) * depth


def test_products_forward_and_backward():
  found = limits.products_of(jax.grad(loss), *arguments())
  first, second = (2 * B * a * b for a, b in ((13, 5), (5, 3)))
  # Each layer forward and for its weights; inputs have no gradient.
  assert sorted(map(flops, found)) == sorted([first] * 2 + [second] * 3)


def test_they_are_found_in_programs_within_programs():
  def within(weights, inputs):
    body = jax.jit(jax.checkpoint(lambda x, _: (x @ weights, None)))
    return jax.lax.scan(body, inputs, None, length=3)[0]

  (one,) = limits.products_of(within, np.ones((4, 4)), np.ones((2, 4)))
  assert flops(one) == 2 * 2 * 4 * 4


def test_batched_products_have_their_flops():
  def pairs(x):
    return jnp.einsum('bfd,bgd->bfg', x, x)

  (one,) = limits.products_of(pairs, np.ones((B, 27, 16), np.float32))
  assert flops(one) == 2 * B * 27 * 27 * 16


def test_alone_they_are_computed_as_they_are():
  some = limits.products_of(jax.grad(loss), *arguments(jnp.bfloat16))
  results = limits.alone(some)()
  for product, result in zip(some, results, strict=True):
    assert result.dtype == jnp.bfloat16
    depth = flops(product) // (2 * result.size)
    np.testing.assert_array_equal(np.asarray(result, np.float32), depth)


def test_a_function_without_products_has_none():
  assert limits.products_of(jnp.sin, np.ones(3)) == []
  assert limits.alone([])() == []


def test_a_step_may_be_read_before_it_is_taken():
  config = smoke(**{'skip.mode': 'off'})
  data = datasets.dataset(config)
  trainer = trainer_of(config, data)
  with planned(trainer, data.train(config.data.batch_size), 0) as stream:
    item = next(stream)
    blocks = trainer.engine.load(item.plans)
    inverses = tuple(plan.inverse for plan in item.plans)
    columns = inverses, item.batch, np.float32(0), item.row_weights
    arguments = trainer.state, blocks, *to_device(columns)
    some = limits.products_of(trainer.update, *arguments)
    assert np.isfinite(float(take_step(trainer, item)))
  widths = {product.right.shape for product in some}
  kernels = [x for x in jax.tree.leaves(trainer.state.params) if x.ndim == 2]
  assert widths >= {kernel.shape for kernel in kernels}
