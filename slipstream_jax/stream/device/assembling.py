"""A step's rows put together on the device: those kept, loaded and held."""

from collections.abc import Callable

from slipstream_jax.placement import bucket
from slipstream_jax.stream.buffers import handing_over, to_step
from slipstream_jax.stream.device import apply
from slipstream_jax.stream.device.kept import NOWHERE, Placed
from slipstream_jax.stream.leaving import Forwarded
from slipstream_jax.types import Positions, RowBlock, RowIds, Slots


def assembled(
  gather: Callable[[RowIds, int], RowBlock],
  kept: RowBlock,
  rows: RowIds,
  slots: Slots,
  load: Positions,
  forwarded: Forwarded | None = None,
) -> tuple[RowBlock, Placed]:
  """Rows on the device [P, ...], with those at positions `load` brought there.

  Args:
    gather: takes rows from the host, padded to a size.
    kept: rows that the device keeps.
    rows: of the step.
    slots: where they are in `kept`.
    load: positions of those that are not there.
    forwarded: what of these comes from the step before.

  Returns:
    The rows, and what `Kept.write` may take of it.
  """
  size = len(kept.rows)
  if size and not len(load):
    with handing_over():
      block, at_slots = apply.gather_at(kept, apply.pad_slots(slots, size))
    return block, Placed(at_slots)
  loaded, room = rows[load], bucket(len(rows))
  if size:
    padded = apply.pad_slots(slots, size)
    positions = apply.pad_positions(load, len(padded))
    room = len(positions)
  held = source = None
  if forwarded is not None:
    held, at = forwarded
    loaded = loaded[at < 0]
    some = bucket(len(loaded), smallest=1024)
    source = apply.sources(at, some, len(held.rows), room)
    room = some
  block = gather(loaded, room)
  if not size and held is None:  # no program has to put rows together
    return to_step(block), NOWHERE
  with handing_over():
    if not size:
      return apply.join(block, held, source), NOWHERE
    joined = None if held is None else (held, source)
    block, *placed = apply.assemble(kept, padded, block, positions, joined)
  return block, Placed(*placed)
