"""How checkpoints are kept."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from slipstream_jax.checkpoint.manifest import Manifest
from slipstream_jax.checkpoint.policies import (
  CHECKPOINT_POLICIES,
  worth_consolidating,
)
from slipstream_jax.checkpoint.quantize import CODECS, RAW
from slipstream_jax.errors import check_whole, choose, UserError


class Saving(NamedTuple):
  """How checkpoints are kept, and what that may take."""

  policy: str = 'consecutive'
  """Which rows go into one, of `CHECKPOINT_POLICIES`."""
  keep: int = 2
  """Checkpoints that can be restored, with all that they need."""
  memory_bytes: int = 1 << 28
  """Of rows that training changes before they are written; once it is spent,
  steps wait for the disk."""
  consolidate: float = 1.0
  """A chain becomes a base, in the background, once its increments are that
  many times as large as its base; 0: never. Of a codec other than `RAW`, the
  next checkpoint is a base instead."""
  codec: str = RAW
  """Of the rows, one of `CODECS`; no run goes on from any but `RAW`."""
  on_error: Callable[[UserError], None] | None = None
  """Told what could not be written in the background; training then goes on,
  and the next checkpoint has what that one missed. None: it is raised."""


def policy_of(settings: Saving, chain: Sequence[Manifest], soon: bool) -> str:
  """The policy by which the next checkpoint is saved.

  Args:
    settings: of the run.
    chain: of the newest checkpoint.
    soon: whether there is little time: then it is an increment.
  """
  if soon:
    return 'consecutive'
  # A chain of fewer bits is not consolidated: rows would lose some again.
  ratio = settings.consolidate
  if settings.codec != RAW and ratio and worth_consolidating(chain, ratio):
    return 'full'
  return settings.policy


def check_saving(settings: Saving) -> None:
  """Looks at settings before anything is saved by them.

  Raises:
    UserError: such that there are not.
  """
  choose(CHECKPOINT_POLICIES, settings.policy, 'Saving, policy')
  choose(CODECS, settings.codec, 'Saving, codec')
  check_whole(settings.keep, 1, 'Saving, keep', 'use 2')
  hint = 'use 1 << 28'
  check_whole(settings.memory_bytes, 1, 'Saving, memory_bytes', hint)
  if not settings.consolidate >= 0:
    raise UserError(
      'consolidate must be a number, at least 0',
      got=settings.consolidate,
      where='Saving, consolidate',
      hint='use 1.0, or 0 to leave chains as they are',
    )
