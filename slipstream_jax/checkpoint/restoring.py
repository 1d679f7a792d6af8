"""Puts a checkpoint into a trainer: all is looked at before that changes."""

from collections.abc import Callable, Iterator
import functools
from typing import Any, NamedTuple
import zlib

from slipstream_jax.checkpoint import dense
from slipstream_jax.checkpoint.chain import Chain, check_exact, read_rows
from slipstream_jax.checkpoint.facts import names_from
from slipstream_jax.checkpoint.manifest import Manifest
from slipstream_jax.checkpoint.packing import (
  arrays_of,
  Checksums,
  checksums,
  shapes_of,
  state_of,
  tables_of,
  unpack,
)
from slipstream_jax.checkpoint.places import Place
from slipstream_jax.checkpoint.row_file import Piece as RowPiece
from slipstream_jax.checkpoint.snapshot import (
  block_of,
  tokens_of,
  values_of,
  VERSION,
)
from slipstream_jax.checkpoint.writing import DENSE, SCHEDULE
from slipstream_jax.data.interrupts import held
from slipstream_jax.data.source import Known
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.group_rows import GroupRows, Piece
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.training import watch
from slipstream_jax.training.parts import TrainerParts

_LOST = 'its disk lost or changed data: start anew, or use a copy of it'


class Position(NamedTuple):
  """Where training stood when the checkpoint was saved."""

  step: int
  """Steps taken."""
  schedule_state: State
  """Position of the planned batches, after the last one trained."""
  counters: Counters
  """Totals up to then."""
  skipped: tuple[str, ...] = ()
  """Of each newer checkpoint, which could not be restored, why."""


def restore(
  trainer: TrainerParts, place: Place, chain: Chain, exact: bool
) -> Position:
  """Puts a chain, whose every byte was looked at, into the trainer.

  Args:
    trainer: unchanged if this fails.
    place: where it is.
    chain: of the checkpoint.
    exact: whether to refuse rows that are not the very bits.

  Raises:
    UserError: it is of another model or tables, or it is not what was saved.
    OSError: it cannot be read.
  """
  position, url = chain[-1].payload, place.url
  # The small part first: a wrong model is told before gigabytes are read.
  _check_version(position.get('version'), url)
  if exact:
    check_exact(chain, url)
  like = arrays_of(trainer)
  own = tables_of(trainer) | shapes_of(trainer, like)
  check_same(position['tables'] | position['shapes'], own, url)
  _check_names(trainer, position, url)
  with place.open(chain[-1].files[DENSE].name) as file:
    arrays = dense.unpacked(file, like, url)
  check_sums(position['checksums'], checksums(arrays), url)
  schedule = _schedule(place, chain[-1])
  fill = functools.partial(_fill, trainer, place, chain)
  state = put(trainer, position, arrays, schedule, fill)
  return Position(chain[-1].step, state, trainer.engine.counters)


def put(
  trainer: TrainerParts,
  position: dict[str, Any],
  arrays: dict[str, Any],
  schedule: bytes,
  fill: Callable[[], None],
) -> State:
  """Puts what was read, and looked at, into the trainer.

  Args:
    trainer: changes.
    position: what the checkpoint says of itself.
    arrays: those of the device but rows.
    schedule: arrays of where the batches stand, as of `unpack`.
    fill: puts the rows.

  Returns:
    The position of the planned batches.
  """
  counters = Counters(**position['counters'])
  state = unpack(position['schedule_state'], schedule)
  grown = unpack(position.get('grown', {}), schedule)
  # From here on it can be torn.
  with held(), trainer.changing('a restore'):
    trainer.state = state_of(trainer, arrays['state'])
    # Rows that took no step, or get another id, are as they were in the run.
    trainer.engine.renew_as(position['seed'])
    fill()
    trainer.engine.swap_hot(position.get('hot_here', False))
    for loss in position.get('losses', ()):
      trainer.probe.put_loss(*loss)
    trainer.engine.counters = counters
    trainer.grown = grown
    trainer.names = _names(trainer, position)
    trainer.rest = Counters()
    if trainer.state.watch is not None:
      # The schedule may yet ask for it, when the watch is long donated.
      moved = watch.moved(trainer.state.watch)
      trainer.probe.put(position['window'], moved)
  return state


