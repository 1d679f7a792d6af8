"""A model of a step's time on devices that are not there.

Bytes and messages are counted, and every rate is stated by a `Machine`. A step
takes as long as the slowest of its device, the host, and the copies between
them, and in addition what devices exchange, as that is not hidden:

  max(device, host, copies) + exchange + sums

Nothing else is modelled, such as waiting for a slower device.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from experiments.plan.machine import Link, Machine
from slipstream_jax.data.source import Dataset
from slipstream_jax.training.forward import pass_of
from slipstream_jax.training.recipe import Recipe

_PROGRAMS = 6  # of a step
_ROW_PASSES = 6  # times that a step reads or writes its rows and their state


class Work(NamedTuple):
  """What a step computes, apart from its rows."""

  operations: float
  """Floating-point operations per example, forward and backward."""
  dense_bytes: int
  """Bytes of the gradients of the model's parameters."""
  lookups: int
  """Lookups of an example."""
  measured: Link | None = None
  """Time of a step on one device, by its examples. None: it is modelled."""


class Crossing(NamedTuple):
  """What the busiest device sends in a step, with padding."""

  near: float
  """Messages to devices of its host."""
  near_bytes: float
  far: float
  """Messages to devices of other hosts."""
  far_bytes: float


class StepTime(NamedTuple):
  """Modelled seconds of a step."""

  device: float
  """Computing."""
  copies: float
  """Loading and storing rows."""
  host: float
  """Finding and planning rows."""
  exchange: float
  """Rows and their gradients between devices."""
  sums: float
  """Gradients of the model's parameters between devices."""

  @property
  def total(self) -> float:
    """Time from one step to the next."""
    hidden = max(self.device, self.copies, self.host)
    return hidden + self.exchange + self.sums

  @property
  def binds(self) -> str:
    """What takes most of the time."""
    return max(self._asdict(), key=lambda name: getattr(self, name))


def work_of(
  config: ml_collections.ConfigDict,
  data: Dataset,
  recipe: Recipe,
  measured: Link | None = None,
) -> Work:
  """Returns what a step computes, as XLA counts it."""
  from slipstream_jax.training.compiled import compiled_of

  state = compiled_of(recipe).init_state(data.dense_features, 0)
  batch = _first(data, config.data.batch_size)
  groups = recipe.tables.groups
  inverses = tuple(
    np.zeros((len(batch.labels), sum(group.lengths)), np.int32)
    for group in groups
  )
  rows = tuple(np.zeros((1, group.dim), np.float32) for group in groups)
  function = functools.partial(pass_of, recipe)
  lowered = jax.jit(function, static_argnums=6).lower(
    state.params, {}, rows, inverses, batch, state.rng, len(batch.labels)
  )
  counted: Any = lowered.cost_analysis() or {}
  leaves = jax.tree.leaves(state.params)
  return Work(
    counted.get('flops', 0.0) / len(batch.labels),
    sum(int(leaf.nbytes) for leaf in leaves),
    batch.lookups.shape[1],
    measured,
  )
