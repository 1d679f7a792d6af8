"""Scores a file of examples, or writes the rows of a table with their ids."""

from collections.abc import Iterator
import pathlib
import time
from typing import Any, BinaryIO

import numpy as np
import polars as pl
from rich.console import Console

from experiments.common import datasets, loading, report
from experiments.common.loading import LoadedRun
from experiments.common.progress import Bar
from experiments.common.workdir import output_file
from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import Chunk, Part, RawData
from slipstream_jax.training import metrics
from slipstream_jax.training.metrics import Predictions


def predict(
  folder: pathlib.Path,
  input: str | None = None,
  rows: str | None = None,
  output: str | None = None,
  data: str | None = None,
  step: int | None = None,
) -> None:
  """Scores a file of examples, or writes the rows of a table.

  The arguments are those of the program.

  Raises:
    UserError: an argument is invalid, the run has no checkpoint, examples are
      bad, or the output cannot be written. Nothing of it is then left.
  """
  if (input is None) == (rows is None):
    raise UserError(
      'one of --input and --rows must be given',
      got='none of them' if input is None else 'both',
      where='command line',
      hint='see --help',
    )
  suffixes = ['.csv', '.npy'] if rows is None else ['.npz']
  default = 'predictions.csv' if rows is None else f'{rows}.npz'
  path = pathlib.Path(output or default)
  if path.suffix not in suffixes or path.is_dir():
    raise UserError(
      f'the output must be a file that ends with {" or ".join(suffixes)}',
      got=path,
      where='--output',
      hint='give it such a name',
    )
  screen = report.console()
  tell = report.teller(screen)
  run = loading.load(folder, data, step=step, tell=tell)
  if input is not None:
    _score(screen, run, input, path)
  elif rows is not None:
    arrays: dict[str, Any] = loading.rows_of(run, rows)
    with output_file(path) as file:
      np.savez(file, **arrays)
    count, dim = arrays['rows'].shape
    tell(f'{count:,} rows of {rows}, dim {dim}, after step {run.step:,}')
  tell(f'written to {path}')


def _score(
  screen: Console, run: LoadedRun, name: str, path: pathlib.Path
) -> None:
  raw = datasets.new_examples(run.config.data, name)
  began = time.monotonic()
  scored: list[Predictions] = []
  with output_file(path) as file:
    for part in _shown(screen, run, raw):
      if path.suffix == '.csv':
        _write_lines(file, part, first=not scored)
      scored.append(part)
    whole = metrics.merge(scored)
    if path.suffix == '.npy':
      np.save(file, _probabilities(whole))
  seconds = max(time.monotonic() - began, 1e-9)
  facts = {
    'steps trained': run.step,
    'examples': len(whole.logits),
    'examples_per_s': len(whole.logits) / seconds,
    'mean probability': float(_probabilities(whole).mean(dtype=np.float64)),
  }
  if whole.labels is not None:
    numbers = metrics.compute(whole)
    for fact in ('auc', 'log_loss', 'accuracy', 'calibration'):
      facts[fact] = getattr(numbers, fact)
  screen.print(report.facts(facts))


def _shown(
  screen: Console, run: LoadedRun, raw: RawData
) -> Iterator[Predictions]:
  """Yields the scores, and shows how much of the file was read."""
  read = [0] * len(raw.parts)

  def watched(number: int, part: Part) -> Part:
    def chunks() -> Iterator[tuple[Chunk, int]]:
      for chunk, nbytes in part.chunks():
        read[number] = nbytes
        yield chunk, nbytes

    return part._replace(chunks=chunks)

  parts = tuple(watched(*item) for item in enumerate(raw.parts))
  total, examples = sum(part.size for part in parts), 0
  with Bar(screen, total or None, '%') as bar:
    for part in loading.scored(run, raw._replace(parts=parts)):
      yield part
      examples += len(part.logits)
      bar.show(sum(read), f'{examples:,} examples')


def _write_lines(file: BinaryIO, part: Predictions, first: bool) -> None:
  """Writes CSV with the shortest decimals that are read as the same f32."""
  values = _probabilities(part)
  columns = {'probability': values}
  if values.ndim > 1:
    columns = {f'probability_{t}': x for t, x in enumerate(values.T)}
  pl.DataFrame(columns).write_csv(file, include_header=first)


def _probabilities(part: Predictions) -> np.ndarray:
  return metrics.probabilities(part.logits.astype(np.float64)).astype('f4')
