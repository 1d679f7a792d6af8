"""Manifests: what a checkpoint consists of, published when all of it is there.

One JSON file per checkpoint, `manifest-{step}.json`, with a checksum of itself.
A checkpoint is a base, or an increment on another one, its parent. Each has a
random id, by which its children know it. So it is never mistaken for the
checkpoint of another run, or of a copy of the same run, at the same step.
Consolidation replaces a manifest by one of the same contents that is a base.
The id stays then. Checkpoints written before there were ids are known by their
step and their payload.
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

_VERSION = 2
_READABLE = 1, 2  # there is no id in version 1
_MOST = 1 << 28  # bytes
_NAME = re.compile(r'manifest-(\d{12})\.json')
KINDS = 'base', 'increment', 'file'
"""Rows of all, rows changed since the parent, and what is no row file."""
_OURS = re.compile(rf'({"|".join(KINDS)})-\d{{12}}-')
_FILE = re.compile(r'\w[\w.-]{0,199}', re.ASCII)
_ID = re.compile(r'([0-9a-f]{32})?')
_HEAD = '{"version":%d,"crc32":%d,"body":'
_WHOLE = re.compile(
  rb'\{"version":(\d{1,9}),"crc32":(\d{1,10}),"body":(.*)\}\n'
)


class _Bad(ValueError):
  """No manifest; the message says why."""


class Parent(NamedTuple):
  """The checkpoint that an increment is on."""

  step: int
  identity: int
  """Its `Manifest.identity`, of at most 128 bits."""


class Manifest(NamedTuple):
  """A checkpoint, as its manifest tells of it."""

  step: int
  parent: Parent | None
  """None of a base."""
  rows: dict[str, FileFacts]
  """Row files by group; a group without rows may be absent."""
  files: dict[str, FileFacts]
  """Others, by what their owner calls them. Children do without them."""
  payload: dict[str, Any]
  """JSON of the owner's."""
  codec: str = RAW
  """Of the rows, one of `CODECS`."""
  earlier: tuple[int, ...] = ()
  """Bytes of the increments on the same parent before this one."""
  id: str = ''
  """From `new_id`; empty where it was written before there were ids."""

  @property
  def identity(self) -> int:
    """The id as a number; without one, the CRC-32 of step and payload."""
    if self.id:
      return int(self.id, 16)
    # As it is read back, when all keys are text.
    read = json.loads(_text([self.step, self.payload]))
    return zlib.crc32(json.dumps(read, sort_keys=True).encode())

  @property
  def bytes(self) -> int:
    """Of all row files."""
    return sum(facts.bytes for facts in self.rows.values())


def new_id() -> str:
  """Returns a random id of 128 bits in hexadecimal digits."""
  return secrets.token_hex(16)


def name_of(step: int) -> str:
  """The manifest's file."""
  return f'manifest-{step:012d}.json'


def file_name(kind: str, step: int, key: str) -> str:
  """Name of a file of a checkpoint.

  Args:
    kind: one of `KINDS`.
    step: of the checkpoint.
    key: letters, digits, _, - and dots: the group, or what its owner likes.
  """
  return f'{kind}-{step:012d}-{key}'


def is_ours(name: str) -> bool:
  """Whether a file has a name of those above."""
  return bool(_NAME.fullmatch(name) or _OURS.match(name))


def write_file(place: Place, name: str, pieces: Iterable[Bytes]) -> FileFacts:
  """Writes a file that is no row file, whole or not at all.

  Raises:
    OSError: it cannot be written.
  """
  crc = 0

  def passing() -> Iterator[Bytes]:
    nonlocal crc
    for piece in pieces:
      crc = zlib.crc32(piece, crc)
      yield piece

  size = place.write(name, passing())
  return FileFacts(name, size, crc)


def check_file(place: Place, facts: FileFacts) -> None:
  """Looks whether a file that is no row file is as it was written.

  Raises:
    UserError: it is not.
    OSError: it cannot be read.
  """
  crc, size = 0, 0
  with place.open(facts.name) as file:
    while piece := file.read(1 << 20):
      crc, size = zlib.crc32(piece, crc), size + len(piece)
  if (size, crc) != (facts.bytes, facts.crc):
    raise UserError(
      f'a file must have {facts.bytes} bytes of checksum {facts.crc}',
      got=f'{size} bytes of checksum {crc}',
      where=f'{place.url}/{facts.name}',
      hint=LOST,
    )


