"""Embedding tables and the features that look their rows up, as pure data.

Names and meanings are those of keras-rs' `TableConfig` and `FeatureConfig`.
"""

from collections.abc import Mapping, Sequence
import math
import numbers
from typing import Any, get_args, Literal, NamedTuple

from slipstream_jax.errors import check_optimizer, is_whole, UserError

Pooling = Literal['sum', 'mean', 'sqrtn', 'none']
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

Unknown = Literal['error', 'row']
UNKNOWNS: tuple[Unknown, ...] = get_args(Unknown)

ROW_DTYPES = ('float32', 'bfloat16', 'float16')


class Uniform(NamedTuple):
  """Initialiser: each element is uniform in [-scale, scale)."""

  scale: float


class Constant(NamedTuple):
  """Initialiser: each element is `value`."""

  value: float


Initializer = Uniform | Constant


class Table(NamedTuple):
  """One embedding table."""

  size: int
  """Number of ids: 0 to size - 1; at least 1."""
  dim: int = 16
  """D, length of a row, at least 1."""
  dtype: str = 'float32'
  """Dtype of the rows wherever they are kept, one of `ROW_DTYPES`. Steps
  compute new rows in f32 and round half precision stochastically."""
  initializer: Initializer | None = None
  """None: Uniform(1/sqrt(size)), as in DLRM (arXiv 1906.00091)."""
  optimizer: Any = None
  """An optax chain for this table's rows. None: the optimizer of all tables."""
  unknown: Unknown = 'error'
  """What to do with ids outside [0, size): 'error' raises, 'row' maps all of
  them to one extra row, the last."""

  @property
  def rows(self) -> int:
    """R: `size`, plus the row of unknown ids if there is one."""
    return self.size + (self.unknown == 'row')


class Feature(NamedTuple):
  """One feature: the lookups of an example in one table."""

  table: str
  """Name of the table. Several features may share it."""
  pooling: Pooling = 'sum'
  """How the rows of a bag become one embedding [D]: their weighted sum ('sum'),
  divided by the sum of weights ('mean') or by the root of the sum of squared
  weights ('sqrtn'). It is 0 for an empty bag or a divisor of 0. With 'none' the
  model gets the sequence [L, D], each row times its weight, 0 at padding."""
  max_length: int = 1
  """L, the most lookups of one example, at least 1. Shorter bags are padded."""
  weighted: bool = False
  """Whether each lookup carries a weight (f32). If not, all weigh 1."""


def check_table(where: str, table: Table) -> None:
  """Checks the values of a table.

  Raises:
    UserError: a value is invalid; `where` names the table.
  """
  _check_type(where, table, Table)
  _check_whole(f'{where}, size', table.size)
  _check_whole(f'{where}, dim', table.dim)
  _check_member(f'{where}, dtype', table.dtype, ROW_DTYPES)
  _check_member(f'{where}, unknown', table.unknown, UNKNOWNS)
  if table.optimizer is not None:
    check_optimizer(table.optimizer, f'{where}, optimizer')
  match table.initializer:
    case None:
      return
    case Uniform(number) | Constant(number):
      good = isinstance(number, numbers.Real) and math.isfinite(number)
    case _:
      good = False
  if not good:
    raise UserError(
      'an initializer must be Uniform(scale), Constant(value) or None, with a'
      ' finite number',
      got=repr(table.initializer),
      where=f'{where}, initializer',
      hint='leave it out for Uniform(1/sqrt(size))',
    )


def check_feature(
  where: str, feature: Feature, tables: Mapping[str, Table]
) -> None:
  """Checks the values of a feature.

  Raises:
    UserError: a value is invalid, or the feature's table does not exist.
  """
  _check_type(where, feature, Feature)
  _check_member(f'{where}, table', feature.table, [*tables])
  _check_member(f'{where}, pooling', feature.pooling, POOLINGS)
  _check_whole(f'{where}, max_length', feature.max_length)


def _check_member(where: str, value: object, members: Sequence[str]) -> None:
  if not isinstance(value, str) or value not in members:
    raise UserError(
      f'it must be one of {", ".join(members)}',
      got=repr(value),
      where=where,
      hint='pick one of them',
    )


def _check_type(where: str, value: object, wanted: type) -> None:
  if not isinstance(value, wanted):
    raise UserError(
      f'it must be a {wanted.__name__}',
      got=repr(value),
      where=where,
      hint=f'make it with {wanted.__name__}(...)',
    )


def _check_whole(where: str, size: object) -> None:
  if not is_whole(size, 1):
    raise UserError(
      'a size must be a whole number of at least 1',
      got=repr(size),
      where=where,
      hint='count the rows, elements or lookups again',
    )
