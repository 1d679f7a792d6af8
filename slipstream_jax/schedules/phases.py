"""The phases of Slipstream as a pure function of the batches seen.

  warm-up | window     | settle  | skip ......... | window | settle | skip ...
          A: snapshot  B         T: threshold

From arXiv 2404.04270 and its released code, which goes through them once per
epoch. Ours: `settle`, the batches between the window's end and the decision.
They are trained whole and are the sample that the decision is made on, and
they hide the time it takes to bring the rows' changes to the host: no step
waits. All counts are of the source's batches, dropped inputs included, so
that what a run does at a batch depends on nothing but the batch's number.
"""

from typing import NamedTuple

from slipstream_jax.errors import UserError

WARM_UP, WINDOW, SETTLE, SKIP = 'warm-up', 'window', 'settle', 'skip'


class Phases(NamedTuple):
  """When rows are compared and inputs skipped; all in batches."""

  warm_up: int
  """Before the first window."""
  window: int
  """From snapshot A to snapshot B."""
  settle: int
  """From snapshot B to the threshold, at least 1."""
  period: int
  """From one window to the next; 0: there is but one."""
  warm_up_again: bool = False
  """Whether each period starts with the warm-up, as published for epochs;
  otherwise skipping goes on until the next window."""


class Phase(NamedTuple):
  """Where a batch stands."""

  name: str
  """'warm-up', 'window', 'settle' or 'skip'."""
  opens: bool = False
  """The window starts with this batch."""
  closes: bool = False
  """The window ends with this batch."""
  decides: bool = False
  """The threshold is set before this batch."""


def phase_at(phases: Phases, batch: int) -> Phase:
  """The phase of the source's batch number `batch`, from 0."""
  since = batch - phases.warm_up
  if phases.period and phases.warm_up_again:
    since = batch % phases.period - phases.warm_up
  elif phases.period and since > 0:
    since %= phases.period
  if since < 0:
    return Phase(WARM_UP)
  if since < phases.window:
    return Phase(WINDOW, since == 0, since == phases.window - 1)
  since -= phases.window
  if since < phases.settle:
    return Phase(SETTLE)
  return Phase(SKIP, decides=since == phases.settle)


def check(phases: Phases, needs_window: bool) -> None:
  """Looks whether the phases fit one another.

  Args:
    phases: to look at.
    needs_window: whether rows are to be compared.

  Raises:
    UserError: one is too short, or a period too short for what is in it.
  """
  least = Phases(0, int(needs_window), 1, 0, False)
  for name, value, low in zip(Phases._fields, phases, least, strict=True):
    if value < low:
      raise UserError(
        f'{name} must be at least {low} batches',
        got=value,
        where=f'config.skip.{name}',
        mend='set it to that or more',
      )
  head = phases.warm_up if phases.warm_up_again else 0
  needed = head + phases.window + phases.settle
  if phases.period and phases.period <= needed:
    raise UserError(
      f'a period must be longer than the {needed} batches before its skipping',
      got=phases.period,
      where='config.skip.period',
      mend='lengthen it, or shorten config.skip.window',
    )
