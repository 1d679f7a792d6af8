"""One's own table, packed in a single call."""

from collections.abc import Callable, Mapping, Sequence

from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.files import Path
from slipstream_jax.formats.base import RawData
from slipstream_jax.formats.frames import Source
from slipstream_jax.formats.table import frame_like, frame_raw
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
  """Packs a table that need not fit memory: `frame_raw`, then `prepare`.

  Stopped in any way, the same call continues to the same bits; repeated once
  it is finished, it changes nothing; with other files or settings it is
  refused. What a lazy frame reads, and what a stream gives, is not compared.

  Args:
    source: files (CSV, TSV, Parquet, Arrow) by path, pattern or list, a frame
      of polars or pandas, or a stream of frames or of dicts of arrays.
    folder: new, empty, or left behind by such a call.
    features: columns of ids by name, each with its `Feature`; names alone are
      one id each, in a table of that name.
    dense: columns of numbers.
    label: column of labels in [0, 1], or several, of one head each.
    lookup_weights: of each weighted feature, the column of its weights.
    fill: what stands for missing values of dense columns, of all or by name.
    split: column that says 'train', 'validation' or 'test' of each example.
    test_share: share of the examples to test on, from the end; without it and
      without `split`, a fifth.
    separator: between the ids of a list that is a text.
    too_long: what is done of lists longer than max_length: 'error', or keep
      the 'first' or the 'last' of them.
    delimiter: of text files; None is ',' in .csv and a tab in .tsv.
    min_count: uses in the training part that earn an id a row of its own.
    hash_rows: buckets of every table, for hashed ids; None counts ids instead.
    threads: tables to rank at a time; None is up to 4, as cores allow.
    on_progress: hears of the progress, some times a second.

  Returns:
    The data set, as `packed_dataset(folder)` opens it.

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
  """New examples, read as those that `pack` packed; labels are not read.

  `new_batches` makes batches of them, with `packed_dataset(folder).vocabulary`.

  Args:
    source: as of `pack`, with the same columns, but for labels.
    folder: that `pack` has finished.

  Raises:
    UserError: no such source, or a folder that `pack` has not written.
  """
  packed = open_packed(folder)
  features = form_of(packed).tables.features
  try:
    return frame_like(source, features, packed.manifest.get('settings', {}))
  except KeyError as error:
    raise UserError(
      'a folder must be one that pack wrote, to read other tables alike',
      got=f'one without {error}',
      where=str(folder),
      hint='read the examples with the function of their format',
    ) from error
