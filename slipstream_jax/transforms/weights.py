"""Weights and learning rates, also for loops that drop examples.

Rates may fall and start again. The model at the end of each such cycle is a
member of an ensemble from one run (Loshchilov and Hutter, SGDR, arXiv
1608.03983; Huang et al., Snapshot Ensembles, 1704.00109; Saphal et al., SEERL,
2001.05209).
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from slipstream_jax.errors import check_whole
from slipstream_jax.transforms.arguments import check_learning_rate


@dataclasses.dataclass(frozen=True)
class _WeightAware:
  """The `update` of `weight_aware`. Those of equal chains are equal."""

  inner: optax.GradientTransformation

  def __call__(
    self,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    *,
    example_weight: Any = 1.0,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    weight = jnp.asarray(example_weight, jnp.float32)
    root = jnp.sqrt(jnp.where(weight > 0, weight, 1))
    shrunk = jax.tree.map(lambda g: g / _broadcast(root, g), updates)
    inner = optax.with_extra_args_support(self.inner)
    updates, state = inner.update(shrunk, state, params, **extra_args)
    return jax.tree.map(lambda u: u * _broadcast(root, u), updates), state


def weight_aware(
  inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Wraps a chain for examples that were kept with chance p and weigh w = 1/p.

  An example of weight w counts as w examples. Its gradient is w times as large,
  but Adagrad, Adam and similar optimizers divide by past gradients, which
  cancels w: a row that is rarely looked up moves as if no example had been
  dropped. Here the chain gets the gradient over sqrt(w), and its update is
  multiplied by sqrt(w). A sum of squares then grows by w g^2, as with w
  examples. The update grows by sqrt(w), as the sum of 1/sqrt(k) over w updates
  does (for Adam: the square root scaling rule, Malladi et al., arXiv
  2205.10287). The factors cancel for SGD, and for weights of 1.

  `Trainer` wraps its optimizers so. What is wrapped already is returned as it
  is.

  Args:
    inner: any chain.

  Returns:
    The chain, whose `update` takes the extra argument `example_weight`: the
    mean weight of the examples behind the gradient, f32[], or f32[U] for leaves
    [U, ...]. A weight of 0, for rows without examples, is taken as 1.
  """
  update = inner.update
  if not isinstance(update, _WeightAware):
    update = _WeightAware(inner)
  return optax.GradientTransformationExtraArgs(inner.init, update)


def _broadcast(root: jax.Array, leaf: jax.Array) -> jax.Array:
  """Shapes and casts the root f32[] or f32[U] for a leaf [U, ...]."""
  shape = root.shape + (1,) * (leaf.ndim - root.ndim if root.ndim else 0)
  return root.reshape(shape).astype(leaf.dtype)


def scale_by_data_seen(
  schedule: optax.Schedule,
) -> optax.GradientTransformationExtraArgs:
  """Scales updates by a schedule of the batches read from the source.

  `optax.scale_by_schedule` counts steps, so it would not reach its end where
  examples are dropped.

  Args:
    schedule: maps the batches read so far, f32[], to a factor.

  Returns:
    A stateless transformation whose `update` takes `batches_seen`, f32[].
  """

  def update(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None = None,
    *,
    batches_seen: Any,
    **_: Any,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    del params
    factor = jnp.asarray(schedule(batches_seen))
    # Cast, as an f32 factor would widen updates of half precision.
    scaled = jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)
    return scaled, state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def cycle_ends(steps: int, cycles: int) -> list[int]:
  """Returns the steps after which each of the cycles ends, ascending.

  Raises:
    UserError: there is no cycle, or one would have no step.
  """
  check_whole(cycles, 1, 'cosine_cycles, cycles', 'give some, such as 5')
  hint = 'give a step to each cycle'
  check_whole(steps, cycles, 'cosine_cycles, steps', hint)
  return [cycle * steps // cycles for cycle in range(1, cycles + 1)]


def cosine_cycles(
  peak: float, steps: int, cycles: int = 1, final: float = 0.0
) -> optax.Schedule:
  """Returns learning rates that fall as a cosine, once in each cycle.

  Step t of a cycle of P steps, from 0, has the rate `peak` times
  (1 + cos(pi t / P)) / 2. After the last cycle the rate stays at its end. One
  cycle is `optax.cosine_decay_schedule`.

  >>> import slipstream_jax as slip
  >>> rates = slip.cosine_cycles(0.1, steps=100, cycles=2)
  >>> print(*(f'{rates(step):.3f}' for step in (0, 25, 49, 50, 75, 100)))
  0.100 0.050 0.000 0.100 0.050 0.000

  Args:
    peak: rate at the start of each cycle.
    steps: of all cycles. Cycles are of equal lengths, up to one step.
    cycles: number of cycles.
    final: share of the peak that is left at the end of a cycle.

  Raises:
    UserError: the peak is no rate, or a cycle would have no step.
  """
  check_learning_rate(peak, 'cosine_cycles')
  ends = [0, *cycle_ends(steps, cycles)]
  falls = [
    optax.cosine_decay_schedule(peak, after - before, final)
    for before, after in itertools.pairwise(ends)
  ]
  return optax.join_schedules(falls, ends[1:-1])
