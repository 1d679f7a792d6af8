"""The runs of a reproduction, grouped by model and system, and compared.

Comparisons pair runs of one seed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.common import estimates
from experiments.common.estimates import Estimate
from experiments.reproduce import paper
from experiments.reproduce.results import KINDS, PHASES, Results, Row

Key = tuple[str, str]
"""System and way to skip."""
DEFAULT: Key = ('pinned', 'ours')
CONTENDERS: dict[Key, str] = {
  DEFAULT: 'default policy',
  ('pinned', 'published'): 'as published',
}
"""Slipstream, with the policy that drops examples."""
ALL: Key = ('pinned', 'off')
"""Slipstream's placement without skipping."""
BASELINES: tuple[Key, ...] = tuple(
  (system, 'off') for system in ('xdl', 'dlrm_hybrid', 'fae', 'hotline')
)
"""Those of the paper."""
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
  """The runs of one system on one model, by seed."""

  key: Key
  runs: dict[int, Row]
  """Those that finished."""
  failures: dict[int, str]
  """What failed of the others."""

  @property
  def name(self) -> str:
    """What people call the system."""
    return name(self.key)

  def mean(self, column: str) -> Estimate | None:
    """Returns the mean over the seeds."""
    values = [run.get(column) for run in self.runs.values()]
    return estimates.mean([x for x in values if x is not None])


class Model(NamedTuple):
  """All that is known of a model."""

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
  def name(self) -> str:
    """What the model is, in full."""
    return str(self.facts.get('title', self.short))

  @property
  def published(self) -> dict[str, Any]:
    """What the papers say of the model; empty if they do not have it."""
    return paper.MODELS.get(self.key, {})


def models_of(results: Results) -> list[Model]:
  """Returns the models of a reproduction, in the paper's order."""
  names = {row['model'] for row in results.rows}
  facts = results.setting.get('models') or {}
  return [
    Model(
      key,
      facts.get(key) or {},
      _groups(results.of('run', key)),
      {kind: results.of(kind, key) for kind in KINDS},
    )
    for key in dict.fromkeys([*_MODELS, *sorted(names)])
    if key in names
  ]


def name(key: Key) -> str:
  """Returns what people call a system that skips in some way."""
  system, skip = key
  if key in CONTENDERS:
    return f'Slipstream, {CONTENDERS[key]}'
  words = _SYSTEMS.get(system, system)
  if key == ALL:
    return f'{words}, nothing skipped'
  return words + {'off': '', 'ours': ' + Slipstream'}.get(skip, f' + {skip}')


def _groups(runs: Sequence[Row]) -> dict[Key, Group]:
  """Groups runs by system. The last run of a seed counts."""
  last = {(run['system'], run['skip'], run['seed']): run for run in runs}
  groups: dict[Key, Group] = {}
  for (system, skip, seed), run in sorted(last.items()):
    key = system, skip
    group = groups.setdefault(key, Group(key, {}, {}))
    if run['status'] == 'ok':
      group.runs[seed] = run | _derived(run)
    else:
      group.failures[seed] = run['status']
  return {key: groups[key] for key in sorted(groups, key=_rank)}


def _rank(key: Key) -> tuple[int, int]:
  first, systems = [*CONTENDERS, ALL], [*_SYSTEMS]
  if key in first:
    return -1, first.index(key)
  at = systems.index(key[0]) if key[0] in systems else len(systems)
  return int(key[1] != 'off'), at


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
  tables, seen = ('bytes_loaded', 'bytes_stored'), 'examples_seen'
  dense = over(seen, 'dense_bytes')
  moved = over(seen, *tables)
  return {
    'pace': over(seen, 'seconds'),
    'rate': over('seconds', seen),
    'loaded': over(seen, 'bytes_loaded'),
    'stored': over(seen, 'bytes_stored'),
    'dense': dense,
    'moved': moved,
    'moved_in_all': None if moved is None else moved + (dense or 0),
    'dropped': dropped,
    # Only hot examples are dropped.
    'dropped_of_hot': dropped / hot if hot and dropped is not None else None,
    'choosing': over('seconds', 'choose_seconds'),
    'watching': over('seconds', 'window_seconds'),
    'overhead': over('seconds', 'choose_seconds', 'window_seconds'),
  }


def _pairs(
  top: Group | None, bottom: Group | None, column: str
) -> tuple[list[float], list[float]]:
  """Returns the values of two systems for the seeds that both know."""
  if top is None or bottom is None:
    return [], []
  pairs = [
    (top.runs[seed].get(column), bottom.runs[seed].get(column))
    for seed in top.runs.keys() & bottom.runs.keys()
  ]
  known = [(x, y) for x, y in pairs if x is not None and y is not None]
  return [x for x, _ in known], [y for _, y in known]


def ratio(
  top: Group | None, bottom: Group | None, column: str
) -> Estimate | None:
  """Returns how many times as much one system has as the other."""
  return estimates.ratio(*_pairs(top, bottom, column))


def lead(
  top: Group | None, bottom: Group | None, column: str
) -> Estimate | None:
  """Returns how much more one system has than the other."""
  tops, bottoms = _pairs(top, bottom, column)
  return estimates.mean([x - y for x, y in zip(tops, bottoms, strict=True)])


def without_overhead(
  groups: dict[Key, Group], against: Group, contender: Key
) -> Estimate | None:
  """Estimates the speed-up if choosing examples took no time.

  It is T_system / T_pinned x 1 / (1 - share dropped): what keeping the hot rows
  on the device gives, times what leaving out the dropped examples gives.
  """
  ours = groups.get(contender)
  base = ratio(against, groups.get(ALL), 'pace')
  dropped = ours.mean('dropped') if ours else None
  if base is None or dropped is None or dropped.mean >= 1:
    return None
  factor = 1 / (1 - dropped.mean)
  return base._replace(
    mean=base.mean * factor,
    low=None if base.low is None else base.low * factor,
    high=None if base.high is None else base.high * factor,
  )


def curves_of(model: Model) -> dict[Key, list[tuple[float, float]]]:
  """Returns seconds and AUC of each system's first seed during training."""
  curves: dict[Key, list[tuple[float, float]]] = {}
  rows = [x for x in model.rows['curve'] if 'seconds' in x and 'auc' in x]
  first = min((row['seed'] for row in rows), default=0)
  for row in rows:
    if row['seed'] == first:
      key = row['system'], row['skip']
      curves.setdefault(key, []).append((row['seconds'], row['auc']))
  return {key: sorted(curves[key]) for key in model.groups if key in curves}


def phase_means(
  model: Model,
) -> tuple[list[Key], list[str], dict[tuple[Key, str], float]]:
  """Returns systems, phases, and the mean ms per batch."""
  spent: dict[tuple[Key, str], list[float]] = {}
  for row in model.rows['phase']:
    if 'ms_per_batch' in row:
      key = (row['system'], row['skip']), row['phase']
      spent.setdefault(key, []).append(row['ms_per_batch'])
  keys = sorted({key for key, _ in spent}, key=_rank)
  names = [name for name in PHASES if name in {name for _, name in spent}]
  return keys, names, {key: float(np.mean(ms)) for key, ms in spent.items()}
