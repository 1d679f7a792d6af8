"""A model's cells as a table for a terminal: ours beside each system."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from experiments.common import report
from experiments.reproduce.grid import OFF, OURS
from experiments.reproduce.models import MODELS, PINNED
from experiments.reproduce.results import Cell, OK

_HEADINGS = {
  'seconds': 'time',
  'ratio time': '/ ours',
  'bytes_moved': 'moved',
  'ratio bytes': '/ ours',
  'dropped share': 'dropped',
}


def table_of(model: str, cells: Sequence[Cell]) -> Table | None:
  """Means over the seeds; None where no cell of the model finished.

  Time and bytes are those of each system over those of ours, the hot rows
  pinned and our own policy: above 1, ours takes less.
  """
  frame = frame_of(model, cells)
  if not frame:
    return None
  words = f'{MODELS[model].title}: time and bytes over those of ours'
  failed = sum(cell.model == model and cell.status != OK for cell in cells)
  if failed:
    words += f'; {failed} cells failed'
  return report.table(words, frame, headings=_HEADINGS)


def frame_of(model: str, cells: Sequence[Cell]) -> list[dict[str, Any]]:
  """A row for each system and way to skip that finished."""
  groups: dict[tuple[str, str], list[Cell]] = {}
  for cell in cells:
    if cell.model == model and cell.status == OK:
      groups.setdefault((cell.system, cell.skip), []).append(cell)
  ours = groups.get((PINNED, OURS), [])
  seconds, moved = _mean(ours, _seconds), _mean(ours, _moved)
  return [
    {
      'system': system,
      'skip': '-' if skip == OFF else skip,
      'seconds': _mean(group, _seconds),
      'ratio time': _over(_mean(group, _seconds), seconds),
      'bytes_moved': _mean(group, _moved),
      'ratio bytes': _over(_mean(group, _moved), moved),
      'dropped share': _mean(group, _dropped),
      'AUC': _mean(group, lambda cell: cell.auc),
    }
    for (system, skip), group in groups.items()
  ]


def _seconds(cell: Cell) -> float | None:
  return cell.seconds


def _moved(cell: Cell) -> float:
  parts = cell.bytes_loaded, cell.bytes_stored, cell.dense_bytes
  return float(sum(part or 0 for part in parts))


def _dropped(cell: Cell) -> float:
  return (cell.examples_dropped or 0) / max(cell.examples_seen or 0, 1)


def _mean(cells: Sequence[Cell], value: Any) -> float | None:
  known = [number for cell in cells if (number := value(cell)) is not None]
  return float(np.mean(known)) if known else None


def _over(one: float | None, other: float | None) -> float | None:
  return one / other if one is not None and other else None
