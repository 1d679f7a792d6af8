"""The one error a user can cause: rule, got, where, mend, in one sentence."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar('T')


class UserError(Exception):
  """Bad input, told in one sentence; programs print it and exit with 1.

  Example: "alpha must be in [1, 26] for 26 features, got 30
  (config.skip.alpha); set it to 26 or less."
  """

  def __init__(self, rule: str, *, got: object, where: str, mend: str):
    """Builds the sentence.

    Args:
      rule: what must hold, as a clause without its full stop.
      got: the offending value; shown as text.
      where: file, line and column, config key or argument name.
      mend: what to do about it, as an imperative clause.
    """
    self.rule, self.got, self.where, self.mend = rule, got, where, mend
    super().__init__(f'{rule}, got {got} ({where}); {mend}.')

  def __reduce__(self) -> tuple:  # keeps the error whole across processes
    return _rebuild, (self.rule, self.got, self.where, self.mend)


def _rebuild(rule: str, got: object, where: str, mend: str) -> UserError:
  return UserError(rule, got=got, where=where, mend=mend)


def choose(members: Mapping[str, T], name: str, where: str) -> T:
  """The member of that name.

  Raises:
    UserError: there is none.
  """
  if name not in members:
    raise UserError(
      f'{where} must be one of {", ".join(members)}',
      got=repr(name),
      where=where,
      mend='pick one of them',
    )
  return members[name]
