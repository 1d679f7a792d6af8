"""Draws initial rows by functions such as those of `jax.nn.initializers`.

Each row is drawn as an array [1, D], by a key that depends on the seed, the
table and the row's number alone. So any rows can be drawn by themselves. If the
values of a function depend on the number of rows, as those of glorot_normal do,
the whole table is drawn at once, and kept in host memory.

Rows are drawn on the CPU wherever JAX has it, so that devices agree.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, UInt32
import numpy as np

from slipstream_jax.engine.buffers import to_cpu, to_device, to_host
from slipstream_jax.errors import UserError
from slipstream_jax.initializers import DrawFn, GivenRows, VectorsById
from slipstream_jax.store.host_table import Draw
from slipstream_jax.tables import Table, TableSet
from slipstream_jax.types import RowIds

# Rows that are drawn at a time, always as many: a program for another number
# might round the same row otherwise.
_ROWS = 256
_SAMPLED = 4096  # rows that show whether values depend on the number of rows
_MOST_BYTES = 1 << 30  # of a table that is drawn at once


def draws_of(tables: TableSet) -> dict[str, Draw]:
  """Returns the function that draws rows of each table that has one.

  Raises:
    UserError: a function cannot be called as those of `jax.nn.initializers`, or
      its values depend on the number of rows and the table is too large.
  """
  draws: dict[str, Draw] = {}
  for number, (name, table) in enumerate(tables.tables.items()):
    how = table.initializer
    if callable(how) and not isinstance(how, GivenRows | VectorsById):
      draws[name] = _draw_of(how, number, table, f'Table {name!r}, initializer')
  return draws


def _draw_of(function: DrawFn, number: int, table: Table, where: str) -> Draw:
  dim, rows = table.embedding_dim, table.rows
  _check_call(function, dim, where)
  if not _depends_on_rows(function, dim):
    return functools.partial(_drawn, function, number, dim)
  if 4 * rows * dim > _MOST_BYTES:
    raise UserError(
      'an initializer whose values depend on the number of rows is drawn at'
      f' once, so that its table has at most {_MOST_BYTES >> 30} GiB in f32',
      got=f'{4 * rows * dim / (1 << 30):.3g} GiB',
      where=where,
      hint='give jax.nn.initializers.normal(stddev), or an array of its rows',
    )
  # One table of one seed is kept. Nobody writes it.
  whole = functools.lru_cache(maxsize=1)(
    lambda seed: _whole(function, number, (rows, dim), seed)
  )

  def draw(seed: int, rows: RowIds) -> np.ndarray:
    part: np.ndarray = whole(seed)[rows]
    return part

  return draw


def _check_call(function: DrawFn, dim: int, where: str) -> None:
  """Checks that a function draws f32[1, dim]."""
  shape = (1, dim)
  try:
    got = jax.eval_shape(
      lambda data: function(_key(data), shape, jnp.float32),
      jax.ShapeDtypeStruct((2,), jnp.uint32),
    )
    flaw = None
    if (got.shape, got.dtype) != (shape, jnp.float32):
      flaw = f'{got.dtype}{list(got.shape)}'
  except Exception as error:  # of any kind, from the user's function
    lines = str(error).splitlines()
    flaw = f'{type(error).__name__}: {lines[0] if lines else ""}'
  if flaw is not None:
    raise UserError(
      'a function that initializes rows is called as initializer(key, shape,'
      f' dtype), and returns that, here float32{list(shape)}',
      got=flaw,
      where=where,
      hint='give one such as jax.nn.initializers.normal(0.01)',
    )


def _key(data: Any) -> jax.Array:
  # Of a named kind, so that no setting of JAX changes the rows.
  return jax.random.wrap_key_data(data, impl='threefry2x32')


def _key_of(table: UInt32[jax.Array, '3']) -> jax.Array:
  """Returns the key of a table."""
  return jax.random.fold_in(_key(table[:2]), table[2])


def _table(seed: int, number: int) -> Any:
  """Returns the seed's two words and the table's number, u32[3]."""
  # An argument, so that tables of one dim and one function share a program.
  words = [seed >> 32, seed & 0xFFFFFFFF, number]
  return _placed(np.array(words, np.uint32))


def _placed(tree: Any) -> Any:
  """Puts arrays on the CPU, or on the default device if JAX has no CPU."""
  try:
    return to_cpu(tree, owned=True)
  except UserError:
    return to_device(tree, owned=True)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draw(
  function: DrawFn,
  dim: int,
  table: UInt32[jax.Array, '3'],
  rows: UInt32[jax.Array, 'n 2'],
) -> Float[jax.Array, 'n _D']:
  key = _key_of(table)

  def draw(words: jax.Array) -> jax.Array:
    own = jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1])
    return function(own, (1, dim), jnp.float32)[0]

  return jax.vmap(draw)(rows)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draw_whole(
  function: DrawFn,
  shape: tuple[int, int],
  table: UInt32[jax.Array, '3'],
) -> Float[jax.Array, '_R _D']:
  whole: jax.Array = function(_key_of(table), shape, jnp.float32)
  return whole


def _drawn(
  function: DrawFn, number: int, dim: int, seed: int, rows: RowIds
) -> np.ndarray:
  """Returns rows of table `number`, f32[U, dim]."""
  words = np.zeros((-(-len(rows) // _ROWS) * _ROWS, 2), np.uint32)
  words[: len(rows), 0] = rows >> 32
  words[: len(rows), 1] = rows & 0xFFFFFFFF
  out = np.empty((len(words), dim), np.float32)
  table = _table(seed, number)
  for at in range(0, len(words), _ROWS):
    some = _placed(words[at : at + _ROWS])
    out[at : at + _ROWS] = to_host(_draw(function, dim, table, some))
  return out[: len(rows)]


def _whole(
  function: DrawFn, number: int, shape: tuple[int, int], seed: int
) -> np.ndarray:
  """Returns all rows of table `number`, f32[R, dim]."""
  table = _table(seed, number)
  whole: np.ndarray = to_host(_draw_whole(function, shape, table))
  return whole


@functools.lru_cache(maxsize=64)
def _depends_on_rows(function: DrawFn, dim: int) -> bool:
  """Whether rows that are drawn one by one have another size on average."""
  alone = _drawn(function, 0, dim, 0, np.arange(_SAMPLED))
  whole = _whole(function, 0, (_SAMPLED, dim), 0)
  one, other = (
    float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
    for x in (alone, whole)
  )
  return abs(one - other) > 0.1 * max(one, other)
