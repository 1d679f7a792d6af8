"""Finds a checkpoint and restores it into a trainer.

Every byte and every fact is checked before the trainer changes.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from slipstream_jax.checkpoint import dense
from slipstream_jax.checkpoint.chain import (
  Chain,
  check_exact,
  drop_later,
  files_of,
  find_chains,
  read_chain,
  read_rows,
  Search,
)
from slipstream_jax.checkpoint.manifest import Manifest, read_file, steps_in
from slipstream_jax.checkpoint.places import Place, user_errors
from slipstream_jax.checkpoint.row_file import LOST, Piece
from slipstream_jax.checkpoint.save import (
  block_of,
  DENSE,
  SCHEDULE,
  token_of,
  values_of,
  VERSION,
)
from slipstream_jax.checkpoint.state import (
  arrays_of,
  names_from,
  shapes_of,
  state_of,
  tables_of,
  unpack,
)
from slipstream_jax.data.interrupts import held
from slipstream_jax.data.source import Known
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.group_rows import GroupRows
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.training import watch
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.types import RowBlock, RowIds

WHOLE = 'a checkpoint must be whole to be restored'
READABLE = 'a folder of checkpoints must be readable'
_ORBAX_VERSION = 7
_TRIES = 3


class Position(NamedTuple):
  """The position of a run when its checkpoint was saved."""

  step: int
  """Number of steps taken."""
  schedule_state: State
  """Position of the planned batches after the last one trained."""
  counters: Counters
  """Totals up to this step."""
  skipped: tuple[str, ...] = ()
  """Why each newer checkpoint could not be restored."""


def search_for(
  place: Place, step: int | None = None, *, or_older: bool = False
) -> Search:
  """Finds the checkpoint to restore, and reads all of its bytes.

  If an active run deletes it meanwhile, the search starts again and finds a
  newer one.

  Args:
    place: where checkpoints are.
    step: of the checkpoint. None: the newest.
    or_older: whether to fall back to the newest whole checkpoint if this one is
      damaged.

  Returns:
    Its chain, and why newer ones cannot be restored.

  Raises:
    UserError: it is damaged or does not exist, or the place cannot be read. The
      error names the newest whole step.
  """
  for _ in range(_TRIES):
    with user_errors(place.url, READABLE, LOST):
      steps = steps_in(place)
      asked = [one for one in steps if step is None or one <= step]
      search = find_chains(place, steps=asked if or_older else asked[-1:])
    if not (search.skipped and is_gone(search.skipped[0].why)):
      break
  if not steps:
    raise UserError(
      'resuming needs a checkpoint',
      got='none',
      where=place.url,
      hint='start anew, or give the folder that the run saved to',
    )
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
    with user_errors(place.url, READABLE, LOST):
      skipped = find_chains(place, most=len(newer), steps=newer).skipped
    search = search._replace(skipped=[*skipped, *search.skipped])
  return search


def is_gone(error: BaseException | None) -> bool:
  """Whether a file was missing, perhaps because an active run deleted it."""
  return isinstance(error, FileNotFoundError)


def _refuse_damaged(
  place: Place, step: int, why: Exception, newest: bool
) -> NoReturn:
  """Raises an error that says what is damaged, and what can be restored."""
  with user_errors(place.url, READABLE, LOST):
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
  """Returns the chain that a checkpoint of a step follows.

  Deletes later checkpoints if none of them can be restored.

  Args:
    place: where the checkpoint will be.
    known: the chain that was last written there, or restored.
    step: of the checkpoint.
    is_same: whether an existing checkpoint of the step has the same contents.

  Returns:
    The chain, empty if none has all of its files. None if the checkpoint
    exists.

  Raises:
    UserError: another checkpoint of the step or a later one can be restored.
    OSError: the place cannot be listed.
  """
  newest = max(steps_in(place), default=None)
  if newest is None:
    return ()
  chain = known
  if not chain or chain[-1].step != newest:
    try:
      chain = read_chain(place, newest)  # another run saved it
    except (UserError, OSError):
      chain = ()
  if {facts.name for facts in files_of(chain)} - {*place.names()}:
    chain = ()
  if chain and newest == step and is_same(chain[-1]):
    return None
  if newest < step:
    return chain
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


def restore(
  trainer: TrainerParts, place: Place, chain: Chain, exact: bool
) -> Position:
  """Restores a chain whose bytes were all checked.

  Args:
    trainer: unchanged if this fails.
    place: where the chain is.
    chain: of the checkpoint.
    exact: whether to refuse quantized rows.

  Raises:
    UserError: it is of another model or other tables, or damaged.
    OSError: it cannot be read.
  """
  newest, url = chain[-1], place.url
  payload = newest.payload
  # The small part first, so that a wrong model is reported at once.
  version = payload.get('version')
  if version not in (_ORBAX_VERSION, VERSION):
    raise UserError(
      f'a checkpoint must be of version {_ORBAX_VERSION} or {VERSION}',
      got=version,
      where=url,
      hint='restore it with the version of the library that saved it',
    )
  if exact:
    check_exact(chain, url)
  like = arrays_of(trainer)
  own = tables_of(trainer) | shapes_of(trainer, like)
  _check_same(payload['tables'] | payload['shapes'], own, url)
  _check_names(trainer, payload, url)
  by_orbax = version == _ORBAX_VERSION
  unpacked = dense.unpacked_by_orbax if by_orbax else dense.unpacked
  arrays = unpacked(read_file(place, newest.files[DENSE]), like, url)
  schedule = read_file(place, newest.files[SCHEDULE])
  state = _put(trainer, place, chain, arrays, schedule)
  return Position(newest.step, state, trainer.engine.counters)


def _put(
  trainer: TrainerParts,
  place: Place,
  chain: Chain,
  arrays: dict[str, Any],
  schedule: bytes,
) -> State:
  """Changes the trainer. Returns the position of the planned batches."""
  payload = chain[-1].payload
  counters = Counters(**payload['counters'])
  state = unpack(payload['schedule_state'], schedule)
  grown = unpack(payload.get('grown', {}), schedule)
  # From here on a failure leaves the trainer inconsistent.
  with held(), trainer.changing('a restore'):
    trainer.state = state_of(trainer, arrays['state'])
    _put_rows(trainer, place, chain)
    trainer.engine.swap_hot(payload.get('hot_here', False))
    for loss in payload.get('losses', ()):
      trainer.probe.put_loss(*loss)
    trainer.engine.counters = counters
    trainer.grown = grown
    trainer.names = _names(trainer, payload)
    trainer.rest = Counters()
    if trainer.state.watch is not None:
      # Taken now, since the next step donates the watch.
      moved = watch.moved(trainer.state.watch)
      trainer.probe.put(payload['window'], moved)
  return state


def _put_rows(trainer: TrainerParts, place: Place, chain: Chain) -> None:
  """Replaces all rows. Changes are counted from both ends of the chain."""
  engine = trainer.engine

  def pieces(number: int) -> Iterator[tuple[RowIds, RowBlock]]:
    group = engine.groups[number]
    for link in chain:
      for piece in read_rows(place, (link,), str(number)):
        _check_rows(piece, group, place.url)
        yield piece.rows, block_of(piece.values)
      if link is chain[0] or link is chain[-1]:  # only these become parents
        group.dirty.begin(token_of(place.url, link))

  # The seed gives untrained and reassigned rows their values in the run.
  seed = chain[-1].payload['seed']
  engine.reset([pieces(number) for number in range(len(engine.groups))], seed)


def _check_rows(piece: Piece, group: GroupRows, where: str) -> None:
  """Checks that rows belong to the group, which a checksum does not tell."""
  own = {k: (x.dtype, x.shape[1:]) for k, x in values_of(group.none).items()}
  got = {k: (x.dtype, x.shape[1:]) for k, x in piece.values.items()}
  if own != got or piece.rows[-1] >= group.num_rows:
    raise UserError(
      f'rows of a checkpoint must be of the {group.num_rows} of their group',
      got=f'row {piece.rows[-1]} of {", ".join(map(str, got.values()))}',
      where=where,
      hint=LOST,
    )


def _names(trainer: TrainerParts, payload: dict[str, Any]) -> Known:
  """Returns the names that the run had learned, or else the recipe's."""
  known = names_from(payload.get('facts', {}))
  if known.dense is None:
    known = known._replace(dense=trainer.recipe.dense_columns)
  return known


