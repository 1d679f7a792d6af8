"""The finished runs of a comparison, kept so that a killed one continues.

`compare.csv` has a line for every run that is finished, `curve.csv` the points
of the runs' learning curves; a run's points are written before its line, so
that what is cut off anywhere leaves no half of a run.
"""

from collections.abc import Iterable, Sequence
import csv
import io
import json
import math
import pathlib
import types
import typing
from typing import Any, TypeVar

import ml_collections

from experiments.common.record import CONFIG, write_json
from experiments.common.usage import keys_of
from experiments.compare.grid import Cell
from experiments.compare.lines import Point, Run
from slipstream_jax.data.interrupts import held
from slipstream_jax.errors import UserError
from slipstream_jax.files import replace

RUNS, CURVE = 'compare.csv', 'curve.csv'
_FREE = {'seed', 'resume'}  # runs of other seeds may be added
_FLAGS = {'longer', 'own'}
_END = '\r\n'  # of a line, as Python's csv writes it
Line = TypeVar('Line', Run, Point)


class Results:
  """What a comparison's folder holds.

  Attributes:
    runs: those finished, in the order in which they were.
    curve: the points of theirs.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    config: ml_collections.ConfigDict,
    **given: Any,
  ) -> None:
    """Opens a folder: a new one, or that of a comparison to be continued.

    Args:
      workdir: which is there.
      config: of the comparison.
      given: flags that it must go on with, too.

    Raises:
      UserError: it holds a comparison with other settings, or else what is
        none, or damaged.
    """
    self._folder = workdir
    resolved = {**json.loads(config.to_json_best_effort()), **given}
    if (workdir / CONFIG).exists():
      _check_same(_old(workdir / CONFIG), resolved)
    elif any(workdir.iterdir()):
      raise UserError(
        'a comparison needs a new or empty folder, or one to continue',
        got=workdir,
        where='--workdir',
        hint='name another one',
      )
    self.runs = _read(workdir / RUNS, Run)
    finished = {run[:3] for run in self.runs}
    # Without the points of a run that was killed before its line was written.
    points = _read(workdir / CURVE, Point)
    self.curve = [point for point in points if point[:3] in finished]
    write_json(workdir / CONFIG, resolved)
    replace(workdir / RUNS, _text(Run, self.runs))
    replace(workdir / CURVE, _text(Point, self.curve))

  def has(self, seed: int, cell: Cell) -> bool:
    """Whether that run is finished."""
    return any(run[:3] == (*cell, seed) for run in self.runs)

  def add(self, run: Run, points: Sequence[Point]) -> None:
    """Keeps a finished run and its learning curve."""
    with held():
      for name, lines in ((CURVE, points), (RUNS, [run])):
        with (self._folder / name).open('a', newline='') as file:
          file.write(_lines(lines))
      self.curve += points
      self.runs.append(run)


def _old(path: pathlib.Path) -> dict[str, Any]:
  try:
    old: dict[str, Any] = json.loads(path.read_text())
  except ValueError as error:
    raise UserError(
      'the config of a comparison must be JSON',
      got=error,
      where=str(path),
      hint='begin in another --workdir',
    ) from error
  return old


def _check_same(old: dict[str, Any], new: dict[str, Any]) -> None:
  olds, news = (
    dict(keys_of(ml_collections.ConfigDict(config, convert_dict=True)))
    for config in (old, new)
  )
  for key in sorted(olds.keys() | news.keys()):
    if key not in _FREE and olds.get(key) != news.get(key):
      name = f'--{key}' if key in _FLAGS else f'config.{key}'
      raise UserError(
        f'a comparison goes on with its {name}, {olds.get(key)}',
        got=news.get(key),
        where=name,
        hint='use the settings it was started with, or another --workdir',
      )


def _text(kind: type[Line], lines: Iterable[Line]) -> str:
  return ','.join(kind._fields) + _END + _lines(lines)


def _lines(lines: Iterable[Run | Point]) -> str:
  written = io.StringIO(newline='')
  writer = csv.writer(written)
  writer.writerows([_field(value) for value in line] for line in lines)
  return written.getvalue()


def _field(value: Any) -> Any:
  nan = isinstance(value, float) and math.isnan(value)
  return None if nan else value


def _read(path: pathlib.Path, kind: type[Line]) -> list[Line]:
  """The lines of a file; the last one may have been cut off."""
  if not path.exists():
    return []
  # A line that was cut off may end within a letter.
  text = path.read_bytes().rpartition(_END.encode())[0].decode()
  if not text:
    return []
  header, *lines = csv.reader(text.splitlines())
  makers = [_maker(hint) for hint in typing.get_type_hints(kind).values()]
  try:
    if tuple(header) != kind._fields:
      raise ValueError(','.join(header))
    return [_line(kind, makers, line) for line in lines]
  except ValueError as error:
    raise UserError(
      f'a comparison must hold {", ".join(kind._fields)}',
      got=error,
      where=str(path),
      hint='it is of another version, or damaged: begin in another --workdir',
    ) from error


def _line(kind: type[Line], makers: list[Any], texts: list[str]) -> Line:
  pairs = zip(makers, texts, strict=True)
  values: list[Any] = [make(text) for make, text in pairs]
  return kind(*values)


def _maker(hint: Any) -> Any:
  """What makes a value of a field's text; nothing stands for not known."""
  if isinstance(hint, types.UnionType):
    return lambda text: float(text) if text else None
  if hint is float:
    return lambda text: float(text) if text else math.nan
  return hint
