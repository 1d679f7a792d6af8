"""Which files of a place may go, and their removal."""

from collections.abc import Iterable, Sequence

from slipstream_jax.checkpoint.chain import files_of, find_chains
from slipstream_jax.checkpoint.manifest import (
  is_ours,
  Manifest,
  name_of,
  steps_in,
)
from slipstream_jax.checkpoint.places import Place


def superfluous(
  chains: Sequence[tuple[Manifest, ...]], names: Iterable[str]
) -> list[str]:
  """Names of files that none of the chains needs, manifests first.

  Args:
    chains: to keep; of links below the last, other files than rows may go.
    names: of all files; those with names of other kinds are not ours.
  """
  kept = {name_of(link.step) for chain in chains for link in chain}
  kept |= {facts.name for chain in chains for facts in files_of(chain)}
  gone = [name for name in names if is_ours(name) and name not in kept]
  # A manifest that is there has its row files.
  return sorted(gone, key=lambda name: (not name.startswith('manifest-'), name))


def prune(place: Place, keep: int) -> list[str]:
  """Removes all but the newest checkpoints, and what killed writers left.

  Nobody may be writing there meanwhile. Where nothing could be restored,
  nothing is removed.

  Args:
    place: where checkpoints are.
    keep: how many can be restored afterwards, at least 1, if there are as many.

  Returns:
    Names of the files removed.

  Raises:
    OSError: something cannot be read, so that nobody knows whether it is
      needed, or not be removed.
  """
  chains, skipped = find_chains(place, most=keep, deep=False)
  for _, why in skipped:
    if isinstance(why, OSError) and not isinstance(why, FileNotFoundError):
      raise why
  place.sweep()
  gone = superfluous(chains, place.names()) if chains else []
  for name in gone:
    place.delete(name)
  return gone


def drop_later(place: Place, step: int) -> None:
  """Removes checkpoints after a step: of a history that a run goes back on.

  Raises:
    OSError: one cannot be removed.
  """
  for later in reversed(steps_in(place)):
    if later > step:
      place.delete(name_of(later))
