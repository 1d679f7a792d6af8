"""Finds towers from the rows of a run's checkpoint."""

import contextlib
import json
import pathlib

import numpy as np

from experiments.common import loading, report
from experiments.common.loading import LoadedRun
from slipstream_jax.distributed.towers import affinity, partition, within
from slipstream_jax.errors import UserError

_RANDOM = 100  # towers to compare with


def find(folder: pathlib.Path, towers: int, style: str, examples: int) -> None:
  """Shows towers of the features of a run.

  Raises:
    UserError: the run has no checkpoint, or fewer features than towers, or
      features that differ in dim.
  """
  screen = report.console()
  run = loading.load(folder, tell=report.teller(screen))
  names = [*run.trainer.engine.tables.features]
  if towers > len(names):
    raise UserError(
      f'there must be a feature for each tower, of {len(names)} features',
      got=towers,
      where='--towers',
      hint='ask for fewer towers',
    )
  vectors, loads = _features(run, examples)
  between = affinity(vectors)
  chosen = partition(between, towers, loads, style == 'coherent')
  rng = np.random.default_rng(0)
  others = []
  for _ in range(_RANDOM):
    order = rng.permutation(len(names))
    parts = np.array_split(order, towers)
    others.append(within(tuple(tuple(own.tolist()) for own in parts), between))
  sums = np.array([loads[[*own]].sum() for own in chosen])
  screen.print(
    report.facts(
      {
        'affinity within towers': within(chosen, between),
        f'mean of {_RANDOM} random ones': float(np.mean(others)),
        'largest of them': max(others),
        'smallest of them': min(others),
        'largest load over the mean': float(sums.max() / sums.mean()),
      }
    )
  )
  lines = [
    {
      'tower': number,
      'features': ' '.join(names[place] for place in own),
      'rows': float(load),
    }
    for number, (own, load) in enumerate(zip(chosen, sums, strict=True))
  ]
  screen.print(report.table('', lines))
  flag = json.dumps(chosen).replace('[', '(').replace(']', ')')
  screen.print(f"--config.model.towers='{flag}'", soft_wrap=True)


def _features(run: LoadedRun, examples: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the mean row of each feature [F, D], and its unique rows [F]."""
  tables = run.trainer.engine.tables
  with contextlib.closing(run.data.train(examples)) as source:
    lookups = next(source).lookups.reshape(examples, -1)
  if len({table.embedding_dim for table in tables.tables.values()}) > 1:
    raise UserError(
      'rows of features must have equal dim to be compared',
      got=[table.embedding_dim for table in tables.tables.values()],
      where='config.model.dims',
      hint='take a run without it as the pilot',
    )
  places = {name: number for number, name in enumerate(tables.features)}
  dim = tables.groups[0].dim
  vectors, loads = np.zeros((len(places), dim)), np.zeros(len(places))
  for group in tables.groups:
    for feature, (first, end) in zip(group.features, group.spans, strict=True):
      table = tables.features[feature].table
      columns = lookups[:, list(group.columns[first:end])]
      rows = columns[columns >= 0] - tables.first_rows[table]
      own, counts = np.unique(rows, return_counts=True)
      values = run.trainer.engine.rows_of(table)[own].astype(np.float64)
      at = places[feature]
      vectors[at] = counts @ values / max(1, counts.sum())
      loads[at] = len(own)
  return vectors, loads
