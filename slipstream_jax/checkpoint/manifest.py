"""Manifests list the files of a checkpoint, and are written after all of them.

Each checkpoint has one JSON file, `manifest-{step}.json`, with a checksum of
itself. A checkpoint is a base, or an increment on its parent. Its random id
tells it from a checkpoint of another run, or of a copy of the run, at the same
step. A base that replaces a chain has the id of the chain's last checkpoint.

A group of rows may have a file per owner. Owner 0 is not written, so a
checkpoint of owner 0 alone is one of version 2.
"""

from collections.abc import Iterable, Iterator
import json
import re
import secrets
from typing import Any, NamedTuple
import zlib

from slipstream_jax.checkpoint.places import Bytes, Place
from slipstream_jax.checkpoint.quantize import CODECS, RAW
from slipstream_jax.checkpoint.row_file import FileFacts, LOST
from slipstream_jax.errors import is_whole, UserError

_READABLE = 1, 2, 3  # no ids in version 1, and owners only in version 3
_MAX_BYTES = 1 << 28
_NAME = re.compile(r'manifest-(\d{12})\.json')
KINDS = 'base', 'increment', 'file'
"""Files of all rows, files of changed rows, and files that are no row files."""
KEPT = 'kept'
"""Key in the payload of a checkpoint that stays."""
_OURS = re.compile(rf'({"|".join(KINDS)})-\d{{12}}-')
_FILE = re.compile(r'\w[\w.-]{0,199}', re.ASCII)
_ID = re.compile(r'([0-9a-f]{32})?')
_HEAD = '{"version":%d,"crc32":%d,"body":'
_WHOLE = re.compile(
  rb'\{"version":(\d{1,9}),"crc32":(\d{1,10}),"body":(.*)\}\n'
)


class _BadManifest(ValueError):
  """Raised for an invalid manifest. The message says why."""


class Parent(NamedTuple):
  """The checkpoint that an increment builds on."""

  step: int
  identity: int
  """Its `Manifest.identity`, at most 128 bits."""


class Manifest(NamedTuple):
  """A checkpoint, as its manifest describes it."""

  step: int
  parent: Parent | None
  """None for a base."""
  rows: dict[str, FileFacts]
  """Row files by `row_key`. A group without rows may be absent."""
  files: dict[str, FileFacts]
  """Other files by a key of the caller's. Increments do not need those of their
  parent."""
  payload: dict[str, Any]
  """JSON of the caller's."""
  codec: str = RAW
  """Codec of the rows, one of `CODECS`."""
  earlier: tuple[int, ...] = ()
  """Bytes of each earlier increment on the same parent."""
  id: str = ''
  """From `new_id`. Empty in checkpoints written before there were ids."""

  @property
  def identity(self) -> int:
    """The id as a number, or the CRC-32 of step and payload if it is empty."""
    if self.id:
      return int(self.id, 16)
    # As JSON gives it back, where all keys are text.
    read = json.loads(_text([self.step, self.payload]))
    return zlib.crc32(json.dumps(read, sort_keys=True).encode())

  @property
  def bytes(self) -> int:
    """Bytes of all row files."""
    return sum(facts.bytes for facts in self.rows.values())

  @property
  def groups(self) -> set[str]:
    """Groups that have row files."""
    return {
      key.removesuffix(f'.{facts.owner}') if facts.owner else key
      for key, facts in self.rows.items()
    }

  def row_files(self, group: str) -> list[FileFacts]:
    """Returns the row files of a group, of all owners."""
    return [
      facts
      for key, facts in self.rows.items()
      if key == row_key(group, facts.owner)
    ]

  @property
  def kept(self) -> bool:
    """Whether it stays, however many newer ones there are."""
    return bool(self.payload.get(KEPT))


def row_key(group: str, owner: int = 0) -> str:
  """Returns the key of a row file in a manifest and in the file's name."""
  return f'{group}.{owner}' if owner else group


def new_id() -> str:
  """Returns a random id of 128 bits in hexadecimal digits."""
  return secrets.token_hex(16)


def name_of(step: int) -> str:
  """Returns the name of a step's manifest."""
  return f'manifest-{step:012d}.json'


def file_name(kind: str, step: int, key: str) -> str:
  """Returns the name of a checkpoint's file. `kind` is one of `KINDS`."""
  return f'{kind}-{step:012d}-{key}'


def is_ours(name: str) -> bool:
  """Whether a name is that of a manifest or of a checkpoint's file."""
  return bool(_NAME.fullmatch(name) or _OURS.match(name))


def write_file(place: Place, name: str, pieces: Iterable[Bytes]) -> FileFacts:
  """Writes a file that is no row file. If it fails, the place is unchanged.

  Raises:
    OSError: it cannot be written.
  """
  crc = 0

  def summed() -> Iterator[Bytes]:
    nonlocal crc
    for piece in pieces:
      crc = zlib.crc32(piece, crc)
      yield piece

  size = place.write(name, summed())
  return FileFacts(name, size, crc)


def file_pieces(place: Place, facts: FileFacts) -> Iterator[bytes]:
  """Yields the content of a file that is no row file.

  Raises:
    UserError: it has other bytes. It is raised after the last piece.
    OSError: it cannot be read.
  """
  crc = size = 0
  with place.open(facts.name) as file:
    while size <= facts.bytes and (piece := file.read(1 << 20)):
      crc, size = zlib.crc32(piece, crc), size + len(piece)
      yield piece
  _check_content(place, facts, size, crc)


