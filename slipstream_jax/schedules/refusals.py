"""What schedules refuse while they read, or as they go on from a position."""

from typing import Any, NoReturn

from slipstream_jax.errors import UserError
from slipstream_jax.schedules.settings import Skip


def refuse_nothing(settings: Skip, batches: int, dropped: bool) -> NoReturn:
  """Says what is wrong where reading goes on, and nothing is left to train.

  Args:
    settings: of the schedule.
    batches: how many in a row have left no example.
    dropped: whether some of them had any.

  Raises:
    UserError: always.
  """
  if dropped:
    raise UserError(
      'the drop target must leave examples to train',
      got=f'{settings.drop}, which left none of the last'
      f' {batches} batches of the source',
      where='Skip.drop',
      hint='lower it, or give a source that ends before',
    )
  refuse_idle(batches)


def refuse_idle(batches: int) -> NoReturn:
  """Says that a source gives batch after batch of nothing but padding.

  Raises:
    UserError: always.
  """
  raise UserError(
    'a source must give examples of a weight above 0',
    got=f'{batches} batches in a row without one',
    where='train, source',
    hint='look at its weights',
  )


def check_same(
  state: dict[str, Any], name: str, rule: str, own: object
) -> None:
  """Looks whether a position is of a schedule like this one.

  Raises:
    UserError: that of another has another value of that name.
  """
  before = state.get(name)
  if before != own:
    raise UserError(
      f'a resumed run must {rule}, {before}',
      got=own,
      where=f'slipstream, {name}',
      hint='use what the run was started with',
    )
