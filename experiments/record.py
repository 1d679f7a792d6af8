"""What a run leaves in its folder while it runs: config, metrics, events."""

import json
import os
import pathlib
from typing import Any

import ml_collections
from tensorboardX import SummaryWriter

from slipstream_jax.errors import UserError

SUMMARY = 'summary.json'
CONFIG = 'config.json'
METRICS = 'metrics.jsonl'
# What must be equal for a resumed run to be the same run.
_SAME = ('seed', 'data', 'model', 'optimizer', 'skip')


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes JSON so that the file is never there half-written."""
  partial = path.with_suffix('.partial')
  partial.write_text(json.dumps(value, indent=2) + '\n')
  os.replace(partial, path)


def check_workdir(
  workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> None:
  """Looks whether a run may use this folder, before any work is done.

  Raises:
    UserError: the folder holds another run, or one that resume cannot mean.
  """
  old = workdir / CONFIG
  if config.resume:
    if old.exists():
      _check_same(json.loads(old.read_text()), _resolved(config))
  elif workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
    raise UserError(
      'a new run needs a new or empty folder',
      got=workdir,
      where='--workdir',
      mend='name another one, or set --config.resume=True to continue it',
    )


def open_workdir(
  workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> None:
  """Makes the run's folder and writes the resolved config into it."""
  workdir.mkdir(parents=True, exist_ok=True)
  (workdir / SUMMARY).unlink(missing_ok=True)  # it is not finished any more
  write_json(workdir / CONFIG, _resolved(config))


def _resolved(config: ml_collections.ConfigDict) -> dict[str, Any]:
  return json.loads(config.to_json_best_effort())


def _check_same(old: dict[str, Any], new: dict[str, Any]) -> None:
  for key in _SAME:
    if old.get(key) != new.get(key):
      raise UserError(
        f'a resumed run must keep config.{key}, which was {old.get(key)}',
        got=new.get(key),
        where=f'config.{key}',
        mend='use the settings the run was started with',
      )


class Recorder:
  """Appends lines to metrics.jsonl and the same scalars to TensorBoard."""

  def __init__(self, workdir: pathlib.Path, step: int) -> None:
    """Opens both; lines of a resumed run past `step` are dropped."""
    self._path = workdir / METRICS
    self.lines = [line for line in self._old_lines() if line['step'] <= step]
    self._path.write_text(''.join(json.dumps(x) + '\n' for x in self.lines))
    self._events = SummaryWriter(
      str(workdir / 'tensorboard'), purge_step=step or None
    )

  def _old_lines(self) -> list[dict[str, Any]]:
    if not self._path.exists():
      return []
    # A killed run may have left half a line at the end.
    whole = self._path.read_text().rpartition('\n')[0].splitlines()
    return [json.loads(line) for line in whole]

  def write(self, line: dict[str, Any]) -> None:
    """Records one line; it has 'step', 'kind' and numbers or None."""
    self.lines.append(line)
    with self._path.open('a') as file:
      file.write(json.dumps(line) + '\n')
    for key, value in line.items():
      if key not in ('step', 'kind') and value is not None:
        self._events.add_scalar(f'{line["kind"]}/{key}', value, line['step'])

  def close(self) -> None:
    """Closes the event file."""
    self._events.close()
