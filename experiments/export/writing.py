"""Writes an export: a folder that is there whole or not at all."""

from collections.abc import Iterator, Sequence
import os
import pathlib
import shutil
from typing import Any
import uuid

import numpy as np

from experiments.common import report, workdir
from experiments.export import codecs, program
from experiments.predict.loading import LoadedRun
from slip_serve import layout as form
from slip_serve.layout import Layout
from slip_serve.manifest import checksum_of, text_of
from slip_serve.program import DENSE
from slipstream_jax.errors import UserError
from slipstream_jax.files import sync
from slipstream_jax.selection.hot import popular_rows_of_groups
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.hashed import Hashed, Ranked

_WHERE = '--output'


def batch_sizes(words: Sequence[str]) -> list[int]:
  """Examples of the programs, rising.

  Raises:
    UserError: one is no such number.
  """
  try:
    sizes = sorted({int(word) for word in words})
  except ValueError:
    sizes = []
  if not sizes or sizes[0] < 1 or sizes[-1] > 1 << 24:
    raise UserError(
      'batch sizes must be whole numbers from 1 to 2**24',
      got=','.join(words) or 'none',
      where='--batch_sizes',
      hint='give some, such as 1,64,1024',
    )
  return sizes


def check_new(output: pathlib.Path) -> None:
  """Looks whether there is nothing yet, before any work is done.

  Raises:
    UserError: there is something.
  """
  if output.exists() and (not output.is_dir() or any(output.iterdir())):
    raise UserError(
      'an export needs a new or empty folder',
      got=output,
      where=_WHERE,
      hint='name another one, or remove what is there',
    )


def write(
  run: LoadedRun,
  output: pathlib.Path,
  codec: str,
  sizes: Sequence[int],
  platforms: Sequence[str] = ('cpu',),
) -> Layout:
  """Writes an export of a run, and returns what it is.

  Args:
    run: whose model and rows.
    output: the folder, new or empty.
    codec: of rows, a member of `CODECS`.
    sizes: batch sizes of its programs.
    platforms: that they run on.

  Raises:
    UserError: the model or the rows cannot be exported, or there is no room;
      nothing is then left of it.
  """
  check_new(output)
  # What a killed one left has another name: a folder of that may be anybody's.
  partial = output.with_name(f'{output.name}.{uuid.uuid4().hex}.tmp')
  workdir.writable(str(partial), _WHERE)
  try:
    layout = _write(run, partial, codec, sizes, platforms)
    if output.exists():
      output.rmdir()
    partial.rename(output)
  except OSError as error:
    raise UserError(
      'an export needs a folder that can be written',
      got=f'{output}: {error.strerror}',
      where=_WHERE,
      hint='name one on a disk with room',
    ) from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  return layout


def _write(
  run: LoadedRun,
  folder: pathlib.Path,
  codec: str,
  sizes: Sequence[int],
  platforms: Sequence[str],
) -> Layout:
  tables, leaves = run.trainer.recipe.tables, program.leaves_of(run.trainer)
  popular = popular_rows(run)
  groups = tuple(
    form.Group(
      group.num_rows,
      group.dim,
      f'rows_{number}.bin',
      group.columns,
      f'popular_{number}.bin' if len(popular[number]) else '',
    )
    for number, group in enumerate(tables.groups)
  )
  layout = Layout(
    run.data.name,
    run.step,
    codec,
    run.trainer.shape.dense_features,
    tables.is_weighted,
    _features(run),
    _tables(run),
    groups,
    tuple(form.Program(size, f'score_{size}.jax') for size in sizes),
    tuple(form.Leaf(leaf.dtype.name, leaf.shape) for leaf in leaves),
    (),
    (),
  )
  _check_room(folder, layout)
  # The programs first, as they are what may fail.
  for size, name in layout.programs:
    (folder / name).write_bytes(
      program.serialized(run.trainer, size, platforms)
    )
  (folder / DENSE).write_bytes(b''.join(leaf.tobytes() for leaf in leaves))
  for group, rows in zip(groups, popular, strict=True):
    if group.popular:
      _save(folder / group.popular, rows.astype('<i8'))
  for group, of_tables in zip(groups, tables.groups, strict=True):
    with open(folder / group.file, 'wb') as file:
      for name in of_tables.tables:
        for rows in run.trainer.engine.pieces_of(name):
          file.write(codecs.encoded(codec, rows, name).data)
      file.truncate(form.padded(group.rows * layout.record(group)))
  words = run.data.vocabulary() if run.data.vocabulary else None
  vocabulary = vocabulary_files(words, folder, len(tables.tables))
  layout = layout._replace(vocabulary=tuple(vocabulary))
  files = []
  for path in sorted(folder.iterdir()):
    sync(path)
    crc = checksum_of(path)
    files.append(form.File(path.name, path.stat().st_size, crc))
  layout = layout._replace(files=tuple(files))
  (folder / form.MANIFEST).write_text(text_of(layout))
  sync(folder / form.MANIFEST)
  return layout


