"""Chains: a base and the increments on it, which are a checkpoint together.

A search finds the newest chains whose files are all present and unchanged.
Consolidation turns a chain into a base while training continues. It replaces
the manifest of the chain's last checkpoint by one write, after which the
chain's files are unreferenced. Increments saved on that checkpoint meanwhile
stay valid.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from slipstream_jax.checkpoint.manifest import (
  file_name,
  file_pieces,
  is_ours,
  Manifest,
  name_of,
  new_id,
  Parent,
  publish,
  read_manifest,
  steps_in,
  write_file,
)
from slipstream_jax.checkpoint.places import Place
from slipstream_jax.checkpoint.quantize import RAW
from slipstream_jax.checkpoint.row_file import (
  check_row_file,
  concatenate,
  FileFacts,
  Leaf,
  leaves_in,
  part_of,
  Piece,
  read_row_file,
  with_codec,
  write_row_file,
)
from slipstream_jax.errors import UserError

Chain = tuple[Manifest, ...]
"""A checkpoint: the base first, then the increments on it."""


class Skipped(NamedTuple):
  """A checkpoint that is damaged or unreadable."""

  step: int
  why: Exception
  """UserError if something is damaged, OSError if it cannot be read."""


class Search(NamedTuple):
  """The checkpoints of a place that can be restored."""

  chains: list[Chain]
  """The newest whole checkpoints, newest first."""
  skipped: list[Skipped]
  """Newer ones than the last of these, newest first."""


def find_chains(
  place: Place,
  *,
  most: int = 1,
  deep: bool = True,
  steps: Iterable[int] | None = None,
) -> Search:
  """Finds the newest whole chains.

  Args:
    place: where checkpoints are.
    most: how many chains to find.
    deep: whether to read every byte. Else only the sizes of files are compared.
    steps: steps to look at. None: all.

  Raises:
    OSError: the place cannot be listed.
  """
  chains: list[Chain] = []
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


def _check(place: Place, facts: FileFacts, deep: bool) -> None:
  if deep and facts.rows is not None:
    check_row_file(place, facts)
  elif deep:
    for _ in file_pieces(place, facts):
      pass
  elif (size := place.size(facts.name)) != facts.bytes:
    raise UserError(
      f'a file of a checkpoint must have {facts.bytes} bytes',
      got=f'{size} bytes',
      where=f'{place.url}/{facts.name}',
      hint='use an older checkpoint, or a copy',
    )


def read_chain(place: Place, step: int) -> Chain:
  """Reads the manifests of a checkpoint.

  Raises:
    UserError: one is damaged, or is not the parent that its child was saved on.
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


def files_of(chain: Chain) -> list[FileFacts]:
  """Returns all files that a checkpoint needs, except manifests."""
  of_rows = [facts for link in chain for facts in link.rows.values()]
  others = [facts for link in chain[-1:] for facts in link.files.values()]
  return [*of_rows, *others]


def next_on(chain: Chain, parent: int | None, **values: Any) -> Chain:
  """Returns the chain of a new checkpoint, whose last manifest is unpublished.

  Args:
    chain: of the newest checkpoint. Empty if there is none.
    parent: a step of the chain, from a policy. None for a base.
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


def read_rows(place: Place, chain: Chain, group: str) -> Iterator[Piece]:
  """Yields a group's rows, link by link. Later values replace earlier ones."""
  for facts in _row_files(chain, group):
    yield from read_row_file(place, facts)


def _row_files(chain: Chain, group: str) -> list[FileFacts]:
  return [facts for link in chain for facts in link.row_files(group)]


def merged_rows(place: Place, chain: Chain, group: str) -> Iterator[Piece]:
  """Yields a group's rows, ascending, each once with its newest values."""
  return merged(
    [read_row_file(place, facts) for facts in _row_files(chain, group)]
  )


def merged(sources: list[Iterator[Piece]]) -> Iterator[Piece]:
  """Merges ascending sources. Of equal rows it keeps that of the last source.

  All sources are read side by side, one piece of each at a time. Rows up to the
  lowest end of these pieces are merged and yielded. So memory is a few MiB per
  source, however many rows there are.
  """
  # Sources with the unmerged rest of their piece, in order.
  waiting = [(s, p) for s in sources if (p := next(s, None)) is not None]
  while waiting:
    end = min(piece.rows[-1] for _, piece in waiting)
    parts, rests = [], []
    for source, piece in waiting:
      cut = int(np.searchsorted(piece.rows, end, side='right'))
      if cut:
        parts.append(part_of(piece, slice(0, cut)))
      rest: Piece | None = part_of(piece, slice(cut, None))
      if cut == len(piece.rows):
        rest = next(source, None)
      if rest is not None:
        rests.append((source, rest))
    waiting = rests
    yield _last_of_each(parts)


def _last_of_each(pieces: list[Piece]) -> Piece:
  """Merges pieces into an ascending one. Of equal rows it keeps the last."""
  if len(pieces) == 1:
    return pieces[0]
  whole = concatenate(pieces)
  order = np.argsort(whole.rows, kind='stable')
  rows = whole.rows[order]
  last = np.append(rows[1:] != rows[:-1], True)
  return part_of(whole, order[last])


