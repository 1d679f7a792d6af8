"""Keeps the finished runs of a comparison, so that a stopped one can continue.

`compare.csv` has a line for every finished run. `curve.csv` has the points of
the runs' learning curves. The points of a run are written before its line, so
a comparison that is killed anywhere leaves no half of a run.
"""

from collections.abc import Iterable, Sequence
import csv
import io
import json
import math
import pathlib
import typing
from typing import Any, NamedTuple, TypeVar

import ml_collections

from experiments.common.record import CONFIG, write_json
from experiments.common.usage import keys_of
from slipstream_jax.data.interrupts import held
from slipstream_jax.errors import UserError
from slipstream_jax.files import replace

RUNS, CURVE = 'compare.csv', 'curve.csv'
PLAIN, CONTROL, OURS = 'plain', 'random', 'surprise_offset'
_FREE = {'seed', 'resume'}  # runs of other seeds may be added
_FLAGS = {'longer', 'own'}
_END = '\r\n'  # of a line, as Python's csv writes it


class Cell(NamedTuple):
  """What is trained once for every seed."""

  policy: str
  """`PLAIN` or a policy's name, which may end with `_small`."""
  target: float
  """Share of the examples to drop, `config.skip.drop`. 0 for the plain run."""


class Run(NamedTuple):
  """A finished run: one line of compare.csv."""

  policy: str
  target: float
  seed: int
  batches: int
  """Batches of the source that it was to read."""
  steps: int
  examples_seen: int
  """Examples of the source, trained or dropped."""
  examples_trained: int
  examples_dropped: int
  examples_hot: float | None
  """Share of the examples with hot rows only, at the last decision."""
  seconds: float
  """Seconds of training alone, without compiling."""
  seconds_choosing: float
  """CPU seconds of choosing, part of `seconds`."""
  auc: float
  log_loss: float
  calibration: float | None
  test_examples: int
  bytes_loaded: int
  bytes_stored: int

  @property
  def dropped(self) -> float:
    """Share of the examples seen."""
    return self.examples_dropped / max(self.examples_seen, 1)


class Point(NamedTuple):
  """A point of a learning curve, scored on some test examples."""

  policy: str
  target: float
  seed: int
  number: int
  """From 1 on. Points of one number have read equally much of the source."""
  examples_seen: int
  examples_trained: int
  seconds: float
  auc: float
  log_loss: float


Line = TypeVar('Line', Run, Point)


class Results:
  """Reads and extends the folder of a comparison.

  Attributes:
    runs: the finished runs, in the order in which they finished.
    curve: the points of their learning curves.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    config: ml_collections.ConfigDict,
    **given: Any,
  ) -> None:
    """Opens an empty folder, or that of a comparison to continue.

    Args:
      workdir: an existing folder.
      config: the comparison's config.
      given: flags that must not change either.

    Raises:
      UserError: the folder holds a comparison with other settings, something
        else, or damaged files.
    """
    self._folder = workdir
    resolved = {**json.loads(config.to_json_best_effort()), **given}
    if (workdir / CONFIG).exists():
      _check_same(workdir / CONFIG, resolved)
    elif any(workdir.iterdir()):
      raise UserError(
        'a comparison needs a new or empty folder, or one to continue',
        got=workdir,
        where='--workdir',
        hint='name another one',
      )
    self.runs = _read(workdir / RUNS, Run)
    finished = {run[:3] for run in self.runs}
    # A killed run may have left points without its line.
    points = _read(workdir / CURVE, Point)
    self.curve = [point for point in points if point[:3] in finished]
    write_json(workdir / CONFIG, resolved)
    replace(workdir / RUNS, _text([Run._fields, *self.runs]))
    replace(workdir / CURVE, _text([Point._fields, *self.curve]))

  def has(self, seed: int, cell: Cell) -> bool:
    """Whether that run is finished."""
    return any(run[:3] == (*cell, seed) for run in self.runs)

  def add(self, run: Run, points: Sequence[Point]) -> None:
    """Keeps a finished run and its learning curve."""
    with held():
      for name, lines in ((CURVE, points), (RUNS, [run])):
        with (self._folder / name).open('a', newline='') as file:
          file.write(_text(lines))
      self.curve += points
      self.runs.append(run)


def _check_same(path: pathlib.Path, new: dict[str, Any]) -> None:
  try:
    old = json.loads(path.read_text())
  except ValueError as error:
    raise UserError(
      'the config of a comparison must be JSON',
      got=error,
      where=str(path),
      hint='start in another --workdir',
    ) from error
  olds, news = (
    dict(keys_of(ml_collections.ConfigDict(config, convert_dict=True)))
    for config in (old, new)
  )
  for key in sorted(olds.keys() | news.keys()):
    if key not in _FREE and olds.get(key) != news.get(key):
      name = f'--{key}' if key in _FLAGS else f'config.{key}'
      raise UserError(
        f'a continued comparison must keep {name}, which was {olds.get(key)}',
        got=news.get(key),
        where=name,
        hint='use the settings it was started with, or another --workdir',
      )


def _text(lines: Iterable[Sequence[Any]]) -> str:
  written = io.StringIO(newline='')
  csv.writer(written, lineterminator=_END).writerows(
    ['' if value != value else value for value in line] for line in lines
  )
  return written.getvalue()


def _read(path: pathlib.Path, kind: type[Line]) -> list[Line]:
  """Returns the lines of a file, without a last one that was cut off."""
  if not path.exists():
    return []
  # A line that was cut off may end within a character.
  text = path.read_bytes().rpartition(_END.encode())[0].decode()
  if not text:
    return []
  header, *lines = csv.reader(text.splitlines())
  hints = typing.get_type_hints(kind).values()
  try:
    if tuple(header) != kind._fields:
      raise ValueError(','.join(header))
    return [
      kind(*(_parsed(*pair) for pair in zip(hints, line, strict=True)))
      for line in lines
    ]
  except ValueError as error:
    raise UserError(
      f'a comparison must hold {", ".join(kind._fields)}',
      got=error,
      where=str(path),
      hint='it is of another version, or damaged: use another --workdir',
    ) from error


def _parsed(hint: Any, text: str) -> Any:
  """Returns the value of a field. An empty one is unknown: NaN or None."""
  optional = hint == float | None
  if not text and (optional or hint is float):
    return None if optional else math.nan
  return float(text) if optional else hint(text)
