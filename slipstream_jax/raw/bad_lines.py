"""A budget of bad lines: none is skipped unless the user allows it."""

from slipstream_jax.errors import UserError


class BadLines:
  """Counts the lines skipped, and ends the reading where they are too many."""

  def __init__(self, allowed: int = 0):
    """No line skipped yet.

    Args:
      allowed: lines that may be skipped; 0 makes every bad line an error.

    Raises:
      UserError: a negative number.
    """
    if allowed < 0:
      raise UserError(
        'bad_lines must be at least 0',
        got=allowed,
        where='config.data.bad_lines',
        mend='allow none or some',
      )
    self._allowed, self._count = allowed, 0

  @property
  def count(self) -> int:
    """Lines skipped so far."""
    return self._count

  def restore(self, count: int) -> None:
    """Continues a count: `count` lines were skipped before."""
    self._count = count

  def add(self, error: UserError) -> None:
    """One more line is bad, for the reason that `error` gives.

    Raises:
      UserError: `error`, where no more lines may be skipped.
    """
    if self._count < self._allowed:
      self._count += 1
      return
    before = f', after {self._count} bad lines' if self._count else ''
    raise UserError(
      error.rule,
      got=error.got,
      where=f'{error.where}{before}',
      mend=f'{error.mend}, or raise config.data.bad_lines to skip some',
    ) from error
