"""Restores a checkpoint into a trainer.

Every byte and every fact is checked before the trainer changes.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from slipstream_jax.checkpoint.chain import Chain, check_exact, read_rows
from slipstream_jax.checkpoint.manifest import read_file
from slipstream_jax.checkpoint.places import Place
from slipstream_jax.checkpoint.row_file import LOST, Piece
from slipstream_jax.checkpoint.save import block_of, token_of, values_of
from slipstream_jax.checkpoint.state import (
  arrays_of,
  DENSE,
  FIRST_ROWS,
  names_from,
  read_dense,
  read_orbax,
  SCHEDULE,
  shapes_of,
  state_of,
  tables_of,
  unpack,
  VERSION,
)
from slipstream_jax.data.interrupts import held
from slipstream_jax.data.source import ColumnNames
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.group_rows import GroupRows
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import RowBlock, RowIds

_ORBAX_VERSION = 7


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


def restore(
  trainer: TrainerParts, place: Place, chain: Chain, exact: bool
) -> Position:
  """Restores a chain whose bytes were all checked.

  The trainer is unchanged if this fails. `exact` refuses quantized rows.

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
  read = read_orbax if version == _ORBAX_VERSION else read_dense
  arrays = read(read_file(place, newest.files[DENSE]), like, url)
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
  predicted = unpack({'all': payload.get('predicted', [])}, schedule)['all']
  # From here on a failure leaves the trainer inconsistent.
  with held(), trainer.changing('a restore'):
    trainer.state = state_of(trainer, arrays['state'])
    _put_rows(trainer, place, chain)
    trainer.engine.swap_hot(payload.get('hot_here', False))
    trainer.probe.losses.put_all(dict(payload.get('losses', ())))
    trainer.probe.logits.put_all(dict(predicted))
    trainer.engine.counters = counters
    trainer.grown = grown
    trainer.names = _names(trainer, payload)
    trainer.rest = Counters()
    if trainer.state.watch is not None:
      trainer.probe.put(payload['window'], trainer.moved())
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


def _names(trainer: TrainerParts, payload: dict[str, Any]) -> ColumnNames:
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
  """Checks that model, tables and optimizers are those of the checkpoint."""
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
    hint = 'make the trainer as that of the run was made'
    if name.startswith(FIRST_ROWS) and 'checksum' in str(there):
      hint = 'give the table the initializer of the run, with the same values'
    raise UserError(
      'a checkpoint restores only into the model and tables it is of: '
      f'its {name} is {there}',
      got=here,
      where=where,
      hint=hint,
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
