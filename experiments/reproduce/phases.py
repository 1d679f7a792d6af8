"""Measures the phases of a batch under each system, one after the other.

Systems take turns, a batch each, so that what else the machine does disturbs
all of them alike. Nothing overlaps here, so the phases of a batch take longer
in all than a batch in training. Times are medians. A system with two kinds of
steps has a median for each, weighted by how often it comes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import ml_collections
import numpy as np

from experiments.common import build
from experiments.common.meter import now
from experiments.reproduce.cases import Case, trainer_of
from experiments.reproduce.models import configured
from slipstream_jax.engine import apply
from slipstream_jax.engine.buffers import from_cpu, to_cpu, to_device, to_host
from slipstream_jax.engine.planner import PlannedBatch
from slipstream_jax.store.host_table import unique_rows_of
from slipstream_jax.training.loop import on_device, score_held_out
from slipstream_jax.training.trainer_parts import TrainerParts

BATCHES = 32
"""Number of batches on which the phases of each system are measured."""
T = TypeVar('T')


class Stopwatch:
  """Collects the milliseconds of phases, by the kind of their step."""

  def __init__(self) -> None:
    self.kind = ''
    self._ms: dict[tuple[str, str], list[float]] = {}

  def __call__(self, phase: str, call: Callable[..., T], *args: Any) -> T:
    """Returns the result of `call` once it is computed."""
    started = now()
    result: T = jax.block_until_ready(call(*args))
    spent = 1e3 * (now() - started)
    self._ms.setdefault((phase, self.kind), []).append(spent)
    return result

  def per_batch(self, batches: int) -> dict[str, float]:
    """Returns the milliseconds of each phase per batch."""
    totals: dict[str, float] = {}
    for (phase, _), ms in self._ms.items():
      total = float(np.median(ms)) * len(ms) / batches
      totals[phase] = totals.get(phase, 0.0) + total
    return totals


def phases_of(
  case: Case, systems: Sequence[str]
) -> dict[str, dict[str, float]]:
  """Returns the ms per batch of each phase, by system, without skipping.

  Raises:
    UserError: invalid settings.
  """
  configs = {name: configured(case.config, name, 'off') for name in systems}
  for config in configs.values():
    config.prefetch_batches = 0  # one thread does everything
    for _ in _steps(case, config, Stopwatch()):  # compiles
      pass
  watches = {name: Stopwatch() for name in systems}
  swaps: dict[str, list[bool]] = {name: [] for name in systems}
  turns = {
    name: _steps(case, configs[name], watch) for name, watch in watches.items()
  }
  while turns:
    for name, steps in [*turns.items()]:
      swapped = next(steps, None)
      if swapped is None:
        del turns[name]
      else:
        swaps[name].append(swapped)
  return {
    name: _per_batch(watch, swaps[name], case)
    for name, watch in watches.items()
  }


def _per_batch(
  watch: Stopwatch, swaps: Sequence[bool], case: Case
) -> dict[str, float]:
  ms = watch.per_batch(len(swaps))
  ms['plan'] = max(0.0, ms.pop('next') - ms['unique'])
  if any(swaps):  # a run has as many, as they are shares of its batches
    ms['sync'] *= len(swaps) / case.steps
  if 'update' in ms:  # pooling and updating belong to one phase
    ms['host_update'] = ms.get('host_update', 0.0) + ms.pop('update')
  return ms


def _steps(
  case: Case, config: ml_collections.ConfigDict, watch: Stopwatch
) -> Iterator[bool]:
  """Times some steps. Yields whether hot rows were swapped for each."""
  count = min(BATCHES, case.steps)
  trainer = trainer_of(case, config)
  source = case.data.train(config.data.batch_size)
  most = min(build.most_steps(config, case.data, count), count + 2)
  with build.batches(config, trainer, case.data, count) as stream:
    for _ in range(most):
      watch.kind = ''
      batch = watch('data', next, source)
      watch('unique', _unique, trainer, batch)
      item = watch('next', next, stream, None)
      if item is None:
        break
      yield _step(trainer, item, watch)
  source.close()


def _unique(trainer: TrainerParts, batch: Any) -> None:
  engine = trainer.engine
  groups = zip(engine.tables.groups, engine.hot_of_groups, strict=True)
  for group, hot in groups:
    unique_rows_of(batch.lookups, group, hot)


def _step(trainer: TrainerParts, item: PlannedBatch, watch: Stopwatch) -> bool:
  """Times one step. Returns whether hot rows were swapped for it."""
  engine, edge, rows = trainer.engine, item.scheduled.edge, trainer.rows
  swaps = edge.hot_here is not None and edge.hot_here != engine.hot_here
  if swaps:
    watch('sync', engine.swap_hot, edge.hot_here)
  if edge.hot_here:
    rows = 'stream'
  watch.kind = 'device' if rows == 'stream' else 'host'
  (_device_step if rows == 'stream' else _host_step)(trainer, item, watch)
  if edge.scores is not None:
    score_held_out(trainer, edge.scores)
  return swaps


def _device_step(
  trainer: TrainerParts, item: PlannedBatch, watch: Stopwatch
) -> None:
  engine, plans = trainer.engine, item.plans
  stores = [group.host for group in engine.groups]

  def gathered() -> list[Any]:
    blocks = []
    for store, plan in zip(stores, plans, strict=True):
      rows = plan.rows[plan.load]
      if plan.forward is not None:  # the device has them
        rows = rows[plan.forward.at < 0]
      blocks.append(store.gather(rows, len(rows)))
    return blocks

  block = watch('gather', gathered)
  columns = on_device(item.batch), item.row_weights
  sent = block, tuple(plan.inverse for plan in plans), *columns
  watch('put', to_device, sent)
  blocks = jax.block_until_ready(engine.load(plans))
  inputs = sent[1], columns[0], np.float32(0), columns[1]
  arguments = jax.block_until_ready(to_device(inputs))
  trainer.state, blocks, _ = watch(
    'step', trainer.update, trainer.state, blocks, *arguments
  )
  stored = [
    (store, plan, block)
    for store, plan, block in zip(stores, plans, blocks, strict=True)
    if len(plan.store)
  ]
  changed = [
    apply.gather_slots(
      block, to_device(apply.pad_positions(plan.store, len(block.rows)))
    )
    for _, plan, block in stored
  ]
  on_its_way = watch('get', to_host, changed)

  def scattered() -> None:
    for (store, plan, _), rows in zip(stored, on_its_way, strict=True):
      store.scatter(plan.rows[plan.store], rows)

  watch('scatter', scattered)
  engine.store(plans, blocks)


def _host_step(
  trainer: TrainerParts, item: PlannedBatch, watch: Stopwatch
) -> None:
  """Times the parts of `HostUpdate.step`."""
  engine, plans, state = trainer.engine, item.plans, trainer.state
  programs: Any = trainer.programs.host_update(trainer.rows)
  blocks = watch('gather', lambda: engine.load(plans, on_host=True))
  blocks = to_cpu(blocks, owned=True)
  inverses = to_cpu(tuple(plan.inverse for plan in plans))
  batch, rows = on_device(item.batch), tuple(b.rows for b in blocks)
  sent, weights = (rows, inverses), to_cpu(batch.lookup_weights)
  if programs.pool is not None:
    sent = watch('host_update', programs.pool, rows, inverses, weights)
    batch = batch._replace(lookup_weights=None)
  seen = np.float32(0)
  # A parameter server has the model's parameters, too.
  params = to_host(state.params) if programs.pool is None else ()
  inputs = watch(
    'put',
    lambda: (from_cpu(sent), to_device(params), *to_device((batch, seen))),
  )
  (first, second), params, *rest = inputs
  before = state._replace(row_globals=())
  if programs.pool is None:
    before = before._replace(params=params)
  new_state, gradients, loss = watch(
    'step', programs.gradients, before, first, second, *rest
  )
  params = new_state.params if programs.pool is None else ()
  gradients, step, loss, _ = watch(
    'get', to_cpu, (gradients, state.step, loss, params)
  )
  still = tuple(np.zeros(len(block.rows), bool) for block in blocks)
  beside = to_cpu((state.row_globals, item.row_weights, still, seen))

  def updated() -> Any:
    of_rows = gradients
    if programs.spread is not None:
      of_rows = programs.spread(rows, inverses, weights, gradients)
    return programs.update_rows(blocks, of_rows, *beside, loss, step)

  new_blocks, row_globals, _ = watch('update', updated)
  back = to_host(new_blocks)
  watch('scatter', lambda: engine.store(plans, back, on_host=True))
  row_globals = from_cpu(row_globals)
  trainer.state = new_state._replace(row_globals=row_globals)
