"""Rows of tables as records: float32, float16, or int8 with a range per row."""

from collections.abc import Callable
from typing import BinaryIO

from jaxtyping import Float, Integer, UInt8
import numpy as np

from slip_serve.layout import Group, Layout, padded, record_bytes
from slipstream_jax.checkpoint.quantize import Bits, quantize
from slipstream_jax.errors import UserError
from slipstream_jax.selection.hot import popular_rows_of_groups
from slipstream_jax.training.parts import TrainerParts

Counts = Callable[[], Integer[np.ndarray, ' N']]
"""Returns the uses of each global row."""


def encoded(
  codec: str, rows: Float[np.ndarray, 'n D'], table: str
) -> UInt8[np.ndarray, 'n record']:
  """Returns the records of rows.

  In float32 they have the rows' own bits. In int8 an element of a row with
  range r is at most r / 510 off, and a little more for rounding.

  Args:
    codec: a member of `slip_serve.layout.CODECS`.
    rows: rows of any floating type.
    table: the table's name, for errors.

  Raises:
    UserError: a row does not fit float16, or is not finite in int8.
  """
  records = np.empty((len(rows), record_bytes(codec, rows.shape[1])), np.uint8)
  exact = np.asarray(rows, np.float32)
  if codec == 'float32':
    records.view('<f4')[:] = exact
  elif codec == 'float16':
    with np.errstate(over='ignore'):
      half = exact.astype('<f2')
    if not np.isfinite(half).all():
      raise UserError(
        'rows in float16 must be below 65520',
        got=exact[~np.isfinite(half)][0],
        where=f'table {table}',
        hint='export them as float32 or int8',
      )
    records.view('<f2')[:] = half
  else:
    codes, scales, lows = quantize(exact, Bits(8, adaptive=False))
    ranges = np.stack([scales, lows], axis=1).astype('<f4')
    records[:, :8], records[:, 8:] = ranges.view(np.uint8), codes
  return records


def write_rows(
  file: BinaryIO, parts: TrainerParts, layout: Layout, number: int
) -> None:
  """Writes the records of a group's tables, one table after another."""
  for name in parts.recipe.tables.groups[number].tables:
    for rows in parts.engine.pieces_of(name):
      file.write(encoded(layout.codec, rows, name).data)
  group: Group = layout.groups[number]
  file.truncate(padded(group.rows * layout.record(group)))


def popular_rows(
  parts: TrainerParts, counts: Counts | None = None
) -> list[Integer[np.ndarray, ' _']]:
  """Returns the most used rows of each group, in the group's numbers, i64.

  They are the trainer's hot rows. If it has none, they are chosen by `counts`.
  Without both they are empty.

  Args:
    parts: the trainer.
    counts: uses of each row, if the data were counted.
  """
  tables, hot = parts.recipe.tables, parts.engine.hot
  if hot is not None:
    rows = hot.rows
  elif counts is not None and (uses := counts()).any():
    rooms = [-(-group.num_rows // 4) for group in tables.groups]
    rows = popular_rows_of_groups(uses, tables, rooms)
  else:
    rows = np.empty(0, np.int64)
  return [own for _, own in tables.in_groups(rows)]
