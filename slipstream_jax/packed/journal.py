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
from slipstream_jax.packed import columns as packed
from slipstream_jax.raw import text
from slipstream_jax.raw.base import RawData

UNFINISHED = packed.UNFINISHED
_FILE, _LOCK = 'journal.json', 'lock'


class Journal(NamedTuple):
  """How far a preparation has come."""

  identity: Mapping[str, Any]
  """What is prepared and how; JSON. Another one may not continue."""
  parts: tuple[tuple[str, int, int], ...] = ()
  """Parts read to their ends: name, inputs, bad lines skipped."""
  chunks: int = 0
  """Chunks read of the part that comes next."""
  inputs: int = 0
  """Inputs spilled; what a file holds beyond them is dropped."""
  splits: Mapping[str, tuple[int, int]] | None = None
  """Set with the last part: what decides them may be known to its reader
  alone."""
  tables: Mapping[str, Any] = {}
  """Tables that are written, by name: fields of `ranking.Written`."""


def identity(
  raw: RawData, min_count: int, hash_rows: int | None
) -> dict[str, Any]:
  """What must be the same when a preparation is continued."""
  facts = {
    'name': raw.name,
    'tables': raw.tables,
    'dense_features': raw.dense_features,
    'series': raw.series,
    'sources': sources(raw),
    'changed': [text.changed(part.name) for part in raw.parts],
    'settings': dict(raw.settings),
    'min_count': min_count,
    'hash_rows': hash_rows,
  }
  return json.loads(json.dumps(facts))  # as it will be read: lists, no tuples


def sources(raw: RawData) -> list[dict[str, Any]]:
  """The files, or days, that are read: path and bytes of each."""
  return [{'path': part.name, 'bytes': part.size} for part in raw.parts]


@contextlib.contextmanager
def opened(
  folder: pathlib.Path, identity: Mapping[str, Any]
) -> Iterator[Journal]:
  """The folder's journal, or a new one, held against other programs.

  Raises:
    UserError: the folder is finished, holds something else, is in use by
      another program, or was begun from other sources or with other settings.
  """
  place = folder / UNFINISHED
  if packed.is_finished(folder) and not place.exists():
    raise UserError(
      'a packed data set is not written over',
      got='one that is finished',
      where=str(folder),
      mend='give another folder as config.data.path, or delete this one',
    )
  if folder.is_dir() and not place.exists() and any(folder.iterdir()):
    raise UserError(
      'the folder of a new data set must be empty',
      got=sorted(path.name for path in folder.iterdir())[0],
      where=str(folder),
      mend='give another folder as config.data.path',
    )
  place.mkdir(parents=True, exist_ok=True)
  with (place / _LOCK).open('w') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise UserError(
        'a data set must be prepared by one program at a time',
        got='another one at work',
        where=str(folder),
        mend='wait for its end',
      ) from error
    yield _read(place, identity)


def save(folder: pathlib.Path, journal: Journal) -> None:
  """Replaces the folder's journal. What it says must be on the disk."""
  place = folder / UNFINISHED / _FILE
  packed.replace(place, json.dumps(journal._asdict()) + '\n')


def clear(folder: pathlib.Path) -> None:
  """Deletes journal and spilled files, of a data set that is finished."""
  shutil.rmtree(folder / UNFINISHED)


def _read(place: pathlib.Path, identity: Mapping[str, Any]) -> Journal:
  path = place / _FILE
  if not path.exists():
    return Journal(identity)
  journal = Journal(**json.loads(path.read_text()))
  for key, value in identity.items():
    was = journal.identity.get(key)
    if was != value:
      raise UserError(
        'a preparation must be continued from the same sources with the same'
        ' settings',
        got=f'{key} {_short(value)} after {_short(was)}',
        where=str(path),
        mend='set them as before, or delete the folder to start anew',
      )
  parts = tuple((name, inputs, bad) for name, inputs, bad in journal.parts)
  splits = {name: (a, b) for name, (a, b) in (journal.splits or {}).items()}
  return journal._replace(parts=parts, splits=splits or None)


def _short(value: object) -> str:
  text = repr(value)
  return text if len(text) <= 200 else f'{text[:200]} and more'