def _check_room(folder: pathlib.Path, layout: Layout) -> None:
  wanted = sum(group.rows * layout.record(group) for group in layout.groups)
  free = shutil.disk_usage(folder).free
  if free < wanted:
    raise UserError(
      f'an export of these rows needs {report.size(wanted)} of its disk',
      got=report.size(free),
      where=_WHERE,
      hint='name another disk, or --dtype=float16 or int8',
    )


def popular_rows(run: LoadedRun) -> list[np.ndarray]:
  """Of each group, in its numbers, rows i64 that are looked up most, in order.

  They are the hot rows of the run, or those of a data set that was counted;
  empty where nobody counted.
  """
  tables, count = run.trainer.recipe.tables, run.data.counts
  if run.trainer.engine.hot is not None:
    rows = run.trainer.engine.hot.rows
  elif count is not None and (counts := count()).any():
    rooms = [-(-group.num_rows // 4) for group in tables.groups]
    rows = popular_rows_of_groups(counts, tables, rooms)
  else:
    rows = np.empty(0, np.int64)
  return [own for _, own in tables.in_groups(rows)]


def _features(run: LoadedRun) -> tuple[form.Feature, ...]:
  tables = run.trainer.recipe.tables
  numbers = {name: number for number, name in enumerate(tables.tables)}
  return tuple(
    form.Feature(
      name,
      numbers[feature.table],
      tables.columns[name].start,
      feature.max_length,
    )
    for name, feature in tables.features.items()
  )


def _tables(run: LoadedRun) -> tuple[form.Table, ...]:
  tables = run.trainer.recipe.tables
  places: dict[str, tuple[int, int]] = {}
  for number, group in enumerate(tables.groups):
    first = 0
    for name in group.tables:
      places[name] = number, first
      first += tables.tables[name].rows
  return tuple(
    form.Table(name, table.rows, *places[name])
    for name, table in tables.tables.items()
  )


def vocabulary_files(
  words: Any, folder: pathlib.Path, tables: int
) -> Iterator[form.Vocabulary]:
  """Writes which row stands for which raw id, table by table.

  Args:
    words: of `slipstream_jax.vocabulary`, one per table. None: ids are rows.
    folder: gets a file for each table that needs one.
    tables: how many.

  Raises:
    UserError: a vocabulary of another kind.
  """
  for number in range(tables):
    name = f'ids_{number}.bin'
    if words is None:
      yield form.Vocabulary('none', 0, '')
    elif isinstance(words[number], Hashed):
      yield form.Vocabulary('hashed', words[number].size, '')
    elif isinstance(words[number], Ranked):
      ranks = np.asarray(words[number].ranks).astype('<i4')
      _save(folder / name, ranks)
      yield form.Vocabulary('ranked', len(ranks), name)
    elif isinstance(words[number], Vocabulary):
      ids = words[number].known
      order = np.argsort(ids)
      rows = (order + 1).astype('<i4')
      _save(folder / name, ids[order].astype('<i8'), rows)
      yield form.Vocabulary('counted', len(ids), name)
    else:
      raise UserError(
        'a vocabulary must be one that can be exported',
        got=type(words[number]).__name__,
        where='Dataset.vocabulary',
        hint='make it by counting, or by hashing',
      )


def _save(path: str | os.PathLike[str], *arrays: np.ndarray) -> None:
  with open(path, 'wb') as file:
    for array in arrays:
      file.write(np.ascontiguousarray(array).data)
