"""Makes a packed data set of raw files, once, for many experiments.

    python -m experiments.prepare --config=configs/criteo.py \
        --config.data.raw=PATH --config.data.path=DIR [--verify]

PATH is the raw data in the format of `config.data.format`, DIR the folder to
write. What was stopped, by Ctrl-C or worse, continues when the same command is
run again. `--verify` compares a finished folder with its checksums instead, or
a new one once it is finished.
"""

import pathlib
import resource
import time
from typing import Any

from absl import flags
import ml_collections
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from experiments.common import cli, report
from experiments.common.formats import raw_data
from slipstream_jax.errors import UserError
from slipstream_jax.packed import columns as packed
from slipstream_jax.packed.prepare import prepare

_VERIFY = flags.DEFINE_bool(
  'verify', False, 'Compare the finished folder with its checksums.'
)
_QUIET_S = 10  # between lines of progress where there is no terminal


def main(config: ml_collections.ConfigDict) -> None:
  """Prepares the data set of `config.data`.

  Raises:
    UserError: bad settings, bad data or no room; the folder is then not
      finished, and can be continued.
  """
  shown, data = report.console(), config.data
  for key, what in ('raw', 'the raw data'), ('path', 'the folder to write'):
    needed = key == 'path' or not (_VERIFY.value and _finished(data))
    if needed and not data[key]:
      raise UserError(
        f'config.data.{key} must name {what}',
        got=repr(data[key]),
        where=f'config.data.{key}',
        mend=f'add --config.data.{key}=...',
      )
  if data.path.startswith('tfds:'):
    raise UserError(
      'config.data.path must name the folder to write',
      got=repr(data.path),
      where='config.data.path',
      mend='add --config.data.path=FOLDER',
    )
  if not (_VERIFY.value and _finished(data)):
    _prepare(shown, data)
  if _VERIFY.value:
    _verify(shown, data.path)


def _finished(data: ml_collections.ConfigDict) -> bool:
  return data.path is not None and packed.is_finished(data.path)


def _prepare(shown: Console, data: ml_collections.ConfigDict) -> None:
  """Prepares the data set, telling its progress, and says what it made."""
  raw = raw_data(data, data.raw)
  shown.print(f'[bold]{raw.name}[/] to {data.path}', highlight=False)
  started, told, first = time.monotonic(), 0.0, None
  work = prepare(
    raw, data.path, min_count=data.min_count, hash_rows=data.hash_rows
  )
  with _bar(shown) as bar:
    task, phase = bar.add_task('reading', total=None, rate=''), 'reading'
    for at in work:
      seconds = time.monotonic() - started
      first = at.inputs if first is None else first  # of a resumed one
      if at.phase != phase:
        bar.reset(task, description=at.phase, total=at.total)
        phase = at.phase
      rate = f'{at.inputs:,} inputs'
      if phase == 'reading':
        rate += f', {(at.inputs - first) / max(seconds, 1e-9):,.0f} inputs/s'
      bar.update(task, completed=at.done, total=at.total or None, rate=rate)
      if bar.disable and seconds - told >= _QUIET_S:
        told = seconds
        share = f'{at.done / at.total:.0%}, ' if at.total else ''
        shown.print(f'{phase} {share}{rate}', highlight=False)
  manifest = packed.open_packed(data.path).manifest
  lines = manifest['inputs'] - (first or 0)  # of this process
  shown.print(_summary(manifest, time.monotonic() - started, lines))


def _bar(shown: Console) -> Progress:
  return Progress(
    TextColumn('[bold]{task.description}'),
    BarColumn(bar_width=24),
    TextColumn('{task.percentage:>3.0f} %'),
    TimeRemainingColumn(),
    TextColumn('{task.fields[rate]}'),
    console=shown,
    disable=not shown.is_terminal,
  )


def _summary(manifest: dict[str, Any], seconds: float, lines: int) -> Table:
  """What was made of what, as a table a person reads."""
  table = Table(show_header=False, min_width=60)
  table.add_column(style='bold')
  table.add_column(justify='right')
  inputs, tables = manifest['inputs'], manifest['tables']
  for name, text in (
    ('inputs', f'{inputs:,}'),
    *((f'... to {k}', f'{b - a:,}') for k, (a, b) in _splits(manifest)),
    ('bad lines skipped', f'{manifest["bad_lines"]:,}'),
    ('clicks per input to train', f'{manifest["base_rate"]:.4f}'),
    ('tables', f'{len(tables)}'),
    ('... rows of all', f'{sum(each["rows"] for each in tables):,}'),
    ('bytes before', _mib(sum(s['bytes'] for s in manifest['sources']))),
    ('bytes after', _mib(_bytes_after(manifest))),
    ('time', f'{seconds:,.1f} s'),
    ('inputs/s', f'{lines / max(seconds, 1e-9):,.0f}'),
    ('peak memory', f'{_peak_rss() / (1 << 30):.2f} GiB'),
  ):
    table.add_row(name, text)
  table.add_section()
  for each in tables:
    share = each['unknown'] / max(each['lookups'], 1)
    table.add_row(each['name'], f'{each["rows"]:,} rows, {share:.2%} unknown')
  return table


def _splits(manifest: dict[str, Any]) -> list[tuple[str, tuple[int, int]]]:
  return [(name, (a, b)) for name, (a, b) in manifest['splits'].items()]


def _bytes_after(manifest: dict[str, Any]) -> int:
  return sum(
    packed.Column(c['name'], c['dtype'], tuple(c['shape'])).nbytes
    for c in manifest['columns']
  )


def _mib(size: int) -> str:
  return f'{size / (1 << 20):,.1f} MiB'


def _peak_rss() -> int:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _verify(shown: Console, folder: str) -> None:
  """Reads every file again, and compares it with its checksum."""
  size = 0
  for _, nbytes in packed.verify(pathlib.Path(folder)):
    size += nbytes
  shown.print(f'{folder}: {_mib(size)} as they were written', highlight=False)


if __name__ == '__main__':
  cli.run(main, kept='the same command continues')
