"""Raw data on its way to a packed data set: one file per column.

Labels and dense features are written where the packed data set has them; raw
ids, which have no rows yet, go to a file per feature.
"""

from collections.abc import Generator, Iterator
import contextlib
import os
import pathlib
from typing import BinaryIO

import numpy as np

from slipstream_jax.data.ahead import ahead
from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import check_chunk, Chunk, Part, RawData
from slipstream_jax.packed import journal as journals
from slipstream_jax.packed.columns import Column, UNFINISHED
from slipstream_jax.packed.journal import Journal, ReadPart
from slipstream_jax.packed.layout import layout_of
from slipstream_jax.packed.ranking import RawColumn

SAVED_EXAMPLES = 1 << 21
"""Examples after which the journal is written: at most so many are read
again."""


def raw_columns(
  folder: pathlib.Path, raw: RawData, table: str, examples: int
) -> list[RawColumn]:
  """The raw ids of each feature of a table."""
  return [
    RawColumn(_raw_path(folder, name), examples, raw.features[name].max_length)
    for name in raw.of_table(table)
  ]


def _raw_path(folder: pathlib.Path, feature: str) -> pathlib.Path:
  return folder / UNFINISHED / Column(feature, 'int64', ()).file


def spill(
  raw: RawData, folder: pathlib.Path, journal: Journal
) -> Iterator[tuple[Journal, int]]:
  """Reads what the journal does not have yet, yielding (journal, bytes read).

  A journal is saved every `SAVED_EXAMPLES` examples, and at the end of each
  part. What was read after the last one saved is read again.

  Raises:
    UserError: what the parts raise; nothing to train on or to test on; files
      that are not as the journal says.
    OSError: there is no room.
  """
  raw.restore(journal.bad)
  # Some raw data count from 0 all the same: what they lack is added below.
  earlier = journal.bad - raw.skipped()
  with _opened(raw, folder, journal.examples) as files:
    before = sum(part.size for part in raw.parts[: len(journal.parts)])
    for part in raw.parts[len(journal.parts) :]:
      journal = yield from _spill_part(
        raw, part, before, folder, journal, files
      )
      before += part.size
      examples = journal.examples - sum(done.examples for done in journal.parts)
      # Only now: a part that is read again counts its bad lines again.
      bad = raw.skipped() + earlier - journal.bad
      done = ReadPart(part.name, examples, bad)
      # `chunks` counts those of the part that comes next.
      journal = journal._replace(parts=(*journal.parts, done), chunks=0)
      if len(journal.parts) == len(raw.parts):
        try:
          journal = journal._replace(splits=_splits(raw, journal))
        except UserError:
          journals.forget(folder)  # the same files would be refused again
          raise
      _save(files, folder, journal)
      yield journal, before


def _spill_part(
  raw: RawData,
  part: Part,
  before: int,
  folder: pathlib.Path,
  journal: Journal,
  files: list[BinaryIO],
) -> Generator[tuple[Journal, int], None, Journal]:
  """Reads a part's chunks, but for those that the journal has.

  Yields as `spill`, of whose parts `before` bytes were read; returns the last
  journal.
  """
  skip, saved = journal.chunks, journal.examples
  # From the start, as no one can begin in the midst of a gzip file. Chunks
  # are the same each time, so the first `skip` of them are in the files.
  chunks = ahead(part.chunks())
  try:
    for number, (chunk, read) in enumerate(chunks, start=1):
      if number > skip:
        check_chunk(raw, chunk, part.name)
        _append(files, raw, chunk)
        examples = journal.examples + len(chunk.labels)
        journal = journal._replace(chunks=number, examples=examples)
      if journal.examples - saved >= SAVED_EXAMPLES:
        _save(files, folder, journal)
        saved = journal.examples
      # Ahead of the one saved: the caller shows it, but counts on nothing.
      yield journal, before + read
  finally:
    chunks.close()
  return journal


def _splits(raw: RawData, journal: Journal) -> dict[str, tuple[int, int]]:
  splits = raw.split(journal.examples, tuple(p.examples for p in journal.parts))
  sizes = {name: end - first for name, (first, end) in splits.items()}
  if min(sizes['train'], sizes['test']) < 1:
    raise UserError(
      'there must be examples to train on and examples to test on',
      got=', '.join(f'{size} to {name}' for name, size in sizes.items()),
      where=', '.join(part.name for part in raw.parts),
      hint='give more lines',
    )
  return splits


def remove(raw: RawData, folder: pathlib.Path) -> None:
  """Deletes the columns that `spill` wrote; raw ids lie with the journal."""
  for column in _columns(raw, 0):
    (folder / column.file).unlink(missing_ok=True)


def _columns(raw: RawData, examples: int) -> list[Column]:
  """Columns of examples that no vocabulary changes."""
  layout = layout_of(raw, None)
  weights = layout.lookup_weights(examples).values()
  return [*layout.example_columns(examples), *weights]


@contextlib.contextmanager
def _opened(
  raw: RawData, folder: pathlib.Path, examples: int
) -> Iterator[list[BinaryIO]]:
  """The columns' files, to append to after `examples` examples."""
  sizes = {folder / c.file: c.nbytes for c in _columns(raw, examples)}
  for name, feature in raw.features.items():
    sizes[_raw_path(folder, name)] = 8 * examples * feature.max_length
  with contextlib.ExitStack() as stack:
    yield [stack.enter_context(_open_at(*place)) for place in sizes.items()]


def _append(files: list[BinaryIO], raw: RawData, chunk: Chunk) -> None:
  """Appends to the files of `_opened`, in its order."""
  ids, spans, weights = chunk.flat_ids, raw.columns, chunk.lookup_weights
  columns = [
    chunk.labels.astype(raw.label_dtype),
    chunk.dense.astype('<f4', copy=False),
    *(
      weights[:, spans[name]]
      for name, feature in raw.features.items()
      if feature.weighted and weights is not None
    ),
    *(ids[:, span] for span in spans.values()),
  ]
  for file, values in zip(files, columns, strict=True):
    file.write(np.ascontiguousarray(values).data)


def _save(
  files: list[BinaryIO], folder: pathlib.Path, journal: Journal
) -> None:
  """Saves a journal once what it says is on the disk."""
  for file in files:
    file.flush()
    os.fdatasync(file.fileno())  # with its size, but not its time of change
  journals.save(folder, journal)


def _open_at(path: pathlib.Path, size: int) -> BinaryIO:
  """Opens a file to append after its first `size` bytes; drops the others."""
  # Appending goes to the end that the file has by then: the one cut below.
  file = path.open('ab')
  length = file.tell()
  if length < size:
    file.close()
    raise UserError(
      f'a file of an unfinished data set must have at least {size} bytes',
      got=length,
      where=str(path),
      hint='delete the folder to start anew: something changed the file',
    )
  file.truncate(size)
  return file
