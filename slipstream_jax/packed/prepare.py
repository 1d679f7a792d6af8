"""From raw data to a packed data set, in bounded memory, resumable.

Pass 1 (`spill`) reads the parts once and writes one file per column. Pass 2
(`ranking`) counts the ids of one table after the other, a few tables at a time,
numbers its rows by frequency, and writes the rows of all inputs. The manifest
comes last. What is written depends on raw data and settings only: not on the
number of threads, nor on where the preparation was stopped and continued.
"""

from collections.abc import Iterator, Mapping
from concurrent import futures
import errno
import functools
import os
import pathlib
import threading
from typing import Any, NamedTuple

import numpy as np

from slipstream_jax.data import vocabulary
from slipstream_jax.errors import UserError
from slipstream_jax.packed import columns as packed
from slipstream_jax.packed import journal as journals
from slipstream_jax.packed import ranking, spill
from slipstream_jax.packed.columns import Column, Path
from slipstream_jax.packed.journal import Journal
from slipstream_jax.raw.base import RawData

_TELL_S = 0.2  # between reports of progress while threads work
_THREADS = 4  # each holds one table's ids: more would cost memory
Splits = Mapping[str, tuple[int, int]]


class Progress(NamedTuple):
  """How far a preparation has come."""

  phase: str
  """'reading', 'ranking' or 'sealing'."""
  done: int
  """Of `total`: bytes, lookups, or columns."""
  total: int
  """0 where it is not known."""
  inputs: int
  """Inputs of the data set so far."""


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
    folder: new, empty, or left behind by a preparation that was stopped.
    min_count: uses in the training part that earn an id a row of its own.
    hash_rows: buckets of every table, for hashed ids; None counts ids instead.
    threads: tables to rank at a time; None is up to 4, as cores allow.

  Yields:
    Its progress, some times a second. Whoever stops asking stops the work,
    which can then be continued.

  Raises:
    UserError: bad arguments or data, a folder that cannot be used (see
      `journal.opened`), or no room on the disk.
  """
  vocabulary.fit_by(
    len(raw.tables), min_count=min_count, hash_rows=hash_rows
  )  # refuses what cannot be
  folder = pathlib.Path(folder)
  threads = threads or min(_THREADS, os.cpu_count() or 1)
  identity = journals.identity(raw, min_count, hash_rows)
  try:
    with journals.opened(folder, identity) as journal:
      if not packed.is_finished(folder):
        yield from _prepare(raw, folder, journal, threads)
      journals.clear(folder)
  except OSError as error:
    raise _unwritable(folder, error) from error


def _prepare(
  raw: RawData, folder: pathlib.Path, journal: Journal, threads: int
) -> Iterator[Progress]:
  size = sum(part.size for part in raw.parts)
  yield Progress('reading', 0, size, journal.inputs)
  if len(journal.parts) < len(raw.parts):
    for now, read in spill.spill(raw, folder, journal):
      yield Progress('reading', read, size, now.inputs)
      journal = now
  splits = journal.splits or {}
  total = len(raw.tables) * _reads(raw, journal, splits)
  for now, done in _rank(raw, folder, journal, splits, threads):
    yield Progress('ranking', done, total, now.inputs)
    journal = now
  columns = [*spill.input_columns(raw, journal.inputs)]
  for name in raw.tables:
    written = journal.tables[name]['columns']
    columns += [Column(n, dtype, tuple(shape)) for n, dtype, shape in written]
  yield Progress('sealing', 0, len(columns), journal.inputs)
  packed.finish(folder, columns, _facts(raw, folder, journal, splits))
  yield Progress('sealing', len(columns), len(columns), journal.inputs)


def _reads(raw: RawData, journal: Journal, splits: Splits) -> int:
  """Ids that are read of each table: to count them, and to find their rows."""
  first, end = splits['train']
  return (end - first + journal.inputs) * (raw.series or 1)


def _rank(
  raw: RawData,
  folder: pathlib.Path,
  journal: Journal,
  splits: Splits,
  threads: int,
) -> Iterator[tuple[Journal, int]]:
  """Writes the tables that are not yet, yielding (journal, lookups done)."""
  left = [t for t, name in enumerate(raw.tables) if name not in journal.tables]
  # One counter per table: threads may not add to the same one.
  done = np.zeros(len(raw.tables), np.int64)
  done[[t for t in range(len(done)) if t not in left]] = _reads(
    raw, journal, splits
  )
  stopped = threading.Event()

  def tick(table: int, lookups: int) -> None:
    done[table] += lookups
    if stopped.is_set():
      raise _Stopped(table)

  pool = futures.ThreadPoolExecutor(threads, 'slipstream-ranker')
  try:
    working = {
      pool.submit(
        _write_table,
        raw,
        folder,
        journal,
        splits['train'],
        table,
        functools.partial(tick, table),
      ): table
      for table in left
    }
    while working:
      ready, _ = futures.wait(working, _TELL_S, futures.FIRST_COMPLETED)
      for future in ready:
        table = working.pop(future)
        written = {raw.tables[table]: future.result()._asdict()}
        journal = journal._replace(tables={**journal.tables, **written})
        journals.save(folder, journal)
        # Its rows are on the disk, so its raw ids need no more room there.
        spill.raw_column(folder, raw, table, journal.inputs).path.unlink()
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
  train: tuple[int, int],
  table: int,
  tick: ranking.Tick,
) -> ranking.Written:
  name = raw.tables[table]
  column = spill.raw_column(folder, raw, table, journal.inputs)
  hash_rows = journal.identity['hash_rows']
  if hash_rows is None:
    min_count = journal.identity['min_count']
    ranked = ranking.rank_counted(column, name, train, min_count, tick)
  else:
    ranked = ranking.rank_hashed(column, name, table, train, hash_rows, tick)
  written = ranking.write(folder, name, column, ranked, tick)
  for each in written.columns:
    packed.sync(folder / each.file)
  return written


def _facts(
  raw: RawData, folder: pathlib.Path, journal: Journal, splits: Splits
) -> dict[str, Any]:
  hash_rows = journal.identity['hash_rows']
  return {
    'name': raw.name,
    'dense_features': raw.dense_features,
    'series': raw.series,
    'tables': [
      {
        'name': name,
        'rows': journal.tables[name]['rows'],
        'unknown': journal.tables[name]['unknown'],
        'lookups': journal.tables[name]['lookups'],
      }
      for name in raw.tables
    ],
    'inputs': journal.inputs,
    'splits': {name: list(limits) for name, limits in splits.items()},
    'parts': [
      {'name': pathlib.Path(name).name, 'inputs': inputs}
      for name, inputs, _ in journal.parts
    ],
    'base_rate': _base_rate(raw, folder, journal, splits['train']),
    'vocabulary': {
      'kind': 'counted' if hash_rows is None else 'hashed',
      'min_count': journal.identity['min_count'],
      'hash_rows': hash_rows,
    },
    'bad_lines': sum(bad for _, _, bad in journal.parts),
    'sources': journals.sources(raw),
    'settings': dict(raw.settings),
  }


def _base_rate(
  raw: RawData,
  folder: pathlib.Path,
  journal: Journal,
  train: tuple[int, int],
) -> float:
  labels, _ = spill.input_columns(raw, journal.inputs)
  clicks = labels.map(folder)[slice(*train)].sum(dtype=np.int64)
  return float(clicks / (train[1] - train[0]))


def _unwritable(folder: pathlib.Path, error: OSError) -> UserError:
  full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
  return UserError(
    'a data set must have a folder that can be written, with room for it',
    got=f'"{error.strerror or error}"',
    where=str(error.filename or folder),
    mend=(
      'make room and run the same command again: it continues'
      if full
      else 'give another folder as config.data.path'
    ),
  )
