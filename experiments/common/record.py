"""Writes and reads a run's files: config, metrics and TensorBoard events."""

import json
import pathlib
from typing import Any

import ml_collections

from configs import common
from experiments.common.cli import CONFIG_FILE
from slipstream_jax.api.callbacks import EventFile
from slipstream_jax.errors import UserError
from slipstream_jax.files import replace

SUMMARY = 'summary.json'
CONFIG = CONFIG_FILE
METRICS = 'metrics.jsonl'


def as_json(value: Any) -> str:
  """Formats a value as JSON for a file that people may read."""
  return json.dumps(value, indent=2, allow_nan=False) + '\n'


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes JSON into a file that is never half-written."""
  replace(path, as_json(value))


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Returns the value of a JSON file; {} if there is no such file.

  Raises:
    UserError: the file is damaged.
  """
  return _parsed(path, path.read_bytes()) if path.exists() else {}


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the lines of a JSON-lines file; none if there is no such file.

  A last line of which a killed run wrote only a part is left out.

  Raises:
    UserError: a line is damaged.
  """
  data = path.read_bytes() if path.exists() else b''
  lines = data.rpartition(b'\n')[0].splitlines()
  return [_parsed(path, line) for line in lines]


def _parsed(path: pathlib.Path, text: bytes) -> dict[str, Any]:
  try:
    value = json.loads(text)
    if not isinstance(value, dict):
      raise ValueError(f'a {type(value).__name__}')
    return value
  except ValueError as error:
    raise UserError(
      f'{path.name} must be JSON, with names and values',
      got=error,
      where=str(path),
      hint='correct or remove it, or name another folder',
    ) from error


def config_of(workdir: pathlib.Path) -> ml_collections.ConfigDict:
  """Returns the config of a run. Keys that an older run lacks get defaults.

  Raises:
    UserError: the folder has no config, or a damaged one.
  """
  try:
    text = (workdir / CONFIG).read_text()
    config = ml_collections.ConfigDict(json.loads(text))
  except (OSError, ValueError, TypeError) as error:
    raise UserError(
      'the folder of a run must have its config as JSON',
      got=error,
      where=str(workdir / CONFIG),
      hint='name another run, or start anew in another --workdir',
    ) from error
  _complete(config)
  return config


def _complete(config: ml_collections.ConfigDict) -> None:
  today = ml_collections.ConfigDict()
  common.training(today)
  common.optimizers(today, rows=(), dense=(), dense_final=1.0)
  with config.unlocked():
    for name, value in today.items():
      own = config.get(name)
      if name not in config:
        config[name] = value
      elif isinstance(value, ml_collections.ConfigDict) and isinstance(
        own, ml_collections.ConfigDict
      ):
        own.update({key: value[key] for key in value if key not in own})


class Recorder:
  """Appends lines to metrics.jsonl, and their numbers to TensorBoard."""

  def __init__(self, workdir: pathlib.Path, step: int) -> None:
    """Opens both. Drops the lines of a resumed run after `step`.

    Raises:
      UserError: the file of metrics is damaged.
    """
    self._path = workdir / METRICS
    lines = read_lines(self._path)
    self.lines = [line for line in lines if line['step'] <= step]
    self._write_all()
    self._events = EventFile(workdir / 'tensorboard', step)

  def _write_all(self) -> None:
    replace(self._path, ''.join(_as_text(line) for line in self.lines))

  def has(self, step: int, kind: str) -> bool:
    """Whether there is a line of that kind for that step."""
    return any(x['step'] == step and x['kind'] == kind for x in self.lines)

  def write(self, line: dict[str, Any]) -> None:
    """Records a line, in place of an older one with its step and kind.

    Args:
      line: 'step', 'kind', and numbers, words or None.
    """
    if self.has(line['step'], line['kind']):
      key = line['step'], line['kind']
      self.lines = [
        line if (x['step'], x['kind']) == key else x for x in self.lines
      ]
      self._write_all()
    else:
      self.lines.append(line)
      with self._path.open('a') as file:
        file.write(_as_text(line))
    own = ('step', 'kind')
    values = {
      f'{line["kind"]}/{name}': value
      for name, value in line.items()
      if name not in own and not isinstance(value, str)
    }
    self._events.write(line['step'], values)

  def go_back(self, step: int) -> None:
    """Drops the lines after a step."""
    self.lines = [line for line in self.lines if line['step'] <= step]
    self._write_all()
    self._events.go_back(step)

  def close(self) -> None:
    """Closes the event file."""
    self._events.close()


def _as_text(line: dict[str, Any]) -> str:
  return json.dumps(line, allow_nan=False) + '\n'
