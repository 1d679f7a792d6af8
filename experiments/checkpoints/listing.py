"""What a place has of checkpoints, and which of them can be restored."""

from typing import Any, NamedTuple

from slipstream_jax.checkpoint.chain import (
  files_of,
  find_chains,
  READABLE,
  search_for,
)
from slipstream_jax.checkpoint.manifest import (
  Manifest,
  read_manifest,
  steps_in,
)
from slipstream_jax.checkpoint.places import Place, user_errors
from slipstream_jax.checkpoint.row_file import FileFacts, LOST
from slipstream_jax.errors import UserError


class Entry(NamedTuple):
  """A checkpoint of a place."""

  step: int
  manifest: Manifest | None
  """None: it cannot be read."""
  reads: int | None
  """Bytes that restoring it reads; None where that cannot be done."""
  flaw: str | None
  """Why it cannot be restored; None: it can, or it is a link."""

  @property
  def whole(self) -> str:
    """Yes or no; 'link' where only what is on it can be restored any more."""
    if self.flaw is not None:
      return 'no'
    return 'link' if self.reads is None else 'yes'


def entries(place: Place, verify: bool = True) -> list[Entry]:
  """All checkpoints of a place, oldest first.

  Args:
    place: where they are.
    verify: whether to read every byte; else a file that has its size is taken
      for whole.

  Raises:
    UserError: there is none, or the place cannot be read.
  """
  with user_errors(place.url, READABLE, LOST):
    steps = steps_in(place)
    if not steps:
      search_for(place)  # says what there is instead
    search = find_chains(place, most=len(steps), deep=verify)
  whole = [
    Entry(chain[-1].step, chain[-1], _bytes(files_of(chain)), None)
    for chain in search.chains
  ]
  links = {link.step for chain in search.chains for link in chain}
  others = [
    Entry(
      step,
      _read(place, step),
      None,
      # Of what a run does not keep, only the rows stay.
      None if step in links else ' '.join(str(why).split()),
    )
    for step, why in search.skipped
  ]
  return sorted(whole + others, key=lambda entry: entry.step)


def _bytes(files: list[FileFacts]) -> int:
  return sum(facts.bytes for facts in files)


def _read(place: Place, step: int) -> Manifest | None:
  try:
    return read_manifest(place, step)
  except (UserError, OSError):
    return None


def row_of(entry: Entry) -> dict[str, Any]:
  """A checkpoint as a row of a table for people."""
  of = entry.manifest
  row = {'step': entry.step, 'kind': '-', 'codec': '-'}
  if of is None:
    none = {'rows': None, 'bytes': None, 'bytes_read': None}
    return {**row, **none, 'whole': entry.whole}
  kind = 'base' if of.parent is None else f'increment on {of.parent.step:,}'
  return {
    'step': entry.step,
    'kind': kind,
    'codec': of.codec,
    'rows': sum(facts.rows or 0 for facts in of.rows.values()),
    'bytes': _bytes([*of.rows.values(), *of.files.values()]),
    'bytes_read': entry.reads,
    'whole': entry.whole,
  }
