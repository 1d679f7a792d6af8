"""What the folder of a run holds, finished or not."""

from collections.abc import Iterator
import datetime
import json
import pathlib
from typing import Any, NamedTuple

from experiments.common import report
from experiments.common.record import CONFIG, METRICS, SUMMARY
from slipstream_jax.errors import UserError

_WHERE = 'command line'


class Recorded(NamedTuple):
  """A run as it was recorded."""

  name: str
  """Of its folder."""
  date: datetime.datetime
  """When something was last written there."""
  config: dict[str, Any]
  """By dotted key."""
  lines: list[dict[str, Any]]
  """Of its metrics."""
  summary: dict[str, Any] | None
  """None while it is not finished."""

  def last(self, key: str) -> Any:
    """The summary's value, or else the newest line's; None if none has it."""
    if self.summary is not None:
      return self.summary.get(key)
    values = [x[key] for x in self.lines if x.get(key) is not None]
    return values[-1] if values else None


def is_run(folder: pathlib.Path) -> bool:
  """Whether a folder is that of a run."""
  return (folder / CONFIG).is_file() and (folder / METRICS).is_file()


def runs_in(folder: pathlib.Path) -> list[Recorded]:
  """The runs of a folder, the newest last.

  Raises:
    UserError: the folder is not there, or a run is damaged.
  """
  if not folder.is_dir():
    raise UserError(
      'runs are listed of a folder',
      got=f'{folder}, which is none',
      where=_WHERE,
      hint='name the folder of your runs, or a run',
    )
  runs = [read(path) for path in folder.iterdir() if is_run(path)]
  return sorted(runs, key=lambda run: (run.date, run.name))


def read(folder: pathlib.Path) -> Recorded:
  """The run of a folder.

  Raises:
    UserError: it is none, or damaged.
  """
  if not is_run(folder):
    raise UserError(
      f'a run has {CONFIG} and {METRICS} in its folder',
      got=folder,
      where=_WHERE,
      hint='name folders of runs; without a name, those in runs/ are listed',
    )
  # A run under way may have written half of its last line.
  text = (folder / METRICS).read_bytes().rpartition(b'\n')[0].decode()
  summary = folder / SUMMARY
  try:
    config = json.loads((folder / CONFIG).read_text())
    lines = [json.loads(line) for line in text.splitlines()]
    figures = json.loads(summary.read_text()) if summary.is_file() else None
  except ValueError as error:
    raise UserError(
      'the files of a run must hold JSON',
      got=error,
      where=str(folder),
      hint='leave it out',
    ) from error
  newest = max(path.stat().st_mtime for path in folder.iterdir())
  date = datetime.datetime.fromtimestamp(newest)
  return Recorded(folder.name, date, dict(_flat(config)), lines, figures)


def _flat(
  section: dict[str, Any], before: str = ''
) -> Iterator[tuple[str, Any]]:
  for name, value in section.items():
    if isinstance(value, dict):
      yield from _flat(value, f'{before}{name}.')
    else:
      yield before + name, value


def overview(runs: list[Recorded]) -> list[dict[str, str]]:
  """A row for each run, as text: what one wants to see first."""
  return [
    {
      'run': run.name,
      'date': run.date.strftime('%m-%d %H:%M'),
      'steps': _steps(run),
      'AUC': _auc(run),
      'log loss': _text(run, 'log_loss', '{:.4f}'),
      'examples/s': _text(run, 'examples_per_s', '{:,.0f}'),
      'saved': _saved(run),
    }
    for run in runs
  ]


def _auc(run: Recorded) -> str:
  """A finished run without an AUC was evaluated on one class."""
  known = run.summary is not None and 'auc' in run.summary
  return report.auc(run.last('auc')) if known else _text(run, 'auc', '{:.4f}')


def _text(run: Recorded, key: str, form: str) -> str:
  value = run.last(key)
  return '-' if value is None else form.format(value)


def _steps(run: Recorded) -> str:
  steps = run.last('steps' if run.summary else 'step')
  if run.summary:
    return f'{steps:,}'
  return f'{steps or 0:,}...'  # not finished


def _saved(run: Recorded) -> str:
  if run.summary is None:
    return '-'
  extra = run.summary.get('extra_bytes')
  if extra:
    return f'costs {report.size(extra)}'
  return report.size(max(run.summary.get('saved_bytes') or 0, 0))


def differences(runs: list[Recorded]) -> list[dict[str, str]]:
  """Skip that are not the same in all runs: a row for each key."""
  keys = dict.fromkeys(key for run in runs for key in run.config)
  frame = []
  for key in keys:
    values = [str(run.config.get(key, '-')) for run in runs]
    if len(set(values)) > 1:
      names = [run.name for run in runs]
      frame.append({'setting': key} | dict(zip(names, values, strict=True)))
  return frame


def figures(runs: list[Recorded]) -> list[dict[str, str]]:
  """The summaries side by side: a row for each figure."""
  known = [run for run in runs if run.summary is not None]
  keys = dict.fromkeys(key for run in known for key in run.summary or {})
  return [
    {'figure': key.replace('_', ' ')}
    | {
      run.name: report.text(key, (run.summary or {}).get(key)) for run in known
    }
    for key in keys
    if any((run.summary or {}).get(key) is not None for run in known)
  ]
