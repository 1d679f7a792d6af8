"""A finished run, loaded in one call: to score examples, to look at rows."""

from collections.abc import Callable, Iterator
import contextlib
import pathlib
from typing import NamedTuple

import ml_collections
import numpy as np

from experiments.common import (
  build,
  datasets,
  errors,
  record,
  workdir,
)
from experiments.common.record import CONFIG, SUMMARY
from experiments.predict.written import WRITTEN
from slipstream_jax.checkpoint.checkpoint import Checkpoints, Position
from slipstream_jax.checkpoint.state import Facts
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import choose, UserError
from slipstream_jax.formats.base import RawData
from slipstream_jax.formats.in_memory import new_batches
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.store.base import Storage
from slipstream_jax.store.memory import MEMORY
from slipstream_jax.training.evaluate import predict_batch
from slipstream_jax.training.metrics import Predictions
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import (
  make_parts,
  start_watch,
  TrainerParts,
)
from slipstream_jax.vocabulary.counted import Vocabulary


class LoadedRun(NamedTuple):
  """A finished run."""

  config: ml_collections.ConfigDict
  """As it was run."""
  data: Dataset
  """What it was trained on, and evaluated with."""
  trainer: TrainerParts
  """As it was at the end."""
  step: int
  """Steps it has taken."""


def load(
  folder: str | pathlib.Path,
  data_path: str | None = None,
  *,
  other: ml_collections.ConfigDict | None = None,
  finished: bool = True,
  step: int | None = None,
  tell: Callable[[str], None] = lambda text: None,
) -> LoadedRun:
  """The run of a folder: its config, its data set and its last checkpoint.

  Tables stay on the host, whatever the placement of the run was: in memory as
  far as they were trained, or on the disk as in the run. No number changes.

  Args:
    folder: of the run, its --workdir.
    data_path: where its data are now; None: where they were.
    other: a config whose data and evaluation take the place of the run's.
    finished: whether a run that is not is refused.
    step: of the checkpoint; None: the newest.
    tell: called with the step that was asked for, and with why newer
      checkpoints cannot be restored.

  Raises:
    UserError: no finished run, one that kept no checkpoint, a damaged
      checkpoint, or other data.
  """
  folder = pathlib.Path(folder)
  config = _config(folder, finished)
  with config.unlocked():
    if other is not None:
      config.data, config.eval = other.data, other.eval
    if data_path is not None:
      config.data.path = data_path
  errors.check(config)
  data = datasets.dataset(config)
  recipe = build.recipe(config, data, 1)
  storage = build.storage(config)
  if storage.name == MEMORY.name:  # what was not trained need not be there
    storage = WRITTEN

  def make(facts: Facts) -> TrainerParts:
    return _trainer(facts, recipe, data.dense_features, config.seed, storage)

  at = workdir.checkpoints_at(folder, config)
  trainer, position = _restored(at, make, step, 1 if finished else 3)
  if step is not None:
    tell(f'step {step} is loaded, as asked')
    for why in position.skipped:
      tell(f'a newer checkpoint cannot be restored: {why}')
  return LoadedRun(config, data, trainer, position.step)


def _trainer(
  facts: Facts,
  recipe: Recipe,
  dense_features: int,
  seed: int,
  storage: Storage,
) -> TrainerParts:
  """A trainer that a checkpoint of these facts can be restored into."""
  size, hot = recipe.tables.num_rows, facts.hot
  # Of other tables there are none; restoring says that they are others.
  if hot is not None and (not len(hot) or hot.max() >= size):
    hot = None
  chosen = None if hot is None else hot_rows(hot, size)
  trainer = make_parts(
    recipe, 'streamed', dense_features, seed, chosen, storage=storage
  )
  if facts.watched and chosen is not None:  # its rows were being compared
    start_watch(trainer)
  return trainer


def _restored(
  at: str, make: Callable[[Facts], TrainerParts], step: int | None, tries: int
) -> tuple[TrainerParts, Position]:
  """A trainer with a checkpoint of a place, and where that stood.

  A run under way may remove it while it is read: there is a newer one then.
  """
  with contextlib.closing(Checkpoints(at)) as checkpoints:
    try:
      trainer = make(checkpoints.facts(step))
      # Quantized rows score well enough; it is going on that needs their bits.
      return trainer, checkpoints.restore(trainer, exact=False, step=step)
    except UserError as error:
      if tries == 1 or not isinstance(error.__cause__, FileNotFoundError):
        raise
  return _restored(at, make, step, tries - 1)


def _config(folder: pathlib.Path, finished: bool) -> ml_collections.ConfigDict:
  names = (CONFIG, SUMMARY) if finished else (CONFIG,)
  missing = [n for n in names if not (folder / n).is_file()]
  if missing:
    raise UserError(
      'what is loaded must be the folder of a'
      f'{" finished" if finished else ""} run',
      got=f'{folder} without {" and ".join(missing)}',
      where='command line',
      hint='name one that `python -m experiments.report` lists, and finish it'
      ' first with --config.resume=True',
    )
  config = record.config_of(folder)
  if not workdir.has_checkpoint(workdir.checkpoints_at(folder, config)):
    raise UserError(
      'a run is loaded from its checkpoint',
      got='none, for it was not kept',
      where='config.train.keep_checkpoint',
      hint='run it again with --config.train.keep_checkpoint=True',
    )
  return config


def new_examples(run: LoadedRun, path: str) -> RawData:
  """A file of raw examples in the format of the run's data.

  Raises:
    UserError: the format has no such files, or there is no such file.
  """
  return datasets.new_examples(run.config.data, path)


def scored(run: LoadedRun, raw: RawData) -> Iterator[Predictions]:
  """Labels, where there are some, and logits, some thousand examples at a time.

  Raises:
    UserError: the run's data do not say which rows raw ids have, or what
      reading raises.
  """
  if run.data.vocabulary is None:
    raise UserError(
      'raw ids are scored with the vocabulary of the data trained on',
      got=f'{run.data.name}, which has none',
      where='config.data',
      hint='make batches of rows yourself, and score those',
    )
  size = run.config.eval.batch_size
  for batch in new_batches(raw, run.data.vocabulary(), size):
    yield predict_batch(run.trainer, batch)


def rows_of(run: LoadedRun, table: str) -> dict[str, np.ndarray]:
  """The rows of a table, and which raw ids they are of.

  Returns:
    `rows` [R, D] in the tables' dtype, and `ids` i64[R] of each. Where ids have
    a vocabulary, the row that all unknown ones share is apart, as `unknown`
    [D]. Hashed ids share rows, and have no `ids` here.

  Raises:
    UserError: there is no such table.
  """
  tables = list(run.data.sizes)
  choose(dict.fromkeys(tables), table, '--rows')
  rows = np.asarray(run.trainer.engine.rows_of(table))
  if run.data.vocabulary is None:
    return {'rows': rows, 'ids': np.arange(len(rows))}
  words = run.data.vocabulary()[tables.index(table)]
  if not isinstance(words, Vocabulary):
    return {'rows': rows}
  return {'rows': rows[1:], 'ids': words.known, 'unknown': rows[0]}
