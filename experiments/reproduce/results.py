"""The results of a reproduction: one table, a row for each run or point.

A folder holds `results.csv` and `setting.json`, which are replaced after each
job.

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

from collections.abc import Iterable
import pathlib
from typing import Any, NamedTuple

from experiments.common import results
from experiments.common.record import read_json, write_json
from experiments.common.results import Row
from slipstream_jax.data.interrupts import held

RESULTS, SETTING = 'results.csv', 'setting.json'
KINDS = ('run', 'curve', 'phase', 'skew', 'row', 'naive', 'threshold')
PHASES = (
  *('data', 'unique', 'plan', 'gather', 'put', 'step', 'get', 'scatter'),
  *('host_update', 'choose', 'snapshot', 'sync'),
)


class Job(NamedTuple):
  """The first columns of a row: all rows with these values are of one job.

  The phases of all systems are of the job of the pinned one.
  """

  kind: str
  model: str
  seed: int
  system: str = 'pinned'
  skip: str = 'off'
  variant: str | None = None
  """The rows that a naive run freezes; None for other jobs."""
  drop_target: float | None = None
  """The target of a threshold run; None for other jobs."""


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
    self.setting: dict[str, Any] = read_json(folder / SETTING)
    self.rows = _read(folder / RESULTS)
    if not (folder / RESULTS).exists():
      for name, kind in _OLD.items():
        skip = 'published' if kind == 'threshold' else 'off'
        job = {'system': 'pinned', 'skip': skip, 'seed': 0, 'kind': kind}
        self.rows += [{**job, **row} for row in _read(folder / name)]
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
    self.rows += map(results.known, rows)
    with held():
      self.save()

  def save(self) -> None:
    """Writes the table and the setting."""
    results.write(self.folder / RESULTS, COLUMNS, self.rows)
    write_json(self.folder / SETTING, self.setting)


def _is_of_run(row: Row) -> bool:
  phase = row['kind'] == 'phase' and row['skip'] != 'off'
  return phase or row['kind'] == 'curve'


def job_of(row: Row) -> Job:
  """Returns the job that a row belongs to."""
  return Job(*(row.get(name) for name in Job._fields))  # type: ignore[arg-type]


def _read(path: pathlib.Path) -> list[Row]:
  # Older versions had the steps of a run under another name.
  return results.read(path, COLUMNS, _TEXT, {'steps': 'step'})
