"""Prepares a packed data set of raw data, in bounded memory and resumable.

Pass 1 reads the parts once and writes one file per column. Raw ids, which have
no rows yet, go to a file per feature. Pass 2 (`ranking`) numbers the rows of a
few tables at a time, and writes the rows of all examples. The manifest comes
last. The result does not depend on the number of threads or on interruptions.
"""

from collections.abc import Iterator, Sequence
from concurrent import futures
import contextlib
import errno
import functools
import os
import pathlib
import shutil
import threading
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from slipstream_jax.data.prefetch import ahead
from slipstream_jax.errors import check_path, UserError
from slipstream_jax.files import Path
from slipstream_jax.formats.base import (
  BadLines,
  check_chunk,
  check_labelled,
  checked_splits,
  Chunk,
  Part,
  RawData,
)
from slipstream_jax.packed import journal as journals
from slipstream_jax.packed import ranking
from slipstream_jax.packed.columns import (
  Column,
  finish,
  is_finished,
  MANIFEST,
  read_manifest,
  UNFINISHED,
)
from slipstream_jax.packed.journal import Journal, ReadPart
from slipstream_jax.packed.layout import Layout, layout_of
from slipstream_jax.vocabulary.counted import fit_by, Vocabulary

SAVED_EXAMPLES = 1 << 21
"""Examples between two saved journals: the most that are read again."""
_PAUSE_S = 0.2  # between reports of progress while threads work
_THREADS = 4  # each has one table's ids in memory


class Progress(NamedTuple):
  """How far a preparation has come."""

  phase: str
  """'reading', 'ranking' or 'sealing'."""
  done: int
  """Bytes, lookups or columns done, of `total`."""
  total: int
  """0 if unknown."""
  examples: int
  """Examples of the data set so far."""


def prepare(
  raw: RawData,
  folder: Path,
  *,
  min_count: int = 1,
  hash_rows: int | None = None,
  vocabularies: Sequence[Vocabulary] | None = None,
  threads: int | None = None,
) -> Iterator[Progress]:
  """Writes a packed data set of raw data. Resumes an interrupted preparation.

  Args:
    raw: the raw data.
    folder: a new or empty folder, or one of an interrupted preparation. A
      finished data set is not changed.
    min_count: uses in the training part that an id needs to get its own row.
    hash_rows: buckets of every table, for hashed ids. None counts ids instead.
    vocabularies: one for each table, with integers as ids, in place of counting
      or hashing. Ids that they do not know have row 0 or shared rows.
    threads: tables to rank at a time. None: up to 4, but no more than cores.

  Yields:
    Progress, several times a second. Closing the generator stops the work,
    which can be resumed later.

  Raises:
    UserError: bad arguments or data, no room on the disk, or a folder with
      other contents, of other sources or settings, in use by another program,
      or begun from a source that can be read only once. If data are refused
      before a journal was saved, nothing remains of them.
  """
  # Only checks the arguments here.
  fit_by(len(raw.tables), min_count=min_count, hash_rows=hash_rows)
  _check_given(raw, vocabularies, min_count > 1 or hash_rows is not None)
  check_labelled(raw)
  check_path(folder, 'pack, folder')
  folder = pathlib.Path(folder)
  threads = threads or min(_THREADS, os.cpu_count() or 1)
  layout = layout_of(raw, hash_rows, vocabularies)
  identity = journals.identity(raw, min_count, layout)
  new = [path for path in (folder, *folder.parents) if not path.exists()]
  try:
    if is_finished(folder):
      manifest = read_manifest(folder)
      # A manifest has each table's facts, but an identity has only its name.
      names = [table.get('name') for table in manifest.get('tables', ())]
      before = {**manifest, 'tables': names}
      journals.check_same(identity, before, folder / MANIFEST)
      # If killed just after the manifest was written, this is left to clear.
      if not (folder / UNFINISHED).exists():
        return
    with journals.opened(folder, identity) as journal:
      if not is_finished(folder):
        try:
          work = _Preparation(raw, folder, layout, journal, vocabularies)
          yield from work.run(threads)
        except UserError:
          _clear_refused(layout, folder, new)
          raise
      shutil.rmtree(folder / UNFINISHED)
  except OSError as error:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    mend = 'make room and prepare it again: that continues'
    raise UserError(
      'a data set must have a folder that can be written, with room for it',
      got=f'"{error.strerror or error}"',
      where=str(error.filename or folder),
      hint=mend if full else 'give another folder',
    ) from error


