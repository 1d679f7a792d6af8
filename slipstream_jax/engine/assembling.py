"""Assembles a step's rows on the device: kept, loaded and forwarded rows."""

from collections.abc import Callable

from slipstream_jax.engine import apply
from slipstream_jax.engine.buffers import handing_over, to_step
from slipstream_jax.engine.device_rows import DeviceIndices, NO_INDICES
from slipstream_jax.engine.write_back import Forwarded
from slipstream_jax.placement import bucket
from slipstream_jax.types import Positions, RowBlock, RowIds, Slots


def assemble_rows(
  gather: Callable[[RowIds, int], RowBlock],
  kept: RowBlock,
  rows: RowIds,
  slots: Slots,
  load: Positions,
  forwarded: Forwarded | None = None,
) -> tuple[RowBlock, DeviceIndices]:
  """Returns rows on the device [P, ...], loading those at positions `load`.

  Args:
    gather: gathers rows from the host, padded to a size.
    kept: rows that the device keeps.
    rows: of the step.
    slots: their slots in `kept`.
    load: positions of the rows to load.
    forwarded: rows among these that come from the previous step.

  Returns:
    The rows, and device arrays that `write` can reuse.
  """
  size = len(kept.rows)
  if size and not len(load):
    with handing_over():
      block, at_slots = apply.gather_at(kept, apply.pad_slots(slots, size))
    return block, DeviceIndices(at_slots)
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
  if not size and held is None:  # no rows to combine
    return to_step(block), NO_INDICES
  with handing_over():
    if not size:
      return apply.join(block, held, source), NO_INDICES
    joined = None if held is None else (held, source)
    block, *placed = apply.assemble(kept, padded, block, positions, joined)
  return block, DeviceIndices(*placed)
