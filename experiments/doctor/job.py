"""Checks all that a long run is going to need, the cheap things first."""

from collections.abc import Iterator
import contextlib
import importlib.metadata
import math
import os
import pathlib
import platform
import sys
import tempfile
import time
from typing import Literal, NamedTuple
import uuid

import jax
import ml_collections
import numpy as np

from experiments.common import build, datasets, errors, record, report
from experiments.common import workdir as workdirs
from experiments.common.machine import memory_left
from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.packed import columns
from slipstream_jax.store.scratch import file_bytes
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.evaluate import predict_batch
from slipstream_jax.training.loop import train
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import Batch

_COLOURS = {'good': 'green', 'doubtful': 'yellow', 'bad': 'bold red'}
_PYTHONS, _JAXES = ((3, 11), (3, 13)), ((0, 10), (0, 12))
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy')
_WRITTEN_BYTES = 1 << 24
_STEPS = 2  # one that compiles, and one that does not


class Finding(NamedTuple):
  """The result of one check."""

  name: str
  verdict: Literal['good', 'doubtful', 'bad']
  words: str


def examine(
  config: ml_collections.ConfigDict | None,
  run: pathlib.Path | None = None,
  workdir: str = 'runs',
  verify: bool = False,
) -> None:
  """Prints the findings; see `findings`. The arguments are the program's.

  Raises:
    UserError: something is bad, or there is neither a config nor a run.
  """
  screen, bad = report.console(), []
  if run is None and config is not None:
    where = pathlib.Path(workdir)
  elif run is not None and config is None:
    where, config = run, record.config_of(run)
  else:
    raise UserError(
      'either a config or the folder of a run must be given',
      got='none of them' if run is None else 'both',
      where='command line',
      hint='add --config=configs/criteo.py, or give RUN alone',
    )
  for name, verdict, words in findings(config, where, verify):
    words = words.replace('[', r'\[')
    line = f'[{_COLOURS[verdict]}]{verdict:<8}[/] {name}: {words}'
    screen.print(line, highlight=False, soft_wrap=True)
    bad += [name] if verdict == 'bad' else []
  if bad:
    raise UserError(
      'a long run needs machine, config and data without a fault',
      got=', '.join(bad),
      where='above',
      hint='correct what is bad, and check again',
    )


def findings(
  config: ml_collections.ConfigDict, where: pathlib.Path, whole: bool = False
) -> Iterator[Finding]:
  """Yields findings. Ends where a bad one makes further checks impossible.

  Args:
    config: the config of the run to be.
    where: its folder, which need not exist. Nothing is left in it.
    whole: whether to compare all checksums of packed data.
  """
  yield _versions()
  yield _device()
  yield _disk(where)
  name = 'config'
  try:
    errors.check(config)
    yield Finding('config', 'good', 'all keys are there, and within bounds')
    name = 'data'
    data = datasets.dataset(config)
    batch, words = _examples(config, data, whole)
    yield Finding('data', 'good', words)
    name = 'model'
    steps = build.total_steps(config, data)
    recipe = build.recipe(config, data, steps)
    memory = _host_memory(config, recipe)
    yield memory
    if config.store.kind != 'memory':
      yield _store_room(config, recipe)
    at = workdirs.checkpoints_at(where, config)
    if '://' not in at:
      yield _checkpoint_room(config, recipe, data, pathlib.Path(at))
    if memory.verdict == 'bad':
      return
    hot = build.hot(config, data, recipe)
    trainer = build.trainer(config, data, recipe, hot)
    name = 'step'
    yield _steps(config, data, trainer, steps, batch)
    yield _device_memory()
    name = 'checkpoint'
    yield _saved_and_restored(trainer, at)
  except UserError as error:
    yield Finding(name, 'bad', str(errors.in_config(error)))
  except OSError as error:
    yield Finding(name, 'bad', f'{error.filename}: {error.strerror}')


