"""Consolidation: a chain becomes a base, beside the run that goes on.

The base has step, payload and id of the chain's last checkpoint, and takes
the place of its manifest: before that one write everything is as it was, and
after it the chain's files are needed no more. Increments saved on it meanwhile
stay on it. `retention.prune` then removes what is left over.
"""

from slipstream_jax.checkpoint.chain import check_exact
from slipstream_jax.checkpoint.manifest import (
  file_name,
  Manifest,
  new_id,
  publish,
  write_file,
)
from slipstream_jax.checkpoint.merge import merged_rows
from slipstream_jax.checkpoint.places import Place
from slipstream_jax.checkpoint.quantize import RAW
from slipstream_jax.checkpoint.row_file import (
  check_row_file,
  FileFacts,
  Leaf,
  leaves_in,
  with_codec,
  write_row_file,
)
from slipstream_jax.errors import UserError

_CHUNK = 1 << 20


def consolidate(place: Place, chain: tuple[Manifest, ...]) -> Manifest:
  """Makes a chain's last checkpoint a base; memory is a few MiB per link.

  What was written is read back before it is published.

  Returns:
    The manifest that now stands for the checkpoint.

  Raises:
    UserError: a file is damaged, the links are of other arrays, or quantized.
    OSError: something cannot be read or written; all is then as it was.
  """
  if len(chain) == 1:
    return chain[0]
  return _as_base(place, chain, place, RAW, chain[-1].files)


def copy_as_base(
  place: Place, chain: tuple[Manifest, ...], into: Place, codec: str = RAW
) -> Manifest:
  """Writes a checkpoint as a base elsewhere: to archive it, or to serve.

  Args:
    place: where the chain is.
    chain: of rows in full precision.
    into: another place.
    codec: of the copy's rows, one of `CODECS`.

  Returns:
    The copy's manifest.

  Raises:
    UserError: as `consolidate`; both places are the same.
    OSError: something cannot be read or written.
  """
  if into.url == place.url:
    raise UserError(
      'a copy needs a place of its own',
      got=into.url,
      where='copy_as_base, into',
      hint='name another folder or URL',
    )
  step = chain[-1].step
  files = {
    key: _copied(place, facts, into, step)
    for key, facts in chain[-1].files.items()
  }
  return _as_base(place, chain, into, codec, files)


def _as_base(
  place: Place,
  chain: tuple[Manifest, ...],
  into: Place,
  codec: str,
  files: dict[str, FileFacts],
) -> Manifest:
  check_exact(chain, place.url)
  step, rows = chain[-1].step, {}
  for group in sorted({group for link in chain for group in link.rows}):
    leaves = with_codec(_leaves(place, chain, group), codec)
    pieces = merged_rows(place, chain, group)
    name = file_name('base', step, f'{group}.rows')
    rows[group] = write_row_file(into, name, leaves, pieces)
    check_row_file(into, rows[group])
  # Rows in fewer bits are not those that increments were saved on.
  own_id = chain[-1].id if codec == RAW else new_id()
  payload = chain[-1].payload
  base = Manifest(step, None, rows, files, payload, codec, id=own_id)
  publish(into, base)
  return base


def _leaves(
  place: Place, chain: tuple[Manifest, ...], group: str
) -> tuple[Leaf, ...]:
  """What all links have for a group's rows."""
  own = [link.rows[group].name for link in chain if group in link.rows]
  leaves = leaves_in(place, own[0])
  for name in own[1:]:
    others = leaves_in(place, name)
    if others != leaves:
      raise UserError(
        f'all links of a chain must have the arrays {leaves}',
        got=others,
        where=f'{place.url}/{name}',
        hint='save a base when tables or optimizers change',
      )
  return leaves


def _copied(
  place: Place, facts: FileFacts, into: Place, step: int
) -> FileFacts:
  # By the step of its checkpoint: one that several share has an earlier one,
  # which another run may have, too.
  name = file_name('file', step, facts.name.split('-', 2)[-1])
  with place.open(facts.name) as file:
    copy = write_file(into, name, iter(lambda: file.read(_CHUNK), b''))
  if copy != facts._replace(name=name):
    raise UserError(
      f'a file must be {facts}',
      got=copy,
      where=f'{place.url}/{facts.name}',
      hint='use an older checkpoint, or a copy',
    )
  return copy
