"""Writes an export: a folder that is complete, or absent."""

from collections.abc import Iterator, Sequence
import contextlib
import os
import pathlib
import shutil
from typing import Any
import uuid

import numpy as np

from slip_serve import layout as form
from slip_serve.layout import Layout
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.errors import check_path, choose, is_whole, UserError
from slipstream_jax.export import program
from slipstream_jax.export.rows import popular_rows, write_rows
from slipstream_jax.export.source import SourceFacts
from slipstream_jax.export.vocabulary import write_ids
from slipstream_jax.files import checksum, Path, sync
from slipstream_jax.tables import offsets, TableSet
from slipstream_jax.training.parts import TrainerParts

BATCH_SIZES = 1, 64, 1024
"""The examples of the programs, if nothing else is asked for."""
_MOST_EXAMPLES = 1 << 24
_WHERE = 'export'


def check_arguments(
  folder: Path,
  dtype: object,
  batch_sizes: Sequence[object],
  platforms: Sequence[str],
) -> None:
  """Checks the arguments of `write_export` before any work is done.

  Raises:
    UserError: one is invalid, or the folder is not new or empty.
  """
  check_path(folder, f'{_WHERE}, path')
  choose(dict.fromkeys(form.CODECS), dtype, f'{_WHERE}, dtype')
  for platform in platforms:
    choose(dict.fromkeys(program.PLATFORMS), platform, f'{_WHERE}, platforms')
  for size in batch_sizes or [0]:
    if not is_whole(size, 1, _MOST_EXAMPLES + 1):
      raise UserError(
        'batch_sizes must be whole numbers from 1 to 2**24, at least one',
        got=repr(size) if batch_sizes else 'none',
        where=f'{_WHERE}, batch_sizes',
        hint='give some, such as 1, 64, 1024',
      )
  path = pathlib.Path(folder)
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise UserError(
      'an export needs a new or empty folder',
      got=path,
      where=f'{_WHERE}, path',
      hint='give another one, or remove what is there',
    )


def write_export(
  parts: TrainerParts,
  folder: Path,
  facts: SourceFacts,
  dtype: str = 'float32',
  batch_sizes: Sequence[Any] = BATCH_SIZES,
  platforms: Sequence[str] = ('cpu',),
) -> Layout:
  """Writes a trainer's model, rows and vocabularies; returns what it wrote.

  Args:
    parts: the trainer. It must take no step meanwhile.
    folder: a new or empty folder.
    facts: what is known of the data.
    dtype: dtype of the rows, a member of `slip_serve.layout.CODECS`.
    batch_sizes: examples of the programs.
    platforms: platforms that the programs run on.

  Raises:
    UserError: an invalid argument, a model or rows that cannot be exported, or
      no room. Nothing of the export is then left.
  """
  check_arguments(folder, dtype, batch_sizes, platforms)
  popular = popular_rows(parts, facts.counts)
  leaves = program.leaves_of(parts)
  sizes = sorted({int(size) for size in batch_sizes})
  layout = _layout(parts, facts, leaves, [len(x) > 0 for x in popular])
  layout = layout._replace(
    codec=dtype,
    programs=tuple(form.Program(n, f'score_{n}.jax') for n in sizes),
  )
  with _complete(pathlib.Path(folder)) as partial:
    _check_room(partial, layout)
    # The programs come first, because a model may fail to be exported.
    for size, file in layout.programs:
      contents = program.serialized(parts, size, platforms)
      (partial / file).write_bytes(contents)
    (partial / form.DENSE).write_bytes(b''.join(x.tobytes() for x in leaves))
    for number, group in enumerate(layout.groups):
      if group.popular:
        rows = popular[number].astype('<i8')
        (partial / group.popular).write_bytes(rows.tobytes())
      with open(partial / group.file, 'wb') as opened:
        write_rows(opened, parts, layout, number)
    words = tuple(write_ids(x, partial, n) for n, x in enumerate(facts.ids))
    layout = layout._replace(vocabulary=words, files=_synced(partial))
    (partial / form.MANIFEST).write_text(form.text_of(layout))
    sync(partial / form.MANIFEST)
  return layout


def _layout(
  parts: TrainerParts,
  facts: SourceFacts,
  leaves: Sequence[np.ndarray],
  popular: Sequence[bool],
) -> Layout:
  """Returns the layout without codec, programs, vocabularies and files.

  Args:
    parts: the trainer.
    facts: what is known of the data.
    leaves: the model's parameters.
    popular: for each group whether there are popular rows.
  """
  tables = parts.recipe.tables
  groups = tuple(
    form.Group(
      group.num_rows,
      group.dim,
      f'rows_{number}.bin',
      group.columns,
      f'popular_{number}.bin' if popular[number] else '',
    )
    for number, group in enumerate(tables.groups)
  )
  return Layout(
    name=facts.name,
    step=int(to_host(parts.state.step)),
    codec='float32',
    dense_features=parts.shape.dense_features,
    weighted=tables.is_weighted,
    features=_features(tables),
    tables=_tables(tables),
    groups=groups,
    programs=(),
    leaves=tuple(form.Leaf(leaf.dtype.name, leaf.shape) for leaf in leaves),
    vocabulary=(),
    files=(),
    dense=facts.dense,
  )


@contextlib.contextmanager
def _complete(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Makes a temporary folder that gets the folder's name when the block ends.

  If the block fails, the temporary folder is removed.

  Raises:
    UserError: the folder cannot be written.
  """
  # A unique name, because a killed process may have left another one.
  partial = folder.with_name(f'{folder.name}.{uuid.uuid4().hex}.tmp')
  try:
    partial.mkdir(parents=True)
    yield partial
    if folder.exists():
      folder.rmdir()
    partial.rename(folder)
  except OSError as error:
    raise UserError(
      'an export needs a folder that can be written',
      got=f'{folder}: {error.strerror}',
      where=f'{_WHERE}, path',
      hint='give one on a disk with room',
    ) from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _check_room(folder: pathlib.Path, layout: Layout) -> None:
  wanted = sum(group.rows * layout.record(group) for group in layout.groups)
  free = shutil.disk_usage(folder).free
  if free < wanted:
    raise UserError(
      f'an export of these rows needs {wanted / 1e9:.3g} GB of its disk',
      got=f'{free / 1e9:.3g} GB',
      where=f'{_WHERE}, path',
      hint='give another disk, or the dtype float16 or int8',
    )


def _synced(folder: pathlib.Path) -> tuple[form.File, ...]:
  """Syncs all files of a folder to disk; returns their sizes and checksums."""
  files = []
  for path in sorted(folder.iterdir()):
    sync(path)
    size = os.path.getsize(path)
    files.append(form.File(path.name, size, f'{checksum(path):08x}'))
  return tuple(files)


def _features(tables: TableSet) -> tuple[form.Feature, ...]:
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


def _tables(tables: TableSet) -> tuple[form.Table, ...]:
  places: dict[str, tuple[int, int]] = {}
  for number, group in enumerate(tables.groups):
    sizes = [tables.tables[name].rows for name in group.tables]
    first = offsets(sizes).tolist()[:-1]
    pairs = zip(group.tables, first, strict=True)
    places |= {name: (number, row) for name, row in pairs}
  return tuple(
    form.Table(name, table.rows, *places[name])
    for name, table in tables.tables.items()
  )
