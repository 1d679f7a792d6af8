"""The finished runs of a comparison, kept so that a killed one continues.

`compare.csv` has a line for every run that is finished, `curve.csv` the points
of the plain runs' learning curves; a run's points are written before its line.
"""

import csv
import json
import pathlib
from typing import Any

import ml_collections

from experiments.common.record import CONFIG, write_json
from experiments.compare.ladder import PLAIN, Run
from experiments.usage.keys import keys_of
from slipstream_jax.errors import UserError

RUNS, CURVE = 'compare.csv', 'curve.csv'
_WHOLE = {
  *('seed', 'examples_trained', 'bytes_loaded', 'bytes_stored'),
  'examples_dropped',
}
_FREE = {'seed', 'resume'}  # runs of other seeds may be added


class Results:
  """What a comparison's folder holds.

  Attributes:
    runs: those finished, in the order in which they were.
    curve: points of the plain ones among them.
  """

  def __init__(
    self, workdir: pathlib.Path, config: ml_collections.ConfigDict
  ) -> None:
    """Opens a folder: a new one, or that of a comparison to be continued.

    Raises:
      UserError: it holds a comparison with another config, or else what is
        none.
    """
    self._folder = workdir
    resolved = json.loads(config.to_json_best_effort())
    if (workdir / CONFIG).exists():
      _check_same(json.loads((workdir / CONFIG).read_text()), resolved)
    elif any(workdir.iterdir()):
      raise UserError(
        'a comparison needs a new or empty folder, or one to continue',
        got=workdir,
        where='--workdir',
        hint='name another one',
      )
    write_json(workdir / CONFIG, resolved)
    self.runs = _read(workdir / RUNS)
    plain = {run.seed for run in self.runs if run.policy == PLAIN}
    # The points of a run that was killed before its line was written.
    points = [x for x in _read(workdir / CURVE) if x.seed in plain]
    self.curve = points
    for name, kept in ((RUNS, self.runs), (CURVE, points)):
      (workdir / name).unlink(missing_ok=True)
      _append(workdir / name, kept)

  def has(self, seed: int, policy: str, target: float) -> bool:
    """Whether that run is finished."""
    return any(run[:3] == (policy, target, seed) for run in self.runs)

  def add(self, points: list[Run]) -> None:
    """Keeps a finished run; of a plain one all points, the last is the run."""
    if points[-1].policy == PLAIN:
      self.curve += points
      _append(self._folder / CURVE, points)
    self.runs.append(points[-1])
    _append(self._folder / RUNS, points[-1:])

  @property
  def curves(self) -> list[list[Run]]:
    """The points by seed."""
    seeds = dict.fromkeys(run.seed for run in self.curve)
    return [[run for run in self.curve if run.seed == s] for s in seeds]


def _check_same(old: dict[str, Any], new: dict[str, Any]) -> None:
  olds, news = (
    dict(keys_of(ml_collections.ConfigDict(config, convert_dict=True)))
    for config in (old, new)
  )
  for key in sorted(olds.keys() | news.keys()):
    if key not in _FREE and olds.get(key) != news.get(key):
      raise UserError(
        f'a comparison goes on with its config.{key}, {olds.get(key)}',
        got=news.get(key),
        where=f'config.{key}',
        hint='use the settings it was started with, or another --workdir',
      )


def _append(path: pathlib.Path, runs: list[Run]) -> None:
  new = not path.exists()
  with path.open('a', newline='') as file:
    writer = csv.writer(file)
    if new:
      writer.writerow(Run._fields)
    writer.writerows(runs)


def _read(path: pathlib.Path) -> list[Run]:
  """The lines of a file; the last one may have been cut off."""
  if not path.exists():
    return []
  text = path.read_bytes().decode().rpartition('\r\n')[0]
  lines = list(csv.reader(text.splitlines()))[1:]
  return [
    Run(*(_value(*pair) for pair in zip(Run._fields, line, strict=True)))
    for line in lines
  ]


def _value(name: str, text: str) -> Any:
  if name == 'policy':
    return text
  if not text:
    return None
  return int(text) if name in _WHOLE else float(text)
