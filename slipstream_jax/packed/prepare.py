"""From raw data to a packed data set, in bounded memory, resumable.

Pass 1 (`spill`) reads the parts once and writes one file per column. Pass 2
(`ranking`) counts the ids of one table after the other, a few tables at a time,
numbers its rows by frequency, and writes the rows of all examples. The manifest
comes last. What is written depends on raw data and settings only: not on the
number of threads, nor on where the preparation was stopped and continued.
"""

from collections.abc import Iterator, Mapping
from concurrent import futures
import contextlib
import errno
import os
import pathlib
import threading
from typing import Any, NamedTuple

import numpy as np

from slipstream_jax.data import vocabulary
from slipstream_jax.errors import check_path, UserError
from slipstream_jax.files import Path
from slipstream_jax.formats.base import check_labelled, RawData
from slipstream_jax.packed import journal as journals
from slipstream_jax.packed import ranking, spill
from slipstream_jax.packed.columns import (
  finish,
  is_finished,
  MANIFEST,
  read_manifest,
  UNFINISHED,
)
from slipstream_jax.packed.journal import Journal
from slipstream_jax.packed.layout import Layout, layout_of

_PAUSE_S = 0.2  # between reports of progress while threads work
_THREADS = 4  # each holds one table's ids: more would cost memory


class Progress(NamedTuple):
  """How far a preparation has come."""

  phase: str
  """'reading', 'ranking' or 'sealing'."""
  done: int
  """Of `total`: bytes, lookups, or columns."""
  total: int
  """0 where it is not known."""
  examples: int
  """Examples of the data set so far."""


def prepare(
  raw: RawData,
  folder: Path,
  *,
  min_count: int = 1,
  hash_rows: int | None = None,
  threads: int | None = None,
) -> Iterator[Progress]:
  """Writes a packed data set of raw data; continues what was stopped.

  Args:
    raw: the data set.
    folder: new, empty, or left behind by a preparation that was stopped. One
      that is finished already is left as it is.
    min_count: uses in the training part that earn an id a row of its own.
    hash_rows: buckets of every table, for hashed ids; None counts ids instead.
    threads: tables to rank at a time; None is up to 4, as cores allow.

  Yields:
    Its progress, some times a second. Whoever stops asking stops the work,
    which can then be continued.

  Raises:
    UserError: bad arguments or data, no room on the disk, or a folder that
      cannot be used: it holds something else, was prepared from other sources
      or with other settings, is in use by another program, or was begun from
      what can be read only once. Of data that were refused nothing is left,
      unless a journal was saved before, from which a preparation continues.
  """
  vocabulary.fit_by(
    len(raw.tables), min_count=min_count, hash_rows=hash_rows
  )  # refuses what cannot be
  check_labelled(raw)
  check_path(folder, 'pack, folder')
  folder = pathlib.Path(folder)
  threads = threads or min(_THREADS, os.cpu_count() or 1)
  layout = layout_of(raw, hash_rows)
  identity = journals.identity(raw, min_count, layout)
  new = [path for path in (folder, *folder.parents) if not path.exists()]
  try:
    if is_finished(folder):
      _check_finished(folder, identity)
      # One killed after its manifest was written has still to be cleared.
      if not (folder / UNFINISHED).exists():
        return
    with journals.opened(folder, identity) as journal:
      if not is_finished(folder):
        _check_repeatable(raw, folder, journal)
        try:
          yield from _prepare(raw, folder, journal, layout, threads)
        except UserError:
          _clear_refused(raw, folder, new)
          raise
      journals.clear(folder)
  except OSError as error:
    raise _unwritable(folder, error) from error


def _check_finished(folder: pathlib.Path, identity: Mapping[str, Any]) -> None:
  manifest = read_manifest(folder)
  # `_facts` puts rows and counts of each in place of the identity's names.
  names = [table.get('name') for table in manifest.get('tables', ())]
  was = {**manifest, 'tables': names}
  journals.check_same(identity, was, folder / MANIFEST)


def _clear_refused(
  raw: RawData, folder: pathlib.Path, new: list[pathlib.Path]
) -> None:
  """Leaves nothing of a preparation whose raw data were refused.

  Unless it can be continued, from what its journal says, once the reason is
  gone: as where more bad lines are allowed.

  Args:
    raw: the raw data.
    folder: of the preparation.
    new: folders that it made, the innermost first.
  """
  if journals.exists(folder):
    return
  spill.remove(raw, folder)
  journals.clear(folder)
  with contextlib.suppress(OSError):  # something else was put there meanwhile
    for path in new:
      path.rmdir()


def _check_repeatable(
  raw: RawData, folder: pathlib.Path, journal: Journal
) -> None:
  """Refuses to go on with what cannot be read again from its start."""
  unread = len(journal.parts) < len(raw.parts)
  if not raw.repeatable and unread and journal.examples:
    raise UserError(
      'a preparation that was stopped needs a source that can be read again',
      got='an iterator, which can be read once',
      where=str(folder),
      hint='delete the folder to start anew, or give a function that makes it',
    )


