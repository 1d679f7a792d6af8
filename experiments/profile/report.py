"""What a person sees of a profile: the tables, the advice and the picture."""

from collections.abc import Mapping, Sequence
import pathlib

from matplotlib import pyplot as plt
import numpy as np
from rich.table import Table

from experiments.common import report
from experiments.common.plots import ACCENT, INK, MUTED, note, picture
from experiments.profile.predictions import Prediction
from slipstream_jax.placement.sizing import Curve

_CACHES = {'lru': ('s', MUTED), 'lfu': ('^', INK), 'look_ahead': ('o', ACCENT)}
_TABLES_SHOWN = 6


def table(
  predictions: Sequence[Prediction], picked: Prediction, budget: int
) -> Table:
  """Predictions a line each; what does not fit is dim, the pick is bold."""
  styles = [
    'dim' if p.device_bytes > budget else 'bold' if p == picked else None
    for p in predictions
  ]
  frame = [p._asdict() for p in predictions]
  title = (
    'predicted: rows that the device keeps; per step, lookups that hit, rows '
    'loaded and stored, bytes moved; bytes on device and host'
  )
  headings = {
    **{'hit_rate': 'hits', 'rows_loaded': 'loaded', 'rows_stored': 'stored'},
    **{'bytes_moved': 'moved', 'device_bytes': 'device'},
    'host_bytes': 'host',
  }
  return report.table(title, frame, styles, headings)


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
    f'for {report.text("bytes", budget)} of device memory ({whose}): {keys}\n'
    f'which moves {report.text("bytes", picked.bytes_moved)} per step in the '
    f'long run and keeps {report.text("bytes", picked.device_bytes)} on the '
    'device'
  )


def outcome_table(picked: Prediction, outcome: Mapping[str, float]) -> Table:
  """Prediction and outcome of what was picked."""
  frame = [
    {
      'per step': key.replace('_', ' '),
      'predicted': report.text(key, predicted),
      'outcome': report.text(key, outcome[key]),
      'outcome / predicted': outcome[key] / predicted if predicted else None,
    }
    for key, predicted in picked._asdict().items()
    if key in outcome
  ]
  return report.table(f'{outcome["steps"]} steps of training', frame)


def plot(
  path: pathlib.Path,
  curves: Mapping[str, Curve],
  predictions: Sequence[Prediction],
  names: Sequence[str],
  largest: int,
) -> None:
  """Hit rate against capacity, of all tables and of the busiest ones.

  Left of the shade's edge not even the rows of a batch fit.
  """
  with picture(path, '', (11, 4.2)) as (left, right):
    styles = zip(curves.items(), ((MUTED, '-'), (INK, '--')), strict=True)
    for (name, curve), (color, line) in styles:
      rate = 100 * curve.hit_rate
      left.plot(curve.capacities, rate, line, color=color, label=name)
    for policy, (mark, color) in _CACHES.items():
      points = [p for p in predictions if p.policy == policy]
      rates = [100 * p.hit_rate for p in points]
      label = f'cached, {policy} (planned)'
      rows = [p.rows for p in points]
      left.plot(rows, rates, mark, color=color, label=label)
    note(left, 'smaller than a batch', (largest, 95), va='baseline')
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
      axis.axvspan(curve.capacities[0], largest, color=MUTED, alpha=0.15, lw=0)
      axis.set(xscale='log', xlabel='rows that the device keeps', ylim=(0, 101))
      axis.legend(frameon=False, fontsize=8, loc='lower right')
