"""Descriptions of machines: what their devices, links and hosts take.

A description is a small JSON file, written by `experiments.bench.link`, or a
member of `MACHINES`. Those have published rates. What nobody publishes, such as
the time of a message, is assumed, and says so in `how`.
"""

from collections.abc import Iterator
import json
import pathlib
from typing import Any, NamedTuple

from slipstream_jax.errors import UserError


class Link(NamedTuple):
  """Time of what crosses a link, in seconds."""

  call: float
  """For each message or copy."""
  byte: float
  """For each byte."""

  def seconds(self, calls: float, nbytes: float) -> float:
    """Returns the time of some calls that carry so many bytes in all."""
    return calls * self.call + nbytes * self.byte


class Machine(NamedTuple):
  """One kind of host, and what connects several of them."""

  name: str
  how: str
  """Source of the figures."""
  devices: int
  """Devices of a host, a power of two."""
  room: float
  """Bytes of a device's memory."""
  products: float
  """Floating-point operations per second of a device's matrix products."""
  memory: float
  """Bytes per second of a device's memory."""
  program: float
  """Seconds to start a program."""
  find: float
  """Seconds of the host's processor per lookup, in several threads."""
  plan: Link
  """Time of the planner's thread, by lanes and lookups."""
  threads: int
  """Most threads of a host that work at once."""
  load: Link
  """Copies from the host to a device."""
  store: Link
  """Copies from a device to the host."""
  inside: Link
  """`all_to_all` and `ppermute` between devices of a host, by the messages and
  bytes that a device sends."""
  between: Link
  """The same between devices of several hosts."""
  shared: bool = False
  """Whether the devices are the processor of one host, which all processes
  share."""


_FIND, _PLAN = 1.5e-8, Link(2e-5, 2.3e-9)  # of an EPYC, up to 32 devices
_ASSUMED = (
  'published peak rates; 30 us for a program, 3 us for a message inside a host'
  ' and 10 us between hosts are assumed, the host is as measured for an EPYC'
)


def _published(
  name: str,
  devices: int,
  room: float,
  products: float,
  memory: float,
  copies: float,
  inside: float,
  between: float,
) -> Machine:
  copy, near, far = (
    Link(call, 1 / rate)
    for call, rate in ((1e-5, copies), (3e-6, inside), (1e-5, between))
  )
  return Machine(
    name,
    _ASSUMED,
    devices,
    room,
    products,
    memory,
    3e-5,
    _FIND,
    _PLAN,
    8,
    copy,
    copy,
    near,
    far,
  )


MACHINES = {
  # Rates are of one device and direction: f32 operations without tensor cores,
  # memory, PCIe or NVLink-C2C, NVLink, network.
  'h100': _published(
    '8 x H100 SXM', 8, 80e9, 67e12, 3.35e12, 64e9, 450e9, 50e9
  ),
  'a100': _published(
    '8 x A100 SXM', 8, 80e9, 19.5e12, 2.04e12, 32e9, 300e9, 25e9
  ),
  'gb200': _published('4 x GB200', 4, 186e9, 80e12, 8e12, 225e9, 900e9, 50e9),
}


def machine_of(name: str) -> Machine:
  """Returns a member of `MACHINES`, or what a file describes.

  Raises:
    UserError: there is no such machine or file, or it is none.
  """
  if name in MACHINES:
    return MACHINES[name]
  hint = f'use {", ".join(MACHINES)}, or write one with experiments.bench.link'
  try:
    read = json.loads(pathlib.Path(name).read_text())
    return _from_facts(read['machine'])
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise UserError(
      'a machine must be known, or described by a file',
      got=f'{name!r} ({type(error).__name__})',
      where='--machine',
      hint=hint,
    ) from error


def as_facts(machine: Machine) -> dict[str, Any]:
  """Returns a description that `machine_of` reads: {'load_call': 1e-5, ...}."""
  return dict(_flat('', machine))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
  if not isinstance(value, Machine | Link):
    yield name, value
    return
  for field, one in value._asdict().items():
    yield from _flat(f'{name}_{field}' if name else field, one)


def _from_facts(facts: dict[str, Any]) -> Machine:
  def link(name: str) -> Link:
    return Link(*(float(facts.pop(f'{name}_{one}')) for one in Link._fields))

  names = 'plan', 'load', 'store', 'inside', 'between'
  fields: dict[str, Any] = {name: link(name) for name in names}
  return Machine(**facts, **fields)
