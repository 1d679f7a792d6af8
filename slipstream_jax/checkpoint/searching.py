"""What a place has to restore, or why it has nothing, in one sentence."""

from collections.abc import Callable, Iterator
import contextlib
import pathlib
from typing import NoReturn

from slipstream_jax.checkpoint.chain import (
  Chain,
  drop_later,
  files_of,
  find_chains,
  read_chain,
  Search,
)
from slipstream_jax.checkpoint.manifest import Manifest, steps_in
from slipstream_jax.checkpoint.places import Place
from slipstream_jax.errors import UserError

_WHOLE = 'a checkpoint must be whole to be restored'
_READABLE = 'a folder of checkpoints must be readable'
_TRIES = 3
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


def search_for(
  place: Place, step: int | None = None, *, or_older: bool = False
) -> Search:
  """Reads the checkpoint that is to be restored.

  A run under way may remove a checkpoint while it is read. There is a newer one
  then, which is read instead.

  Args:
    place: where checkpoints are.
    step: of the checkpoint that is asked for; None: the newest.
    or_older: whether the newest whole checkpoint may stand for a damaged one.

  Returns:
    Its chain, and why newer ones cannot be restored.

  Raises:
    UserError: it is damaged or there is none, or the place cannot be read. The
      sentence names the newest step that is whole.
  """
  for _ in range(_TRIES):
    with reading(place.url, _READABLE):
      steps = steps_in(place)
      asked = [one for one in steps if step is None or one <= step]
      search = find_chains(place, steps=asked if or_older else asked[-1:])
    if not (search.skipped and is_gone(search.skipped[0].why)):
      break
  if not steps or (or_older and not search.chains):
    _refuse(place, search)
  if step is not None and step not in steps:
    raise UserError(
      'there must be a checkpoint of the step that is asked for',
      got=f'step {step}',
      where=place.url,
      hint=f'the steps are {", ".join(map(str, steps))}',
    )
  if not search.chains:
    _refuse_damaged(place, *search.skipped[0], newest=step is None)
  if step is not None:
    newer = [other for other in steps if other > step]
    with reading(place.url, _READABLE):
      skipped = find_chains(place, most=len(newer), steps=newer).skipped
    search = search._replace(skipped=[*skipped, *search.skipped])
  return search


def is_gone(error: BaseException | None) -> bool:
  """Whether a file was not there, as a run under way may have removed it."""
  return isinstance(error, FileNotFoundError)


def _refuse_damaged(
  place: Place, step: int, why: Exception, newest: bool
) -> NoReturn:
  """Says what is damaged, and what can be restored instead."""
  with reading(place.url, _READABLE):
    search = find_chains(place)
  got = ' '.join(str(why).split())
  if isinstance(why, UserError):
    got = f'{why.got} in {why.where}'
  hint = 'no other is whole, either: start anew, or use a copy of it'
  if search.chains:
    whole = search.chains[0][-1].step
    hint = (
      f'step {whole} is whole: ask for it by step={whole}, of a program by'
      f' --step={whole}'
    )
  raise UserError(
    f'the {"newest " if newest else ""}checkpoint must be whole to be restored',
    got=f'step {step}: {got}',
    where=place.url,
    hint=hint,
  ) from why


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
      hint='train anew, and save into another folder',
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
