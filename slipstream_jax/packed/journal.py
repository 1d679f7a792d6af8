"""The journal of a preparation: what is done, so that it can be resumed.

Files are synced before the journal that describes them is written, and the
journal is replaced by a rename.
"""

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import json
import pathlib
from typing import Any, NamedTuple

from slipstream_jax.errors import UserError
from slipstream_jax.files import replace
from slipstream_jax.formats import text
from slipstream_jax.formats.base import RawData
from slipstream_jax.packed.columns import UNFINISHED
from slipstream_jax.packed.layout import Layout


class ReadPart(NamedTuple):
  """A part that was read to its end."""

  name: str
  examples: int
  bad: int
  """Lines skipped."""


class Journal(NamedTuple):
  """How far a preparation has come."""

  identity: Mapping[str, Any]
  """Sources and settings, as JSON. A preparation is resumed with the same."""
  parts: tuple[ReadPart, ...] = ()
  """Parts read to their end."""
  chunks: int = 0
  """Chunks read of the next part."""
  examples: int = 0
  """Examples written. Files are cut to these on resuming."""
  splits: Mapping[str, tuple[int, int]] = {}
  """Set after the last part, because a split may depend on all examples."""
  tables: Mapping[str, Any] = {}
  """Facts about the tables that are written, by name."""

  @property
  def bad(self) -> int:
    """Lines skipped in the parts read to their end."""
    return sum(part.bad for part in self.parts)


def identity(raw: RawData, min_count: int, layout: Layout) -> dict[str, Any]:
  """Returns the facts that must not change when a preparation is resumed."""
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
  return json.loads(json.dumps(facts))  # lists instead of tuples, as in files


def check_same(
  identity: Mapping[str, Any], before: Mapping[str, Any], path: pathlib.Path
) -> None:
  """Raises a `UserError` if an identity is not the one in the file `path`."""
  for key, value in identity.items():
    old = before.get(key)
    if value == old:
      continue
    if isinstance(value, dict) and isinstance(old, dict):
      # Shows only the entries that differ.
      same = [k for k in value if k in old and value[k] == old[k]]
      value, old = (
        {k: entry for k, entry in entries.items() if k not in same}
        for entries in (value, old)
      )
    raise UserError(
      'a folder must be prepared from the same sources with the same'
      ' settings as before',
      got=f'{key} {value!r:.200} after {old!r:.200}',
      where=str(path),
      hint='set them as before, give another folder, or delete this one',
    )


@contextlib.contextmanager
def opened(
  folder: pathlib.Path, identity: Mapping[str, Any]
) -> Iterator[Journal]:
  """Locks the folder and yields its journal, or a new one.

  Raises:
    UserError: the folder has other contents, is in use by another program, or
      was begun from other sources or with other settings.
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
  with (place / 'lock').open('w') as lock:
    # The system releases the lock when the process ends, even if it is killed.
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise UserError(
        'a data set must be prepared by one program at a time',
        got='another one at work',
        where=str(folder),
        hint='wait for its end',
      ) from error
    path = path_in(folder)
    if not path.exists():
      yield Journal(identity)
      return
    journal = Journal(**json.loads(path.read_text()))
    check_same(identity, journal.identity, path)
    yield journal._replace(
      parts=tuple(ReadPart(*part) for part in journal.parts),
      splits={name: (a, b) for name, (a, b) in journal.splits.items()},
    )


def save(folder: pathlib.Path, journal: Journal) -> None:
  """Replaces the folder's journal. Its files must be synced before."""
  replace(path_in(folder), json.dumps(journal._asdict()) + '\n')


def path_in(folder: pathlib.Path) -> pathlib.Path:
  """Returns the path of a folder's journal. Without one, nothing is resumed."""
  return folder / UNFINISHED / 'journal.json'
