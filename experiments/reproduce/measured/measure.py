"""One cell of the grid: a run of a model by a system, and what it took.

Only training is timed, and compiling is left out; points of the learning curve
are evaluated while the clock stands still.
"""

from collections.abc import Callable
import itertools
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from experiments.common import build, interrupts
from experiments.common.build import most_steps
from experiments.common.meter import Meter
from experiments.reproduce.measured.cases import Case, trainer_of
from experiments.reproduce.models import configured
from experiments.reproduce.results import Cell, Point
from slipstream_jax.engine.counters import Counters
from slipstream_jax.placement import bucket
from slipstream_jax.store.host_table import unique_rows_of
from slipstream_jax.training.evaluate import predict
from slipstream_jax.training.loop import embedding_bytes, train
from slipstream_jax.training.metrics import compute, Metrics, Predictions
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import HotRows

Tell = Callable[[int], object]
"""Called with the batches of the source that a run has read so far."""


class At(NamedTuple):
  """Where a run was evaluated on the way."""

  step: int
  counters: Counters
  seconds: float
  metrics: Metrics


class Outcome(NamedTuple):
  """What a run came to."""

  trainer: TrainerParts
  meter: Meter
  metrics: Metrics
  way: list[At]
  decision: dict[str, Any]
  """The last one of the schedule; empty without any."""
  choose_seconds: float
  positives: int
  """Test examples with label 1."""


def run_of(
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
    config: how.
    tell: of the batches read.
    hot: rows to watch, in place of those of the config's budget.
    curve: whether it is evaluated on its way, too.
    watch: called between steps, every so many of them, with their number.

  Raises:
    UserError: settings that cannot be, or a loss that is not finite.
    KeyboardInterrupt: a signal came.
  """
  trainer = trainer_of(case, config, hot)
  way, decision = [], {}
  meter = Meter(trainer.engine.counters)
  most = most_steps(config, case.data, case.steps)
  stops = config.eval.curve_steps if curve or watch else most
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
        scored = _scored(case, config, trainer, config.eval.curve_examples)
        counters = trainer.engine.counters
        at_step = meter.step, counters, meter.seconds
        way.append(At(*at_step, compute(scored)))
    choosing = batches.seconds_choosing
  scored = _scored(case, config, trainer, None)
  positives = int(np.count_nonzero(np.asarray(scored.labels)))
  metrics = compute(scored)
  return Outcome(trainer, meter, metrics, way, decision, choosing, positives)


def _scored(
  case: Case,
  config: ml_collections.ConfigDict,
  trainer: TrainerParts,
  examples: int | None,
) -> Predictions:
  size = config.eval.batch_size
  batches = None if examples is None else -(-examples // size)
  source = interrupts.Checked(case.data.test(size))
  return predict(trainer, source, batches)


def cell_of(
  case: Case, system: str, skip: str, curve: bool, tell: Tell = bool
) -> tuple[Cell, list[Point]]:
  """Runs a cell; the points are those of its learning curve, the end last.

  Raises:
    UserError: as `run_of`.
    KeyboardInterrupt: likewise.
  """
  config = configured(case.config, system, skip)
  done = run_of(case, config, tell, curve=curve)
  counters, metrics = done.trainer.engine.counters, done.metrics
  key = case.model, system, skip, config.seed
  skips = skip != 'off'
  cell = Cell(
    *key,
    steps=done.meter.step,
    examples_seen=counters.examples_seen,
    examples_trained=counters.examples_trained,
    examples_dropped=counters.examples_dropped,
    seconds=done.meter.seconds,
    bytes_loaded=counters.bytes_loaded,
    bytes_stored=counters.bytes_stored,
    # A lone parameter server has the model's, too: f32, there and back.
    dense_bytes=8 * case.dense_parameters * done.meter.step
    if system == 'xdl'
    else 0,
    lookups_hot_share=case.lookups_hot_share,
    examples_hot_share=case.examples_hot_share,
    auc=metrics.auc,
    log_loss=metrics.log_loss,
    accuracy=metrics.accuracy,
    test_examples=metrics.examples,
    device_bytes=device_bytes(case, done.trainer),
    host_bytes=_host_bytes(done.trainer),
    choose_seconds=done.choose_seconds if skips else None,
    window_seconds=done.trainer.seconds_watching if skips else None,
    matrix_share=_matrix_share(case, done),
    test_positives=done.positives,
  )
  last = At(done.meter.step, counters, done.meter.seconds, metrics)
  points = [
    Point(
      *key,
      at.step,
      at.counters.examples_seen,
      at.counters.examples_trained,
      at.seconds,
      at.metrics.auc,
      at.metrics.log_loss,
    )
    for at in [*done.way, last]
  ]
  return cell, points if curve else []


def device_bytes(case: Case, trainer: TrainerParts) -> int:
  """What the device must hold: rows kept, two blocks, parameters, the watch.

  Computed, without what the model's layers leave between them. Rows that are
  swapped count as there; a block has the rows of the first batch.
  """
  engine = trainer.engine
  source = case.data.train(case.config.data.batch_size)
  batch = next(source)
  source.close()
  total = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state))
  of_groups = zip(
    engine.groups,
    engine.tables.groups,
    embedding_bytes(engine.tables),
    strict=True,
  )
  for group, of_table, pooled in of_groups:
    kept = group.kept.rows
    rows = group.num_rows if kept is None else len(kept)
    if group.placement.swaps and group.hot is not None:
      rows = len(group.hot.rows)
    unique = unique_rows_of(batch.lookups, of_table, group.hot)
    block = bucket(len(unique.rows))
    sent = {
      'stream': block * group.row_bytes,
      'parameter_server': block * 4 * of_table.dim,
      'pooled': len(batch.labels) * pooled,
    }
    total += rows * group.row_bytes + 2 * sent[trainer.rows]
  return total


def _host_bytes(trainer: TrainerParts) -> int:
  """Tables and row state of the host."""
  return sum(
    group.num_rows * group.row_bytes
    for group in trainer.engine.groups
    if group.kept.rows is not None
  )


def _matrix_share(case: Case, done: Outcome) -> float | None:
  """Share of a plain product's speed that the whole run reaches.

  Counted are the layers of a DLRM, forward and backward, without what its
  first layer would pass back; None of models whose layers run per lookup.
  """
  if case.config.model.name != 'dlrm':
    return None
  leaves = jax.tree.leaves(done.trainer.state.params)
  shapes = [leaf.shape for leaf in leaves if np.ndim(leaf) == 2]
  size = sum(itertools.starmap(lambda rows, columns: rows * columns, shapes))
  first = case.data.dense_features * case.config.model.bottom[0]
  flops = (6 * size - 2 * first) * done.trainer.engine.counters.examples_trained
  return flops / done.meter.seconds / case.flops
