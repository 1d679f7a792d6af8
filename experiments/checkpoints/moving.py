"""Copies checkpoints of a run."""

from collections.abc import Callable
import pathlib

from experiments.common import record, workdir
from slipstream_jax.checkpoint.chain import copy_as_base, search_for
from slipstream_jax.checkpoint.manifest import Manifest, steps_in
from slipstream_jax.checkpoint.places import (
  NO_ROOM,
  open_place,
  Place,
  user_errors,
)
from slipstream_jax.checkpoint.quantize import CODECS
from slipstream_jax.errors import choose, UserError

_TRIES = 3


def check_asked(copy: str | None, codec: str | None, step: int | None) -> None:
  """Checks the flags of these names before anything is begun.

  Raises:
    UserError: an unknown codec, or a codec or step without a copy.
  """
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
      if not isinstance(error.__cause__, FileNotFoundError):
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
  with user_errors(both, 'a copy must be read and written whole', NO_ROOM):
    if into.url != place.url and chain[-1].step in steps_in(into):
      raise UserError(
        'a copy needs a place that has no checkpoint of its step',
        got=f'one of step {chain[-1].step}',
        where=into.url,
        hint='it may be there already; else name another folder or URL',
      )
    return copy_as_base(place, chain, into, codec)
