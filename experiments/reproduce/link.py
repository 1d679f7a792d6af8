"""What a step would take over links that a machine need not have: a model.

Nothing here is measured. What the engine counted crosses a link of a stated
rate, a step takes the device a stated time, and what the host does takes what
it took here; a small graph of each system says what may overlap. What comes out
is always to be called modelled. Durations are means: batches that differ from
one another take longer than the model says.
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
import statistics
from typing import Any, NamedTuple

from experiments.reproduce import overlap, results
from experiments.reproduce.overlap import StepTime


class Link(NamedTuple):
  """A link between host and device; it carries both ways at once."""

  name: str
  load_gb_per_s: float
  """1e9 bytes a second to the device, of large copies of page-locked memory."""
  store_gb_per_s: float
  """Likewise, from the device."""
  latency_us: float
  """Of each copy, whatever it holds."""


LINKS = {
  link.name: link
  for link in (
    Link('PCIe 3 x16', 12.0, 12.0, 10.0),
    Link('PCIe 4 x16', 24.0, 24.0, 10.0),
    Link('PCIe 5 x16', 50.0, 50.0, 10.0),
    Link('NVLink-C2C', 375.0, 297.0, 5.0),
  )
}
"""Stated, not measured: about what large copies get of 15.8, 31.5, 63 and 450
GB/s each way."""
STEP_MS = (0.25, 0.5, 1.0)
"""What a step may take the device, stated likewise."""


class Counts(NamedTuple):
  """What a step of a system does, in the mean of a run's steps."""

  system: str
  """Its key in `WAYS`."""
  bytes_loaded: float
  """To the device, of all that crosses: rows or embeddings, and swaps."""
  bytes_stored: float
  """From it."""
  host_ms: Mapping[str, float]
  """By phase, what the host took; of a phase that is not of every step, its
  share. Those that the link and the device are asked for are not read."""
  popular: float = 0.0
  """Share of the steps' examples that look up hot rows only."""
  workers: int = 2
  """Threads that read batches and find their unique rows."""


class Way(NamedTuple):
  """How a system goes about a step."""

  model: Callable[[Mapping[str, float], float, int], StepTime]
  """Of `overlap`: phases' ms, share of popular batches, and workers."""
  loads: int = 8
  """Copies to the device in a step: of rows with two leaves of state, places,
  and the batch's columns."""
  stores: int = 2
  """Copies from it."""
  places: bool = True
  """Whether rows cross, so that the device is told which lookup is of which."""


def modelled(counts: Counts, link: Link, device_step_ms: float) -> StepTime:
  """What a step takes, and what binds.

  Args:
    counts: of the system.
    link: what carries the bytes.
    device_step_ms: of forward, backward and updates on the device.
  """
  way = WAYS[counts.system]
  ms = {**dict.fromkeys(results.PHASES, 0.0), **counts.host_ms}
  latency_ms = link.latency_us / 1e3
  # 1e9 bytes a second are 1e6 a millisecond.
  loading, storing = 1e6 * link.load_gb_per_s, 1e6 * link.store_gb_per_s
  ms['put'] = counts.bytes_loaded / loading + way.loads * latency_ms
  ms['get'] = counts.bytes_stored / storing
  if counts.bytes_stored:
    ms['get'] += way.stores * latency_ms
  # The device waits for a snapshot, and is watched meanwhile.
  ms['step'] = device_step_ms + ms['snapshot']
  ms['data'] += ms['choose']  # by whoever takes the next batch
  return way.model(ms, counts.popular, counts.workers)


WAYS: dict[str, Way] = {
  'plain': Way(overlap.overlapping),
  'cached': Way(overlap.overlapping),
  'pinned': Way(overlap.overlapping),
  'fae_pinned': Way(overlap.overlapping),
  'xdl': Way(overlap.parameter_server, loads=6, stores=1),
  'dlrm_hybrid': Way(overlap.nothing_overlaps, loads=4, stores=1, places=False),
  'fae': Way(overlap.strips, loads=4, stores=1, places=False),
  'hotline': Way(overlap.working_sets),
  'hotline_micro': Way(overlap.working_sets),
}
"""Every system of a reproduction by its name."""


