"""When a checkpoint is a base, and else on which one: functions of sizes.

Eisenman et al., Check-N-Run (NSDI 2022), whose four these are. They decide by
what is there already, and nothing else.
"""

from collections.abc import Callable, Sequence

from slipstream_jax.checkpoint.manifest import Manifest

Policy = Callable[[Sequence[Manifest]], int | None]
"""Of the chain of the newest checkpoint, base first: the step in it that is to
be the parent of the next one, which then has the rows changed since that step;
None for a base. Of no checkpoint, None."""


def full(chain: Sequence[Manifest]) -> int | None:
  """Always a base."""
  return None


def one_shot(chain: Sequence[Manifest]) -> int | None:
  """All that changed since the base, which stays the same one."""
  return chain[0].step if chain else None


def consecutive(chain: Sequence[Manifest]) -> int | None:
  """What changed since the last: the fewest bytes, and the longest chain."""
  return chain[-1].step if chain else None


def intermittent(chain: Sequence[Manifest]) -> int | None:
  """As `one_shot`, with a new base once that is predicted to cost less.

  The next increments cost at least what the last one did. After a new base they
  would cost what they did after this one.
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
  'full': full,
  'one_shot': one_shot,
  'consecutive': consecutive,
  'intermittent': intermittent,
}


def worth_consolidating(
  chain: Sequence[Manifest], ratio: float = 1.0, links: int = 64
) -> bool:
  """Whether a chain is to become a base.

  What is written for it is then at most 1 + 1 / ratio times the increments, or
  else a base every `links` checkpoints.

  Args:
    chain: base first.
    ratio: of the bytes of increments to those of the base.
    links: increments that a restore is to read at most.
  """
  if len(chain) < 2:
    return False
  base, *increments = (manifest.bytes for manifest in chain)
  return sum(increments) >= ratio * base or len(increments) >= links