def _versions() -> Finding:
  python, release = sys.version_info[:2], jax.__version_info__[:2]
  names = [f'{name} {importlib.metadata.version(name)}' for name in _PACKAGES]
  words = f'Python {platform.python_version()}, {", ".join(names)}'
  if _PYTHONS[0] <= python <= _PYTHONS[1] and _JAXES[0] <= release <= _JAXES[1]:
    return Finding('versions', 'good', words)
  words += ': tested are Python 3.11 to 3.13 and JAX 0.10 to 0.12'
  return Finding('versions', 'doubtful', words)


def _device() -> Finding:
  try:
    devices = jax.devices()
  except RuntimeError as error:
    return Finding('device', 'bad', str(error).splitlines()[0])
  first, memory = devices[0], _device_bytes()
  words = f'{len(devices)} of {first.platform}, {first.device_kind}'
  if memory is not None:
    words += f', {report.size(memory)} of memory'
  if first.platform == 'cpu':
    words += ': no accelerator'
  return Finding('device', 'good', words)


def _device_bytes() -> int | None:
  limit = (jax.devices()[0].memory_stats() or {}).get('bytes_limit')
  return None if limit is None else int(limit)


def _disk(where: pathlib.Path) -> Finding:
  """Checks that a folder can be written, and how fast."""
  existing = workdirs.existing(where)
  try:
    with tempfile.TemporaryFile(dir=existing) as file:
      began = time.perf_counter()
      file.write(os.urandom(_WRITTEN_BYTES))
      file.flush()
      os.fsync(file.fileno())
      seconds = time.perf_counter() - began
  except OSError as error:
    return Finding('disk', 'bad', f'{existing}: {error.strerror}')
  rate = report.size(_WRITTEN_BYTES / max(seconds, 1e-9))
  free = report.size(workdirs.free_bytes(where))
  return Finding('disk', 'good', f'{existing} takes {rate}/s, {free} are left')


def _examples(
  config: ml_collections.ConfigDict, data: Dataset, whole: bool
) -> tuple[Batch, str]:
  """Returns a batch to score, and a description of the data."""
  with contextlib.closing(data.test(config.eval.batch_size)) as source:
    batch = next(source)
  path = config.data.path
  checked = ''
  if whole and path is not None and pathlib.Path(path).is_dir():
    nbytes = sum(size for _, size in columns.verify(path))
    checked = f', {report.size(nbytes)} as they were written'
  examples = 'endless'
  if data.train_examples is not None:
    examples = f'{data.train_examples:,} examples'
  rows = sum(data.sizes.values())
  return batch, f'{data.name}: {examples}, {rows:,} rows{checked}'


def fits(
  name: str, wanted: int, available: int | None, of: str, hint: str
) -> Finding:
  """Checks that bytes fit, with a tenth to spare.

  Args:
    name: name of the finding.
    wanted: bytes.
    available: bytes that are left, or None if unknown.
    of: what takes the bytes, as the beginning of a sentence.
    hint: what to do if they do not fit.
  """
  size = report.size(wanted)
  if available is None:
    words = f'{of} {size}, and it is unknown how much is left'
    return Finding(name, 'doubtful', words)
  words = f'{of} {size} of {report.size(available)} that are left'
  if wanted <= 0.9 * available:
    return Finding(name, 'good', words)
  words = f'{words}: {hint}'
  return Finding(name, 'bad' if wanted > available else 'doubtful', words)


def _host_memory(config: ml_collections.ConfigDict, recipe: Recipe) -> Finding:
  store = config.store
  wanted, of = build.table_bytes(recipe), 'tables with their row state take'
  if store.kind == 'tiered':
    wanted = min(wanted, int(store.dram_bytes))
    of = 'rows kept in memory take'
  elif store.kind == 'file':
    wanted, of = 0, 'rows of a file take'
  hint = 'take fewer rows or a smaller dim, a smaller dtype, or more memory'
  return fits('memory', wanted, memory_left(), of, hint)