def lines(folder: pathlib.Path, workers: int = 2) -> list[results.Modelled]:
  """What every system of a reproduction would take, over every link.

  Of each system and way to skip the counts are the means of its finished
  seeds; where the phases of one were not measured, there are no lines of it.

  Args:
    folder: of the reproduction.
    workers: threads that read batches and find their unique rows.

  Raises:
    UserError: a file of the folder is damaged.
  """
  phases = _means_of_phases(results.read(folder, results.Phase))
  models = results.read_setting(folder).get('models', {})
  cells: dict[tuple[str, str, str], list[results.Cell]] = {}
  for cell in results.read(folder, results.Cell):
    if cell.status == results.OK and cell.system in WAYS and cell.steps:
      cells.setdefault((cell.model, cell.system, cell.skip), []).append(cell)
  modelled_lines = []
  for key, of_seeds in cells.items():
    if (host_ms := phases.get(key)) is None:
      continue
    counts = _counts(of_seeds, host_ms, models.get(key[0], {}), workers)
    for link in LINKS.values():
      for step_ms in STEP_MS:
        time = modelled(counts, link, step_ms)
        line = results.Modelled(*key, link.name, step_ms, *time)
        modelled_lines.append(line)
  return modelled_lines


def write(folder: pathlib.Path) -> None:
  """Puts those lines into the folder, in the place of older ones."""
  new = lines(folder)
  if results.read(folder, results.Modelled) == new:
    return
  (folder / results.FILES[results.Modelled]).unlink(missing_ok=True)
  results.append(folder, new)


def _means_of_phases(
  phases: Sequence[results.Phase],
) -> dict[tuple[str, str, str], dict[str, float]]:
  """Of each model, system and way to skip the mean ms of its seeds."""
  of_all: dict[tuple[str, str, str], dict[str, list[float]]] = {}
  for phase in phases:
    if phase.ms_per_batch is not None:
      of_one = of_all.setdefault((phase.model, phase.system, phase.skip), {})
      of_one.setdefault(phase.phase, []).append(phase.ms_per_batch)
  return {
    key: {name: statistics.fmean(ms) for name, ms in of_one.items()}
    for key, of_one in of_all.items()
  }


def _counts(
  cells: Sequence[results.Cell],
  host_ms: Mapping[str, float],
  model: Mapping[str, Any],
  workers: int,
) -> Counts:
  """Of a step, in the mean of the finished seeds of one system."""

  def per_step(name: str) -> float:
    total = sum(getattr(cell, name) or 0 for cell in cells)
    return float(total) / sum(cell.steps or 0 for cell in cells)

  system = cells[0].system
  # The engine counts rows. Their places in a step cross beside them, i32.
  lookups = model.get('batch_size', 0) * model.get('features_per_example', 0)
  places = 4.0 * lookups if WAYS[system].places else 0.0
  dense = per_step('dense_bytes') / 2 if system == 'xdl' else 0.0  # each way
  return Counts(
    system,
    per_step('bytes_loaded') + places + dense,
    per_step('bytes_stored') + dense,
    host_ms,
    _popular(cells),
    workers,
  )


def _popular(cells: Sequence[results.Cell]) -> float:
  """Share of the examples trained that look up hot rows only.

  All that are dropped do.
  """
  hot = trained = 0.0
  for cell in cells:
    if cell.examples_hot_share is not None and cell.examples_seen:
      dropped = cell.examples_dropped or 0
      hot += cell.examples_hot_share * cell.examples_seen - dropped
      trained += cell.examples_seen - dropped
  return min(1.0, max(0.0, hot / trained)) if trained else 0.0
