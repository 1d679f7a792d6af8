"""Phases of Slipstream as a pure function of the batches seen.

  warm-up | window     | settle  | skip ......... | window | settle | skip ...
          A: snapshot  B         T: threshold

From arXiv 2404.04270 and its released code, which goes through them once per
epoch. We added `settle`, the batches between the window's end and the decision.
They are trained whole, and the decision is made on them as a sample. They hide
the time it takes to copy the rows' changes to the host, so that no step waits.

All counts are of the source's batches, dropped examples included, except that
of `PendingDecision`.
"""

from typing import NamedTuple

import numpy as np

from slipstream_jax.errors import check_whole, UserError

WARM_UP, WINDOW, SETTLE, SKIP = 'warm-up', 'window', 'settle', 'skip'


class Phases(NamedTuple):
  """Lengths of the phases in batches."""

  warm_up: int = 40
  """Batches before the first window."""
  window: int = 60
  """Batches from snapshot A to snapshot B."""
  settle: int = 20
  """Batches from snapshot B to the threshold, at least 1."""
  period: int = 1000
  """Batches from one window to the next. 0: there is only one window."""
  warm_up_again: bool = False
  """Whether each period starts with the warm-up, as published for epochs.
  Otherwise skipping continues until the next window."""


def phases_for(batches: int | None) -> Phases:
  """Returns phases for sources with so many batches in a pass. None: unknown.

  They are the default ones, in proportion to the batches where there are fewer,
  with four periods in a pass.
  """
  longest = Phases()
  if batches is None:
    return longest
  warm_up = max(1, min(longest.warm_up, batches // 50))
  window = max(2, min(longest.window, 3 * batches // 100))
  settle = max(4, min(longest.settle, batches // 60))
  period = min(longest.period, max(batches // 4, 3 * (window + settle)))
  return Phases(warm_up, window, settle, period)


class Phase(NamedTuple):
  """The phase of a batch of the source."""

  name: str
  """'warm-up', 'window' or 'skip'. The schedule replaces 'skip' by 'settle'
  while the period's decision is pending."""
  opens: bool = False
  """The window starts with this batch."""
  closes: bool = False
  """The window ends with this batch."""
  samples: bool = False
  """First batch after the window, or of the period if there is no window."""


class PendingDecision(NamedTuple):
  """A pending decision. Until it is made, examples are sampled."""

  window: int
  """Batches of the source up to the window's end: the window's number."""
  left: int
  """Batches until the decision is due. With windows, batches to train from the
  one that closes the window on. Without windows, batches of the source that are
  not all padding."""


def phase_at(phases: Phases, batch: int) -> Phase:
  """Returns the phase of the source's batch number `batch`, from 0."""
  # Batches since the window opened, negative in the warm-up.
  since = batch - phases.warm_up
  if phases.period and phases.warm_up_again:
    since = batch % phases.period - phases.warm_up
  elif phases.period and since > 0:
    since %= phases.period
  if since < 0:
    return Phase(WARM_UP)
  if since < phases.window:
    return Phase(WINDOW, since == 0, since == phases.window - 1)
  return Phase(SKIP, samples=since == phases.window)


def check_phases(phases: Phases, needs_window: bool) -> None:
  """Checks that the phases fit one another.

  Raises:
    UserError: one is no whole number or too short, or a period too short for
      its phases.
  """
  if not isinstance(phases, Phases):
    raise UserError(
      'phases must be the phases of a schedule',
      got=repr(phases),
      where='Skip.phases',
      hint='make them with Phases(...)',
    )
  least = Phases(0, int(needs_window), 1, 0)
  for name, value, low in zip(Phases._fields[:4], phases, least, strict=False):
    check_whole(value, low, f'Phases.{name}', 'set it to that or more')
  if not isinstance(phases.warm_up_again, bool | np.bool):
    raise UserError(
      'warm_up_again must be True or False',
      got=repr(phases.warm_up_again),
      where='Phases.warm_up_again',
      hint='pick one of them',
    )
  head = phases.warm_up if phases.warm_up_again else 0
  needed = head + phases.window + phases.settle
  if phases.period and phases.period <= needed:
    raise UserError(
      f'a period must be longer than the {needed} batches before its skipping',
      got=phases.period,
      where='Phases.period',
      hint='lengthen it, or shorten the window',
    )
