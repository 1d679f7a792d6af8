"""How checkpoints are kept, and which checkpoint an increment builds on.

The four policies are those of Eisenman et al., Check-N-Run (NSDI 2022).
"""

from collections.abc import Callable, Sequence
import math
from typing import NamedTuple

from slipstream_jax.checkpoint.manifest import Manifest
from slipstream_jax.checkpoint.quantize import CODECS, RAW
from slipstream_jax.errors import check_whole, choose, UserError

Policy = Callable[[Sequence[Manifest]], int | None]
"""Maps the chain of the newest checkpoint, base first, to the step of the next
checkpoint's parent. None: the next checkpoint is a base."""


def full(chain: Sequence[Manifest]) -> int | None:
  """Always writes a base."""
  return None


def one_shot(chain: Sequence[Manifest]) -> int | None:
  """Writes what changed since the base, which is never replaced."""
  return chain[0].step if chain else None


def consecutive(chain: Sequence[Manifest]) -> int | None:
  """Writes what changed since the last one: fewest bytes, longest chains."""
  return chain[-1].step if chain else None


def intermittent(chain: Sequence[Manifest]) -> int | None:
  """Like `one_shot`, but writes a new base once that is predicted to cost less.

  The next increments are assumed to cost at least as much as the last one, and
  after a new base what they did after this one.
  """
  if not chain:
    return None
  base, newest = chain[0], chain[-1]
  if newest is base:
    return base.step
  sizes = *newest.earlier, newest.bytes
  anew = base.bytes + sum(sizes)
  return None if anew <= (len(sizes) + 1) * newest.bytes else base.step


CHECKPOINT_POLICIES: dict[str, Policy] = {
  policy.__name__: policy
  for policy in (full, one_shot, consecutive, intermittent)
}


def worth_consolidating(
  chain: Sequence[Manifest], ratio: float = 1.0, links: int = 64
) -> bool:
  """Whether a chain, base first, should become a base.

  That is so once its increments have `ratio` times the bytes of its base, or a
  restore would read `links` increments. If an earlier link stays, the first is
  no reason, because a new base would free nothing.
  """
  if len(chain) < 2:
    return False
  base, *increments = (manifest.bytes for manifest in chain)
  if any(manifest.kept for manifest in chain[:-1]):
    ratio = math.inf
  return sum(increments) >= ratio * base or len(increments) >= links


class Saving(NamedTuple):
  """How checkpoints are kept, and how much memory that may take."""

  policy: str = 'consecutive'
  """Which rows go into a checkpoint, of `CHECKPOINT_POLICIES`."""
  keep: int = 2
  """Checkpoints that can be restored, with all files that they need."""
  memory_bytes: int = 1 << 28
  """Bytes of rows that training changes before they are written. When they are
  used up, steps wait for the disk."""
  consolidate: float = 1.0
  """A chain becomes a base, in the background, once its increments are this
  many times as large as its base. 0: never. With a codec other than `RAW`, the
  next checkpoint is a base instead."""
  codec: str = RAW
  """Codec of the rows, one of `CODECS`. Only `RAW` can resume a run."""
  on_error: Callable[[UserError], None] | None = None
  """Called with the error of a checkpoint that could not be written in the
  background. Training continues, and the next checkpoint includes the missed
  changes. None: the error is raised."""

  def policy_for(self, chain: Sequence[Manifest], soon: bool) -> str:
    """Returns the policy of the next checkpoint, as in `Checkpoints.save`."""
    if soon:
      return 'consecutive'
    # A quantized chain is not consolidated, as its rows would lose more bits.
    ratio = self.consolidate
    if self.codec != RAW and ratio and worth_consolidating(chain, ratio):
      return 'full'
    return self.policy

  def check(self) -> None:
    """Checks the settings.

    Raises:
      UserError: one is invalid.
    """
    choose(CHECKPOINT_POLICIES, self.policy, 'Saving, policy')
    choose(CODECS, self.codec, 'Saving, codec')
    check_whole(self.keep, 1, 'Saving, keep', 'use 2')
    hint = 'use 1 << 28'
    check_whole(self.memory_bytes, 1, 'Saving, memory_bytes', hint)
    if not self.consolidate >= 0:
      raise UserError(
        'consolidate must be a number, at least 0',
        got=self.consolidate,
        where='Saving, consolidate',
        hint='use 1.0, or 0 to leave chains as they are',
      )
