"""The runs of a reproduction, by what they share but for the seed."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from experiments.pages.estimates import Estimate, mean, ratio
from experiments.reproduce.results import (
  Cell,
  Modelled,
  Naive,
  OK,
  Phase,
  Point,
  RowChange,
  Skew,
  Threshold,
)

OURS, PUBLISHED, PINNED = (
  ('pinned', 'ours'),
  ('pinned', 'published'),
  ('pinned', 'off'),
)
CONTENDERS = {OURS: 'default policy', PUBLISHED: 'as published'}
"""Slipstream, by the policy that skips."""
BASELINES = ('xdl', 'dlrm_hybrid', 'fae', 'hotline')
"""Those of the paper."""
_NAMES = {
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
_SHORT = {'rm2_l20': 'RM2 with L = 20'}
_MODELS = ('rm1', 'rm2', 'rm2_l20', 'rm3', 'rm4')

Key = tuple[str, str]
"""System and skip."""
Value = Callable[[Cell], float | None]


class Reproduction(NamedTuple):
  """All lines of a reproduction's folder."""

  setting: dict[str, Any]
  cells: Sequence[Cell] = ()
  points: Sequence[Point] = ()
  phases: Sequence[Phase] = ()
  skew: Sequence[Skew] = ()
  changes: Sequence[RowChange] = ()
  naive: Sequence[Naive] = ()
  thresholds: Sequence[Threshold] = ()
  modelled: Sequence[Modelled] = ()

  @property
  def models(self) -> list[str]:
    """Those that something is known of, in the paper's order."""
    lines = [line.model for kind in self[1:] for line in kind]
    names = dict.fromkeys([*_MODELS, *sorted(lines)])
    return [name for name in names if name in lines]

  def setting_of(self, model: str) -> dict[str, Any]:
    """What the setting says of a model; empty if it says nothing."""
    models = self.setting.get('models') or {}
    return models.get(model) or {}

  def title(self, model: str) -> str:
    """What a model is called, and what it is."""
    return str(self.setting_of(model).get('title') or short(model))


class Group(NamedTuple):
  """The runs of a model by one system, one for each seed."""

  model: str
  key: Key
  cells: dict[int, Cell]
  """Those that finished, by seed."""
  failures: dict[int, str]
  """What failed of the others, by seed."""

  @property
  def name(self) -> str:
    """What the system is called, and what it skips."""
    return name(self.key)

  def values(self, value: Value) -> list[float]:
    """Of all seeds for which it is known."""
    each_seed = [value(cell) for cell in self.cells.values()]
    return [x for x in each_seed if x is not None]

  def mean(self, value: Value) -> Estimate | None:
    """Over the seeds."""
    return mean(self.values(value))


def short(model: str) -> str:
  """What a model is called where there is little room."""
  return _SHORT.get(model, model.upper())


def name(key: Key) -> str:
  """What people call a system that skips so."""
  system, skip = key
  if key in CONTENDERS:
    return f'Slipstream, {CONTENDERS[key]}'
  if key == PINNED:
    return 'pinned, nothing skipped'
  words = _NAMES.get(system, system)
  ending = {'off': '', 'ours': ' + Slipstream'}
  return words + ending.get(skip, f' + Slipstream, {skip}')


def groups(results: Reproduction, model: str) -> dict[Key, Group]:
  """The runs of a model; ours first, then the paper's baselines.

  A run that is there twice counts as it was the last time.
  """
  last = {
    (cell.system, cell.skip, cell.seed): cell
    for cell in results.cells
    if cell.model == model
  }
  grouped: dict[Key, Group] = {}
  for (system, skip, seed), cell in sorted(last.items()):
    group = grouped.setdefault(
      (system, skip), Group(model, (system, skip), {}, {})
    )
    if cell.status == OK:
      group.cells[seed] = cell
    else:
      group.failures[seed] = cell.status
  return dict(sorted(grouped.items(), key=lambda item: _rank(item[0])))


