"""Texts of a trainer: its tables, where their rows are, and its model."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from slipstream_jax.engine.buffers import to_host
from slipstream_jax.engine.group_rows import GroupRows
from slipstream_jax.placement import Placement
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import TrainerParts

_TEXTS = {'table', 'dtype', 'placement'}  # to the left, numbers to the right


class Summary(str):
  """A text that a notebook or a prompt shows line by line."""

  __slots__ = ()

  def __repr__(self) -> str:
    return str(self)


def summary_of(
  recipe: Recipe, placements: Sequence[Placement], parts: TrainerParts | None
) -> Summary:
  """Returns a summary of a trainer. The parts are None before its first source.

  Call it in the trainer's turn.
  """
  programs = compiled_of(recipe) if parts is None else parts.programs
  tables, sizes = recipe.tables, programs.row_bytes_by_table()
  rows = [table.rows for table in tables.tables.values()]
  whole = _column(np.multiply(rows, sizes).tolist())
  device = host = ['-'] * len(whole)
  title, model = 'before its first source', 'parameters: not yet known'
  head = 'table', 'rows', 'dim', 'dtype', 'size', 'placement', 'device', 'host'
  if parts is not None:
    here, away = _rows_of(parts)
    device = _column(np.multiply(here, sizes).tolist())
    host = _column(np.multiply(away, sizes).tolist())
    title = f'after {int(to_host(parts.state.step)):,} steps'
    model = _parameters(parts)
    if parts.engine.groups[0].host.counts is not None:
      head = (*head[:-1], 'disk')
  chosen = {
    name: placement.name
    for group, placement in zip(tables.groups, placements, strict=True)
    for name in group.tables
  }
  lines = [
    (name, f'{t.rows:,}', str(t.embedding_dim), t.dtype, chosen[name])
    for name, t in tables.tables.items()
  ]
  lines.append(('all', f'{sum(rows):,}', '', '', ''))
  sized = [
    (*line[:-1], size, line[-1], *places)
    for line, size, *places in zip(lines, whole, device, host, strict=True)
  ]
  text = [f'{_model_of(recipe)}, {title}', '', *_aligned([head, *sized])]
  return Summary('\n'.join([*text, '', model]))


def _column(nbytes: Sequence[int]) -> list[str]:
  """Returns bytes as texts, with their sum at the end."""
  return [_bytes(count) for count in (*nbytes, sum(nbytes))]


def describe(
  recipe: Recipe, placements: Sequence[Placement], parts: TrainerParts | None
) -> str:
  """Returns the representation of a trainer, in one line. Waits for no step."""
  tables = recipe.tables
  some = (
    '1 table' if len(tables.tables) == 1 else f'{len(tables.tables)} tables'
  )
  names = ' and '.join(dict.fromkeys(one.name for one in placements))
  trained = 'before its first source'
  if parts is not None:
    trained = f'{parts.engine.counters.examples_trained:,} examples trained'
  return (
    f'Trainer({_model_of(recipe)}, {some} with {tables.num_rows:,} rows,'
    f' {names}, {trained})'
  )


def _model_of(recipe: Recipe) -> str:
  return type(recipe.model).__name__


def _rows_of(parts: TrainerParts) -> tuple[list[int], list[int]]:
  """Returns how many rows of each table are on the device, and elsewhere."""
  tables, places = parts.recipe.tables, dict[str, tuple[int, int]]()
  for group, rows in zip(tables.groups, parts.engine.groups, strict=True):
    first = 0
    for name in group.tables:
      count = tables.tables[name].rows
      here = _on_device(rows, first, first + count)
      places[name] = here, 0 if rows.kept.rows is None else count
      first += count
  both = [places[name] for name in tables.tables]
  return [here for here, _ in both], [away for _, away in both]


def _on_device(rows: GroupRows, first: int, end: int) -> int:
  """Returns how many of a group's rows in [first, end) are on the device."""
  kept = rows.kept.rows
  if kept is None:
    return end - first
  return int(np.count_nonzero((kept >= first) & (kept < end)))


def _parameters(parts: TrainerParts) -> str:
  state = parts.state
  leaves = jax.tree.leaves(state.params)
  count = sum(int(np.size(leaf)) for leaf in leaves)
  others = _nbytes((state.dense_state, state.model_state))
  return (
    f'parameters: {count:,}, {_bytes(_nbytes(leaves))} on the device, with'
    f' {_bytes(others)} of optimizer and model state'
  )


def _nbytes(tree: Any) -> int:
  return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(tree))


def _bytes(nbytes: int) -> str:
  """Formats bytes, such as 3.1 MB."""
  size = float(nbytes)
  for unit in 'B', 'kB', 'MB', 'GB':
    if size < 999.5:
      return f'{size:.3g} {unit}'
    size /= 1000
  return f'{size:,.4g} TB'


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
  """Returns lines with columns of equal widths, below their head."""
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return [
    '  '.join(
      cell.ljust(width) if name in _TEXTS else cell.rjust(width)
      for name, cell, width in zip(lines[0], line, widths, strict=True)
    ).rstrip()
    for line in lines
  ]
