"""A table of one's own as everything that a source may be."""

import numpy as np
import polars as pl

from slipstream_jax.tables import Feature

BATCHES = 'collect_batches'
"""What a polars that reads lazy frames in pieces has."""
FEATURES = {
  'user': Feature('user'),
  'item': Feature('item'),
  'history': Feature('item', 'mean', 4, weighted=True),
  'tags': Feature('tag', 'sqrtn', 3),
}
LAYOUT = {
  'features': FEATURES,
  'lookup_weights': {'history': 'history_weight'},
  'dense': ['age', 'price'],
  'label': ['click', 'share'],
  'fill': {'age': -1.0},
  'too_long': 'last',
}


def own_table(rows=200, seed=0):
  """Ids of several kinds, lists of unlike lengths, and missing values."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(0, 7, rows)
  names = [f'item {n}' for n in range(9)] + ['7', '-2', 'ä, "quoted"']

  def lists(draw):
    return [[draw() for _ in range(length)] for length in lengths]

  frame = pl.DataFrame(
    {
      'user': rng.integers(-3, 40, rows),
      'item': rng.choice(names, rows),
      'history': lists(lambda: str(rng.choice(names))),
      'history_weight': lists(lambda: float(np.float32(rng.normal()))),
      'tags': pl.Series(
        [rng.integers(0, 9, n % 4).tolist() for n in lengths],
        dtype=pl.List(pl.UInt64),
      ),
      'age': rng.integers(18, 90, rows),
      'price': rng.normal(size=rows).astype(np.float32),
      'click': rng.random(rows) < 0.3,
      'share': rng.random(rows),
    }
  )
  holes = {
    name: pl.when(pl.Series(rng.random(rows) > 0.1)).then(pl.col(name))
    for name in ('user', 'item', 'age', 'price')
  }
  return frame.with_columns(**holes)


def flat(frame):
  """With lists as texts, as a CSV file has them."""
  lists = [n for n, t in frame.schema.items() if isinstance(t, pl.List)]
  texts = [
    pl.col(name).list.eval(pl.element().cast(pl.String)).list.join('|')
    for name in lists
  ]
  return frame.with_columns(texts)


def dicts(frame, rows):
  """A stream of dicts of arrays, lists as (values, row_splits)."""

  def column(series):
    if isinstance(series.dtype, pl.List):
      lists = series.to_list()
      splits = np.cumsum([0, *map(len, lists)])
      values = [value for some in lists for value in some]
      return pl.Series(values, dtype=series.dtype.inner).to_numpy(), splits
    return series if series.null_count() else series.to_numpy()

  for part in frame.iter_slices(rows):
    yield {series.name: column(series) for series in part}


def sources(frame, folder, rows=37):
  """The same table by name of its kind."""
  folder.mkdir(parents=True, exist_ok=True)
  half = frame.height // 2
  flat(frame).write_csv(folder / 'all.csv')
  flat(frame).write_csv(folder / 'all.tsv', separator='\t')
  flat(frame.head(half)).write_csv(folder / 'half-1.csv')
  flat(frame.slice(half)).write_csv(folder / 'half-2.csv')
  frame.write_parquet(folder / 'all.parquet', row_group_size=rows)
  frame.write_ipc(folder / 'all.arrow')
  lazy = {'lazy': frame.lazy()} if hasattr(frame.lazy(), BATCHES) else {}
  return lazy | {
    'frame': frame,
    'csv': folder / 'all.csv',
    'tsv': str(folder / 'all.tsv'),
    'pattern': str(folder / 'half-*.csv'),
    'paths': [folder / 'half-1.csv', folder / 'half-2.csv'],
    'parquet': folder / 'all.parquet',
    'arrow': folder / 'all.arrow',
    'frames': lambda: frame.iter_slices(rows),
    'iterator': frame.iter_slices(rows),
    'dict': next(dicts(frame, frame.height)),
    'dicts': lambda: dicts(frame, rows),
  }