def _prepare(
  raw: RawData,
  folder: pathlib.Path,
  journal: Journal,
  layout: Layout,
  threads: int,
) -> Iterator[Progress]:
  size = sum(part.size for part in raw.parts)
  yield Progress('reading', 0, size, journal.examples)
  if len(journal.parts) < len(raw.parts):
    for now, read in spill.spill(raw, folder, journal):
      yield Progress('reading', read, size, now.examples)
      journal = now
  total = sum(_lookups(raw, journal, table) for table in raw.tables)
  for now, done in _rank(raw, folder, journal, layout, threads):
    yield Progress('ranking', done, total, now.examples)
    journal = now
  rows = {name: journal.tables[name]['rows'] for name in raw.tables}
  columns = layout.columns(rows, journal.examples)
  yield Progress('sealing', 0, len(columns), journal.examples)
  finish(folder, columns, _facts(raw, folder, journal, layout))
  yield Progress('sealing', len(columns), len(columns), journal.examples)


def _lookups(raw: RawData, journal: Journal, table: str) -> int:
  """Ids that are read of a table: to count them, and to find their rows."""
  first, end = journal.splits['train']
  lengths = [raw.features[name].max_length for name in raw.of_table(table)]
  return (end - first + journal.examples) * sum(lengths)


def _rank(
  raw: RawData,
  folder: pathlib.Path,
  journal: Journal,
  layout: Layout,
  threads: int,
) -> Iterator[tuple[Journal, int]]:
  """Writes the tables that are not yet, yielding (journal, lookups done)."""
  left = [t for t, name in enumerate(raw.tables) if name not in journal.tables]
  # One counter per table: threads may not add to the same one.
  lookups = [_lookups(raw, journal, table) for table in raw.tables]
  done = np.array(lookups, np.int64)
  done[left] = 0
  stopped = threading.Event()

  # The journal is given, as this function's own is bound anew meanwhile.
  def write_table(table: int, journal: Journal) -> ranking.Written:
    def tick(lookups: int) -> None:
      done[table] += lookups
      if stopped.is_set():
        raise _Stopped(table)

    return _write_table(raw, folder, journal, layout, table, tick)

  pool = futures.ThreadPoolExecutor(threads, 'slipstream-ranker')
  try:
    working = {pool.submit(write_table, t, journal): t for t in left}
    while working:
      ready, _ = futures.wait(working, _PAUSE_S, futures.FIRST_COMPLETED)
      for future in ready:
        name = raw.tables[working.pop(future)]
        written = {name: future.result()._asdict()}
        journal = journal._replace(tables={**journal.tables, **written})
        journals.save(folder, journal)
        # Only after the journal says that its rows are on the disk: raw ids
        # are much larger, but could not be made again from rows.
        for column in spill.raw_columns(folder, raw, name, journal.examples):
          column.path.unlink()
      yield journal, int(done.sum())
  finally:
    stopped.set()
    pool.shutdown(cancel_futures=True)


class _Stopped(Exception):
  """Ends a thread whose work nobody waits for."""


def _write_table(
  raw: RawData,
  folder: pathlib.Path,
  journal: Journal,
  layout: Layout,
  table: int,
  tick: ranking.Tick,
) -> ranking.Written:
  train, name = journal.splits['train'], raw.tables[table]
  columns = spill.raw_columns(folder, raw, name, journal.examples)
  if layout.hash_rows is None:
    min_count = journal.identity['min_count']
    ranked = ranking.rank_counted(columns, train, min_count, tick)
  else:
    ranked = ranking.rank_hashed(columns, train, table, layout.hash_rows, tick)
  rows = len(ranked.frequency)
  lookups = [
    layout.lookups(feature, rows, journal.examples)
    for feature in raw.of_table(name)
  ]
  of_table = layout.of_table(name, rows)
  return ranking.write(folder, columns, ranked, of_table, lookups, tick)


def _facts(
  raw: RawData, folder: pathlib.Path, journal: Journal, layout: Layout
) -> dict[str, Any]:
  """What the manifest says beside the columns: identity first."""
  labels, _ = layout.example_columns(journal.examples)
  clicks = labels.map(folder)[slice(*journal.splits['train'])]
  return {
    **journal.identity,
    'tables': [{'name': name, **journal.tables[name]} for name in raw.tables],
    'examples': journal.examples,
    'splits': journal.splits,
    'parts': [
      {'name': pathlib.Path(part.name).name, 'examples': part.examples}
      for part in journal.parts
    ],
    'base_rate': float(clicks.mean(dtype=np.float64)),
    'bad_lines': journal.bad,
  }


def _unwritable(folder: pathlib.Path, error: OSError) -> UserError:
  full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
  return UserError(
    'a data set must have a folder that can be written, with room for it',
    got=f'"{error.strerror or error}"',
    where=str(error.filename or folder),
    hint='make room and prepare it again: that continues'
    if full
    else 'give another folder',
  )
