"""What the paper shows beside its table: skew, rows over time, naive skipping.

And what a drop target makes of the threshold. All of it is of the hot rows of
the case, trained with the hot rows pinned or, where most rows stand still, with
none on the device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.reproduce.measured.cases import Case
from experiments.reproduce.measured.measure import run_of, Tell
from experiments.reproduce.models import configured, PINNED
from experiments.reproduce.results import (
  Cell,
  Naive,
  OK,
  RowChange,
  Skew,
  Threshold,
)
from slipstream_jax.engine.buffers import to_device, to_host
from slipstream_jax.errors import UserError
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import HotRows

POINTS = 200
"""Of an access curve, at ranks evenly spread on a log axis."""
ROWS = 10
"""Hot rows that are followed, drawn by their lookups."""
_TIMES = 25  # that they are looked at
_ALL = 1e30  # no row moves so far: all of them are stale


def skew_of(case: Case) -> list[Skew]:
  """The access curve of the profile's rows, of all tables together."""
  assert case.data.counts is not None
  counts = np.sort(case.data.counts().astype(np.int64))[::-1]
  counts = counts[counts > 0]
  total, sums = counts.sum(), counts.cumsum()
  ranks = np.unique(np.geomspace(1, len(counts), POINTS).astype(np.int64))
  return [
    Skew(
      case.model,
      int(rank),
      float(counts[rank - 1] / total),
      float(sums[rank - 1] / total),
    )
    for rank in ranks
  ]


def rows_of(case: Case, tell: Tell = bool) -> list[RowChange]:
  """How far random hot rows are from where they began, as training goes on.

  They are drawn by how often they are looked up: in a short run most others are
  not met at all.

  Raises:
    UserError: settings that cannot be.
  """
  config = configured(case.config, PINNED, 'off')
  config.eval.curve_steps = max(1, case.steps // _TIMES)
  rng = np.random.default_rng(config.seed)
  assert case.data.counts is not None
  lookups = case.data.counts()[case.hot.rows].astype(np.float64)
  count = min(ROWS, int(np.count_nonzero(lookups)))
  shares = lookups / lookups.sum()
  picked = np.sort(rng.choice(len(shares), count, replace=False, p=shares))
  known: list[np.ndarray] = []
  changes: list[RowChange] = []

  def watch(trainer: TrainerParts, step: int) -> None:
    hot: Any = trainer.engine.hot
    rows = _hot_now(trainer, picked)
    known.append(rows)
    for at, row, first in zip(picked, rows, known[0], strict=True):
      change = float(np.abs(row - first).max())
      changes.append(RowChange(case.model, int(hot.rows[at]), step, change))

  run_of(case, config, tell, watch=watch)
  return changes


@jax.jit
def _take(rows: jax.Array, at: jax.Array) -> jax.Array:
  return jnp.take(rows, at, axis=0)


def _hot_now(trainer: TrainerParts, picked: np.ndarray) -> np.ndarray:
  """Some hot rows as they are, f32[n, D]; of models with one group."""
  (rows,) = trainer.engine.hot_rows_now()
  picked_rows: np.ndarray = to_host(_take(rows, to_device(picked)))
  return picked_rows


def naive_of(
  case: Case, variant: str, cells: list[Cell], tell: Tell = bool
) -> Naive:
  """What becomes of the model if all hot, or all cold, rows stand still.

  They do from the end of the phases before skipping on.

  Args:
    case: what is trained.
    variant: 'none', 'hot' or 'cold'; the first is the cell that skips nothing.
    cells: finished; that one among them.
    tell: of the batches read.

  Raises:
    UserError: that cell failed, or settings that cannot be.
  """
  seed = case.config.seed
  if variant == 'none':
    return _untouched(case.model, seed, cells)
  config = configured(case.config, 'plain', 'ours')
  config.skip.mode = 'rows'
  config.skip.threshold, config.skip.min_touches = _ALL, 0
  hot = case.hot if variant == 'hot' else _others(case.hot)
  metrics = run_of(case, config, tell, hot=hot).metrics
  scores = metrics.auc, metrics.log_loss, metrics.accuracy
  return Naive(case.model, variant, seed, *scores)


def _untouched(model: str, seed: int, cells: list[Cell]) -> Naive:
  key = model, PINNED, 'off', seed
  for cell in cells:
    if cell[:4] == key and cell.status == OK:
      return Naive(model, 'none', seed, cell.auc, cell.log_loss, cell.accuracy)
  raise UserError(
    'naive skipping is compared with the run that skips nothing',
    got='none that finished',
    where=f'{model}, seed {seed}',
    hint='look at the status of its cell',
  )


def _others(hot: HotRows) -> HotRows:
  """All cold rows, in the place of the hot ones."""
  num_rows = len(hot.place) - 1
  is_hot = np.zeros(num_rows, bool)
  is_hot[hot.rows] = True
  return hot_rows(np.flatnonzero(~is_hot), num_rows)


def threshold_of(case: Case, target: float, tell: Tell = bool) -> Threshold:
  """What a drop target makes of the published rule's threshold, and quality.

  Raises:
    UserError: settings that cannot be.
  """
  config = configured(case.config, PINNED, 'published')
  config.skip.drop = target
  done = run_of(case, config, tell)
  counters = done.trainer.engine.counters
  # Hot examples that came once it was decided which rows are stale.
  read = done.decision.get('batches_seen', case.steps)
  left = counters.examples_seen - read * config.data.batch_size
  hot = left * done.decision.get('examples_hot', 0.0)
  return Threshold(
    case.model,
    config.seed,
    target,
    done.decision.get('threshold'),
    counters.examples_dropped / hot if hot > 0 else None,
    done.metrics.auc,
    done.metrics.log_loss,
  )
