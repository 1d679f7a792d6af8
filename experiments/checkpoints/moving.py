"""Copies of checkpoints, and those of before that become ones of today."""

from collections.abc import Callable
import pathlib

import ml_collections

from experiments.common import build, datasets, errors, record, workdir
from experiments.systems.order import skip_settings
from slipstream_jax.errors import choose, UserError
from slipstream_jax.row_files.consolidate import copy_as_base
from slipstream_jax.row_files.manifest import Manifest, steps_in
from slipstream_jax.row_files.places import open_place, Place
from slipstream_jax.row_files.quantize import CODECS
from slipstream_jax.saving.searching import is_gone, reading, search_for
from slipstream_jax.saving.version_5 import convert
from slipstream_jax.saving.writing import ROOM
from slipstream_jax.schedules.systems import SCHEDULES
from slipstream_jax.training.parts import make_parts, start_watch, TrainerParts

_TRIES = 3


def check_asked(
  copy: str | None, codec: str | None, convert: bool, step: int | None
) -> None:
  """Looks at what the flags of these names ask for, before it is begun.

  Raises:
    UserError: two things at a time, or a codec of nothing, or none.
  """
  if copy is not None and convert:
    raise UserError(
      'checkpoints are copied or converted, one after the other',
      got='both',
      where='command line, --copy and --convert',
      hint='convert first, and copy what there is then',
    )
  if codec is not None:
    choose(CODECS, codec, 'command line, --codec')
  if codec is not None and copy is None:
    raise UserError(
      'a codec is that of a copy',
      got='none to make',
      where='command line, --codec',
      hint='add --copy=FOLDER',
    )
  if step is not None and copy is None:
    raise UserError(
      'a step is that of the checkpoint to copy',
      got=f'step {step}, and no copy to make',
      where='command line, --step',
      hint='add --copy=FOLDER',
    )


def place_of(name: str) -> Place:
  """Where the checkpoints of a run are; of a folder or URL of them, itself.

  Raises:
    UserError: nothing can open it, or the config of the run is damaged.
  """
  folder = pathlib.Path(name)
  if '://' in name or not (folder / record.CONFIG).exists():
    return open_place(name)
  return open_place(workdir.checkpoints_at(folder, record.config_of(folder)))


def copied(
  place: Place,
  into: Place,
  codec: str,
  step: int | None = None,
  tell: Callable[[str], None] = lambda text: None,
) -> Manifest:
  """Copies a checkpoint, as a base.

  A run under way may remove it while it is read: there is a newer one then.

  Args:
    place: where it is.
    into: where the copy goes, perhaps beside others.
    codec: of the copy's rows, one of `CODECS`.
    step: of the checkpoint; None: the newest.
    tell: called with why newer checkpoints than that of `step` cannot be
      copied.

  Returns:
    The copy's manifest.

  Raises:
    UserError: there is none, it is damaged, there is one of its step already,
      or something cannot be read or written; there is then no copy.
  """
  for _ in range(_TRIES - 1):
    try:
      return _copied(place, into, codec, step, tell)
    except UserError as error:
      if not is_gone(error.__cause__):
        raise
  return _copied(place, into, codec, step, tell)


def _copied(
  place: Place,
  into: Place,
  codec: str,
  step: int | None,
  tell: Callable[[str], None],
) -> Manifest:
  (chain,), skipped = search_for(place, step)
  for other, why in skipped:
    text = ' '.join(str(why).split())
    tell(f'a newer checkpoint cannot be copied: step {other}: {text}')
  both = f'{place.url}, to {into.url}'
  with reading(both, 'a copy must be read and written whole', ROOM):
    if into.url != place.url and chain[-1].step in steps_in(into):
      raise UserError(
        'a copy needs a place that has no checkpoint of its step',
        got=f'one of step {chain[-1].step}',
        where=into.url,
        hint='it may be there already; else name another folder or URL',
      )
    return copy_as_base(place, chain, into, codec)


def converted(name: str, data_path: str | None = None) -> int:
  """Makes the newest checkpoint of version 5 of a run one of today.

  It comes to lie beside the old ones, which stay.

  Args:
    name: the folder of the run.
    data_path: where its data are now; None: where they were.

  Returns:
    The steps taken.

  Raises:
    UserError: no run, no checkpoint of version 5, or as `convert`.
  """
  folder = pathlib.Path(name)
  config = record.config_of(folder)
  place = open_place(workdir.checkpoints_at(folder, config))
  with reading(place.url, 'a folder of checkpoints must be readable'):
    steps = steps_in(place)
  if steps:
    raise UserError(
      'what is converted must be a checkpoint of version 5',
      got=f'one of today, of step {steps[-1]}',
      where=place.url,
      hint='go on from it: there is nothing to convert',
    )
  with config.unlocked():
    config.resume = True
    if data_path is not None:
      config.data.path = data_path
  errors.check(config)
  with workdir.claimed(folder, config):
    trainer = _trainer(config)
    return convert(place.url, place.url, trainer)


def _trainer(config: ml_collections.ConfigDict) -> TrainerParts:
  """A trainer made as that of a run, whose tables stay on the host.

  Raises:
    UserError: other data than the run's, or settings that cannot be.
  """
  data = datasets.dataset(config)
  recipe = build.recipe(config, data, 1)
  hot = build.hot(config, data, recipe)
  dense, seed = data.dense_features, config.seed
  kept = build.storage(config)
  trainer = make_parts(recipe, 'streamed', dense, seed, hot, storage=kept)
  if build.skips(config):
    schedule = SCHEDULES['slipstream'](skip_settings(config), None)
    if schedule.settle is not None:  # its rows were being compared
      start_watch(trainer)
  return trainer
