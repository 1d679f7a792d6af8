"""Scores new examples with a finished run, or writes the rows of a table.

    python -m experiments.predict RUN --input=FILE [--output=predictions.csv]
    python -m experiments.predict RUN --rows=TABLE [--output=TABLE.npz]

RUN is the --workdir of a run that is finished and has kept its checkpoint. The
newest is loaded, or that of --step. A damaged one is refused. FILE
holds examples in the format of its data, with labels or without; they get the
rows that their ids had in training, and ids that training did not know the row
of those. Written is a line of probabilities for each example, one of each head,
as CSV or, where the output ends with .npy, as an array f32[n] or f32[n, T].

Of a table, an .npz has `rows` [R, D] and their raw `ids` i64[R]; the row of
unknown ids stands apart, as `unknown` [D].
"""

from collections.abc import Iterator
import contextlib
import pathlib
import time
from typing import Any, BinaryIO

from absl import flags
import numpy as np
import polars as pl
from rich.console import Console

from experiments.common import cli, report
from experiments.common.progress import Bar
from experiments.common.workdir import made_folder
from experiments.predict import loading
from experiments.predict.loading import LoadedRun
from slipstream_jax.errors import UserError
from slipstream_jax.files import written
from slipstream_jax.formats.base import Chunk, Part, RawData
from slipstream_jax.training import metrics
from slipstream_jax.training.metrics import Predictions

_INPUT = flags.DEFINE_string('input', None, 'File of examples to score.')
_ROWS = flags.DEFINE_string('rows', None, 'Table whose rows are written.')
_OUTPUT = flags.DEFINE_string(
  'output',
  None,
  'File to write, .csv or .npy; predictions.csv by default. Of rows, .npz; '
  'TABLE.npz by default.',
)
_DATA = flags.DEFINE_string(
  'data', None, "Where the run's data are now; by default where they were."
)
_STEP = flags.DEFINE_integer(
  'step', None, 'Step of the checkpoint; the newest by default.', lower_bound=0
)


def main(run_folder: pathlib.Path) -> None:
  """Scores or writes rows.

  Raises:
    UserError: no such run, bad examples, or no file to write to; nothing is
      then left of the output.
  """
  if (_INPUT.value is None) == (_ROWS.value is None):
    raise UserError(
      'one of --input and --rows must be given',
      got='none of them' if _INPUT.value is None else 'both',
      where='command line',
      hint='see --help',
    )
  if _ROWS.value is not None:
    path = _output(f'{_ROWS.value}.npz', ('.npz',))
  else:
    path = _output('predictions.csv', ('.csv', '.npy'))
  screen = report.console()
  tell = report.teller(screen)
  run = loading.load(run_folder, _DATA.value, step=_STEP.value, tell=tell)
  if _ROWS.value is not None:
    _write_rows(screen, run, _ROWS.value, path)
  else:
    _score(screen, run, str(_INPUT.value), path)


def _output(default: str, suffixes: tuple[str, ...]) -> pathlib.Path:
  path = pathlib.Path(_OUTPUT.value or default)
  if path.suffix not in suffixes or path.is_dir():
    raise UserError(
      f'the output must be a file that ends with {" or ".join(suffixes)}',
      got=path,
      where='--output',
      hint='give it such a name',
    )
  return path


def _write_rows(
  screen: Console, run: LoadedRun, table: str, path: pathlib.Path
) -> None:
  arrays: dict[str, Any] = loading.rows_of(run, table)
  with _file(path) as file:
    np.savez(file, **arrays)
  count, dim = arrays['rows'].shape
  screen.print(
    f'{count:,} rows of {table}, dim {dim}, after step {run.step:,}, written to'
    f' {path}: {", ".join(arrays)}',
    highlight=False,
    soft_wrap=True,
  )


def _score(
  screen: Console, run: LoadedRun, name: str, path: pathlib.Path
) -> None:
  raw = loading.new_examples(run, name)
  began = time.monotonic()
  scored: list[Predictions] = []
  with _file(path) as file:
    for part in _shown(screen, run, raw):
      if path.suffix == '.csv':
        _write_lines(file, part, first=not scored)
      scored.append(part)
    whole = metrics.merge(scored)
    if not len(whole.logits):
      raise UserError(
        'there must be an example to score',
        got='none',
        where=name,
        hint='give a file with more than a header',
      )
    if path.suffix == '.npy':
      np.save(file, _probabilities(whole))
  screen.print(report.facts(_summary(run, whole, time.monotonic() - began)))
  screen.print(f'written to {path}', highlight=False, soft_wrap=True)


def _shown(
  screen: Console, run: LoadedRun, raw: RawData
) -> Iterator[Predictions]:
  """The scores, while a bar says how far they are."""
  read = [0] * len(raw.parts)

  def watched(number: int, part: Part) -> Part:
    def chunks() -> Iterator[tuple[Chunk, int]]:
      for chunk, nbytes in part.chunks():
        read[number] = nbytes
        yield chunk, nbytes

    return part._replace(chunks=chunks)

  raw = raw._replace(
    parts=tuple(watched(*item) for item in enumerate(raw.parts))
  )
  total, examples = sum(part.size for part in raw.parts), 0
  began = time.monotonic()
  with Bar(screen, total or None, '%') as bar:
    for part in loading.scored(run, raw):
      yield part
      examples += len(part.logits)
      rate = examples / max(time.monotonic() - began, 1e-9)
      bar.show(sum(read), f'{examples:,} examples', f'{rate:,.0f} examples/s')


def _write_lines(file: BinaryIO, part: Predictions, first: bool) -> None:
  """Lines of CSV; of the shortest decimals that are read as the same f32."""
  values = _probabilities(part)
  columns = {'probability': values}
  if values.ndim > 1:
    columns = {f'probability_{t}': x for t, x in enumerate(values.T)}
  pl.DataFrame(columns).write_csv(file, include_header=first)


def _probabilities(part: Predictions) -> np.ndarray:
  return metrics.probabilities(part.logits.astype(np.float64)).astype('f4')


def _summary(
  run: LoadedRun, whole: Predictions, seconds: float
) -> dict[str, Any]:
  known = {}
  if whole.labels is not None:
    numbers = metrics.compute(whole)
    known = {
      name: getattr(numbers, name)
      for name in ('auc', 'log_loss', 'accuracy', 'calibration')
    }
  return {
    'steps trained': run.step,
    'examples': len(whole.logits),
    'examples_per_s': len(whole.logits) / max(seconds, 1e-9),
    'mean probability': float(_probabilities(whole).mean(dtype=np.float64)),
    **known,
  }


@contextlib.contextmanager
def _file(path: pathlib.Path) -> Iterator[BinaryIO]:
  """The output, which is there once it is whole."""
  try:
    with made_folder(str(path.parent), '--output'), written(path) as file:
      yield file
  except OSError as error:
    raise UserError(
      'predictions need a file that can be written',
      got=f'{path}: {error.strerror}',
      where='--output',
      hint='name one on a disk with room',
    ) from error


if __name__ == '__main__':
  cli.run(
    main,
    config='none',
    words='RUN',
    kept='nothing was written',
  )