def publish(place: Place, manifest: Manifest) -> None:
  """Writes a manifest; from then on the checkpoint is there.

  Raises:
    UserError: a name, size or step is none, or the payload is no JSON, or too
      much of it.
    OSError: it cannot be written; there is then none, or the one before.
  """
  flaw = _flaw_of(manifest)
  if flaw is not None:
    raise UserError(
      'a manifest must be of plain names and sizes',
      got=flaw,
      where='publish, manifest',
      hint='name groups and files by letters, digits, _, - and dots',
    )
  try:
    body = _text(manifest._asdict())
  except (TypeError, ValueError) as error:
    raise UserError(
      'the payload of a manifest must be JSON',
      got=f'{type(error).__name__}: {error}',
      where='publish, manifest',
      hint='write arrays as files',
    ) from error
  if len(body) > _MOST // 2:
    raise UserError(
      f'a manifest must have at most {_MOST // 2} bytes',
      got=len(body),
      where='publish, manifest',
      hint='write arrays as files',
    )
  head = _HEAD % (_VERSION, zlib.crc32(body))
  place.write(name_of(manifest.step), [head.encode(), body, b'}\n'])


def steps_in(place: Place) -> list[int]:
  """Steps whose manifest is there, ascending.

  Raises:
    OSError: the place cannot be listed.
  """
  matches = map(_NAME.fullmatch, place.names('manifest-'))
  return [int(match[1]) for match in matches if match]


def read_manifest(place: Place, step: int) -> Manifest:
  """The manifest of a step.

  Raises:
    UserError: it is damaged.
    OSError: it cannot be read.
  """
  name = name_of(step)
  data = place.read(name, _MOST)
  try:
    manifest = _parsed(data)
    if manifest.step != step:
      raise _Bad(f'of step {manifest.step}')
  except _Bad as error:
    raise UserError(
      'a manifest must be as it was written',
      got=str(error),
      where=f'{place.url}/{name}',
      hint=LOST,
    ) from error
  return manifest


def _text(value: Any) -> bytes:
  return json.dumps(value, separators=(',', ':')).encode()


def _parsed(data: bytes) -> Manifest:
  match = None if len(data) > _MOST else _WHOLE.fullmatch(data)
  if match is None:
    raise _Bad(f'{len(data)} bytes that are no manifest')
  version, crc, body = int(match[1]), int(match[2]), match[3]
  if version not in _READABLE:
    raise _Bad(f'version {version}, not {_VERSION}')
  if zlib.crc32(body) != crc:
    raise _Bad('another checksum')
  try:
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
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise _Bad(f'{type(error).__name__}: {error}') from error
  except RecursionError as error:
    raise _Bad('JSON too deep') from error
  if flaw is not None:
    raise _Bad(flaw)
  return manifest


def _flaw_of(manifest: Manifest) -> str | None:
  step, parent, rows, files, payload, codec, earlier, own_id = manifest
  if not is_whole(step, 0, 10**12):
    return f'step {step}'
  if parent is not None and not (
    is_whole(parent.step, 0, step) and is_whole(parent.identity, 0, 1 << 128)
  ):
    return f'parent {parent}'
  for of_rows, those in ((True, rows), (False, files)):
    for facts in those.values():
      sizes = (facts.bytes, facts.crc, facts.rows if of_rows else 0)
      if not _FILE.fullmatch(facts.name) or not all(
        is_whole(size, 0, 1 << 63) for size in sizes
      ):
        return f'file {facts}'
  if not isinstance(payload, dict) or codec not in CODECS:
    return f'payload {type(payload).__name__} and codec {codec}'
  if not all(is_whole(size, 0, 1 << 63) for size in earlier):
    return f'earlier sizes {earlier}'
  if not isinstance(own_id, str) or not _ID.fullmatch(own_id):
    return f'id {own_id}'
  return None
