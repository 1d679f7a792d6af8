"""A model of a step's time on devices that are not there.

Bytes and messages are counted, and every rate is stated by a `Machine`. A step
takes as long as the slowest of its device, the host, and the copies between
them, and in addition what devices exchange, as that is not hidden:

  max(device, host, copies) + exchange + sums

Nothing else is modelled, such as waiting for a slower device.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.plan.machine import Link, Machine
from slipstream_jax.data.source import Dataset
from slipstream_jax.distributed.exchange import SMALLEST
from slipstream_jax.placement import bucket
from slipstream_jax.tables import Group
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.forward import pass_of
from slipstream_jax.training.loop import on_device
from slipstream_jax.training.recipe import Recipe

_PROGRAMS = 6  # of a step
_ROW_PASSES = 6  # times that a step reads or writes its rows and their state


class Work(NamedTuple):
  """Work of a step, apart from its rows."""

  operations: float
  """Floating-point operations per example, forward and backward."""
  dense_bytes: int
  """Bytes of the gradients of the model's parameters."""
  lookups: int
  """Lookups of an example."""


class Measured(NamedTuple):
  """Times of a step on one device, by its examples, as calls and bytes."""

  step: Link
  host: Link
  """Finding and planning rows, which each process does for all devices."""


class Crossing(NamedTuple):
  """Messages and bytes that the busiest device sends, with padding."""

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
    """Name of the part that takes most of the time."""
    return max(self._asdict(), key=lambda name: getattr(self, name))


def exchanged(
  group: Group, element: int, near: int, lanes: int, most: int
) -> np.ndarray:
  """Returns the fields of `Crossing` for rows and gradients of a group.

  Args:
    group: of tables.
    element: bytes of an element of a gradient.
    near: devices of a host among those that exchange.
    lanes: devices that exchange.
    most: rows of the pair of devices with most, for which every pair has room.
  """
  row = min(element, np.dtype(group.dtype).itemsize)
  pair = bucket(most, SMALLEST) * group.dim * (row + element)
  here, there = near - 1, lanes - near
  return np.array([2 * here, here * pair, 2 * there, there * pair])


def work_of(data: Dataset, recipe: Recipe, examples: int) -> Work:
  """Returns what a step computes, as XLA counts it before it optimizes."""
  state = compiled_of(recipe).init_state(data.dense_features, 0)
  with contextlib.closing(data.train(examples)) as source:
    batch = next(source)
  groups = recipe.tables.groups
  inverses = tuple(
    np.zeros((examples, len(group.columns)), np.int32) for group in groups
  )
  rows = tuple(np.zeros((1, group.dim), np.float32) for group in groups)

  computed = functools.partial(pass_of, recipe, examples=examples)
  lowered = jax.jit(computed).lower(
    state.params, {}, rows, inverses, on_device(batch), state.rng
  )
  counted: Any = lowered.cost_analysis() or {}
  leaves = jax.tree.leaves(state.params)
  return Work(
    counted.get('flops', 0.0) / examples,
    sum(int(leaf.nbytes) for leaf in leaves),
    batch.lookups.shape[1],
  )


def step_time(
  machine: Machine,
  work: Work,
  devices: int,
  examples: int,
  row_bytes: float,
  loaded: float,
  stored: float,
  crossing: Crossing,
  measured: Measured | None = None,
  replicas: int = 1,
) -> StepTime:
  """Returns the modelled time of a step.

  Args:
    machine: whose hosts have `machine.devices` each.
    work: what the model computes.
    devices: W.
    examples: B, of all devices.
    row_bytes: bytes of the step's rows and their state on the busiest device.
    loaded: bytes that the host sends to the busiest device.
    stored: bytes that this device sends to its host.
    crossing: what this device exchanges.
    measured: times of a step on one device here. None: they are modelled.
    replicas: R.
  """
  near = min(devices, machine.devices)
  hosts = devices // near
  lookups = examples * work.lookups
  threads = min(machine.threads, 8)
  lanes = devices // replicas
  host = max(
    lookups * machine.find / threads, machine.plan.seconds(lanes, lookups)
  )
  between = machine.between
  if machine.shared:  # a message waits for processes that are before it
    turns = max(1, hosts / machine.threads)
    between = between._replace(call=turns * between.call)
  if measured is None:
    own = examples / devices
    device = (
      _PROGRAMS * machine.program
      + own * work.operations / machine.products
      + _ROW_PASSES * row_bytes / machine.memory
    )
  elif machine.shared:  # all devices compute on the same cores, and plan
    device = measured.step.seconds(1, examples)
    more = (hosts - 1) * measured.host.seconds(1, examples)
    device += more / machine.threads
    host = 0.0  # is in what was measured
  else:
    device = measured.step.seconds(1, examples / devices)
    host = measured.host.seconds(1, examples)
  # All devices add the sums in pairs, then in pairs of pairs, and so on.
  sums = sum(
    link.seconds(2 * rounds, rounds * work.dense_bytes)
    for link, rounds in (
      (machine.inside, near.bit_length() - 1),
      (between, hosts.bit_length() - 1),
    )
  )
  return StepTime(
    device,
    max(machine.load.seconds(1, loaded), machine.store.seconds(1, stored)),
    host,
    max(
      machine.inside.seconds(crossing.near, crossing.near_bytes),
      between.seconds(crossing.far, crossing.far_bytes),
    ),
    sums,
  )