def read_file(place: Place, facts: FileFacts) -> bytes:
  """Returns the content of a file, or raises what `file_pieces` raises."""
  data = place.read(facts.name, facts.bytes)
  _check_content(place, facts, len(data), zlib.crc32(data))
  return data


def _check_content(place: Place, facts: FileFacts, size: int, crc: int) -> None:
  if (size, crc) != (facts.bytes, facts.crc):
    raise UserError(
      f'a file must have {facts.bytes} bytes of checksum {facts.crc}',
      got=f'{size} bytes of checksum {crc}',
      where=f'{place.url}/{facts.name}',
      hint=LOST,
    )


def publish(place: Place, manifest: Manifest) -> None:
  """Writes a manifest. The checkpoint exists from then on.

  Raises:
    UserError: a name, size or step is invalid, or the payload is not JSON or
      too large.
    OSError: it cannot be written. An earlier manifest of the step then stays.
  """
  flaw = _flaw_of(manifest)
  if flaw is not None:
    raise UserError(
      'a manifest must be of plain names and sizes',
      got=flaw,
      where='publish, manifest',
      hint='name groups and files by letters, digits, _, - and dots',
    )
  values = manifest._asdict()
  for key in ('rows', 'files'):
    values[key] = {
      name: facts if facts.owner else facts[:-1]
      for name, facts in values[key].items()
    }
  try:
    body = _text(values)
    flaw = f'{len(body)} bytes' if len(body) > _MAX_BYTES // 2 else None
  except (TypeError, ValueError) as error:
    flaw = f'{type(error).__name__}: {error}'
  if flaw is not None:
    raise UserError(
      f'a manifest must be JSON of at most {_MAX_BYTES // 2} bytes',
      got=flaw,
      where='publish, manifest',
      hint='write arrays as files',
    )
  version = 3 if any(facts.owner for facts in manifest.rows.values()) else 2
  head = _HEAD % (version, zlib.crc32(body))
  place.write(name_of(manifest.step), [head.encode(), body, b'}\n'])


def steps_in(place: Place) -> list[int]:
  """Returns the steps that have a manifest, ascending.

  Raises:
    OSError: the place cannot be listed.
  """
  matches = map(_NAME.fullmatch, place.names('manifest-'))
  return [int(match[1]) for match in matches if match]


def read_manifest(place: Place, step: int) -> Manifest:
  """Reads the manifest of a step.

  Raises:
    UserError: it is damaged, or of a newer version of the library.
    OSError: it cannot be read.
  """
  name = name_of(step)
  data = place.read(name, _MAX_BYTES)
  try:
    manifest = _parsed(data)
    flaw = None if manifest.step == step else f'of step {manifest.step}'
  except _BadManifest as error:
    flaw = str(error)
  except RecursionError:
    flaw = 'JSON too deep'
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    flaw = f'{type(error).__name__}: {error}'
  if flaw is not None:
    raise UserError(
      'a manifest must be as it was written',
      got=flaw,
      where=f'{place.url}/{name}',
      hint=LOST,
    )
  return manifest


def _text(value: Any) -> bytes:
  return json.dumps(value, separators=(',', ':')).encode()


def _parsed(data: bytes) -> Manifest:
  """Returns a manifest whose checksum and values are valid, else raises."""
  match = None if len(data) > _MAX_BYTES else _WHOLE.fullmatch(data)
  if match is None:
    raise _BadManifest(f'{len(data)} bytes that are no manifest')
  version, crc, body = int(match[1]), int(match[2]), match[3]
  if version not in _READABLE:
    raise _BadManifest(
      f'version {version}, where this library reads up to {_READABLE[-1]}'
    )
  if zlib.crc32(body) != crc:
    raise _BadManifest('another checksum')
  values = json.loads(body)
  parent = values.pop('parent')
  manifest = Manifest(
    parent=parent and Parent(*parent),
    rows={k: FileFacts(*facts) for k, facts in values.pop('rows').items()},
    files={k: FileFacts(*facts) for k, facts in values.pop('files').items()},
    earlier=tuple(values.pop('earlier')),
    **values,
  )
  flaw = _flaw_of(manifest)
  if flaw is not None:
    raise _BadManifest(flaw)
  return manifest


def _flaw_of(manifest: Manifest) -> str | None:
  """Returns what is invalid in a manifest, or None."""
  step, parent, rows, files, payload, codec, earlier, own_id = manifest
  if not is_whole(step, 0, 10**12):
    return f'step {step}'
  if parent is not None and not (
    is_whole(parent.step, 0, step) and is_whole(parent.identity, 0, 1 << 128)
  ):
    return f'parent {parent}'
  for of_rows, entries in ((True, rows), (False, files)):
    for facts in entries.values():
      sizes = (facts.bytes, facts.crc, facts.rows if of_rows else 0)
      if not (
        _FILE.fullmatch(facts.name)
        and all(is_whole(size, 0, 1 << 63) for size in sizes)
        and is_whole(facts.owner, 0, 1 << 31 if of_rows else 1)
      ):
        return f'file {facts}'
  if not isinstance(payload, dict) or codec not in CODECS:
    return f'payload {type(payload).__name__} and codec {codec}'
  if not all(is_whole(size, 0, 1 << 63) for size in earlier):
    return f'earlier sizes {earlier}'
  if not isinstance(own_id, str) or not _ID.fullmatch(own_id):
    return f'id {own_id}'
  return None
