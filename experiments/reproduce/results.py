"""What a reproduction keeps in its folder: a file for each kind of line.

All are CSV with a header; an empty field is a value that is not known. Lines
are appended as they come, so a folder is good to read at any time, and a line
that was cut off when its writer was killed is no line.
"""

from collections.abc import Iterable
import csv
import io
import json
import math
import pathlib
import types
import typing
from typing import Any, NamedTuple, TypeVar

from experiments.common.record import write_json
from slipstream_jax.errors import UserError

SETTING = 'setting.json'
OK = 'ok'
"""The status of a cell that finished."""
SKIPS = ('off', 'published', 'ours')
"""Nothing is skipped; as the paper skips; by the policy of the config."""
_END = '\r\n'  # of a line, as Python's csv writes it


class Cell(NamedTuple):
  """One run of one model by one system."""

  model: str
  system: str
  """A key of `SYSTEMS`, or 'pinned': plain, with the hot rows pinned."""
  skip: str
  """Of `SKIPS`."""
  seed: int
  status: str = OK
  """`OK`, or one sentence of what failed."""
  steps: int | None = None
  examples_seen: int | None = None
  examples_trained: int | None = None
  examples_dropped: int | None = None
  seconds: float | None = None
  """Of training alone, without compilation."""
  bytes_loaded: int | None = None
  """Exact counts of the engine, as all bytes here."""
  bytes_stored: int | None = None
  dense_bytes: int | None = None
  """What the dense parameters of XDL would add, both ways."""
  lookups_hot_share: float | None = None
  examples_hot_share: float | None = None
  auc: float | None = None
  log_loss: float | None = None
  accuracy: float | None = None
  test_examples: int | None = None
  device_bytes: int | None = None
  host_bytes: int | None = None
  choose_seconds: float | None = None
  """Spent on scores, thresholds and choices."""
  window_seconds: float | None = None
  """Spent on snapshots and on comparing rows."""
  matrix_share: float | None = None
  """Rate of a run's matrix products over that of a plain one."""
  test_positives: int | None = None
  """Of the test examples, those with label 1: with them a single run's AUC has
  an interval, too."""


class Point(NamedTuple):
  """A point of a learning curve."""

  model: str
  system: str
  skip: str
  seed: int
  step: int | None = None
  examples_seen: int | None = None
  examples_trained: int | None = None
  seconds: float | None = None
  auc: float | None = None
  log_loss: float | None = None


class Phase(NamedTuple):
  """What one phase of a batch takes."""

  model: str
  system: str
  skip: str
  seed: int
  phase: str
  """Of `PHASES`."""
  ms_per_batch: float | None = None


class Skew(NamedTuple):
  """A point of the access curve, over all rows of all tables."""

  model: str
  rank: int
  """Of the row, by its lookups: 1 is the most popular."""
  share: float
  """Of all lookups, those of this row."""
  cumulative_share: float
  """Of all lookups, those of this row and all more popular ones."""


class RowChange(NamedTuple):
  """How far a row is, after a batch, from where it was at first."""

  model: str
  row: int
  batch: int
  change: float
  """The maximum over the row's elements of |now - at the start|."""


class Naive(NamedTuple):
  """What becomes of a model some of whose rows stand still after warm-up."""

  model: str
  variant: str
  """Rows that stand still: none, hot or cold."""
  seed: int
  auc: float | None = None
  log_loss: float | None = None
  accuracy: float | None = None


class Threshold(NamedTuple):
  """What a drop target makes of the threshold, and of the model."""

  model: str
  seed: int
  drop_target: float
  threshold: float | None = None
  drop_rate: float | None = None
  """Of the hot examples seen while skipping, those dropped."""
  auc: float | None = None
  log_loss: float | None = None


class Modelled(NamedTuple):
  """A time that is computed from counts and stated rates, not measured."""

  model: str
  system: str
  skip: str
  link: str
  device_step_ms: float
  ms_per_batch: float
  binds: str
  """What the time is made of: the link, the device, or the host."""