def _names(trainer: TrainerParts, position: dict[str, Any]) -> Known:
  """The names that the run had learned; what it had not, the recipe may say."""
  known = names_from(position.get('facts', {}))
  if known.dense is None:
    known = known._replace(dense=trainer.recipe.dense_columns)
  return known


def _check_names(
  trainer: TrainerParts, position: dict[str, Any], where: str
) -> None:
  """Checks that the model gets dense features in the order of the run."""
  own, saved = trainer.recipe.dense_columns, _names(trainer, position).dense
  if own is not None and saved is not None and [*own] != [*saved]:
    raise UserError(
      'dense features by name must come to the model in the order of the run,'
      f' {", ".join(map(repr, saved))}',
      got=', '.join(map(repr, own)),
      where=where,
      hint='give Recipe.dense_columns in that order',
    )


def _schedule(place: Place, newest: Manifest) -> bytes:
  """The file of where the batches stand, if it is the checkpoint's own."""
  file = newest.files[SCHEDULE]
  data = place.read(file.name, file.bytes)
  saved = {SCHEDULE: newest.payload['schedule']}
  check_sums(saved, {SCHEDULE: zlib.crc32(data)}, place.url)
  return data


def _fill(trainer: TrainerParts, place: Place, chain: Chain) -> None:
  """Replaces all rows; changes are counted from both ends of the chain."""
  engine = trainer.engine

  def pieces(group: int) -> Iterator[Piece]:
    dirty = engine.groups[group].dirty
    for link, token in zip(chain, tokens_of(place.url, chain), strict=True):
      for piece in read_rows(place, (link,), str(group)):
        _check_rows(piece, engine.groups[group], place.url)
        yield piece.rows, block_of(piece.values)
      if link is chain[0] or link is chain[-1]:  # no other becomes a parent
        dirty.begin(token)

  engine.reset([pieces(number) for number in range(len(engine.groups))])


def _check_rows(piece: RowPiece, group: GroupRows, where: str) -> None:
  """Looks whether rows are of this group: a checksum does not say that."""
  own = {k: (x.dtype, x.shape[1:]) for k, x in values_of(group.none).items()}
  got = {k: (x.dtype, x.shape[1:]) for k, x in piece.values.items()}
  if own != got or piece.rows[-1] >= group.num_rows:
    raise UserError(
      f'rows of a checkpoint must be of the {group.num_rows} of their group',
      got=f'row {piece.rows[-1]} of {", ".join(map(str, got.values()))}',
      where=where,
      hint=_LOST,
    )


def _check_version(version: object, where: str) -> None:
  if version != VERSION:
    raise UserError(
      f'a checkpoint must be of version {VERSION}',
      got=version,
      where=where,
      hint='restore it with the version of the library that saved it',
    )


def check_same(saved: dict[str, Any], own: dict[str, Any], where: str) -> None:
  """Looks whether a trainer is of what a checkpoint is of.

  Raises:
    UserError: it is of other tables, another model or another optimizer.
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


# Of each optimizer its argument, and how names of its state begin.
_OPTIMIZERS: dict[str, tuple[str, tuple[str, ...]]] = {
  'row optimizer': (
    'row_optimizer of Trainer, or optimizer of the table,',
    ('state of a row', 'untrained state', "['state'].row_globals"),
  ),
  'dense optimizer': ('dense_optimizer of Trainer', ("['state'].dense_state",)),
}


def _in_order(name: str) -> tuple[int, str]:
  """Puts what says most of a difference first."""
  # A model's parameters decide what state its optimizer has, too.
  if name.startswith('untrained'):
    return 3, name
  if any(name.startswith(begins) for _, begins in _OPTIMIZERS.values()):
    return 2, name
  return int(name.startswith('[')), name


def check_sums(saved: Checksums, now: Checksums, where: str) -> None:
  """Looks whether arrays are those that were saved.

  Raises:
    UserError: one is not.
  """
  for name, crc in now.items():
    if saved.get(name) != crc:
      raise UserError(
        f'{name} of a checkpoint must have the checksum {saved.get(name)}',
        got=crc,
        where=where,
        hint=_LOST,
      )