def in_order(
  keys: Collection[Key], results: Reproduction, model: str
) -> list[Key]:
  """Systems in the order of `groups`, behind them those that have no runs."""
  order = [key for key in groups(results, model) if key in keys]
  return [*order, *sorted(set(keys) - set(order))]


def _rank(key: Key) -> tuple[int, int]:
  first: list[Key] = [*CONTENDERS, PINNED]
  if key in first:
    return -1, first.index(key)
  systems = list(_NAMES)
  number = systems.index(key[0]) if key[0] in systems else len(systems)
  return int(key[1] != 'off'), number


def paired(
  top: Group | None, bottom: Group | None, value: Value
) -> tuple[list[float], list[float]]:
  """Values of two systems, of the seeds for which both are known."""
  if top is None or bottom is None:
    return [], []
  pairs = [
    (value(top.cells[seed]), value(bottom.cells[seed]))
    for seed in top.cells.keys() & bottom.cells.keys()
  ]
  known = [(x, y) for x, y in pairs if x is not None and y is not None]
  return [x for x, _ in known], [y for _, y in known]


def times(
  top: Group | None, bottom: Group | None, value: Value
) -> Estimate | None:
  """How many times as much one has as the other."""
  return ratio(*paired(top, bottom, value))


def less(
  top: Group | None, bottom: Group | None, value: Value
) -> Estimate | None:
  """How much more one has than the other."""
  tops, bottoms = paired(top, bottom, value)
  return mean([x - y for x, y in zip(tops, bottoms, strict=True)])


def pace(cell: Cell) -> float | None:
  """Seconds of training per example seen, trained or dropped."""
  return _per_example(cell, cell.seconds)


def auc(cell: Cell) -> float | None:
  """Of the test set."""
  return cell.auc


def moved(cell: Cell) -> float | None:
  """Bytes that tables made cross the link, both ways, per example seen."""
  return _per_example(cell, cell.bytes_loaded, cell.bytes_stored)


def moved_in_all(cell: Cell) -> float | None:
  """As `moved`, and the dense parameters where they cross as well."""
  return _per_example(
    cell, cell.bytes_loaded, cell.bytes_stored, cell.dense_bytes or 0
  )


def loaded(cell: Cell) -> float | None:
  """Bytes to the device per example seen."""
  return _per_example(cell, cell.bytes_loaded)


def stored(cell: Cell) -> float | None:
  """Bytes to the host per example seen."""
  return _per_example(cell, cell.bytes_stored)


def dense(cell: Cell) -> float | None:
  """Bytes of dense parameters per example seen, both ways."""
  return _per_example(cell, cell.dense_bytes)


def _per_example(cell: Cell, *parts: float | None) -> float | None:
  if not cell.examples_seen or any(part is None for part in parts):
    return None
  return sum(part for part in parts if part is not None) / cell.examples_seen


def dropped(cell: Cell) -> float | None:
  """Share of all examples seen."""
  if not cell.examples_seen or cell.examples_dropped is None:
    return None
  return cell.examples_dropped / cell.examples_seen


def dropped_of_hot(cell: Cell) -> float | None:
  """Share of the hot examples seen: none but hot ones are dropped."""
  share = dropped(cell)
  if share is None or not cell.examples_hot_share:
    return None
  return share / cell.examples_hot_share


def without_overhead(
  all_groups: dict[Key, Group], against: Group, contender: Key
) -> Estimate | None:
  """Estimates the speed-up if choosing examples took no time.

  It is T_system / T_pinned x 1 / (1 - share dropped): what keeping the hot rows
  on the device gives, times what leaving out the dropped examples gives. The
  seconds are measured, so a measured speed-up may exceed it by noise.
  """
  ours = all_groups.get(contender)
  base = times(against, all_groups.get(PINNED), pace)
  saved = ours.mean(dropped) if ours else None
  if base is None or saved is None or saved.mean >= 1:
    return None
  factor = 1 / (1 - saved.mean)
  return base._replace(
    mean=base.mean * factor,
    low=None if base.low is None else base.low * factor,
    high=None if base.high is None else base.high * factor,
  )