def check_exact(chain: Chain, where: str) -> None:
  """Checks that a chain has the rows in full precision."""
  for link in chain:
    if link.codec != RAW:
      raise UserError(
        'a run goes on from rows in full precision',
        got=f'codec {link.codec} at step {link.step}',
        where=where,
        hint='restore it to evaluate or to serve, or use a raw checkpoint',
      )


def consolidate(
  place: Place, chain: Chain, check: Callable[[], None] = lambda: None
) -> Manifest:
  """Replaces a chain's last checkpoint by a base. Memory is a few MiB per link.

  What was written is read back before it is published.

  Args:
    place: where the chain is.
    chain: of rows in full precision.
    check: called before each write. What it raises ends the consolidation.

  Returns:
    The new manifest of the checkpoint.

  Raises:
    UserError: a file is damaged, the links have different arrays, or they are
      quantized.
    OSError: something cannot be read or written. The checkpoint is unchanged.
  """
  if len(chain) == 1:
    return chain[0]
  return _as_base(place, chain, place, RAW, chain[-1].files, check)


def copy_as_base(
  place: Place, chain: Chain, into: Place, codec: str = RAW
) -> Manifest:
  """Copies a checkpoint to another place as a base, to archive or serve it.

  Args:
    place: where the chain is.
    chain: of rows in full precision.
    into: another place.
    codec: of the copy's rows, one of `CODECS`.

  Returns:
    The manifest of the copy.

  Raises:
    UserError: as `consolidate`, or both places are the same.
    OSError: something cannot be read or written.
  """
  if into.url == place.url:
    raise UserError(
      'a copy needs a place of its own',
      got=into.url,
      where='copy_as_base, into',
      hint='name another folder or URL',
    )
  # Named by the step of its checkpoint. A file that checkpoints share has an
  # earlier step in its name, which another run may use, too.
  step, files = chain[-1].step, {}
  for key, facts in chain[-1].files.items():
    name = file_name('file', step, facts.name.split('-', 2)[-1])
    files[key] = write_file(into, name, file_pieces(place, facts))
  return _as_base(place, chain, into, codec, files)


def _as_base(
  place: Place,
  chain: Chain,
  into: Place,
  codec: str,
  files: dict[str, FileFacts],
  check: Callable[[], None] = lambda: None,
) -> Manifest:
  def pieces(group: str) -> Iterator[Piece]:
    for piece in merged_rows(place, chain, group):
      check()
      yield piece

  check_exact(chain, place.url)
  step, rows = chain[-1].step, {}
  for group in sorted({group for link in chain for group in link.groups}):
    leaves = with_codec(_leaves(place, _row_files(chain, group)), codec)
    name = file_name('base', step, f'{group}.rows')
    rows[group] = write_row_file(into, name, leaves, pieces(group))
    check_row_file(into, rows[group])
  # Increments cannot build on rows that lost bits, so they get another id.
  own_id = chain[-1].id if codec == RAW else new_id()
  payload = chain[-1].payload
  base = Manifest(step, None, rows, files, payload, codec, id=own_id)
  check()
  publish(into, base)
  return base


def _leaves(place: Place, files: list[FileFacts]) -> tuple[Leaf, ...]:
  """Returns the leaves that all row files have."""
  leaves = leaves_in(place, files[0].name)
  for facts in files[1:]:
    others = leaves_in(place, facts.name)
    if others != leaves:
      raise UserError(
        f'all links of a chain must have the arrays {leaves}',
        got=others,
        where=f'{place.url}/{facts.name}',
        hint='save a base when tables or optimizers change',
      )
  return leaves


def unreferenced(chains: Sequence[Chain], names: Iterable[str]) -> list[str]:
  """Returns the names of files that no chain needs, manifests first.

  Args:
    chains: chains to keep. Only their last links need files besides rows.
    names: of all files. Those that are not of a checkpoint are left out.
  """
  kept = {name_of(link.step) for chain in chains for link in chain}
  kept |= {facts.name for chain in chains for facts in files_of(chain)}
  gone = [name for name in names if is_ours(name) and name not in kept]
  # So that no manifest is ever left without its row files.
  return sorted(gone, key=lambda name: (not name.startswith('manifest-'), name))


def prune(place: Place, keep: int) -> list[str]:
  """Deletes all but the newest checkpoints, and files of killed writers.

  No writer may be active. Deletes nothing if no checkpoint can be restored.

  Args:
    place: where checkpoints are.
    keep: how many checkpoints must remain restorable, at least 1.

  Returns:
    The names of the deleted files.

  Raises:
    OSError: something cannot be read, so it may be needed, or not be deleted.
  """
  chains, skipped = find_chains(place, most=keep, deep=False)
  for _, why in skipped:
    if isinstance(why, OSError) and not isinstance(why, FileNotFoundError):
      raise why
  place.sweep()
  gone = unreferenced(chains, place.names()) if chains else []
  for name in gone:
    place.delete(name)
  return gone


def drop_later(place: Place, step: int) -> None:
  """Deletes checkpoints after a step that a run was restored from.

  Raises:
    OSError: one cannot be deleted.
  """
  for later in reversed(steps_in(place)):
    if later > step:
      place.delete(name_of(later))
