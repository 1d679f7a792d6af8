"""Runs each job, and returns the rows that it adds to the table.

Only training is timed. Compilation is left out, and the clock stops while
points of the learning curve are evaluated.

Beside the runs of systems there is what else the paper shows: skewed access,
rows over time, naive skipping, and the threshold of a drop target. These take
the hot rows of the case.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from experiments.common import build, interrupts
from experiments.common.meter import Meter
from experiments.reproduce.cases import Case, trainer_of
from experiments.reproduce.models import configured
from experiments.reproduce.phases import phases_of
from experiments.reproduce.results import Job, job_of, Row
from slipstream_jax.engine.buffers import to_device, to_host
from slipstream_jax.engine.counters import Counters
from slipstream_jax.errors import UserError
from slipstream_jax.placement import bucket
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.store.host_table import unique_rows_of
from slipstream_jax.training.evaluate import predict
from slipstream_jax.training.loop import embedding_bytes, train
from slipstream_jax.training.metrics import compute, Predictions
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import HotRows

Tell = Callable[[int], object]
"""Called with the batches of the source that a run has read so far."""
POINTS = 200
"""Points of an access curve, at ranks evenly spread on a log axis."""
ROWS = 10
"""Number of hot rows that are followed, drawn by their lookups."""
_LOOKS = 25  # at each of those rows
_FROZEN = 1e30  # a threshold that no row exceeds
_COMPILING = 100  # steps of a short run, at least
_SKIPS = 0.4  # share of a run's steps that is enough to skip in


class Outcome(NamedTuple):
  """A finished run."""

  trainer: TrainerParts
  meter: Meter
  quality: Row
  """AUC, log loss and accuracy on the test set, with its counts."""
  points: list[Row]
  """Points of the learning curve, the end included."""
  decision: dict[str, Any]
  """The last decision of the schedule; empty without any."""
  choose_seconds: float


def rows_of(
  job: Job,
  case: Case,
  before: Sequence[Row],
  systems: Sequence[str],
  tell: Tell = bool,
) -> list[Row]:
  """Runs a job and returns its rows.

  Args:
    job: what to run.
    case: of its model and seed.
    before: the rows of jobs before it.
    systems: those that skip nothing, whose phases are measured in one job.
    tell: called with the number of batches read.

  Raises:
    UserError: invalid settings, or a loss that is not finite.
    KeyboardInterrupt: a signal came.
  """
  run: dict[str, Callable[[], list[Row]]] = {
    'run': lambda: _run(job, case, before, tell),
    'phase': lambda: _phases(case, systems),
    'skew': lambda: _skew(case),
    'row': lambda: _row_changes(case, tell),
    'naive': lambda: [_naive(job, case, before, tell)],
    'threshold': lambda: [_threshold(case, job.drop_target, tell)],
  }
  return [job._asdict() | row for row in run[job.kind]()]


def train_and_score(
  case: Case,
  config: ml_collections.ConfigDict,
  tell: Tell = bool,
  hot: HotRows | None = None,
  curve: bool = False,
  watch: Callable[[TrainerParts, int], object] | None = None,
) -> Outcome:
  """Trains and evaluates.

  Args:
    case: what is trained.
    config: of the run.
    tell: called with the number of batches read.
    hot: rows to watch instead of those that fit the config's budget.
    curve: whether points of the learning curve are evaluated.
    watch: called with the step at the start and every `eval.curve_steps` steps.
  """
  trainer = trainer_of(case, config, hot)
  points, decision = [], {}
  meter = Meter(trainer.engine.counters)
  most = build.most_steps(config, case.data, case.steps)
  stops = config.eval.curve_steps if curve or watch else most

  def point(scored: Row) -> Row:
    row = {'step': meter.step, 'seconds': meter.seconds, **scored}
    return row | _examples(trainer.engine.counters)

  with build.batches(config, trainer, case.data, case.steps) as batches:
    if watch is not None:
      watch(trainer, 0)
    while meter.step < most:
      before = meter.step
      meter.start()
      for at in train(trainer, batches, min(stops, most - before)):
        meter.add(at)
        if (at.event or {}).get('kind') == 'decision':
          decision = dict(at.event or {})
        tell(at.counters.examples_seen // config.data.batch_size)
      meter.stop()
      if meter.step == before:
        break
      if watch is not None:
        watch(trainer, meter.step)
      if curve and meter.step - before == stops and meter.step < most:
        some = config.eval.curve_examples
        points.append(point(_quality(case, config, trainer, some)))
    choosing = batches.seconds_choosing
  quality = _quality(case, config, trainer)
  points.append(point(quality))
  return Outcome(trainer, meter, quality, points, decision, choosing)


def _examples(counters: Counters) -> Row:
  names = ('examples_seen', 'examples_trained', 'examples_dropped')
  return {name: getattr(counters, name) for name in names}


def _quality(
  case: Case,
  config: ml_collections.ConfigDict,
  trainer: TrainerParts,
  examples: int | None = None,
) -> Row:
  """Scores the test set, or its first examples."""
  size = config.eval.batch_size
  batches = None if examples is None else -(-examples // size)
  source = interrupts.Checked(case.data.test(size))
  scored: Predictions = predict(trainer, source, batches)
  metrics = compute(scored)
  return {
    'auc': metrics.auc,
    'log_loss': metrics.log_loss,
    'accuracy': metrics.accuracy,
    'test_examples': metrics.examples,
    'test_positives': int(np.count_nonzero(np.asarray(scored.labels))),
  }


def _run(job: Job, case: Case, before: Sequence[Row], tell: Tell) -> list[Row]:
  """Runs a system. Its learning curve and phases are of the first seed."""
  config = configured(case.config, job.system, job.skip)
  first, skips = job.seed == 0, job.skip != 'off'
  if first and skips:  # compiles what only skipping needs
    few = max(_COMPILING, round(_SKIPS * case.steps))
    train_and_score(case._replace(steps=min(case.steps, few)), config)
  done = train_and_score(case, config, tell, curve=first)
  counters, meter = done.trainer.engine.counters, done.meter
  run = {
    'status': 'ok',
    'step': meter.step,
    **_examples(counters),
    'seconds': meter.seconds,
    'bytes_loaded': counters.bytes_loaded,
    'bytes_stored': counters.bytes_stored,
    'dense_bytes': counters.bytes_of_parameters,
    'lookups_hot_share': case.lookups_hot_share,
    'examples_hot_share': case.examples_hot_share,
    **done.quality,
    'device_bytes': _device_bytes(case, done.trainer),
    'host_bytes': _host_bytes(done.trainer),
    'choose_seconds': done.choose_seconds if skips else None,
    'window_seconds': done.trainer.seconds_watching if skips else None,
    'matrix_share': _matrix_share(case, done),
  }
  names = ('step', 'examples_seen', 'examples_trained', 'seconds')
  curve = [
    {name: point[name] for name in (*names, 'auc', 'log_loss')}
    for point in done.points
  ]
  rows = [{'kind': 'curve', **point} for point in curve if first]
  if first and skips:
    # Phases are as without skipping, and skipping adds two.
    same = job._replace(kind='phase', skip='off')
    alone = {
      row['phase']: row['ms_per_batch'] for row in before if job_of(row) == same
    }
    per_step = 1e3 / meter.step
    alone['choose'] = done.choose_seconds * per_step
    alone['snapshot'] = done.trainer.seconds_watching * per_step
    rows += [{'kind': 'phase', **row} for row in _phase_rows(alone)]
  return [*rows, run]


def _phases(case: Case, systems: Sequence[str]) -> list[Row]:
  return [
    {'system': system, **row}
    for system, ms in phases_of(case, systems).items()
    for row in _phase_rows(ms)
  ]


def _phase_rows(ms: dict[str, float]) -> list[Row]:
  return [{'phase': name, 'ms_per_batch': spent} for name, spent in ms.items()]


def _device_bytes(case: Case, trainer: TrainerParts) -> int:
  """Returns the bytes that the device must hold, computed.

  These are rows kept there, two blocks, parameters and snapshots, without what
  the model's layers keep between them. Rows that are swapped count as kept. A
  block has the rows of the first batch.
  """
  engine = trainer.engine
  source = case.data.train(case.config.data.batch_size)
  batch = next(source)
  source.close()
  total = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state))
  pooled = embedding_bytes(engine.tables)
  groups = zip(engine.groups, engine.tables.groups, pooled, strict=True)
  for group, of_table, pooled_bytes in groups:
    kept = group.kept.rows
    rows = group.num_rows if kept is None else len(kept)
    if group.placement.swaps and group.hot is not None:
      rows = len(group.hot.rows)
    unique = unique_rows_of(batch.lookups, of_table, group.hot)
    block = bucket(len(unique.rows))
    sent = {
      'stream': block * group.row_bytes,
      'parameter_server': block * 4 * of_table.dim,
      'pooled': len(batch.labels) * pooled_bytes,
    }
    total += rows * group.row_bytes + 2 * sent[trainer.rows]
  return total


def _host_bytes(trainer: TrainerParts) -> int:
  """Returns the bytes of tables and row state on the host."""
  return sum(
    group.num_rows * group.row_bytes
    for group in trainer.engine.groups
    if group.kept.rows is not None
  )


def _matrix_share(case: Case, done: Outcome) -> float | None:
  """Returns the share of a plain product's speed that the run reaches.

  Counts the layers of a DLRM, forward and backward, without the gradient of
  the first layer's input. None for models whose layers run per lookup.
  """
  if case.config.model.name != 'dlrm':
    return None
  leaves = jax.tree.leaves(done.trainer.state.params)
  size = sum(math.prod(leaf.shape) for leaf in leaves if np.ndim(leaf) == 2)
  first = case.data.dense_features * case.config.model.bottom[0]
  flops = (6 * size - 2 * first) * done.trainer.engine.counters.examples_trained
  return flops / done.meter.seconds / case.flops


def _counts(case: Case) -> np.ndarray:
  """Returns how often the profile looks up each row."""
  assert case.data.counts is not None
  return case.data.counts().astype(np.int64)


def _skew(case: Case) -> list[Row]:
  """Returns points of the access curve over the rows of all tables."""
  counts = np.sort(_counts(case))[::-1]
  counts = counts[counts > 0]
  total, sums = counts.sum(), counts.cumsum()
  ranks = np.unique(np.geomspace(1, len(counts), POINTS).astype(np.int64))
  return [
    {
      'rank': int(rank),
      'share': float(counts[rank - 1] / total),
      'cumulative_share': float(sums[rank - 1] / total),
    }
    for rank in ranks
  ]


def _row_changes(case: Case, tell: Tell) -> list[Row]:
  """Returns how far random hot rows move from their start during training.

  They are drawn by their lookups, as a short run does not meet most others.
  """
  config = configured(case.config, 'pinned', 'off')
  config.eval.curve_steps = max(1, case.steps // _LOOKS)
  rng = np.random.default_rng(config.seed)
  lookups = _counts(case)[case.hot.rows].astype(np.float64)
  count = min(ROWS, int(np.count_nonzero(lookups)))
  shares = lookups / lookups.sum()
  picked = np.sort(rng.choice(len(shares), count, replace=False, p=shares))
  starts: list[np.ndarray] = []
  changes: list[Row] = []

  def watch(trainer: TrainerParts, step: int) -> None:
    (group,), hot = trainer.engine.groups, case.hot  # models have one group
    # Pinned rows are in the order of the hot ones.
    rows = to_host(_take(group.kept.block.rows, to_device(picked)))
    starts.append(rows)
    for at, row, start in zip(picked, rows, starts[0], strict=True):
      change = float(np.abs(row - start).max())
      number = int(hot.rows[at])
      changes.append({'row': number, 'batch': step, 'change': change})

  train_and_score(case, config, tell, watch=watch)
  return changes


@jax.jit
def _take(rows: jax.Array, at: jax.Array) -> jax.Array:
  return jnp.take(rows, at, axis=0)


def _naive(job: Job, case: Case, before: Sequence[Row], tell: Tell) -> Row:
  """Scores a run whose hot or cold rows are frozen once skipping begins.

  The variant 'none' is the finished run that skips nothing.
  """
  if job.variant == 'none':
    key = Job('run', job.model, job.seed)
    whole = [
      row for row in before if job_of(row) == key and row['status'] == 'ok'
    ]
    if not whole:
      raise UserError(
        'naive skipping is compared with the run that skips nothing',
        got='none that finished',
        where=f'{job.model}, seed {job.seed}',
        hint='look at the status of its run',
      )
    return _scores(whole[-1])
  config = configured(case.config, 'plain', 'ours')
  config.skip.mode = 'rows'
  config.skip.threshold, config.skip.min_touches = _FROZEN, 0
  hot = case.hot if job.variant == 'hot' else _cold(case.hot)
  return _scores(train_and_score(case, config, tell, hot=hot).quality)


def _scores(row: Row) -> Row:
  return {name: row.get(name) for name in ('auc', 'log_loss', 'accuracy')}


def _cold(hot: HotRows) -> HotRows:
  """Returns all cold rows in the place of the hot ones."""
  num_rows = len(hot.place) - 1
  is_hot = np.zeros(num_rows, bool)
  is_hot[hot.rows] = True
  return hot_rows(np.flatnonzero(~is_hot), num_rows)


def _threshold(case: Case, target: float | None, tell: Tell) -> Row:
  """Returns the threshold of the published rule for a drop target."""
  config = configured(case.config, 'pinned', 'published')
  config.skip.drop = target
  done = train_and_score(case, config, tell)
  counters = done.trainer.engine.counters
  # Hot examples that came after the stale rows were decided.
  read = done.decision.get('batches_seen', case.steps)
  left = counters.examples_seen - read * config.data.batch_size
  hot = left * done.decision.get('examples_hot', 0.0)
  return {
    'threshold': done.decision.get('threshold'),
    'drop_rate': counters.examples_dropped / hot if hot > 0 else None,
    'auc': done.quality['auc'],
    'log_loss': done.quality['log_loss'],
  }
