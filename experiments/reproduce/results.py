"""The results of a reproduction: one table, a row for each run or point.

A folder holds `results.csv` and `setting.json`. Both are replaced as a whole
after each job, so they are complete at any time. An empty field is a value that
is not known.

| kind | a row is | its values |
| --- | --- | --- |
| run | one run of a system | status, counts, seconds, bytes, quality |
| curve | a point of a run's learning curve | step, seconds, auc, log_loss |
| phase | one phase of a batch | phase, ms_per_batch |
| skew | a row of the tables | rank, share, cumulative_share |
| row | a hot row after some batches | row, batch, change |
| naive | a run with frozen rows | variant, quality |
| threshold | a run with a drop target | threshold, drop_rate, quality |
"""

from collections.abc import Iterable, Sequence
import csv
import io
import json
import pathlib
from typing import Any, NamedTuple

from experiments.common.record import write_json
from slipstream_jax.data.interrupts import held
from slipstream_jax.errors import UserError
from slipstream_jax.files import replace

Row = dict[str, Any]
"""Column to value. Unknown values are absent."""
RESULTS, SETTING = 'results.csv', 'setting.json'
KINDS = ('run', 'curve', 'phase', 'skew', 'row', 'naive', 'threshold')
PHASES = (
  *('data', 'unique', 'plan', 'gather', 'put', 'step', 'get', 'scatter'),
  *('host_update', 'choose', 'snapshot', 'sync'),
)


class Job(NamedTuple):
  """One thing to run. All rows with these values belong to it."""

  kind: str
  model: str
  seed: int
  system: str = 'pinned'
  skip: str = 'off'
  variant: str | None = None
  """Of a naive run: the rows that are frozen."""
  drop_target: float | None = None
  """Of a threshold run."""


_TEXT = ('kind', 'model', 'system', 'skip', 'variant', 'status', 'phase')
COLUMNS = (
  *Job._fields,
  # Of runs. Bytes are exact counts of the engine. The dense bytes are those of
  # the dense parameters under XDL. The seconds are of training alone.
  *('status', 'step', 'examples_seen', 'examples_trained', 'examples_dropped'),
  *('seconds', 'bytes_loaded', 'bytes_stored', 'dense_bytes'),
  *('lookups_hot_share', 'examples_hot_share', 'auc', 'log_loss', 'accuracy'),
  *('test_examples', 'test_positives', 'device_bytes', 'host_bytes'),
  # Seconds spent on scores and choices, and on snapshots and comparing rows.
  *('choose_seconds', 'window_seconds'),
  # The rate of a run's matrix products over that of one plain product.
  'matrix_share',
  *('phase', 'ms_per_batch'),
  # Shares of all lookups: of this row, and of it and all more popular ones.
  *('rank', 'share', 'cumulative_share'),
  # The greatest |now - at the start| of the row's elements.
  *('row', 'batch', 'change'),
  # The drop rate is of the hot examples seen while skipping.
  *('threshold', 'drop_rate'),
)
# The files of older versions, and what rows without these columns belong to.
_OLD = {
  'cells.csv': 'run',
  'curves.csv': 'curve',
  'phases.csv': 'phase',
  'skew.csv': 'skew',
  'rows.csv': 'row',
  'naive.csv': 'naive',
  'thresholds.csv': 'threshold',
}
_FIRST = {'system': 'pinned', 'skip': 'off', 'seed': 0}


class Results:
  """The folder of a reproduction.

  Attributes:
    folder: its path.
    setting: what is run, on which machine; a dictionary for JSON.
    rows: the table.
  """

  def __init__(self, folder: pathlib.Path) -> None:
    """Reads a folder, which may be empty or of an older version.

    Raises:
      UserError: a file is damaged.
    """
    self.folder = folder
    self.setting: dict[str, Any] = _setting(folder / SETTING)
    self.rows: list[Row] = []
    if (folder / RESULTS).exists():
      self.rows = _read(folder / RESULTS, {})
    else:
      for name, kind in _OLD.items():
        if (folder / name).exists():
          skip = 'published' if kind == 'threshold' else 'off'
          old = {**_FIRST, 'kind': kind, 'skip': skip}
          self.rows += _read(folder / name, old)
    # What a run left beside its own row, which may have been removed by hand.
    finished = {job_of(row)[1:] for row in self.of('run')}
    self.rows = [
      row
      for row in self.rows
      if job_of(row)[1:] in finished or not _is_of_run(row)
    ]

  def of(self, kind: str, model: str | None = None) -> list[Row]:
    """Returns the rows of a kind, of one model or of all."""
    return [
      row
      for row in self.rows
      if row['kind'] == kind and model in (None, row['model'])
    ]

  def has(self, job: Job) -> bool:
    """Whether a job is finished, or has failed."""
    return any(job_of(row) == job for row in self.rows)

  def add(self, rows: Iterable[Row]) -> None:
    """Adds the rows of a job and saves the table."""
    known = [
      {name: x for name, x in row.items() if x is not None and x == x}
      for row in rows
    ]
    self.rows += known
    with held():
      self.save()

  def save(self) -> None:
    """Writes the table and the setting."""
    file = io.StringIO(newline='')
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    writer.writerows(self.rows)
    replace(self.folder / RESULTS, file.getvalue())
    write_json(self.folder / SETTING, self.setting)


def _is_of_run(row: Row) -> bool:
  phase = row['kind'] == 'phase' and row['skip'] != 'off'
  return phase or row['kind'] == 'curve'


def job_of(row: Row) -> Job:
  """Returns the job that a row belongs to."""
  return Job(*(row.get(name) for name in Job._fields))  # type: ignore[arg-type]


def _setting(path: pathlib.Path) -> dict[str, Any]:
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


def _read(path: pathlib.Path, job: Row) -> list[Row]:
  """Reads a table, without a last line that was cut off."""
  data = path.read_bytes()
  text = data[: data.rfind(b'\n') + 1].decode()
  header, *lines = csv.reader(io.StringIO(text, newline='')) if text else [[]]
  # Older versions had the steps of a run under another name.
  names = ['step' if name == 'steps' else name for name in header]
  if unknown := set(names) - set(COLUMNS):
    raise _damaged(path, 'columns must be known', sorted(unknown))
  rows = []
  for number, values in enumerate(lines, 2):
    try:
      pairs = zip(names, values, strict=True)
      row = {name: _value(name, text) for name, text in pairs if text}
    except ValueError as error:
      rule = f'line {number} must hold a value, or nothing, for each column'
      raise _damaged(path, rule, values) from error
    rows.append({**job, **row})
  return rows


def _value(name: str, text: str) -> Any:
  if name in _TEXT:
    return text
  return int(text) if text.lstrip('-').isdigit() else float(text)


def _damaged(path: pathlib.Path, rule: str, got: Sequence[str]) -> UserError:
  return UserError(
    rule,
    got=','.join(got),
    where=str(path),
    hint='remove the file, or begin in another folder',
  )
