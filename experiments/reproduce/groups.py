"""The runs of a reproduction, grouped by model and system, and compared."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.common import estimates
from experiments.common.estimates import Estimate
from experiments.reproduce import paper
from experiments.reproduce.results import KINDS, Results, Row

Key = tuple[str, str]
"""A system and the way to skip: a row's columns `system` and `skip`."""
DEFAULT: Key = ('pinned', 'ours')
CONTENDERS = {
  DEFAULT: 'default policy',
  ('pinned', 'published'): 'as published',
}
"""Names of Slipstream's two ways to drop examples."""
ALL: Key = ('pinned', 'off')
"""Slipstream's placement without skipping."""
BASELINES: tuple[Key, ...] = (
  *(('xdl', 'off'), ('dlrm_hybrid', 'off'), ('fae', 'off'), ('hotline', 'off')),
)
"""The systems that the paper compares Slipstream with."""
_SYSTEMS = {
  'xdl': 'XDL',
  'dlrm_hybrid': 'Intel DLRM',
  'fae': 'FAE',
  'hotline': 'Hotline',
  'fae_pinned': 'FAE, hot rows pinned',
  'hotline_micro': 'Hotline, micro-batches',
  'cached': 'cached',
  'plain': 'streamed',
  'pinned': 'pinned',
}
_MODELS = ('rm1', 'rm2', 'rm2_l20', 'rm3', 'rm4')


class Group(NamedTuple):
  """The runs of one system on one model."""

  key: Key
  runs: dict[int, Row]
  """Finished runs by seed, with the columns of `_derived`."""
  failures: dict[int, str]
  """Errors of the failed runs, by seed."""
  figures: dict[str, Estimate | None]
  """Means of all columns by name, and comparisons: see `_compare`."""

  @property
  def name(self) -> str:
    """The system's name on pages."""
    return name(self.key)


class Model(NamedTuple):
  """The facts and results of a model."""

  key: str
  facts: dict[str, Any]
  groups: dict[Key, Group]
  """Slipstream first, then the paper's baselines."""
  rows: dict[str, list[Row]]
  """All rows by kind."""

  @property
  def short(self) -> str:
    """A short name."""
    return {'rm2_l20': 'RM2 with L = 20'}.get(self.key, self.key.upper())

  @property
  def published(self) -> dict[str, Any]:
    """The papers' facts of the model; empty if they do not have it."""
    return paper.MODELS.get(self.key, {})

  @property
  def goal(self) -> float | None:
    """The highest AUC that every learning curve reaches."""
    curves = curves_of(self).values()
    return min((max(auc for _, auc in curve) for curve in curves), default=None)


def models_of(results: Results) -> list[Model]:
  """Returns the models of a reproduction, in the paper's order."""
  names = {row['model'] for row in results.rows}
  facts = results.setting.get('models') or {}
  models = [
    Model(
      key,
      facts.get(key) or {},
      _groups(results.of('run', key)),
      {kind: results.of(kind, key) for kind in KINDS},
    )
    for key in dict.fromkeys([*_MODELS, *sorted(names)])
    if key in names
  ]
  for model in models:
    for group in model.groups.values():
      group.figures.update(_compare(group, model))
  return models


def key_of(row: Row) -> Key:
  """Returns the system of a row."""
  return row['system'], row['skip']


def name(key: Key) -> str:
  """Returns the name on pages of a system that skips in some way."""
  system, skip = key
  if key in CONTENDERS:
    return f'Slipstream, {CONTENDERS[key]}'
  words = _SYSTEMS.get(system, system)
  if key == ALL:
    return f'{words}, nothing skipped'
  return words + {'off': '', 'ours': ' + Slipstream'}.get(skip, f' + {skip}')


def rank(key: Key) -> tuple[int, int]:
  """Orders systems: Slipstream, those without skipping, those with it."""
  first, systems = [*CONTENDERS, ALL], [*_SYSTEMS]
  if key in first:
    return -1, first.index(key)
  at = systems.index(key[0]) if key[0] in systems else len(systems)
  return int(key[1] != 'off'), at


def mean(rows: Iterable[Row], column: str) -> Estimate | None:
  """Returns the mean of a column over the rows that have it."""
  values = [row.get(column) for row in rows]
  return estimates.mean([x for x in values if x is not None])


def _groups(runs: Sequence[Row]) -> dict[Key, Group]:
  """Groups runs by system. The last run of a seed counts."""
  last = {(key_of(run), run['seed']): run for run in runs}
  groups: dict[Key, Group] = {}
  for (key, seed), run in sorted(last.items()):
    group = groups.setdefault(key, Group(key, {}, {}, {}))
    if run['status'] == 'ok':
      group.runs[seed] = run | _derived(run)
    else:
      group.failures[seed] = run['status']
  return {key: groups[key] for key in sorted(groups, key=rank)}


def _derived(run: Row) -> Row:
  """Returns the figures of a run that follow from its columns."""

  def over(bottom: str, *tops: str) -> float | None:
    values = [run.get(top) for top in tops]
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not run.get(bottom):
      return None
    return float(sum(known) / run[bottom])

  dropped = over('examples_seen', 'examples_dropped')
  hot = run.get('examples_hot_share')
  seen, moved = 'examples_seen', ('bytes_loaded', 'bytes_stored')
  return {
    'pace': over(seen, 'seconds'),
    'examples/s': over('seconds', seen),
    'loaded': over(seen, 'bytes_loaded'),
    'stored': over(seen, 'bytes_stored'),
    'dense': over(seen, 'dense_bytes'),
    'moved': over(seen, *moved),
    'moved in all': over(seen, *moved, 'dense_bytes'),
    'dropped': dropped,
    # Only hot examples are dropped.
    'dropped of hot': dropped / hot if hot and dropped is not None else None,
    'choosing': over('seconds', 'choose_seconds'),
    'windows': over('seconds', 'window_seconds'),
    'overhead': over('seconds', 'choose_seconds', 'window_seconds'),
  }