PHASES = (
  *('data', 'unique', 'plan', 'gather', 'put', 'step', 'get', 'scatter'),
  *('host_update', 'choose', 'snapshot', 'sync'),
)
FILES: dict[type, str] = {
  Cell: 'cells.csv',
  Point: 'curves.csv',
  Phase: 'phases.csv',
  Skew: 'skew.csv',
  RowChange: 'rows.csv',
  Naive: 'naive.csv',
  Threshold: 'thresholds.csv',
  Modelled: 'link.csv',
}

Line = TypeVar('Line', bound=tuple[Any, ...])


def write_setting(folder: pathlib.Path, setting: dict[str, Any]) -> None:
  """Says what is run, on what and how; replaces what was said before."""
  write_json(folder / SETTING, setting)


def read_setting(folder: pathlib.Path) -> dict[str, Any]:
  """What was run; empty where nothing says so.

  Raises:
    UserError: the file is damaged.
  """
  path = folder / SETTING
  try:
    setting = json.loads(path.read_text()) if path.exists() else {}
  except ValueError as error:
    raise UserError(
      'the setting of a reproduction must be JSON',
      got=error,
      where=str(path),
      hint='correct it, or begin in another folder',
    ) from error
  return setting if isinstance(setting, dict) else {}


def append(folder: pathlib.Path, lines: Iterable[Any]) -> None:
  """Keeps lines, each kind in its file.

  Args:
    folder: of the reproduction.
    lines: NamedTuples of this module. None and NaN are kept as not known, and
      words in one line.
  """
  by_kind: dict[type, list[Any]] = {}
  for line in lines:
    by_kind.setdefault(type(line), []).append(line)
  for kind, group in by_kind.items():
    path = folder / FILES[kind]
    written = io.StringIO(newline='')
    writer = csv.writer(written)
    if not _mended(path):
      writer.writerow(kind._fields)  # type: ignore[attr-defined]
    writer.writerows([_field(value) for value in line] for line in group)
    with path.open('ab') as file:
      file.write(written.getvalue().encode())


def mend(folder: pathlib.Path) -> None:
  """Takes away lines that were cut off, of every kind."""
  for name in FILES.values():
    _mended(folder / name)


def _mended(path: pathlib.Path) -> int:
  """Bytes of whole lines; what was cut off behind them is taken away."""
  if not path.exists():
    return 0
  whole = path.read_bytes().rfind(_END.encode()) + 1
  size = whole + 1 if whole else 0
  if size < path.stat().st_size:  # else it stays as it is, its time too
    with path.open('r+b') as file:
      file.truncate(size)
  return size


def _field(value: Any) -> Any:
  if isinstance(value, str):
    return ' '.join(value.split())
  nan = isinstance(value, float) and math.isnan(value)
  return None if nan else value


def read(folder: pathlib.Path, kind: type[Line]) -> list[Line]:
  """The lines of one kind, in the order in which they were written.

  Raises:
    UserError: the file has other columns, or a value that is none.
  """
  path = folder / FILES[kind]
  if not path.exists():
    return []
  # A line that was cut off may end within a letter.
  text = path.read_bytes().rpartition(_END.encode())[0].decode()
  header, *lines = csv.reader(text.splitlines()) if text else [[]]
  if not header:
    return []
  fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
  if tuple(header) != fields:
    raise _damaged(path, f'columns must be {", ".join(fields)}', header)
  types_of = [_type(hint) for hint in typing.get_type_hints(kind).values()]
  return [
    _line(path, number, kind, types_of, values)
    for number, values in enumerate(lines, 2)
  ]


def _line(
  path: pathlib.Path,
  number: int,
  kind: type[Line],
  types_of: list[Any],
  values: list[str],
) -> Line:
  try:
    pairs = zip(types_of, values, strict=True)
    parsed: list[Any] = [make(text) if text else None for make, text in pairs]
    return kind(*parsed)
  except ValueError as error:
    rule = f'line {number} must hold a value, or nothing, for each column'
    raise _damaged(path, rule, values) from error


def _type(hint: Any) -> Any:
  """What makes a value of a field's text."""
  if isinstance(hint, types.UnionType):
    return next(x for x in typing.get_args(hint) if x is not types.NoneType)
  return hint


def _damaged(path: pathlib.Path, rule: str, got: list[str]) -> UserError:
  return UserError(
    rule,
    got=','.join(got),
    where=str(path),
    hint='remove the file, or begin in another folder',
  )
