"""Loads a run: its config, its data and the model of one of its checkpoints."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import pathlib
import sys
from typing import NamedTuple, TypeVar

import ml_collections
import numpy as np

from experiments.common import build, datasets, errors, record, workdir
from experiments.common.written import WRITTEN
from slipstream_jax.checkpoint.chain import find_chains, kept_steps, READABLE
from slipstream_jax.checkpoint.checkpoint import Checkpoints, Position
from slipstream_jax.checkpoint.places import open_place, user_errors
from slipstream_jax.checkpoint.row_file import LOST
from slipstream_jax.checkpoint.state import Facts
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import choose, UserError
from slipstream_jax.formats.base import RawData
from slipstream_jax.formats.in_memory import new_batches
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.store.memory import MEMORY
from slipstream_jax.training.evaluate import predict_batch
from slipstream_jax.training.metrics import Predictions
from slipstream_jax.training.trainer_parts import (
  make_parts,
  start_watch,
  TrainerParts,
)
from slipstream_jax.vocabulary.counted import Vocabulary

_TRIES = 3
T = TypeVar('T')


class LoadedRun(NamedTuple):
  """A run as one of its checkpoints has it."""

  config: ml_collections.ConfigDict
  """The config that it was run with."""
  data: Dataset
  """The data that it was trained on."""
  trainer: TrainerParts
  """The trainer after `step` steps."""
  step: int


def load(
  folder: pathlib.Path,
  data_path: str | None = None,
  other: ml_collections.ConfigDict | None = None,
  step: int | None = None,
  tell: Callable[[str], None] = lambda text: None,
) -> LoadedRun:
  """Loads a run, finished or not, from one of its checkpoints.

  Tables are on the host, whatever the run's placement was. They are in memory,
  as far as they were trained, or on the disk as in the run.

  Args:
    folder: the run's --workdir.
    data_path: where its data are now. None: where they were.
    other: a config whose sections `data` and `eval` replace those of the run.
    step: of the checkpoint. None: the newest.
    tell: called with the step that was asked for, and with the reasons why
      newer checkpoints cannot be restored.

  Raises:
    UserError: the run is missing, kept no checkpoint or has a damaged one, or
      its data do not match.
  """
  config, data, place = _opened(folder, data_path, other)
  loaded, skipped = _restored(config, data, place, step)
  if step is not None:
    tell(f'step {step} is loaded, as asked')
    for why in skipped:
      tell(f'a newer checkpoint cannot be restored: {why}')
  return loaded


def members(
  folder: pathlib.Path,
  data_path: str | None = None,
  other: ml_collections.ConfigDict | None = None,
  steps: Sequence[int] | None = None,
) -> Iterator[LoadedRun]:
  """Yields the members of a run's ensemble, by step.

  They are the checkpoints that the run kept at the ends of cycles, or all that
  it has if it kept none.

  Args:
    folder: as in `load`, like the next two.
    data_path: see there.
    other: see there.
    steps: of the members. None: all.

  Raises:
    UserError: as in `load`, or there are fewer than two.
  """
  config, data, place = _opened(folder, data_path, other)
  if steps is None:
    opened = open_place(place)
    with user_errors(place, READABLE, LOST):
      steps = kept_steps(opened)
      if not steps:
        search = find_chains(opened, most=sys.maxsize, deep=False)
        steps = sorted(chain[-1].step for chain in search.chains)
  if len(steps) < 2:
    raise UserError(
      'an ensemble needs two checkpoints or more',
      got=len(steps),
      where=place,
      hint='train with --config.optimizer.cycles=5, or keep more of them',
    )
  for step in steps:
    yield check_clicks(_restored(config, data, place, step)[0])


def check_clicks(run: LoadedRun) -> LoadedRun:
  """Returns the run, if it can be a member of an ensemble.

  Raises:
    UserError: its model does not predict clicks, with one head.
  """
  if tuple(run.trainer.kinds) != ('clicks',):
    raise UserError(
      'an ensemble is of models with one head, which predicts clicks',
      got=f'heads of {", ".join(run.trainer.kinds)}',
      where='config.model.name',
      hint='take one checkpoint at a time, with --step',
    )
  return run


def _opened(
  folder: pathlib.Path,
  data_path: str | None,
  other: ml_collections.ConfigDict | None,
) -> tuple[ml_collections.ConfigDict, Dataset, str]:
  """Returns a run's config, its data and the place of its checkpoints."""
  config = record.config_of(folder)
  place = workdir.checkpoints_at(folder, config)
  if workdir.newest_step(place) is None:
    raise UserError(
      'a run is loaded from its checkpoint',
      got='none, as it was not kept',
      where='config.train.keep_checkpoint',
      hint='run it again with --config.train.keep_checkpoint=True',
    )
  with config.unlocked():
    if other is not None:
      config.data, config.eval = other.data, other.eval
    if data_path is not None:
      config.data.path = data_path
  errors.check(config)
  return config, datasets.dataset(config), place


