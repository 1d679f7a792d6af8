"""Raw data on its way to a packed data set: one file per column.

Labels and dense features are written where the packed data set has them; raw
ids, which have no rows yet, go to a file per feature.
"""

from collections.abc import Iterator
import os
import pathlib
from typing import BinaryIO

import numpy as np

from slipstream_jax.data.ahead import ahead
from slipstream_jax.errors import UserError
from slipstream_jax.packed import journal as journals
from slipstream_jax.packed.columns import Column
from slipstream_jax.packed.journal import Journal
from slipstream_jax.packed.ranking import RawColumn
from slipstream_jax.raw.base import Chunk, RawData

SAVED_INPUTS = 1 << 21
"""Inputs after which the journal is written: at most so many are read again."""


def input_columns(raw: RawData, inputs: int) -> tuple[Column, Column]:
  """Columns of the packed data set that need no second pass."""
  return (
    Column('labels', 'uint8', (inputs,)),
    Column('dense', 'float32', (inputs, raw.dense_features)),
  )


def raw_column(
  folder: pathlib.Path, raw: RawData, table: int, inputs: int
) -> RawColumn:
  """The raw ids of feature `table`, from 0."""
  path = folder / journals.UNFINISHED / f'{raw.tables[table]}.int64'
  return RawColumn(path, inputs, raw.series)


def spill(
  raw: RawData, folder: pathlib.Path, journal: Journal
) -> Iterator[tuple[Journal, int]]:
  """Reads what the journal has not, yielding (journal, bytes read).

  Only what a journal saved on disk says counts; one is saved every
  `SAVED_INPUTS` inputs, and at the end of each part.

  Raises:
    UserError: what the parts raise; nothing to train on or to test on; files
      that are not as the journal says.
    OSError: there is no room.
  """
  raw.restore(sum(bad for _, _, bad in journal.parts))
  # A reader that cannot restore a count starts at 0: what it lacks is added.
  earlier = sum(bad for _, _, bad in journal.parts) - raw.skipped()
  with _Files(raw, folder, journal.inputs) as files:
    before = sum(part.size for part in raw.parts[: len(journal.parts)])
    for part in raw.parts[len(journal.parts) :]:
      first = sum(inputs for _, inputs, _ in journal.parts)
      bad = sum(bad for _, _, bad in journal.parts)
      skip, saved = journal.chunks, journal.inputs
      chunks = ahead(part.chunks())
      try:
        for number, (chunk, read) in enumerate(chunks, start=1):
          if number > skip:
            files.append(chunk)
            journal = journal._replace(
              chunks=number, inputs=journal.inputs + len(chunk.labels)
            )
          if journal.inputs - saved >= SAVED_INPUTS:
            files.sync()
            journals.save(folder, journal)
            saved = journal.inputs
          yield journal, before + read
      finally:
        chunks.close()
      done = (part.name, journal.inputs - first, raw.skipped() + earlier - bad)
      journal = journal._replace(parts=(*journal.parts, done), chunks=0)
      if len(journal.parts) == len(raw.parts):
        journal = journal._replace(splits=_splits(raw, journal))
      files.sync()
      journals.save(folder, journal)
      before += part.size
      yield journal, before


def _splits(raw: RawData, journal: Journal) -> dict[str, tuple[int, int]]:
  parts = tuple(inputs for _, inputs, _ in journal.parts)
  splits = raw.split(journal.inputs, parts)
  sizes = {name: end - first for name, (first, end) in splits.items()}
  if min(sizes['train'], sizes['test']) < 1:
    raise UserError(
      'there must be inputs to train on and inputs to test on',
      got=', '.join(f'{size} to {name}' for name, size in sizes.items()),
      where=', '.join(part.name for part in raw.parts),
      mend='give more lines',
    )
  return splits


class _Files:
  """The columns' files, open for appending after `inputs` inputs."""

  def __init__(self, raw: RawData, folder: pathlib.Path, inputs: int):
    labels, dense = input_columns(raw, inputs)
    sizes = {folder / c.file: c.nbytes for c in (labels, dense)}
    for table in range(len(raw.tables)):
      column = raw_column(folder, raw, table, inputs)
      sizes[column.path] = 8 * inputs * (raw.series or 1)
    self._files: list[BinaryIO] = []
    try:
      for path, size in sizes.items():
        self._files.append(_open_at(path, size))
    except BaseException:
      self.close()
      raise

  def append(self, chunk: Chunk) -> None:
    columns = [
      chunk.labels.astype(np.uint8),
      chunk.dense.astype('<f4', copy=False),
      *(chunk.ids[:, f] for f in range(chunk.ids.shape[1])),
    ]
    for file, values in zip(self._files, columns, strict=True):
      file.write(np.ascontiguousarray(values).data)

  def sync(self) -> None:
    for file in self._files:
      file.flush()
      os.fdatasync(file.fileno())

  def close(self) -> None:
    for file in self._files:
      file.close()

  def __enter__(self) -> '_Files':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def _open_at(path: pathlib.Path, size: int) -> BinaryIO:
  """Opens a file to append after its first `size` bytes; drops the others."""
  file = path.open('ab')
  if file.tell() < size:
    found = file.tell()
    file.close()
    raise UserError(
      f'a file of an unfinished data set must have at least {size} bytes',
      got=found,
      where=str(path),
      mend='delete the folder to start anew: something changed the file',
    )
  file.truncate(size)
  return file
