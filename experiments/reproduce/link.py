"""Models what a step would take over links that the machine does not have.

Nothing here is measured. The bytes that the engine counted cross a link with a
stated rate, a step takes the device a stated time, and host phases take what
they took here. What does not overlap waits in a ring: each task for the one
before it, and the first for the last of an earlier batch. The slowest ring is
the time of a step. All times are means, so batches of unequal size take longer
than the model says. Each thread has a core of its own.

Where examples are left out, a step takes the examples of more than one batch of
the source. Times are then given per batch of the source, like those of a run
that leaves out nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.reproduce.results import PHASES, Row


class Link(NamedTuple):
  """A link between host and device that carries both directions at once."""

  load_gb_per_s: float
  """1e9 bytes per second to the device, for large copies of pinned memory."""
  store_gb_per_s: float
  """The same from the device."""
  latency_us: float
  """Microseconds that each copy takes in addition, whatever its size."""


LINKS = {
  'PCIe 3 x16': Link(12.0, 12.0, 10.0),
  'PCIe 4 x16': Link(24.0, 24.0, 10.0),
  'PCIe 5 x16': Link(50.0, 50.0, 10.0),
  'NVLink-C2C': Link(375.0, 297.0, 5.0),
}
"""Stated rates: about what large copies get of 15.8, 31.5, 63 and 450 GB/s."""
STEP_MS = (0.25, 0.5, 1.0, 3.0)
"""Stated times of a step on the device."""
_AHEAD = ('data', 'unique', 'plan')
_IN_TURN = ('gather', 'put', 'step', 'get', 'host_update', 'scatter', 'sync')

Ms = Mapping[str, float]
"""Phase to ms per batch. A phase that some batches lack has its share."""


class StepTime(NamedTuple):
  """The time from one step to the next, in a steady state."""

  ms_per_batch: float
  binds: str
  """Tasks that wait for one another and take this long: 'a + b'."""


Ring = tuple[Sequence[str], int]
"""Tasks that wait for one another in a ring, and the batches once around it."""


def _slowest(ms: Ms, *rings: Ring) -> StepTime:
  """Returns the time of the ring that takes longest per batch."""
  best = StepTime(0.0, '')
  for tasks, batches in rings:
    time = sum(ms[task] for task in tasks) / batches
    if time > best.ms_per_batch:
      best = StepTime(time, ' + '.join(task for task in tasks if ms[task]))
  return best


def _read_ahead(workers: int) -> list[Ring]:
  """Returns the rings of one thread that reads, and several that find rows."""
  return [(['data'], 1), (['data', 'unique'], workers), (['plan'], 1)]


def overlapping(ms: Ms, popular: float, workers: int) -> StepTime:
  """Models Slipstream, where all work overlaps the steps on the device.

  The host thread of a step scatters what left with the step two before it,
  whose loss is known by then, and gathers. Rows that the last step changed are
  taken on the device.
  """
  return _slowest(
    ms,
    *_read_ahead(workers),
    (['scatter', 'gather', 'put', 'step', 'get'], 2),
    (['scatter', 'gather'], 1),
    *(([task], 1) for task in ('put', 'step', 'get')),
  )


def parameter_server(ms: Ms, popular: float, workers: int) -> StepTime:
  """Models XDL: pull, step, push. Only batches are read ahead."""
  return _slowest(ms, *_read_ahead(workers), (_IN_TURN, 1))


def nothing_overlaps(ms: Ms, popular: float, workers: int) -> StepTime:
  """Models hybrid DLRM."""
  return _slowest(ms, ((*_AHEAD, *_IN_TURN), 1))


def strips(ms: Ms, popular: float, workers: int) -> StepTime:
  """Models FAE: popular batches on the device, others as hybrid DLRM, swaps."""
  hot = _slowest(ms, *_read_ahead(workers), (['step'], 1))
  # These phases belong to all batches, the others to batches that are not hot.
  less = {name: (1 - popular) * ms[name] for name in (*_AHEAD, 'step')}
  others = nothing_overlaps({**ms, **less}, 0.0, workers)
  total = popular * hot.ms_per_batch + others.ms_per_batch
  parts = [f'popular: {hot.binds}'] if popular else []
  if others.ms_per_batch:
    parts.append(f'others: {others.binds}')
  return StepTime(total, '; '.join(parts))


def working_sets(ms: Ms, popular: float, workers: int) -> StepTime:
  """Models Hotline: cold rows come and go while popular batches run.

  A set's rows are gathered after those of the last set are back, as no row is
  in two places.
  """
  others = (1 - popular) * ms['step']
  return _slowest(
    {**ms, 'popular step': ms['step'] - others, 'step': others},
    *_read_ahead(workers),
    (['gather', 'put', 'step', 'get', 'scatter'], 1),
    (['popular step', 'step'], 1),
  )


class Way(NamedTuple):
  """A model of a system's step, with the copies that the step makes."""

  model: Callable[[Ms, float, int], StepTime]
  """Function of the phases' ms, the share of popular batches, the workers."""
  loads: int = 8
  """Copies to the device in a step: rows with two state arrays, positions, and
  the batch's columns."""
  stores: int = 2
  """Copies from the device in a step."""
  rows: bool = True
  """Whether rows cross, so that their positions cross as well."""