def _restored(
  config: ml_collections.ConfigDict,
  data: Dataset,
  place: str,
  step: int | None,
) -> tuple[LoadedRun, tuple[str, ...]]:
  """Returns the run at a step, and why newer ones cannot be restored."""

  def restored() -> tuple[TrainerParts, Position]:
    with contextlib.closing(Checkpoints(place)) as checkpoints:
      trainer = _trainer(checkpoints.facts(step), config, data)
      # Scores do not need the exact bits of quantized rows.
      return trainer, checkpoints.restore(trainer, exact=False, step=step)

  trainer, position = while_saving(restored)
  loaded = LoadedRun(config, data, trainer, position.step)
  return loaded, position.skipped


def while_saving(read: Callable[[], T]) -> T:
  """Reads a checkpoint, again if an active run removes it meanwhile."""
  for _ in range(_TRIES - 1):
    try:
      return read()
    except UserError as error:
      if not isinstance(error.__cause__, FileNotFoundError):
        raise
  return read()


def _trainer(
  facts: Facts, config: ml_collections.ConfigDict, data: Dataset
) -> TrainerParts:
  """Makes a trainer that a checkpoint with these facts can be restored to."""
  steps = max(1, config.optimizer.cycles)  # any, as it takes none
  recipe, storage = build.recipe(config, data, steps), build.storage(config)
  if storage.name == MEMORY.name:
    storage = WRITTEN
  num_rows, hot = recipe.tables.num_rows, facts.hot
  # Restoring explains that the tables differ.
  if hot is not None and (not len(hot) or hot.max() >= num_rows):
    hot = None
  chosen = None if hot is None else hot_rows(hot, num_rows)
  trainer = make_parts(
    recipe,
    'streamed',
    data.dense_features,
    config.seed,
    chosen,
    storage=storage,
  )
  if facts.watched and chosen is not None:  # it was saved within a window
    start_watch(trainer)
  return trainer


def scored(run: LoadedRun, raw: RawData) -> Iterator[Predictions]:
  """Yields logits and labels, if any, of some thousand examples at a time.

  Args:
    run: the run that scores them.
    raw: raw examples, such as those of `datasets.new_examples`.

  Raises:
    UserError: the run's data have no vocabulary, there are no examples, or
      reading failed.
  """
  if run.data.vocabulary is None:
    raise UserError(
      'raw ids are scored with the vocabulary of the data trained on',
      got=f'{run.data.name}, which has none',
      where='config.data',
      hint='make batches of rows yourself, and score those',
    )
  size, examples = run.config.eval.batch_size, 0
  for batch in new_batches(raw, run.data.vocabulary(), size):
    part = predict_batch(run.trainer, batch)
    examples += len(part.logits)
    yield part
  if not examples:
    raise UserError(
      'there must be an example to score',
      got='none',
      where=', '.join(part.name for part in raw.parts),
      hint='give a file with more than a header',
    )


def rows_of(run: LoadedRun, table: str) -> dict[str, np.ndarray]:
  """Returns the rows of a table with their raw ids.

  Returns:
    `rows` [R, D] in the tables' dtype, and their `ids` i64[R]. With a
    vocabulary, the row that all unknown ids share is `unknown` [D] instead.
    Hashed ids share rows and have no `ids`.

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
