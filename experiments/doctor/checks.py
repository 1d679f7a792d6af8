"""Looks at everything that a long run is going to need, the cheap things first.

What fails ends the list where what follows rests on it.
"""

from collections.abc import Iterator
import contextlib
import math
import pathlib
import tempfile
import time
import uuid

import jax
import ml_collections
import numpy as np

from experiments.common import build, datasets, errors, report, workdir
from experiments.common.build import no_disk
from experiments.common.errors import in_config
from experiments.doctor import machine
from experiments.doctor.machine import Finding, fits
from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.data.source import Dataset
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.errors import UserError
from slipstream_jax.packed.columns import verify
from slipstream_jax.store.scratch import file_bytes
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.evaluate import predict_batch
from slipstream_jax.training.loop import train
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import Batch

_STEPS = 2  # one that compiles, and one that does not


def findings(
  config: ml_collections.ConfigDict, where: pathlib.Path, whole: bool = False
) -> Iterator[Finding]:
  """What was looked at, one by one.

  Args:
    config: of the run to be.
    where: its folder, which need not be there; nothing is left in it.
    whole: whether all checksums of packed data are compared.
  """
  yield machine.versions()
  yield machine.device()
  yield machine.disk(where)
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
    build.check_skip(config, recipe)
    yield _host_memory(config, recipe)
    if (on_disk := _store_room(config, recipe)) is not None:
      yield on_disk
    at = workdir.checkpoints_at(where, config)
    if '://' not in at:
      yield _checkpoint_room(config, recipe, data, pathlib.Path(at))
    if _host_memory(config, recipe).verdict == 'bad':
      return
    hot = build.hot(config, data, recipe)
    trainer = build.trainer(config, data, recipe, hot)
    name = 'step'
    yield _steps(config, data, trainer, steps, batch)
    yield _device_memory()
    name = 'checkpoint'
    yield _saved_and_restored(trainer, at)
  except UserError as error:
    yield machine.sentence(name, in_config(error))
  except OSError as error:
    yield Finding(name, 'bad', f'{error.filename}: {error.strerror}')


def _examples(
  config: ml_collections.ConfigDict, data: Dataset, whole: bool
) -> tuple[Batch, str]:
  """A batch to score, and what is known of the data."""
  with contextlib.closing(data.test(config.eval.batch_size)) as source:
    batch = next(source)
  path = config.data.path
  checked = ''
  if whole and path is not None and pathlib.Path(path).is_dir():
    nbytes = sum(size for _, size in verify(path))
    checked = f', {report.size(nbytes)} as they were written'
  examples = 'endless'
  if data.train_examples is not None:
    examples = f'{data.train_examples:,} examples'
  rows = sum(data.sizes.values())
  return batch, f'{data.name}: {examples}, {rows:,} rows{checked}'


def _table_bytes(recipe: Recipe) -> int:
  groups = zip(recipe.tables.groups, compiled_of(recipe).row_bytes, strict=True)
  return sum(group.num_rows * size for group, size in groups)


def _store(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Where rows are kept; in memory, where the config has no word for it."""
  plain = ml_collections.ConfigDict({'kind': 'memory'})
  store: ml_collections.ConfigDict = config.get('store', plain)
  return store


def _host_memory(config: ml_collections.ConfigDict, recipe: Recipe) -> Finding:
  store = _store(config)
  wanted = _table_bytes(recipe)
  of = 'tables with their row state take'
  if store.kind == 'tiered':
    wanted = min(wanted, int(store.dram_bytes))
    of = 'rows kept in memory take'
  elif store.kind == 'file':
    wanted, of = 0, 'rows of a file take'
  hint = 'take fewer rows or a smaller dim, a smaller dtype, or more memory'
  return fits('memory', wanted, machine.memory_left(), of, hint)


def _store_room(
  config: ml_collections.ConfigDict, recipe: Recipe
) -> Finding | None:
  """Room for the file of rows: it is sparse, but may fill up."""
  store = _store(config)
  if store.kind == 'memory':
    return None
  groups = zip(recipe.tables.groups, compiled_of(recipe).row_bytes, strict=True)
  wanted = sum(file_bytes(group.num_rows, size) for group, size in groups)
  if (words := no_disk(config)) is not None:
    return Finding('disk of rows', 'doubtful', words)
  there = workdir.free_bytes(pathlib.Path(build.store_folder(config)))
  of = 'the file of rows, once all are written, takes'
  return fits('disk of rows', wanted, there, of, 'name another disk for them')


def _checkpoint_room(
  config: ml_collections.ConfigDict,
  recipe: Recipe,
  data: Dataset,
  where: pathlib.Path,
) -> Finding:
  state = compiled_of(recipe).init_state(data.dense_features, config.seed)
  dense = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  copies = 2 if config.train.checkpoint_steps else 1
  wanted = copies * (_table_bytes(recipe) + dense)
  free = workdir.free_bytes(where)
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
    f'loss {losses[0]:.4f} after {seconds[1]:.1f} s, of which most was'
    f' compiling; {len(logits):,} held-out examples scored'
  )
  if not (np.isfinite(logits).all() and math.isfinite(losses[-1])):
    return Finding('step', 'bad', f'{words}: not all of them finite')
  return Finding('step', 'good', words)


def _device_memory() -> Finding:
  wanted = sum(array.nbytes for array in jax.live_arrays())
  hint = 'keep fewer rows on the device (config.placement, config.hot.bytes)'
  there = machine.device_bytes()
  if there is None:  # a CPU's is the machine's, which was looked at
    words = f'arrays take {report.size(wanted)}'
    return Finding('memory of the device', 'good', words)
  return fits('memory of the device', wanted, there, 'arrays take', hint)


def _saved_and_restored(trainer: TrainerParts, at: str) -> Finding:
  """Saves everything where the run will, and gets it back."""
  began = time.perf_counter()
  before = to_host(trainer.state.params)
  kept = [np.array(leaf) for leaf in jax.tree.leaves(before)]
  with _place_beside(at) as folder:
    checkpoints = Checkpoints(folder)
    try:
      step = checkpoints.save(trainer, {})
      saved = time.perf_counter() - began
      place = open_place(folder)
      nbytes = sum(place.size(name) for name in place.names())
      restored = checkpoints.restore(trainer).step
    finally:
      checkpoints.remove()
  seconds = time.perf_counter() - began - saved
  after = jax.tree.leaves(to_host(trainer.state.params))
  same = all(map(np.array_equal, kept, after)) and restored == step
  words = (
    f'{report.size(nbytes)} saved in {saved:.1f} s, restored in {seconds:.1f} s'
  )
  if not same:
    return Finding('checkpoint', 'bad', f'{words}, but not as it was')
  return Finding('checkpoint', 'good', words)


@contextlib.contextmanager
def _place_beside(at: str) -> Iterator[str]:
  """A place of its own on the disk, or in the bucket, of another one."""
  if '://' in at:
    yield f'{at}-doctor-{uuid.uuid4().hex}'
    return
  there = workdir.existing(pathlib.Path(at))
  with tempfile.TemporaryDirectory(dir=there, prefix='doctor-') as folder:
    yield f'{folder}/checkpoints'
