"""Scores new examples with a run, or writes the rows of a table.

    python -m experiments.predict RUN --input=FILE [--output=predictions.csv]
    python -m experiments.predict RUN --rows=TABLE [--output=TABLE.npz]

RUN is the folder of a run, finished or not. The checkpoint is the newest, or
that of --step. A damaged one is refused. FILE has examples in the format of the
run's data, with labels or without. An id that training did not see gets the row
of unknown ids. The output has one line of probabilities per example, one for
each head: CSV or, if its name ends with .npy, an array f32[n] or f32[n, T].

The .npz of a table has `rows` [R, D] and their raw `ids` i64[R]. The row of
unknown ids is `unknown` [D].
"""

from collections.abc import Iterator
import contextlib
import pathlib
import time
from typing import Any, BinaryIO, TYPE_CHECKING

from absl import flags

from experiments.common import cli
from slipstream_jax.errors import UserError

if TYPE_CHECKING:
  import numpy as np

  from experiments.common.loading import LoadedRun
  from slipstream_jax.formats.base import Chunk, Part, RawData
  from slipstream_jax.training.metrics import Predictions


def main(folder: pathlib.Path) -> None:
  """Scores examples or writes rows.

  Raises:
    UserError: a flag is invalid, the run has no checkpoint, examples are bad,
      or the output cannot be written. Nothing of the output is then left.
  """
  from experiments.common import loading, report

  asked = flags.FLAGS
  check_choice(asked.input, asked.rows)
  path = output_of(asked.output, asked.rows)
  tell = report.teller(report.console())
  run = loading.load(folder, asked.data, step=asked.step, tell=tell)
  if asked.rows is None:
    score(run, asked.input, path)
  else:
    write_rows(run, asked.rows, path)


def check_choice(examples: str | None, table: str | None) -> None:
  """Checks that either examples or a table was given."""
  if (examples is None) == (table is None):
    raise UserError(
      'one of --input and --rows must be given',
      got='none of them' if examples is None else 'both',
      where='command line',
      hint='see --help',
    )


def output_of(name: str | None, table: str | None) -> pathlib.Path:
  """Returns the file to write for examples, or for the rows of a table."""
  default, suffixes = 'predictions.csv', ('.csv', '.npy')
  if table is not None:
    default, suffixes = f'{table}.npz', ('.npz',)
  path = pathlib.Path(name or default)
  if path.suffix not in suffixes or path.is_dir():
    raise UserError(
      f'the output must be a file that ends with {" or ".join(suffixes)}',
      got=path,
      where='--output',
      hint='give it such a name',
    )
  return path