WAYS: dict[str, Way] = {
  'plain': Way(overlapping),
  'cached': Way(overlapping),
  'pinned': Way(overlapping),
  'fae_pinned': Way(overlapping),
  'xdl': Way(parameter_server, loads=6, stores=1),
  'dlrm_hybrid': Way(nothing_overlaps, loads=4, stores=1, rows=False),
  'fae': Way(strips, loads=4, stores=1, rows=False),
  'hotline': Way(working_sets),
  'hotline_micro': Way(working_sets),
}


class Counts(NamedTuple):
  """Mean bytes and host times of a system's step."""

  system: str
  bytes_loaded: float
  """Bytes to the device: rows or embeddings, and swaps."""
  bytes_stored: float
  host_ms: Ms
  """Phases of the host. Those of the link and the device are not used."""
  popular: float = 0.0
  """Share of the examples that look up hot rows only."""
  workers: int = 2
  """Threads that read batches and find their unique rows."""
  read: float = 1.0
  """Batches of the source per step: above 1 if examples are left out."""


def modelled(counts: Counts, link: Link, device_step_ms: float) -> StepTime:
  """Returns what a batch of the source takes over a link, and what binds.

  Args:
    counts: bytes and host times of the system.
    link: the link that carries the bytes.
    device_step_ms: time of forward, backward and updates on the device.
  """
  way = WAYS[counts.system]
  ms = {**dict.fromkeys(PHASES, 0.0), **counts.host_ms}
  latency_ms = link.latency_us / 1e3
  # 1e9 bytes per second are 1e6 per millisecond.
  loading, storing = 1e6 * link.load_gb_per_s, 1e6 * link.store_gb_per_s
  ms['put'] = counts.bytes_loaded / loading + way.loads * latency_ms
  ms['get'] = counts.bytes_stored / storing
  if counts.bytes_stored:
    ms['get'] += way.stores * latency_ms
  # The device waits for a snapshot. The thread that takes the next batch
  # chooses its examples.
  ms['step'] = device_step_ms + ms['snapshot']
  ms['data'] = counts.read * ms['data'] + ms['choose']
  step = way.model(ms, counts.popular, counts.workers)
  return step._replace(ms_per_batch=step.ms_per_batch / counts.read)


def counts_of(
  runs: Sequence[Row],
  host_ms: Ms,
  model: Mapping[str, Any],
  workers: int = 2,
) -> Counts | None:
  """Returns the counts of a system: means over its finished runs.

  Args:
    runs: rows of finished runs of one model, system and way to skip.
    host_ms: its phases.
    model: the facts of the model.
    workers: threads that read batches and find their unique rows.

  Returns:
    None where runs or phases are not known.
  """
  runs = [run for run in runs if run.get('step')]
  if not runs or not host_ms or runs[0]['system'] not in WAYS:
    return None

  def per_step(name: str) -> float:
    total = sum(run.get(name, 0) for run in runs)
    return float(total) / sum(run['step'] for run in runs)

  system = runs[0]['system']
  # The engine counts rows. Positions cross beside them as i32.
  lookups = model.get('batch_size', 0) * model.get('features_per_example', 0)
  positions = 4.0 * lookups if WAYS[system].rows else 0.0
  dense = per_step('dense_bytes') / 2 if system == 'xdl' else 0.0  # each way
  seen, trained = (per_step(f'examples_{x}') for x in ('seen', 'trained'))
  return Counts(
    system,
    per_step('bytes_loaded') + positions + dense,
    per_step('bytes_stored') + dense,
    host_ms,
    _popular(runs),
    workers,
    seen / trained if seen and trained else 1.0,
  )


def _popular(runs: Sequence[Row]) -> float:
  """Returns the share of popular examples among those trained.

  All examples that are dropped are popular.
  """
  hot = trained = 0.0
  for run in runs:
    if 'examples_hot_share' in run and run.get('examples_seen'):
      dropped = run.get('examples_dropped', 0)
      hot += run['examples_hot_share'] * run['examples_seen'] - dropped
      trained += run['examples_seen'] - dropped
  return min(1.0, max(0.0, hot / trained)) if trained else 0.0