def _check_given(
  raw: RawData, vocabularies: Sequence[Vocabulary] | None, counted: bool
) -> None:
  """Checks given vocabularies.

  Raises:
    UserError: they are not one for each table, have text as ids, or ids are to
      be counted or hashed as well.
  """
  if vocabularies is None:
    return
  where = 'prepare, vocabularies'
  if len(vocabularies) != len(raw.tables):
    raise UserError(
      f'there must be a vocabulary for each of the {len(raw.tables)} tables',
      got=len(vocabularies),
      where=where,
      hint='give one per table, in the order of raw.tables',
    )
  if counted:
    raise UserError(
      'ids have the rows of given vocabularies, so they are not counted or'
      ' hashed',
      got='min_count or hash_rows as well',
      where=where,
      hint='leave those out',
    )
  for name, words in zip(raw.tables, vocabularies, strict=True):
    if words.known.dtype != np.int64:
      raise UserError(
        'packed ids are integers of 64 bits, so those of a vocabulary must be',
        got=f'{words.known.dtype} of table {name}',
        where=where,
        hint='give what packed_dataset(folder).vocabulary() returned, or'
        ' learned_hash made of it',
      )


def _clear_refused(
  layout: Layout, folder: pathlib.Path, new: list[pathlib.Path]
) -> None:
  """Deletes the files of refused raw data, and the folders that are `new`.

  Does nothing if there is a journal: work can be resumed once the reason is
  gone, such as too few bad lines allowed.
  """
  if journals.path_in(folder).exists():
    return
  for column in _final_columns(layout, 0):
    (folder / column.file).unlink(missing_ok=True)
  shutil.rmtree(folder / UNFINISHED)
  with contextlib.suppress(OSError):  # another program may have added files
    for path in new:
      path.rmdir()


class _Preparation:
  """A preparation at work."""

  def __init__(
    self,
    raw: RawData,
    folder: pathlib.Path,
    layout: Layout,
    journal: Journal,
    vocabularies: Sequence[Vocabulary] | None,
  ):
    self.raw, self.folder, self.layout = raw, folder, layout
    self.journal, self.vocabularies = journal, vocabularies

  def run(self, threads: int) -> Iterator[Progress]:
    """Does what the journal does not have yet."""
    raw, layout = self.raw, self.layout
    size = sum(part.size for part in raw.parts)
    yield Progress('reading', 0, size, self.journal.examples)
    if len(self.journal.parts) < len(raw.parts):
      if self.journal.examples and not raw.repeatable:
        raise UserError(
          'a preparation that was stopped needs a source that can be read'
          ' again',
          got='an iterator, which can be read once',
          where=str(self.folder),
          hint='delete the folder to start anew, or give a function that makes'
          ' it',
        )
      for read in self._read():
        yield Progress('reading', read, size, self.journal.examples)
    total = sum(map(self._lookups, raw.tables))
    for done in self._rank(threads):
      yield Progress('ranking', done, total, self.journal.examples)
    rows = {name: self.journal.tables[name]['rows'] for name in raw.tables}
    columns = layout.columns(rows, self.journal.examples)
    yield Progress('sealing', 0, len(columns), self.journal.examples)
    finish(self.folder, columns, self._facts())
    yield Progress('sealing', len(columns), len(columns), self.journal.examples)

  def _read(self) -> Iterator[int]:
    """Reads the parts that the journal does not have. Yields bytes read.

    The journal is saved every `SAVED_EXAMPLES` examples and after each part.
    """
    raw, parts = self.raw, self.journal.parts
    bad = raw.bad or BadLines()
    bad.restore(self.journal.bad)
    with _opened(self.layout, self.folder, self.journal.examples) as files:
      before = sum(part.size for part in raw.parts[: len(parts)])
      for part in raw.parts[len(parts) :]:
        for read in self._read_part(part, files):
          yield before + read
        before += part.size
        journal = self.journal
        examples = journal.examples - sum(p.examples for p in journal.parts)
        done = ReadPart(part.name, examples, bad.count - journal.bad)
        self.journal = journal._replace(parts=(*journal.parts, done), chunks=0)
        if len(self.journal.parts) == len(raw.parts):
          lengths = tuple(part.examples for part in self.journal.parts)
          try:
            splits = checked_splits(raw, lengths)
          except UserError:
            # The same files would be refused again.
            journals.path_in(self.folder).unlink(missing_ok=True)
            raise
          self.journal = self.journal._replace(splits=splits)
        self._save(files)
        yield before

  def _read_part(self, part: Part, files: list[BinaryIO]) -> Iterator[int]:
    """Reads a part's chunks that the journal does not have."""
    skip, saved = self.journal.chunks, self.journal.examples
    # Reads from the start, because gzip files have no other way. Chunks are the
    # same each time, so the first `skip` of them are in the files already.
    with contextlib.closing(ahead(part.chunks())) as chunks:
      for number, (chunk, read) in enumerate(chunks, start=1):
        if number > skip:
          check_chunk(self.raw, chunk, part.name)
          _append(files, self.raw, chunk)
          examples = self.journal.examples + len(chunk.labels)
          self.journal = self.journal._replace(chunks=number, examples=examples)
        if self.journal.examples - saved >= SAVED_EXAMPLES:
          self._save(files)
          saved = self.journal.examples
        yield read

  def _save(self, files: list[BinaryIO]) -> None:
    """Saves the journal after syncing the files that it describes."""
    for file in files:
      file.flush()
      os.fdatasync(file.fileno())  # includes the size, but not the mtime
    journals.save(self.folder, self.journal)

  def _lookups(self, table: str) -> int:
    """Returns how many ids of a table are read, to count and to map them."""
    first, end = self.journal.splits['train']
    features = self.raw.features
    lengths = [features[name].max_length for name in self.raw.of_table(table)]
    return (end - first + self.journal.examples) * sum(lengths)

  def _rank(self, threads: int) -> Iterator[int]:
    """Writes the tables that the journal does not have. Yields ids read."""
    tables, written = self.raw.tables, self.journal.tables
    left = [t for t, name in enumerate(tables) if name not in written]
    # One counter per table, because adding is not atomic.
    done = np.array([self._lookups(name) for name in tables], np.int64)
    done[left] = 0
    stopped = threading.Event()

    def tick(table: int, ids: int) -> None:
      done[table] += ids
      if stopped.is_set():
        raise _StoppedError(table)

    pool = futures.ThreadPoolExecutor(threads, 'slipstream-ranker')
    try:
      working = {
        pool.submit(self._write_table, t, functools.partial(tick, t)): t
        for t in left
      }
      while working:
        ready, _ = futures.wait(working, _PAUSE_S, futures.FIRST_COMPLETED)
        for future in ready:
          name = tables[working.pop(future)]
          written = {**self.journal.tables, name: future.result()}
          self.journal = self.journal._replace(tables=written)
          journals.save(self.folder, self.journal)
          # Only after the journal is saved: raw ids cannot be made from rows.
          for column in self._raw_columns(name):
            column.path.unlink()
        yield int(done.sum())
    finally:
      stopped.set()
      pool.shutdown(cancel_futures=True)

  def _write_table(self, table: int, tick: ranking.Tick) -> dict[str, int]:
    layout, journal = self.layout, self.journal
    name, train = self.raw.tables[table], journal.splits['train']
    columns = self._raw_columns(name)
    pieces = (p for column in columns for p in column.pieces(*train))
    if self.vocabularies is not None:
      ranked = ranking.rank_given(pieces, self.vocabularies[table], tick)
    elif layout.hash_rows is None:
      min_count = journal.identity['min_count']
      ranked = ranking.rank_counted(pieces, min_count, tick)
    else:
      ranked = ranking.rank_hashed(pieces, table, layout.hash_rows, tick)
    rows = len(ranked.frequency)
    lookups = [
      layout.lookups(feature, rows, journal.examples)
      for feature in self.raw.of_table(name)
    ]
    of_table = layout.of_table(name, rows)
    return ranking.write(self.folder, columns, ranked, of_table, lookups, tick)

  def _raw_columns(self, table: str) -> list[ranking.RawColumn]:
    """Returns the raw ids of each feature of a table."""
    return [
      ranking.RawColumn(
        _raw_path(self.folder, name),
        self.journal.examples,
        self.raw.features[name].max_length,
      )
      for name in self.raw.of_table(table)
    ]

  def _facts(self) -> dict[str, Any]:
    """Returns the facts of the manifest, the identity first."""
    journal = self.journal
    labels, _ = self.layout.example_columns(journal.examples)
    clicks = labels.map(self.folder)[slice(*journal.splits['train'])]
    return {
      **journal.identity,
      'tables': [
        {'name': name, **journal.tables[name]} for name in self.raw.tables
      ],
      'examples': journal.examples,
      'splits': journal.splits,
      'parts': [
        {'name': pathlib.Path(part.name).name, 'examples': part.examples}
        for part in journal.parts
      ],
      'base_rate': float(clicks.mean(dtype=np.float64)),
      'bad_lines': journal.bad,
    }