def _check_names(
  trainer: TrainerParts, payload: dict[str, Any], where: str
) -> None:
  """Checks that the model gets dense features in the order of the run."""
  own, saved = trainer.recipe.dense_columns, _names(trainer, payload).dense
  if own is not None and saved is not None and [*own] != [*saved]:
    raise UserError(
      'dense features by name must come to the model in the order of the run,'
      f' {", ".join(map(repr, saved))}',
      got=', '.join(map(repr, own)),
      where=where,
      hint='give Recipe.dense_columns in that order',
    )


def _check_same(saved: dict[str, Any], own: dict[str, Any], where: str) -> None:
  """Checks that the checkpoint matches the trainer's model, tables, optimizers.

  Raises:
    UserError: something differs.
  """
  for name in sorted(saved.keys() | own.keys(), key=_in_order):
    if saved.get(name) == own.get(name):
      continue
    there, here = (facts.get(name, 'nothing') for facts in (saved, own))
    for optimizer, (argument, begins) in _OPTIMIZERS.items():
      if name.startswith(begins):
        raise UserError(
          f'a checkpoint goes on with the {optimizer} of its run: its {name}'
          f' is {there}',
          got=f'another optimizer, for which it is {here}',
          where=where,
          hint=f'give {argument} as in the run',
        )
    raise UserError(
      'a checkpoint restores only into the model and tables it is of: '
      f'its {name} is {there}',
      got=here,
      where=where,
      hint='make the trainer as that of the run was made',
    )


# The argument of each optimizer, and the prefixes of its state's names.
_OPTIMIZERS: dict[str, tuple[str, tuple[str, ...]]] = {
  'row optimizer': (
    'row_optimizer of Trainer, or optimizer of the table,',
    ('state of a row', 'untrained state', "['state'].row_globals"),
  ),
  'dense optimizer': ('dense_optimizer of Trainer', ("['state'].dense_state",)),
}


def _in_order(name: str) -> tuple[int, str]:
  """Sorts the entries that explain a difference best to the front."""
  # The parameters of a model also decide the state of its optimizer.
  if name.startswith('untrained'):
    return 3, name
  if any(name.startswith(begins) for _, begins in _OPTIMIZERS.values()):
    return 2, name
  return int(name.startswith('[')), name
