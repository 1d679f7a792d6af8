"""What lies where below the device: in host memory, and on a disk.

A tiered store keeps the rows used last in memory. The device keeps the ones it
asks for most, so that what reaches the store are uses by the way; what memory
finds of them is estimated by the LRU curve of all uses, and it is one lookup
alone that the curve counts wrong for each row that both of them have.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.profile.predictions import Need, Prediction
from slipstream_jax.placement.sizing import Curve
from slipstream_jax.store.scratch import file_bytes
from slipstream_jax.store.tiered import MAP_BYTES, SLOT_BYTES

_KEPT = 256  # rows: with room for fewer, none is kept


class Tiers(NamedTuple):
  """How many rows each tier has, and what it answers."""

  store: str
  """Of `STORES`."""
  dram_bytes: int
  """Host memory for rows; of a store in memory, that of all rows."""
  dram_rows: int
  """That it has room for."""
  disk_bytes: int
  """Of the file, once every row was written; 0: there is none."""
  rows_read: float
  """From the disk in a step, in the mean."""
  shares: dict[str, list[float]]
  """By tier, the share of each table's lookups that it answers."""


def tiers_of(
  picked: Prediction, need: Need, curve: Curve, host_bytes: int
) -> Tiers:
  """What fits the host beside a placement, and how often it is enough.

  Args:
    picked: the placement.
    need: what the tables take.
    curve: of LRU, over all rows.
    host_bytes: memory that tables and planner may have.
  """
  on_device = _shares(curve, picked.rows)
  if picked.host_bytes <= host_bytes:
    below = 1 - on_device
    shares = {'device': on_device, 'memory': below, 'disk': 0 * below}
    on_host = 0 if picked.placement == 'resident' else need.num_rows
    nbytes = on_host * need.row
    return Tiers('memory', nbytes, on_host, 0, 0.0, _listed(shares))
  maps = picked.host_bytes + (MAP_BYTES - need.row) * need.num_rows
  rows = max(0, (host_bytes - maps) // (need.row + SLOT_BYTES))
  kind = 'tiered' if rows >= _KEPT else 'file'
  rows = int(rows) if kind == 'tiered' else 0
  in_memory = np.maximum(_shares(curve, rows), on_device)
  shares = {
    'device': on_device,
    'memory': in_memory - on_device,
    'disk': 1 - in_memory,
  }
  return Tiers(
    kind,
    rows * (need.row + SLOT_BYTES),
    rows,
    file_bytes(need.num_rows, need.row),
    min(picked.rows_loaded, _loads(curve, rows)),
    _listed(shares),
  )


def _shares(curve: Curve, rows: int) -> np.ndarray:
  """Of each table, the lookups that so many rows answer, as a share: f64[T]."""
  at = np.searchsorted(curve.capacities, rows, side='right') - 1
  hits = curve.hits[:, at] if at >= 0 else 0 * curve.lookups
  shares: np.ndarray = hits / np.maximum(curve.lookups, 1)
  return shares


def _loads(curve: Curve, rows: int) -> float:
  at = np.searchsorted(curve.capacities, rows, side='right') - 1
  return float(curve.loads[at]) if at >= 0 else curve.rows_used


def _listed(shares: dict[str, np.ndarray]) -> dict[str, list[float]]:
  return {name: values.tolist() for name, values in shares.items()}


def frame(
  tiers: Tiers, sizes: dict[str, int], lookups: Sequence[float], most: int = 8
) -> list[dict[str, Any]]:
  """The tables that ask the lower tiers most, a line each."""
  shares = {name: np.array(values) for name, values in tiers.shares.items()}
  asked = np.array(lookups) * (1 - shares['device'])
  names = [*sizes]
  return [
    {
      'table': names[t],
      'rows': sizes[names[t]],
      **{f'share of {tier}': shares[tier][t] for tier in shares},
    }
    for t in np.argsort(-asked, kind='stable')[:most].tolist()
  ]


def advice(tiers: Tiers) -> str:
  """The keys to set for the store."""
  keys = f'--config.store.kind={tiers.store}'
  if tiers.store == 'tiered':
    keys += f' --config.store.dram_bytes={tiers.dram_bytes}'
  if tiers.store != 'memory':
    keys += ' --config.store.path=FOLDER'
  return keys
