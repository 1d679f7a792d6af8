"""What a person sees of a profile: the table, the advice and the plot."""

import pathlib

from matplotlib import pyplot as plt
import numpy as np
from rich.table import Table

from experiments.common.report import ACCENT, INK, MIB, MUTED
from experiments.profile.predictions import Prediction
from slipstream_jax.placement.curves import Curve

_COLORS = {'lru': MUTED, 'lfu': INK, 'look_ahead': ACCENT}
_MARKS = {'lru': 's', 'lfu': '^', 'look_ahead': 'o'}
_TABLES_SHOWN = 6


def table(
  predictions: list[Prediction], picked: Prediction, budget: int
) -> Table:
  """Predictions a line each; what does not fit is dim, the pick is bold."""
  shown = Table(title='predicted, per step', title_justify='left')
  for name in (
    'placement',
    'policy',
    'rows kept',
    'hit rate',
    'loaded',
    'stored',
    'MB moved',
    'device MB',
    'host MB',
  ):
    left = name in ('placement', 'policy')
    shown.add_column(name, justify='left' if left else 'right')
  for p in predictions:
    style = 'bold' if p == picked else None
    style = 'dim' if p.device_bytes > budget else style
    shown.add_row(
      p.placement,
      p.policy,
      f'{p.rows:,}',
      f'{p.hit_rate:.1%}',
      f'{p.rows_loaded:,.0f}',
      f'{p.rows_stored:,.0f}',
      f'{p.bytes_moved / MIB:.2f}',
      f'{p.device_bytes / MIB:,.0f}',
      f'{p.host_bytes / MIB:,.0f}',
      style=style,
    )
  return shown


def advice(
  picked: Prediction, row_bytes: int, look_ahead: int, budget: int, whose: str
) -> str:
  """What to set, and why."""
  keys = f'--config.placement={picked.placement}'
  if picked.placement == 'cached':
    keys += f' --config.cache.capacity={picked.rows}'
    keys += f' --config.cache.eviction={picked.policy}'
  if picked.policy == 'look_ahead':
    keys += f' --config.cache.look_ahead_batches={look_ahead}'
  if picked.placement == 'pinned':
    keys += f' --config.hot.bytes={picked.rows * row_bytes}'
  keys += ' --config.skip.mode=off'  # skipping moves, and may wait for, others
  return (
    f'for {budget / MIB:,.0f} MB of device memory ({whose}): {keys}\n'
    f'which moves {picked.bytes_moved / MIB:.2f} MB per step in the long run '
    f'and keeps {picked.device_bytes / MIB:,.0f} MB on the device'
  )


def outcome_table(picked: Prediction, outcome: dict[str, float]) -> Table:
  """Prediction and outcome of what was picked."""
  shown = Table(
    title=f'{outcome["steps"]} steps of training', title_justify='left'
  )
  for name in ('per step', 'predicted', 'outcome', 'outcome / predicted'):
    shown.add_column(name, justify='left' if name == 'per step' else 'right')
  for key, scale, form in (
    ('hit_rate', 1, '.2%'),
    ('rows_loaded', 1, ',.0f'),
    ('rows_stored', 1, ',.0f'),
    ('device_bytes', MIB, ',.0f'),
  ):
    predicted, got = getattr(picked, key), outcome[key]
    name = key.replace('bytes', 'MB' if scale == MIB else 'bytes')
    shown.add_row(
      name.replace('_', ' '),
      format(predicted / scale, form),
      format(got / scale, form),
      f'{got / predicted:.3f}' if predicted else '-',
    )
  return shown


def plot(
  path: pathlib.Path,
  curves: dict[str, Curve],
  predictions: list[Prediction],
  names: list[str],
  largest: int,
) -> None:
  """Hit rate against capacity, of all tables and of the busiest ones.

  Left of the shade's edge not even the rows of a batch fit.
  """
  figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
  styles = zip(curves.items(), ((MUTED, '-'), (INK, '--')), strict=True)
  for (name, curve), (color, line) in styles:
    rate = 100 * curve.hit_rate
    left.plot(curve.capacities, rate, line, color=color, label=name)
  for policy, color in _COLORS.items():
    points = [p for p in predictions if p.policy == policy]
    left.plot(
      [p.rows for p in points],
      [100 * p.hit_rate for p in points],
      _MARKS[policy],
      color=color,
      label=f'cached, {policy} (planned)',
    )
  left.annotate(
    'smaller than a batch',
    (largest, 95),
    (-4, 0),
    textcoords='offset points',
    ha='right',
    fontsize=8,
    color=MUTED,
  )
  left.set(title='all tables', ylabel='lookups found on the device, %')
  curve = next(iter(curves.values()))
  missed = curve.lookups - curve.hits[:, len(curve.capacities) // 2]
  shades = plt.get_cmap('viridis')(np.linspace(0, 0.85, _TABLES_SHOWN))
  busiest = np.argsort(-missed)[:_TABLES_SHOWN]
  for t, color in zip(busiest, shades, strict=False):
    rate = 100 * curve.hits[t] / max(curve.lookups[t], 1)
    right.plot(curve.capacities, rate, color=color, label=names[t])
  right.set(title=f'the {len(busiest)} tables that miss most, LRU')
  for axis in (left, right):
    axis.set_xscale('log')
    axis.axvspan(curve.capacities[0], largest, color=MUTED, alpha=0.15, lw=0)
    axis.set_xlabel('rows that the device keeps')
    axis.set_ylim(0, 101)
    axis.grid(alpha=0.25)
    axis.spines[['top', 'right']].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc='lower right')
  figure.tight_layout()
  figure.savefig(path, dpi=130)
  plt.close(figure)
