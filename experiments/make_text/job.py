"""Formats examples of the synthetic stream as lines of Criteo's raw text."""

import pathlib

import numpy as np
import polars as pl

from experiments.common import report
from experiments.common.progress import Bar
from experiments.common.workdir import output_file
from slipstream_jax.errors import UserError
from slipstream_jax.hashing import GOLDEN, mix
from slipstream_jax.synthetic.clicks import examples_at
from slipstream_jax.synthetic.spec import SyntheticSpec
from slipstream_jax.tables import offsets

_LINES = 1 << 16  # written at a time
# Shares of lines that lack a field, which differ much between fields.
_MISSING = np.append(
  np.resize([0.45, 0.0, 0.2, 0.2, 0.03, 0.2, 0.0], 13),
  np.resize([0.0, 0.0, 0.03, 0.03, 0.0, 0.1, 0.0, 0.0, 0.4], 26),
)


def make(file: str, *numbers: str) -> None:
  """Writes a file. `numbers` are its lines, and the seed if there are two.

  Raises:
    UserError: invalid numbers, or the file cannot be written.
  """
  try:
    lines, seed = [int(word) for word in [*numbers, '0'][:2]]
  except ValueError as error:
    raise UserError(
      'LINES and SEED must be whole numbers',
      got=' '.join(numbers),
      where='command line',
      hint='write FILE LINES [SEED]',
    ) from error
  if lines < 1:
    raise UserError(
      'a file must have at least one line',
      got=lines,
      where='LINES',
      hint='ask for one or more',
    )
  path, screen = pathlib.Path(file), report.console()
  spec = SyntheticSpec(seed=seed)
  with (
    output_file(path, 'FILE') as out,
    Bar(screen, lines, 'line', f'writing {path}') as bar,
  ):
    for first in range(0, lines, _LINES):
      end = min(first + _LINES, lines)
      frame = _frame(spec, np.arange(first, end))
      frame.write_csv(out, separator='\t', include_header=False)
      bar.show(end)
  size = report.text('bytes', path.stat().st_size)
  screen.print(f'{path}: {lines:,} lines, {size}', highlight=False)


def _frame(spec: SyntheticSpec, positions: np.ndarray) -> pl.DataFrame:
  """Returns the fields of examples of a stream, null where one is missing."""
  names = [str(field) for field in range(40)]
  columns, _ = examples_at(spec, positions)
  integers = np.rint(np.expm1(columns.dense)).astype(np.int64)
  rows = columns.lookups - offsets(spec.rows)[:-1]
  # A draw for each line and field says whether the line has the field.
  keys = mix((positions + 1).astype(np.uint64) * GOLDEN)
  fields = np.arange(1, 40, dtype=np.uint64) * GOLDEN
  present = _uniform(mix(keys[:, None] + fields)) >= _MISSING
  values = [columns.labels.astype(np.int8), *integers.T, *_ids(rows).T]
  frame = pl.DataFrame(dict(zip(names, values, strict=True)))
  masks = pl.DataFrame(present, schema=names[1:])
  return frame.with_columns(
    pl.when(masks[name]).then(pl.col(name)).alias(name) for name in names[1:]
  )


def _uniform(bits: np.ndarray) -> np.ndarray:
  return (bits >> np.uint64(11)) * (1.0 / (1 << 53))


def _ids(rows: np.ndarray) -> np.ndarray:
  """Returns 8 hex digits for each row of 26 tables, str[n, 26]."""
  # An odd factor permutes 32 bits, so different rows get different ids.
  bits = rows.astype(np.uint32) * np.uint32(0x9E3779B1)
  bits ^= np.arange(26, dtype=np.uint32) * np.uint32(0x01000193)
  digits = bits.astype('>u4').tobytes().hex()
  texts = np.frombuffer(digits.encode(), 'S8').astype(str)
  return texts.reshape(rows.shape)
