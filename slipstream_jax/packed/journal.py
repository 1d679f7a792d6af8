"""What is done of a preparation that is under way, to continue it later.

Everything that is not yet part of the packed data set lies in one folder
inside of its folder. What the journal says is on the disk: files are synced
before it is written, and it is replaced by a rename.
"""

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import json
import pathlib
import shutil
from typing import Any, NamedTuple

from slipstream_jax.errors import UserError
from slipstream_jax.files import replace
from slipstream_jax.formats import text
from slipstream_jax.formats.base import RawData
from slipstream_jax.packed.columns import UNFINISHED
from slipstream_jax.packed.layout import Layout

_FILE, _LOCK = 'journal.json', 'lock'


class ReadPart(NamedTuple):
  """A part that was read to its end."""

  name: str
  examples: int
  bad: int
  """Lines skipped."""


class Journal(NamedTuple):
  """How far a preparation has come."""

  identity: Mapping[str, Any]
  """What is prepared and how; JSON. Another one may not continue."""
  parts: tuple[ReadPart, ...] = ()
  """Parts read to their ends."""
  chunks: int = 0
  """Chunks read of the part that comes next."""
  examples: int = 0
  """Examples spilled; what a file holds beyond them is dropped."""
  splits: Mapping[str, tuple[int, int]] = {}
  """Set with the last part, as a format may decide by what it has read: by
  the last day, for one."""
  tables: Mapping[str, Any] = {}
  """Tables that are written, by name: fields of `ranking.Written`."""

  @property
  def bad(self) -> int:
    """Lines skipped in the parts read to their ends."""
    return sum(part.bad for part in self.parts)


def identity(raw: RawData, min_count: int, layout: Layout) -> dict[str, Any]:
  """What must be the same when a preparation is continued or repeated."""
  facts = {
    'format': raw.format,
    'name': raw.name,
    'sources': [
      {
        'path': part.name,
        'bytes': part.size,
        'changed': text.changed(part.name),
      }
      for part in raw.parts
    ],
    'settings': dict(raw.settings),
    'min_count': min_count,
    'hash_rows': layout.hash_rows,
    'tables': raw.tables,
    **layout.facts(),
  }
  return json.loads(json.dumps(facts))  # as it will be read: lists, no tuples


def check_same(
  identity: Mapping[str, Any], was: Mapping[str, Any], path: pathlib.Path
) -> None:
  """Compares an identity with the one that stands in a file.

  Raises:
    UserError: they differ.
  """
  for key, value in identity.items():
    if value != was.get(key):
      now, before = _differing(value, was.get(key))
      raise UserError(
        'a folder must be prepared from the same sources with the same'
        ' settings as before',
        got=f'{key} {_short(now)} after {_short(before)}',
        where=str(path),
        hint='set them as before, give another folder, or delete this one',
      )


@contextlib.contextmanager
def opened(
  folder: pathlib.Path, identity: Mapping[str, Any]
) -> Iterator[Journal]:
  """The folder's journal, or a new one, held against other programs.

  Raises:
    UserError: the folder holds something else, is in use by another program,
      or was begun from other sources or with other settings.
  """
  place = folder / UNFINISHED
  if folder.is_dir() and not place.exists() and any(folder.iterdir()):
    raise UserError(
      'the folder of a new data set must be empty',
      got=sorted(path.name for path in folder.iterdir())[0],
      where=str(folder),
      hint='give another folder',
    )
  place.mkdir(parents=True, exist_ok=True)
  with (place / _LOCK).open('w') as lock:
    # The system gives it back with the process, even a killed one: no lock is
    # ever left behind, though its file is.
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise UserError(
        'a data set must be prepared by one program at a time',
        got='another one at work',
        where=str(folder),
        hint='wait for its end',
      ) from error
    yield _read(place / _FILE, identity)


def save(folder: pathlib.Path, journal: Journal) -> None:
  """Replaces the folder's journal. What it says must be on the disk."""
  contents = json.dumps(journal._asdict()) + '\n'
  replace(folder / UNFINISHED / _FILE, contents)


def exists(folder: pathlib.Path) -> bool:
  """Whether the folder has a journal, from which its preparation continues."""
  return (folder / UNFINISHED / _FILE).exists()


def forget(folder: pathlib.Path) -> None:
  """Deletes the journal, so that nothing continues from it."""
  (folder / UNFINISHED / _FILE).unlink(missing_ok=True)


def clear(folder: pathlib.Path) -> None:
  """Deletes journal and spilled files, of a data set that is finished."""
  shutil.rmtree(folder / UNFINISHED)


def _read(path: pathlib.Path, identity: Mapping[str, Any]) -> Journal:
  if not path.exists():
    return Journal(identity)
  journal = Journal(**json.loads(path.read_text()))
  check_same(identity, journal.identity, path)
  return journal._replace(
    parts=tuple(ReadPart(*part) for part in journal.parts),
    splits={name: (a, b) for name, (a, b) in journal.splits.items()},
  )


def _differing(now: Any, before: Any) -> tuple[Any, Any]:
  """Both; of two mappings what differs alone."""
  if not isinstance(now, dict) or not isinstance(before, dict):
    return now, before
  keys = [k for k in {**now, **before} if now.get(k) != before.get(k)]
  return tuple(  # type: ignore[return-value]
    {key: value[key] for key in keys if key in value} for value in (now, before)
  )


def _short(value: object) -> str:
  text = repr(value)
  return text if len(text) <= 200 else f'{text[:200]} and more'