def _compare(group: Group, model: Model) -> dict[str, Estimate | None]:
  """Returns means, and how a system compares with others seed by seed.

  A comparison is named by the policy of Slipstream: 'speed, as published' and
  so on. Each is missing for a system itself.
  """
  numbers = {
    name
    for run in group.runs.values()
    for name, value in run.items()
    if isinstance(value, int | float)
  }
  figures = {column: mean(group.runs.values(), column) for column in numbers}
  figures |= _published_bytes(group, model)
  figures['seeds'] = Estimate(len(group.runs))
  curve = curves_of(model).get(group.key)
  if curve is not None and model.goal is not None:
    seconds = estimates.seconds_to(curve, model.goal)
    figures['seconds to goal'] = None if seconds is None else Estimate(seconds)
  for contender, policy in CONTENDERS.items():
    ours = model.groups.get(contender)
    if ours is not None and ours is not group:
      figures |= {
        f'speed, {policy}': ratio(group, ours, 'pace'),
        f'ideal, {policy}': without_overhead(model.groups, group, contender),
        f'bytes, {policy}': ratio(group, ours, 'moved'),
        f'all bytes, {policy}': ratio(group, ours, 'moved in all'),
        f'AUC, {policy}': lead(ours, group, 'auc'),
      }
  fae, plain = (model.groups.get((x, 'off')) for x in ('fae', 'plain'))
  if group is not fae:
    figures['bytes, FAE'] = ratio(group, fae, 'moved')
  if group is not plain:
    figures['AUC, streamed'] = lead(group, plain, 'auc')
  claim = paper.CLAIMS.get(group.key[0]) if group.key[1] == 'off' else None
  if claim and model.published:
    figures['claim'] = Estimate(claim)
  sizes = (figures.get(x) for x in ('auc', 'test_positives', 'test_examples'))
  known = [size.mean for size in sizes if size is not None]
  if len(known) == 3:
    auc, positives, examples = known
    bounds = estimates.of_test_set(auc, round(positives), round(examples))
    figures['AUC, one test set'] = bounds
  return figures


def _published_bytes(group: Group, model: Model) -> dict[str, Estimate]:
  """Returns the bytes that a system moves in its paper."""
  system, skip = group.key
  everyone = model.published.get('gigabytes', {})
  if system not in everyone or skip != 'off':
    return {}
  examples = model.published['examples'] * paper.EPOCHS_OF_BYTES
  return {
    'paper, GB': Estimate(everyone[system]),
    'paper, per example': Estimate(everyone[system] * 1e9 / examples),
    "paper, times FAE's": Estimate(everyone[system] / everyone['fae']),
  }


def ratio(
  top: Group | None, bottom: Group | None, column: str
) -> Estimate | None:
  """Returns how many times as much one system has as the other, by seed."""
  pairs = _pairs(top, bottom, column)
  return estimates.ratio([x for x, _ in pairs], [y for _, y in pairs])


def lead(
  top: Group | None, bottom: Group | None, column: str
) -> Estimate | None:
  """Returns how much more one system has than the other, by seed."""
  return estimates.mean([x - y for x, y in _pairs(top, bottom, column)])


def _pairs(
  top: Group | None, bottom: Group | None, column: str
) -> list[tuple[float, float]]:
  """Returns the values of two systems for the seeds that both know."""
  if top is None or bottom is None:
    return []
  pairs = [
    (top.runs[seed].get(column), bottom.runs[seed].get(column))
    for seed in top.runs.keys() & bottom.runs.keys()
  ]
  return [(x, y) for x, y in pairs if x is not None and y is not None]


def without_overhead(
  groups: dict[Key, Group], against: Group, contender: Key
) -> Estimate | None:
  """Estimates the speed-up if choosing examples took no time.

  It is T_system / T_pinned x 1 / (1 - share dropped): what keeping the hot rows
  on the device gives, times what leaving out the dropped examples gives.
  """
  base = ratio(against, groups.get(ALL), 'pace')
  dropped = mean(groups[contender].runs.values(), 'dropped')
  if base is None or dropped is None or dropped.mean >= 1:
    return None
  return Estimate(base.mean / (1 - dropped.mean))


def curves_of(model: Model) -> dict[Key, list[tuple[float, float]]]:
  """Returns seconds and AUC of each system's first seed during training."""
  rows = [x for x in model.rows['curve'] if 'seconds' in x and 'auc' in x]
  first = min((row['seed'] for row in rows), default=0)
  rows = [row for row in rows if row['seed'] == first]
  curves = {
    key: sorted(
      (row['seconds'], row['auc']) for row in rows if key_of(row) == key
    )
    for key in model.groups
  }
  return {key: curve for key, curve in curves.items() if curve}


def phases_of(model: Model) -> dict[Key, dict[str, float]]:
  """Returns the mean ms per batch of each phase, by system."""
  rows = [row for row in model.rows['phase'] if 'ms_per_batch' in row]
  rows.sort(key=lambda row: rank(key_of(row)))
  spent: dict[Key, dict[str, list[float]]] = {}
  for row in rows:
    of_system = spent.setdefault(key_of(row), {})
    of_system.setdefault(row['phase'], []).append(row['ms_per_batch'])
  return {
    key: {phase: float(np.mean(ms)) for phase, ms in phases.items()}
    for key, phases in spent.items()
  }
