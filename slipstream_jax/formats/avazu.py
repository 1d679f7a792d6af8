"""Avazu's click logs: a CSV file with a header, in time order.

The format is that of Kaggle's Click-Through Rate Prediction of 2014: id, click,
hour (YYMMDDHH) and 21 categorical fields. Those of sites, apps and devices are
hex, the others decimal. The tables are those of RM4 (arXiv 2404.04270): one
dense feature, the hour of the day, and a table for each categorical field. Ten
days are too few for a weekday feature.
"""

from collections.abc import Iterator
import os
import pathlib

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.formats import lines, text
from slipstream_jax.formats.base import (
  BadLines,
  Chunk,
  Part,
  RawData,
  Split,
  split_at_end,
  Splits,
  train_and_test,
)
from slipstream_jax.formats.lines import Column, Schema
from slipstream_jax.tables import features_of

HEX = (
  *('site_id', 'site_domain', 'site_category'),
  *('app_id', 'app_domain', 'app_category'),
  *('device_id', 'device_ip', 'device_model'),
)
"""Fields of hex digits. All other categorical fields are decimal."""
TABLES = (
  *('C1', 'banner_pos', *HEX, 'device_type', 'device_conn_type'),
  *(f'C{i}' for i in range(14, 22)),
)
"""The categorical fields, each with a table of that name; F = 21."""
COLUMNS = ('id', 'click', 'hour', *TABLES)
ONE_DAY_TEST_SHARE = 0.2
"""Share of the examples to test on if all are of one day."""

_HEADER = ','.join(COLUMNS).encode()


def _are_hours(values: Int[np.ndarray, ' n']) -> Bool[np.ndarray, ' n']:
  """Whether each YYMMDDHH has a valid month, day and hour."""
  # Accepts 31 days in every month, which is enough to find typing errors.
  month, day = values // 10000 % 100, values // 100 % 100
  dates = (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
  return dates & (values % 100 < 24)


SCHEMA = Schema(
  (
    # Not a feature. Any text is allowed, because some ids do not fit i64.
    Column(
      *('id', 'an id must not be empty', 'write any text there'),
      *(lines.WORD, (1, text.MAX_LINE_BYTES)),
    ),
    lines.click('click'),
    Column(
      'hour',
      'an hour must be YYMMDDHH',
      'write two digits each of year, month, day and hour',
      10,
      (8, 8),
      fits=_are_hours,
    ),
    # In decimal fields, -1 is an id (in C20) and does not mean "missing".
    *(
      (lines.HEX if name in HEX else lines.DECIMAL)._replace(name=name)
      for name in TABLES
    ),
  ),
  delimiter=b',',
  header=_HEADER,
  header_hint='give the training file, the only one with clicks, or put its'
  ' header and columns there',
  whole=None,  # the last field has no fixed length
)
UNLABELLED = SCHEMA._replace(
  columns=(SCHEMA.columns[0], *SCHEMA.columns[2:]),
  header=_HEADER.replace(b'click,', b''),
)
"""The schema of Kaggle's test.csv: without clicks."""


def avazu_raw(
  path: str | os.PathLike[str],
  *,
  test_share: float | None = None,
  bad_lines: int = 0,
  labelled: bool | None = True,
) -> RawData:
  """Returns Avazu's train.csv as a raw data set.

  The last day is held out to test on, or the last fifth of a single day. For
  RM4's 32.3 M training examples, set `test_share` to 0.2.

  Args:
    path: the file, plain or gzip. It is not read yet.
    test_share: share of the examples to test on, from the end. It replaces the
      split by day.
    bad_lines: number of malformed lines that may be skipped.
    labelled: whether there is a column of clicks, which training needs. None:
      decided by the header. Days may come in any order unless it is True.

  Raises:
    UserError: a bad argument, or no such file. Reading raises the errors of
      `lines.read`, and one for days out of order.
  """
  path = pathlib.Path(path)
  bad = BadLines(bad_lines, 'avazu_raw')
  days: dict[int, int] = {}  # YYMMDD to examples, in file order
  in_order = labelled is True
  if labelled is None:
    line = text.first_line(path).removeprefix(lines.BOM)
    labelled = line != UNLABELLED.header
  schema = SCHEMA if labelled else UNLABELLED

  def chunks() -> Iterator[tuple[Chunk, int]]:
    days.clear()
    for block, fields in lines.read(path, schema, bad):
      if in_order:
        _count_days(fields, days, path)
      yield _chunk(fields), block.read

  def at_last_day(examples: int, parts: tuple[int, ...]) -> Splits:
    # A resumed preparation may not have read the file, so it has no days.
    if sum(days.values()) != examples:
      for _ in chunks():
        pass
    if len(days) < 2:
      return train_and_test(examples, round(examples * ONE_DAY_TEST_SHARE))
    return train_and_test(examples, days[max(days)])

  if test_share is None:
    split: Split = at_last_day
    tested = f'last day to test (last {ONE_DAY_TEST_SHARE:.0%} of a single day)'
  else:
    split = split_at_end(test_share, 'avazu_raw')
    tested = f'last {test_share:.3g} of its examples to test'
  return RawData(
    name=f'Avazu {path.name}, {tested}',
    features=features_of(TABLES),
    dense_features=1,
    parts=(Part(str(path), text.size(path), chunks),),
    split=split,
    bad=bad,
    settings={'test_share': test_share},
    format='avazu',
    labelled=labelled,
  )


def _count_days(
  fields: lines.Fields, days: dict[int, int], path: pathlib.Path
) -> None:
  """Adds the lines' days to those seen before. Days must be in order."""
  hours = fields.values[2]
  in_order = hours // 100
  # The first line is compared with the last of the blocks before.
  before = max(days, default=0)
  falls = np.flatnonzero(np.diff(in_order, prepend=before) < 0)
  if len(falls):
    raise UserError(
      'days must be in order, because the last one is held out to test on',
      got=f'hour {hours[falls[0]]} after a later day',
      where=f'{path}, line {fields.lines[falls[0]]}, column hour',
      hint='sort the lines below the header by that column',
    )
  for day, count in zip(*np.unique(in_order, return_counts=True), strict=True):
    days[int(day)] = days.get(int(day), 0) + int(count)


def _chunk(fields: lines.Fields) -> Chunk:
  """Returns the examples. Dense is the hour of the day, 0.0 to 23/24."""
  values = fields.values
  first = len(values) - len(TABLES)
  labelled = len(values) == len(COLUMNS)
  clicks = values[1] if labelled else np.empty((len(fields.lines), 0))
  dense = (values[first - 1] % 100).astype(np.float32) / np.float32(24)
  return Chunk(clicks.astype(np.float32), dense[:, None], values[first:].T)
