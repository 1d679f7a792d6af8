"""Lists and copies checkpoints."""

from collections.abc import Callable
import pathlib
from typing import Any

from experiments.common import loading, record, report, workdir
from slipstream_jax.checkpoint.chain import (
  copy_as_base,
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
from slipstream_jax.checkpoint.places import (
  NO_ROOM,
  open_place,
  Place,
  user_errors,
)
from slipstream_jax.checkpoint.quantize import CODECS, RAW
from slipstream_jax.checkpoint.row_file import LOST
from slipstream_jax.errors import choose, UserError


def list_or_copy(
  place: str,
  copy: str | None = None,
  step: int | None = None,
  codec: str | None = None,
  verify: bool = True,
) -> None:
  """Lists the checkpoints of a run or a place, or copies one of them.

  The arguments are those of the program.

  Raises:
    UserError: the codec is unknown, a flag needs --copy, none that is listed is
      whole, or as in `copied`.
  """
  tell = report.teller(report.console())
  if codec is not None:
    choose(CODECS, codec, 'command line, --codec')
  if copy is not None:
    codec = codec or RAW
    manifest = copied(place_of(place), open_place(copy), codec, step, tell)
    size = report.size(manifest.bytes)
    tell(f'copied step {manifest.step} to {copy}, rows as {codec}: {size}')
    return
  for name, value in ('codec', codec), ('step', step):
    if value is not None:
      raise UserError(
        f'--{name} needs --copy',
        got=f'--{name}={value} alone',
        where=f'command line, --{name}',
        hint='add --copy=FOLDER',
      )
  _show(place_of(place), verify)


def _show(place: Place, verify: bool) -> None:
  """Prints the checkpoints of a place, and what is wrong with them."""
  screen, listed = report.console(), entries(place, verify)
  report.teller(screen)(place.url)
  flaws = {row['step']: row.pop('flaw') for row in listed}
  screen.print(report.table('', listed))
  for step, flaw in flaws.items():
    if flaw is not None:
      text = f'step {step}: {flaw}'
      screen.print(text, style='red', markup=False, soft_wrap=True)
  if all(row['whole'] != 'yes' for row in listed):
    raise UserError(
      'resuming needs a checkpoint that is whole',
      got='none',
      where=place.url,
      hint='use a copy, or start anew',
    )


def place_of(name: str) -> Place:
  """Opens the place of a run's checkpoints, or a place of that name.

  Raises:
    UserError: nothing can open it, or the config of the run is damaged.
  """
  folder = pathlib.Path(name)
  if '://' in name or not (folder / record.CONFIG).exists():
    return open_place(name)
  return open_place(workdir.checkpoints_at(folder, record.config_of(folder)))


def entries(place: Place, verify: bool = True) -> list[dict[str, Any]]:
  """Lists all checkpoints of a place, oldest first, as rows of a table.

  `flaw` says why one cannot be restored. It is None if it can be, or if it is a
  link: a checkpoint that the run dropped keeps its rows for its children.

  Args:
    place: where they are.
    verify: whether every byte is read. Otherwise a file of the right size is
      assumed to be whole.

  Raises:
    UserError: there is none, or the place cannot be read.
  """
  with user_errors(place.url, READABLE, LOST):
    steps = steps_in(place)
    if not steps:
      search_for(place)  # raises
    search = find_chains(place, most=len(steps), deep=verify)
  rows, links = [], set()
  for chain in search.chains:
    links |= {link.step for link in chain}
    read = sum(facts.bytes for facts in files_of(chain))
    rows.append(_row(chain[-1].step, chain[-1], read, 'yes', None))
  for step, why in search.skipped:
    try:
      manifest = read_manifest(place, step)
    except (UserError, OSError):
      manifest = None
    flaw = None if step in links else ' '.join(str(why).split())
    whole = 'no' if flaw else 'link'
    rows.append(_row(step, manifest, None, whole, flaw))
  return sorted(rows, key=lambda row: row['step'])


def _row(
  step: int, of: Manifest | None, read: int | None, whole: str, flaw: str | None
) -> dict[str, Any]:
  kind, codec, rows, nbytes = '-', '-', None, None
  if of is not None:
    on, codec = of.parent, of.codec
    kind = 'base' if on is None else f'increment on {on.step:,}'
    rows = sum(facts.rows or 0 for facts in of.rows.values())
    files = [*of.rows.values(), *of.files.values()]
    nbytes = sum(facts.bytes for facts in files)
  row = {'step': step, 'kind': kind, 'codec': codec, 'rows': rows}
  row |= {'bytes': nbytes, 'bytes_read': read, 'whole': whole, 'flaw': flaw}
  return row


def copied(
  place: Place,
  into: Place,
  codec: str,
  step: int | None = None,
  tell: Callable[[str], None] = lambda text: None,
) -> Manifest:
  """Copies a checkpoint as a base.

  Args:
    place: where it is.
    into: where the copy goes, perhaps beside others.
    codec: of the copy's rows, one of `CODECS`.
    step: of the checkpoint. None: the newest.
    tell: called with the reasons why checkpoints after `step` cannot be copied.

  Returns:
    The copy's manifest.

  Raises:
    UserError: the checkpoint is missing or damaged, `into` has one of its step
      already, or reading or writing failed. There is then no copy.
  """

  def copy_newest() -> Manifest:
    (chain,), skipped = search_for(place, step)
    for other, why in skipped:
      text = ' '.join(str(why).split())
      tell(f'a newer checkpoint cannot be copied: step {other}: {text}')
    both = f'{place.url}, to {into.url}'
    with user_errors(both, 'a copy must be read and written whole', NO_ROOM):
      if into.url != place.url and chain[-1].step in steps_in(into):
        raise UserError(
          'a copy needs a place that has no checkpoint of its step',
          got=f'one of step {chain[-1].step}',
          where=into.url,
          hint='it may be there already; if not, give another folder or URL',
        )
      return copy_as_base(place, chain, into, codec)

  return loading.while_saving(copy_newest)
