"""Lists a run's checkpoints, or copies one.

    python -m experiments.checkpoints RUN
    python -m experiments.checkpoints RUN --copy=s3://bucket/old --codec=int4

RUN is the folder of a run, which may be training, or a folder or URL of
checkpoints. The list shows which of them are whole, after every byte was
compared with its checksum, and what is wrong with the others. A copy is a base
of the newest checkpoint, or of that of --step. A damaged one is refused. A copy
in fewer bits can be scored, evaluated and served, but not trained further.
"""

from collections.abc import Callable
import os
import pathlib
from typing import Any, NamedTuple

from absl import flags
import jax
import ml_collections

from experiments.common import cli, loading, record, report, workdir
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

_COPY = flags.DEFINE_string(
  'copy', None, 'Folder or URL for a copy of the newest, or that of --step.'
)
_STEP = flags.DEFINE_integer(
  'step', None, 'Step of the checkpoint; the newest by default.', lower_bound=0
)
_CODEC = flags.DEFINE_string(
  'codec', None, f"Of the copy's rows: {', '.join(CODECS)}; {RAW} by default."
)
_VERIFY = flags.DEFINE_bool(
  'verify', True, 'Read every byte for the list; otherwise compare sizes.'
)


def main(_: ml_collections.ConfigDict) -> None:
  """Lists or copies checkpoints.

  Raises:
    UserError: no checkpoint is whole, or a flag is invalid.
  """
  (name,) = cli.words_of()
  check_flags(_COPY.value, _CODEC.value, _STEP.value)
  screen, place = report.console(), place_of(name)
  tell = report.teller(screen)
  if _COPY.value is not None:
    codec, into = _CODEC.value or RAW, open_place(_COPY.value)
    copy = copied(place, into, codec, _STEP.value, tell)
    size = report.size(copy.bytes)
    tell(f'copied step {copy.step} to {_COPY.value}, rows as {codec}: {size}')
    return
  listed = entries(place, _VERIFY.value)
  tell(place.url)
  screen.print(report.table('', [row_of(entry) for entry in listed]))
  for entry in listed:
    if entry.flaw is not None:
      text = f'step {entry.step}: {entry.flaw}'
      screen.print(text, style='red', markup=False, soft_wrap=True)
  if all(entry.reads is None for entry in listed):
    raise UserError(
      'resuming needs a checkpoint that is whole',
      got='none',
      where=place.url,
      hint='use a copy, or start anew',
    )


def check_flags(copy: str | None, codec: str | None, step: int | None) -> None:
  """Checks the flags of these names before any work is done.

  Raises:
    UserError: the codec is unknown, or a flag needs --copy.
  """
  if codec is not None:
    choose(CODECS, codec, 'command line, --codec')
  for name, value in ('codec', codec), ('step', step):
    if value is not None and copy is None:
      raise UserError(
        f'--{name} needs --copy',
        got=f'--{name}={value} alone',
        where=f'command line, --{name}',
        hint='add --copy=FOLDER',
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


class Entry(NamedTuple):
  """A checkpoint in a list."""

  step: int
  manifest: Manifest | None
  """None if it cannot be read."""
  reads: int | None
  """Bytes that restoring it reads. None if it cannot be restored."""
  flaw: str | None
  """Why it cannot be restored. None if it can, or if it is a link."""

  @property
  def whole(self) -> str:
    """Yes or no, or 'link' if only its descendants can be restored."""
    if self.flaw is not None:
      return 'no'
    return 'link' if self.reads is None else 'yes'


def entries(place: Place, verify: bool = True) -> list[Entry]:
  """Lists all checkpoints of a place, oldest first.

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
  listed, links = [], set()
  for chain in search.chains:
    links |= {link.step for link in chain}
    nbytes = sum(facts.bytes for facts in files_of(chain))
    listed.append(Entry(chain[-1].step, chain[-1], nbytes, None))
  for step, why in search.skipped:
    try:
      manifest = read_manifest(place, step)
    except (UserError, OSError):
      manifest = None
    # A checkpoint that the run dropped keeps only its rows, for its children.
    flaw = None if step in links else ' '.join(str(why).split())
    listed.append(Entry(step, manifest, None, flaw))
  return sorted(listed, key=lambda entry: entry.step)


def row_of(entry: Entry) -> dict[str, Any]:
  """Returns a checkpoint as a row of a table for people."""
  row: dict[str, Any]
  row = {'step': entry.step, 'kind': '-', 'codec': '-', 'rows': None}
  row |= {'bytes': None, 'bytes_read': entry.reads, 'whole': entry.whole}
  of = entry.manifest
  if of is not None:
    on = of.parent
    row['kind'] = 'base' if on is None else f'increment on {on.step:,}'
    row['codec'] = of.codec
    row['rows'] = sum(facts.rows or 0 for facts in of.rows.values())
    files = [*of.rows.values(), *of.files.values()]
    row['bytes'] = sum(facts.bytes for facts in files)
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

  def copy() -> Manifest:
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

  return loading.while_saving(copy)


if __name__ == '__main__':
  # A run may be training on the accelerator at the same time.
  if 'JAX_PLATFORMS' not in os.environ:
    jax.config.update('jax_platforms', 'cpu')
  cli.run(
    main,
    ml_collections.ConfigDict(),
    kept='nothing was changed',
    words=(1, 1),
  )
