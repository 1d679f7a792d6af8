"""Chains: a base and the increments on it, which are a checkpoint together.

A search finds the newest chains of which everything is there and as it was
written. It says of the newer ones why they cannot be restored.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from slipstream_jax.checkpoint.manifest import (
  check_file,
  Manifest,
  Parent,
  read_manifest,
  steps_in,
)
from slipstream_jax.checkpoint.places import Place
from slipstream_jax.checkpoint.quantize import RAW
from slipstream_jax.checkpoint.row_file import (
  check_row_file,
  FileFacts,
  Piece,
  read_row_file,
)
from slipstream_jax.errors import UserError

Chain = tuple[Manifest, ...]
"""A checkpoint: the base first, then the increments on it."""


class Skipped(NamedTuple):
  """A checkpoint that cannot be restored."""

  step: int
  why: Exception
  """UserError where something is damaged, OSError where it cannot be read."""


class Search(NamedTuple):
  """What a place has to restore."""

  chains: list[tuple[Manifest, ...]]
  """Of the newest whole checkpoints, newest first; of each the base first."""
  skipped: list[Skipped]
  """Newer ones than the last of these, newest first."""


def find_chains(
  place: Place,
  *,
  most: int = 1,
  deep: bool = True,
  steps: Iterable[int] | None = None,
) -> Search:
  """Looks for the newest whole chains.

  Args:
    place: where checkpoints are.
    most: as many as are wanted.
    deep: whether to read every byte; else a file that has its size is taken
      for whole.
    steps: those to look at; None: all.

  Raises:
    OSError: the place cannot be listed.
  """
  chains: list[tuple[Manifest, ...]] = []
  skipped: list[Skipped] = []
  checked = set[FileFacts]()  # files that several chains share
  for step in sorted(steps_in(place) if steps is None else steps)[::-1]:
    if len(chains) == most:
      break
    try:
      chain = read_chain(place, step)
      for facts in files_of(chain):
        if facts not in checked:
          _check(place, facts, deep)
          checked.add(facts)
    except (UserError, OSError) as error:
      skipped.append(Skipped(step, error))
    else:
      chains.append(chain)
  return Search(chains, skipped)


def read_chain(place: Place, step: int) -> tuple[Manifest, ...]:
  """The manifests that a checkpoint consists of, base first.

  Raises:
    UserError: one is damaged, or is not the one that its child is on.
    OSError: one cannot be read.
  """
  chain = [read_manifest(place, step)]
  while (parent := chain[0].parent) is not None:
    manifest = read_manifest(place, parent.step)
    if manifest.identity != parent.identity:
      raise UserError(
        f'step {chain[0].step} must be on the step {parent.step} that it was'
        ' saved on',
        got=f'a step {parent.step} of another history',
        where=place.url,
        hint='use an older checkpoint: this one is of an earlier run',
      )
    chain.insert(0, manifest)
  return tuple(chain)


def files_of(chain: tuple[Manifest, ...]) -> list[FileFacts]:
  """All files that a checkpoint needs, manifests aside."""
  of_rows = [facts for link in chain for facts in link.rows.values()]
  others = [facts for link in chain[-1:] for facts in link.files.values()]
  return [*of_rows, *others]


def next_on(
  chain: tuple[Manifest, ...], parent: int | None, **values: Any
) -> tuple[Manifest, ...]:
  """The chain of a new checkpoint, to publish the last manifest of.

  Args:
    chain: of the newest checkpoint; empty if there is none.
    parent: step in it, from a policy; None for a base.
    values: of `Manifest`: step, rows, files, payload, codec, id.
  """
  below = tuple(
    link for link in chain if parent is not None and link.step <= parent
  )
  if not below:
    return (Manifest(parent=None, **values),)
  on, newest = Parent(below[-1].step, below[-1].identity), chain[-1]
  siblings = newest.parent == on
  earlier = (*newest.earlier, newest.bytes) if siblings else ()
  return (*below, Manifest(parent=on, earlier=earlier, **values))


def read_rows(
  place: Place, chain: tuple[Manifest, ...], group: str
) -> Iterator[Piece]:
  """Yields a group's rows, link by link: what comes later holds.

  Raises:
    UserError: a file is damaged.
    OSError: one cannot be read.
  """
  for link in chain:
    if group in link.rows:
      yield from read_row_file(place, link.rows[group])


def check_exact(chain: tuple[Manifest, ...], where: str) -> None:
  """Looks whether a chain has the very bits that were trained.

  Raises:
    UserError: rows of it are quantized.
  """
  for link in chain:
    if link.codec != RAW:
      raise UserError(
        'a run goes on from rows in full precision',
        got=f'codec {link.codec} at step {link.step}',
        where=where,
        hint='restore it to evaluate or to serve, or use a raw checkpoint',
      )


def _check(place: Place, facts: FileFacts, deep: bool) -> None:
  size = place.size(facts.name)
  if size != facts.bytes:
    raise UserError(
      f'a file of a checkpoint must have {facts.bytes} bytes',
      got=f'{size} bytes',
      where=f'{place.url}/{facts.name}',
      hint='use an older checkpoint, or a copy',
    )
  if deep and facts.rows is not None:
    check_row_file(place, facts)
  elif deep:
    check_file(place, facts)