class _StoppedError(Exception):
  """Ends a thread whose result is not needed."""


def _raw_path(folder: pathlib.Path, feature: str) -> pathlib.Path:
  return folder / UNFINISHED / Column(feature, 'int64', ()).file


def _final_columns(layout: Layout, examples: int) -> list[Column]:
  """Returns the columns that pass 1 writes in their final form."""
  weights = layout.lookup_weights(examples).values()
  return [*layout.example_columns(examples), *weights]


@contextlib.contextmanager
def _opened(
  layout: Layout, folder: pathlib.Path, examples: int
) -> Iterator[list[BinaryIO]]:
  """Opens the files of pass 1 to append to after `examples` examples."""
  columns = _final_columns(layout, examples)
  sizes = {folder / column.file: column.nbytes for column in columns}
  for name, feature in layout.features.items():
    sizes[_raw_path(folder, name)] = 8 * examples * feature.max_length
  with contextlib.ExitStack() as stack:
    yield [stack.enter_context(_open_at(*place)) for place in sizes.items()]


def _append(files: list[BinaryIO], raw: RawData, chunk: Chunk) -> None:
  """Appends a chunk to the files, in the order of `_opened`."""
  ids, spans, weights = chunk.ids, raw.columns, chunk.lookup_weights
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


def _open_at(path: pathlib.Path, size: int) -> BinaryIO:
  """Opens a file to append after its first `size` bytes; drops the rest."""
  # In this mode, writes go to the end that the file has after truncation.
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
