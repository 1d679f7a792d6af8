"""Other ways to place tables on devices, with what the busiest device does.

The engine spreads the rows of every table over all devices. These plans keep
tables together instead, on one device or one host, as other systems do. In DMT
(arXiv 2403.00877) a host also computes a tower of its tables' features, for
examples of all hosts, and only what towers return goes to other hosts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.plan.times import Crossing, exchanged
from slipstream_jax.tables import Group

Spread = Sequence[tuple[int, int]]
"""Per table, the first device that has some of its rows, and how many have."""


class Tables(NamedTuple):
  """Rows that a step looks up in T tables, means over steps."""

  used: np.ndarray
  """Unique rows of each table, f64[T]."""
  loaded: np.ndarray
  """Rows of them that come from the host, f64[T]."""
  wanted: np.ndarray
  """Unique rows of each table in each slice, f64[T, W]."""
  wanted_near: np.ndarray
  """The same in all slices of devices with one number on their host, f64[T, L].
  """
  groups: Sequence[tuple[Group, Sequence[int]]]
  """Groups of tables, with the numbers of theirs."""
  row_bytes: np.ndarray
  """Bytes of a row with its state, by table, f64[T]."""

  @property
  def devices(self) -> int:
    """W."""
    return self.wanted.shape[1]


class Load(NamedTuple):
  """Work of the busiest device in a step."""

  rows: np.ndarray
  """Unique rows of each device, f64[W]."""
  row_bytes: float
  loaded: float
  """Bytes from the host."""
  crossing: Crossing


def load_of(tables: Tables, spread: Spread, element: int, within: int) -> Load:
  """Returns the load of a plan.

  Args:
    tables: what a step looks up.
    spread: the plan.
    element: bytes of an element that is exchanged.
    within: devices of a host.
  """
  devices = tables.devices
  share = np.zeros((len(spread), devices))
  for table, (first, count) in enumerate(spread):
    share[table, first : first + count] = 1 / count
  total = np.zeros(4)
  for group, numbers in tables.groups:
    # Every pair has room for the rows of the one with most.
    pairs = share[numbers].T @ tables.wanted[numbers]
    near = min(within, devices)
    total += exchanged(group, element, near, devices, int(pairs.max()))
  used, loaded = (
    share.T @ (rows * tables.row_bytes) for rows in (tables.used, tables.loaded)
  )
  return Load(
    share.T @ tables.used,
    float(used.max()),
    float(loaded.max()),
    Crossing(*map(float, total)),
  )


def towers_of(tables: Tables, element: int, examples: int, ratio: int) -> Load:
  """Returns the load of a plan with a tower of tables for each host.

  Rows and their gradients stay on a host. Each of its devices computes its
  tower for examples of one device of every host, and sends to each host the
  vectors for its own.

  Args:
    tables: what a step looks up.
    element: bytes of an element that is exchanged.
    examples: B, of all devices.
    ratio: how many times fewer elements towers return than they get.
  """
  near = tables.wanted_near.shape[1]
  hosts = tables.devices // near
  spread = costliest_first(tables, near)
  host = np.array([first // near for first, _ in spread])
  load = load_of(tables, spread, element, near)
  total = np.zeros(4)
  for group, numbers in tables.groups:
    of_host = np.eye(hosts)[host[numbers]].T @ tables.wanted_near[numbers]
    most = int(of_host.max() / near)
    total += exchanged(group, element, near, near, most)
    vectors = examples // tables.devices * len(group.features) * group.dim
    # Forward and backward, but for those of its own host.
    total[3] += 2 * vectors // ratio * element * (hosts - 1) / hosts
  total[2] = 2 * (hosts - 1)
  return load._replace(crossing=Crossing(*map(float, total)))


def everywhere(tables: Tables) -> Spread:
  """Returns the plan of the engine: rows of each table on all devices."""
  return [(0, tables.devices)] * len(tables.used)


def in_turn(tables: Tables) -> Spread:
  """Returns a plan that gives each device the next table."""
  return [(n % tables.devices, 1) for n in range(len(tables.used))]


def costliest_first(tables: Tables, devices: int = 1) -> Spread:
  """Returns a plan that gives each table to the hosts with the least to do.

  The tables with most unique rows come first.

  Args:
    tables: what a step looks up.
    devices: that share a table, such as those of a host.
  """
  busy = np.zeros(tables.devices // devices)
  spread = [(0, devices)] * len(tables.used)
  for table in np.argsort(-tables.used, kind='stable').tolist():
    freest = int(np.argmin(busy))
    busy[freest] += tables.used[table]
    spread[table] = freest * devices, devices
  return spread
