"""Chains: a base and the increments on it, which are a checkpoint together.

A search finds the newest chains whose files are all present and unchanged.
Consolidation turns a chain into a base while training continues. It replaces
the manifest of the chain's last checkpoint by one write, after which the
chain's files are unreferenced. Increments saved on that checkpoint meanwhile
stay valid.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
from typing import Any, NamedTuple, NoReturn

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
from slipstream_jax.checkpoint.places import Place, user_errors
from slipstream_jax.checkpoint.quantize import RAW
from slipstream_jax.checkpoint.row_file import (
  check_row_file,
  concatenate,
  FileFacts,
  Leaf,
  leaves_in,
  LOST,
  part_of,
  Piece,
  read_row_file,
  with_codec,
  write_row_file,
)
from slipstream_jax.errors import UserError

READABLE = 'a folder of checkpoints must be readable'
_TRIES = 3
Chain = tuple[Manifest, ...]
"""A checkpoint: the base first, then the increments on it."""


class BadCheckpoint(NamedTuple):
  """A checkpoint that is damaged, or unreadable if `why` is an OSError."""

  step: int
  why: Exception


class Search(NamedTuple):
  """The checkpoints of a place that can be restored."""

  chains: list[Chain]
  """The newest whole checkpoints, newest first."""
  skipped: list[BadCheckpoint]
  """Newer ones than the last of these, newest first."""


def find_chains(
  place: Place,
  *,
  most: int = 1,
  deep: bool = True,
  steps: Iterable[int] | None = None,
) -> Search:
  """Finds the newest whole chains of a place.

  Args:
    place: where checkpoints are.
    most: how many chains to find.
    deep: whether to read every byte. Else only the sizes of files are compared.
    steps: steps to look at. None: all.

  Raises:
    OSError: the place cannot be listed.
  """
  chains: list[Chain] = []
  skipped: list[BadCheckpoint] = []
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
      skipped.append(BadCheckpoint(step, error))
    else:
      chains.append(chain)
  return Search(chains, skipped)


def _check(place: Place, facts: FileFacts, deep: bool) -> None:
  if (size := place.size(facts.name)) != facts.bytes:
    raise UserError(
      f'a file of a checkpoint must have {facts.bytes} bytes',
      got=f'{size} bytes',
      where=f'{place.url}/{facts.name}',
      hint='use an older checkpoint, or a copy',
    )
  if deep and facts.rows is not None:
    check_row_file(place, facts)
  elif deep:
    for _ in file_pieces(place, facts):
      pass


def search_for(
  place: Place, step: int | None = None, *, or_older: bool = False
) -> Search:
  """Finds the checkpoint to restore, and reads all of its bytes.

  If an active run deletes it meanwhile, a newer one is found.

  Args:
    place: where checkpoints are.
    step: of the checkpoint. None: the newest.
    or_older: whether an older one may replace a damaged one.

  Raises:
    UserError: it is damaged or does not exist, or the place cannot be read.
  """
  for _ in range(_TRIES):
    with user_errors(place.url, READABLE, LOST):
      steps = steps_in(place)
      asked = [one for one in steps if step is None or one <= step]
      search = find_chains(place, steps=asked if or_older else asked[-1:])
    gone = [isinstance(why, FileNotFoundError) for _, why in search.skipped]
    if not any(gone[:1]):
      break
  if not steps:
    raise UserError(
      'resuming needs a checkpoint',
      got='none',
      where=place.url,
      hint='start anew, or give the folder that the run saved to',
    )
  if step is not None and step not in steps:
    raise UserError(
      'there must be a checkpoint of the step that is asked for',
      got=f'step {step}',
      where=place.url,
      hint=f'the steps are {", ".join(map(str, steps))}',
    )
  if not search.chains:
    _refuse_damaged(place, *search.skipped[0], newest=step is None)
  if step is not None:
    newer = [other for other in steps if other > step]
    with user_errors(place.url, READABLE, LOST):
      skipped = find_chains(place, most=len(newer), steps=newer).skipped
    search = search._replace(skipped=[*skipped, *search.skipped])
  return search


def _refuse_damaged(
  place: Place, step: int, why: Exception, newest: bool
) -> NoReturn:
  """Raises an error that says what is damaged, and what can be restored."""
  with user_errors(place.url, READABLE, LOST):
    search = find_chains(place)
  got = ' '.join(str(why).split())
  if isinstance(why, UserError):
    got = f'{why.got} in {why.where}'
  hint = 'no other is whole, either: start anew, or use a copy of it'
  if search.chains:
    whole = search.chains[0][-1].step
    hint = (
      f'step {whole} is whole: ask for it by step={whole}, of a program by'
      f' --step={whole}'
    )
  raise UserError(
    f'the {"newest " if newest else ""}checkpoint must be whole to be restored',
    got=f'step {step}: {got}',
    where=place.url,
    hint=hint,
  ) from why


def chain_before(
  place: Place,
  known: Chain,
  step: int,
  is_same: Callable[[Manifest], bool],
) -> Chain | None:
  """Returns the chain that a new checkpoint follows. None if it exists.

  Deletes later checkpoints if none of them can be restored. The chain is empty
  if none has all of its files. `known` is the chain last written or restored,
  and `is_same` tells whether an existing checkpoint has the same contents.

  Raises:
    UserError: another checkpoint of the step or a later one can be restored.
    OSError: the place cannot be listed.
  """
  newest = max(steps_in(place), default=None)
  if newest is None:
    return ()
  chain = known
  if not chain or chain[-1].step != newest:
    try:
      chain = read_chain(place, newest)  # another run saved it
    except (UserError, OSError):
      chain = ()
  if {facts.name for facts in files_of(chain)} - {*place.names()}:
    chain = ()
  if chain and newest == step and is_same(chain[-1]):
    return None
  if newest < step:
    return chain
  chains = find_chains(place).chains
  last = chains[0][-1].step if chains else -1
  if last >= step:
    raise UserError(
      f'a checkpoint must be of a later step than {last}, which is here',
      got=f'step {step}',
      where=place.url,
      hint='save the checkpoints of each run in a folder of their own',
    )
  drop_later(place, last)
  return chains[0] if chains else ()


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
  """Returns the chain of a new checkpoint, whose manifest is unpublished.

  Its parent is a step of the newest checkpoint's chain, or None for a base. The
  values are other fields of its manifest.
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

  One piece of each source is in memory. Rows up to the lowest end of these
  pieces are merged and yielded.
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
  """Replaces a chain's last checkpoint by a base, and returns its manifest.

  What was written is read back before it is published. Memory is a few MiB per
  link. `check` is called before each write. What it raises ends this.

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
  """Returns the names of checkpoints' files that no chain needs.

  Manifests come first, so that none is ever left without its row files.
  """
  kept = {name_of(link.step) for chain in chains for link in chain}
  kept |= {facts.name for chain in chains for facts in files_of(chain)}
  gone = [name for name in names if is_ours(name) and name not in kept]
  return sorted(gone, key=lambda name: (not name.startswith('manifest-'), name))


def prune(place: Place, keep: int) -> list[str]:
  """Deletes all but the newest checkpoints, and files of killed writers.

  No writer may be active. `keep` checkpoints remain restorable, and those that
  were saved to stay. Nothing is deleted if none can be restored.

  Returns:
    The names of the deleted files.

  Raises:
    OSError: something cannot be read, so it may be needed, or not be deleted.
  """
  chains, skipped = find_chains(place, most=keep, deep=False)
  for _, why in skipped:
    if isinstance(why, OSError) and not isinstance(why, FileNotFoundError):
      raise why
  steps = kept_steps(place)
  chains += find_chains(place, most=len(steps), deep=False, steps=steps).chains
  place.sweep()
  gone = unreferenced(chains, place.names()) if chains else []
  for name in gone:
    place.delete(name)
  return gone


def kept_steps(place: Place) -> list[int]:
  """Returns the steps of the checkpoints that were saved to stay, ascending.

  Raises:
    OSError: something cannot be read.
  """
  kept = []
  for step in sorted(steps_in(place)):
    # One that is damaged cannot be restored.
    with contextlib.suppress(UserError, FileNotFoundError):
      if read_manifest(place, step).kept:
        kept.append(step)
  return kept


def drop_later(place: Place, step: int) -> None:
  """Deletes the checkpoints after a step."""
  for later in reversed(steps_in(place)):
    if later > step:
      place.delete(name_of(later))
