"""What a place has to restore, or why it has nothing, in one sentence."""

from collections.abc import Callable, Iterator
import contextlib
import pathlib
from typing import NoReturn

from slipstream_jax.errors import UserError
from slipstream_jax.row_files.chain import (
  Chain,
  files_of,
  find_chains,
  read_chain,
  Search,
)
from slipstream_jax.row_files.manifest import Manifest, steps_in
from slipstream_jax.row_files.places import Place
from slipstream_jax.row_files.retention import drop_later

_WHOLE = 'a checkpoint must be whole to be restored'
_LOST = 'its disk lost or changed data: start anew, or use a copy of it'


@contextlib.contextmanager
def reading(
  where: str, rule: str = _WHOLE, hint: str = _LOST
) -> Iterator[None]:
  """Says in one sentence what a place refused.

  Raises:
    UserError: in place of an OSError.
  """
  try:
    yield
  except OSError as error:
    message = ' '.join(str(error).split()) or type(error).__name__
    raise UserError(rule, got=f'"{message}"', where=where, hint=hint) from error


def newest_whole(place: Place) -> Search:
  """Reads the newest whole checkpoint, and those after it that are not.

  Raises:
    UserError: there is none, or the place cannot be read.
  """
  with reading(place.url, 'a folder of checkpoints must be readable'):
    search = find_chains(place)
  if not search.chains:
    _refuse(place, search)
  return search


def chain_before(
  place: Place,
  known: Chain,
  step: int,
  is_same: Callable[[Manifest], bool],
) -> Chain | None:
  """What a checkpoint of a step comes after; None if it is there already.

  Later ones go, if nobody can restore them.

  Args:
    place: where it will be.
    known: the chain that was last written there, or restored.
    step: of the checkpoint.
    is_same: whether one of the same step has the same.

  Returns:
    A chain; empty if there is none of which all files are there.

  Raises:
    UserError: another one is there that can be restored.
    OSError: the place cannot be listed.
  """
  newest = max(steps_in(place), default=None)
  if newest is None:
    return ()
  chain = known
  if not chain or chain[-1].step != newest:
    chain = _chain_of(place, newest)
  if {facts.name for facts in files_of(chain)} - {*place.names()}:
    chain = ()
  if chain and newest == step and is_same(chain[-1]):
    return None
  if newest < step:
    return chain
  # Only what nobody can restore may go.
  chains = find_chains(place).chains
  last = chains[0][-1].step if chains else -1
  if last >= step:
    raise UserError(
      f'a checkpoint must be of a later step than {last}, which is here',
      got=f'step {step}',
      where=place.url,
      hint='save the checkpoints of each run in a folder of their own',
    )
  drop_later(place, last)
  return chains[0] if chains else ()


def _chain_of(place: Place, step: int) -> Chain:
  """The chain of a step that others saved; empty if it is not whole."""
  try:
    return read_chain(place, step)
  except (UserError, OSError):
    return ()


def _refuse(place: Place, search: Search) -> NoReturn:
  if search.skipped:
    why = search.skipped[0].why
    with reading(f'{place.url}, step {search.skipped[0].step}'):
      raise why
  if is_of_version_5(place):
    raise UserError(
      'a checkpoint must be of version 7',
      got='one of version 5 or before, which saved all rows',
      where=place.url,
      hint='convert it: slipstream_jax.saving.version_5.convert(folder, into,'
      ' trainer), with a trainer made as that of the run',
    )
  raise UserError(
    'resuming needs a checkpoint',
    got='none',
    where=place.url,
    hint='start anew, or give the folder that the run saved to',
  )


def is_of_version_5(place: Place) -> bool:
  """Whether a folder has checkpoints of before: folders named by their step."""
  folder = pathlib.Path(place.url)
  if '://' in place.url or not folder.is_dir():
    return False
  return any(path.name.isdigit() and path.is_dir() for path in folder.iterdir())
