"""Packs a user's own table in a single call."""

from collections.abc import Callable, Mapping, Sequence

from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.files import Path
from slipstream_jax.formats.base import RawData
from slipstream_jax.formats.frames import Source
from slipstream_jax.formats.table import frame_raw
from slipstream_jax.packed.columns import open_packed
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.packed.prepare import prepare, Progress
from slipstream_jax.packed.reader import form_of
from slipstream_jax.tables import Feature


def pack(
  source: Source,
  folder: Path,
  *,
  features: Mapping[str, Feature] | Sequence[str],
  dense: Sequence[str] = (),
  label: str | Sequence[str] = 'label',
  lookup_weights: Mapping[str, str] | None = None,
  fill: float | Mapping[str, float] = 0.0,
  split: str | None = None,
  test_share: float | None = None,
  separator: str = '|',
  too_long: str = 'error',
  delimiter: str | None = None,
  min_count: int = 1,
  hash_rows: int | None = None,
  threads: int | None = None,
  on_progress: Callable[[Progress], None] | None = None,
) -> Dataset:
  """Packs a table that need not fit into memory: `frame_raw`, then `prepare`.

  After any interruption, the same call resumes and writes the same bits. A
  finished data set is not changed. A call with other files or settings is
  refused. The contents of lazy frames and streams are not compared.

  Args:
    source: files (CSV, TSV, Parquet, Arrow) by path, pattern or list, a frame
      of polars or pandas, or a stream of frames or of dicts of arrays.
    folder: a new or empty folder, or one of an interrupted call.
    features: columns of ids by name, each with its `Feature`. A sequence of
      names has one id per feature, in a table of that name.
    dense: columns of numbers.
    label: column of labels, any finite numbers, or several, one per head.
    lookup_weights: column of the weights of each weighted feature.
    fill: replaces missing values of all dense columns, or of each by name.
    split: column with 'train', 'validation' or 'test' for each example.
    test_share: share of the examples to test on, from the end. If neither it
      nor `split` is given, a fifth.
    separator: separates the ids of a list that is a text.
    too_long: treatment of lists longer than max_length. 'error' refuses them,
      'first' and 'last' keep max_length ids of that end.
    delimiter: separates fields of text files. None: ',' in .csv, a tab in .tsv.
    min_count: uses in the training part that an id needs to get its own row.
    hash_rows: buckets of every table, for hashed ids. None counts ids instead.
    threads: tables to rank at a time. None: up to 4, but no more than cores.
    on_progress: called with the progress, several times a second.

  Returns:
    The data set, as opened by `packed_dataset(folder)`.

  Raises:
    UserError: bad arguments or data, no room on the disk, or a folder that
      cannot be used.
  """
  raw = frame_raw(
    source,
    features=features,
    dense=dense,
    label=label,
    lookup_weights=lookup_weights,
    fill=fill,
    split=split,
    test_share=test_share,
    separator=separator,
    too_long=too_long,
    delimiter=delimiter,
  )
  for progress in prepare(
    raw, folder, min_count=min_count, hash_rows=hash_rows, threads=threads
  ):
    if on_progress is not None:
      on_progress(progress)
  return packed_dataset(folder)


def packed_like(source: Source, folder: Path) -> RawData:
  """Reads new examples like those that `pack` packed, without labels.

  `new_batches` makes batches of them, with `packed_dataset(folder).vocabulary`.

  Args:
    source: as in `pack`, with the same columns but labels.
    folder: folder that `pack` has finished.

  Raises:
    UserError: there is no such source, or `pack` has not written the folder.
  """
  packed = open_packed(folder)
  settings = packed.manifest.get('settings', {})
  try:
    return frame_raw(
      source,
      features=form_of(packed).tables.features,
      dense=tuple(settings['dense']),
      label=None,
      lookup_weights=settings['lookup_weights'],
      fill=settings['dense'],
      separator=settings['separator'],
      too_long=settings['too_long'],
      delimiter=settings['delimiter'],
    )
  except KeyError as error:
    raise UserError(
      'to read more examples alike, a folder must be one that pack wrote',
      got=f'one without {error}',
      where=str(folder),
      hint='read the examples with the function of their format',
    ) from error
