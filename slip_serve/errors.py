"""The one error that whoever serves can cause, in one sentence."""


class ServeError(ValueError):
  """What must hold, what came instead, where, and what to do about it."""

  def __init__(self, rule: str, *, got: object, where: str, hint: str) -> None:
    """Builds the sentence.

    Args:
      rule: what must hold, as a clause without its full stop.
      got: the offending value; shown as text.
      where: file, or argument.
      hint: what to do about it, as an imperative clause.
    """
    self.rule, self.got, self.where, self.hint = rule, got, where, hint
    super().__init__(f'{rule}, got {got} ({where}); {hint}.')