def _store_room(config: ml_collections.ConfigDict, recipe: Recipe) -> Finding:
  """Checks the disk for the file of rows, which is sparse but may fill up."""
  if (words := build.no_disk(config)) is not None:
    return Finding('disk of rows', 'doubtful', words)
  groups = zip(recipe.tables.groups, compiled_of(recipe).row_bytes, strict=True)
  wanted = sum(file_bytes(group.num_rows, size) for group, size in groups)
  free = workdirs.free_bytes(pathlib.Path(build.store_folder(config)))
  of = 'the file of rows, once all are written, takes'
  return fits('disk of rows', wanted, free, of, 'name another disk for them')


def _checkpoint_room(
  config: ml_collections.ConfigDict,
  recipe: Recipe,
  data: Dataset,
  where: pathlib.Path,
) -> Finding:
  state = compiled_of(recipe).init_state(data.dense_features, config.seed)
  copies = 2 if config.train.checkpoint_steps else 1
  wanted = copies * build.checkpoint_bytes(recipe, state)
  free = workdirs.free_bytes(where)
  of = f'{copies} checkpoints of all rows take'
  hint = 'name another disk with --workdir or config.checkpoint.path'
  return fits('disk of checkpoints', wanted, free, of, hint)


def _steps(
  config: ml_collections.ConfigDict,
  data: Dataset,
  trainer: TrainerParts,
  steps: int,
  batch: Batch,
) -> Finding:
  """Takes real steps, and scores held-out examples."""
  began, losses, seconds = time.perf_counter(), [], [0.0]
  with build.batches(config, trainer, data, steps) as batches:
    for at in train(trainer, batches, min(_STEPS, steps)):
      losses.append(at.loss)
      seconds.append(time.perf_counter() - began)
  if not losses:
    return Finding('step', 'bad', 'the data and config.skip leave no batch')
  logits = predict_batch(trainer, batch).logits
  words = (
    f'loss {losses[0]:.4f} after {seconds[1]:.1f} s, most of it compiling;'
    f' {len(logits):,} held-out examples scored'
  )
  if not (np.isfinite(logits).all() and math.isfinite(losses[-1])):
    return Finding('step', 'bad', f'{words}: not all of them finite')
  return Finding('step', 'good', words)


def _device_memory() -> Finding:
  wanted = sum(array.nbytes for array in jax.live_arrays())
  name, available = 'memory of the device', _device_bytes()
  if available is None:  # a CPU uses the machine's memory, checked before
    return Finding(name, 'good', f'arrays take {report.size(wanted)}')
  hint = 'keep fewer rows on the device (config.placement, config.hot.bytes)'
  return fits(name, wanted, available, 'arrays take', hint)


def _saved_and_restored(trainer: TrainerParts, at: str) -> Finding:
  """Saves everything beside the run's checkpoints, and restores it."""
  began = time.perf_counter()
  with _place_beside(at) as folder:
    checkpoints = Checkpoints(folder)
    try:
      checkpoints.save(trainer, {})
      saved = time.perf_counter() - began
      place = open_place(folder)
      nbytes = sum(place.size(name) for name in place.names())
      checkpoints.restore(trainer)  # compares all checksums
    finally:
      checkpoints.remove()
  seconds = time.perf_counter() - began - saved
  words = (
    f'{report.size(nbytes)} saved in {saved:.1f} s, restored in {seconds:.1f} s'
  )
  return Finding('checkpoint', 'good', words)


@contextlib.contextmanager
def _place_beside(at: str) -> Iterator[str]:
  """Yields an unused place on the disk, or in the bucket, of another one."""
  if '://' in at:
    yield f'{at}-doctor-{uuid.uuid4().hex}'
    return
  existing = workdirs.existing(pathlib.Path(at))
  with tempfile.TemporaryDirectory(dir=existing, prefix='doctor-') as folder:
    yield f'{folder}/checkpoints'
