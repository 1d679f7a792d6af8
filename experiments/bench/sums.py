"""Ways to sum the gradients of duplicate rows, side by side.

What a lookup's backward pass does: of B F gradients, those of one row are
added up. Right is any order; fast depends on the backend.
"""

from collections.abc import Callable
import functools
import time

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np
from rich.table import Table as ShownTable

from slipstream_jax.stream.buffers import to_device
from slipstream_jax.types import Lookups

Gradients = Float[jax.Array, 'n D']
Places = Int[jax.Array, ' n']
Sum = Callable[[Gradients, Places, int], Float[jax.Array, 'P D']]


def scatter_add(
  gradients: Gradients, places: Places, rows: int
) -> Float[jax.Array, 'P D']:
  """What differentiating the gather gives, and the step uses."""
  zeros = jnp.zeros((rows, gradients.shape[1]), gradients.dtype)
  return zeros.at[places].add(gradients, mode='promise_in_bounds')


def sort_segment_sum(
  gradients: Gradients, places: Places, rows: int
) -> Float[jax.Array, 'P D']:
  """Sorts on the device, then sums runs."""
  order = jnp.argsort(places)
  return jax.ops.segment_sum(
    gradients[order], places[order], rows, indices_are_sorted=True
  )


def one_hot_product(
  gradients: Gradients, places: Places, rows: int
) -> Float[jax.Array, 'P D']:
  """A product with a 0/1 matrix, a block of lookups at a time."""
  block = 1024
  padding = -len(places) % block
  blocks = jnp.pad(places, (0, padding), constant_values=rows)
  parts = jnp.pad(gradients, ((0, padding), (0, 0)))

  def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple:
    at, values = part
    return total + jax.nn.one_hot(at, rows, axis=0) @ values, None

  start = jnp.zeros((rows, gradients.shape[1]), gradients.dtype)
  shaped = blocks.reshape(-1, block), parts.reshape(-1, block, parts.shape[1])
  return jax.lax.scan(add, start, shaped)[0]


SUMS: dict[str, Sum] = {
  'scatter-add': scatter_add,
  'sort, then segment sum': sort_segment_sum,
}
if jax.default_backend() != 'cpu':  # quadratic: seconds on a CPU
  SUMS['product with one-hot'] = one_hot_product


def _flipped(
  way: Sum, rows: int, gradients: Gradients, places: Places
) -> Float[jax.Array, 'P D']:
  return way(gradients, places, rows)


def times(
  inverse: Lookups, rows: int, dim: int, rounds: int = 30
) -> dict[str, float]:
  """Median ms of each way, in alternation; they agree to f32's rounding.

  Args:
    inverse: place of each lookup of a batch, none of them padding.
    rows: P, of the padded block.
    dim: D.
    rounds: turns of each.
  """
  places = to_device(inverse.reshape(-1))
  rng = np.random.default_rng(0)
  values = rng.normal(size=(inverse.size, dim)).astype(np.float32)
  gradients = to_device(values)
  calls = {
    name: jax.jit(functools.partial(_flipped, way, rows))
    for name, way in SUMS.items()
  }
  spent: dict[str, list[float]] = {name: [] for name in SUMS}
  for turn in range(rounds + 2):
    for name, call in calls.items():
      started = time.perf_counter()
      jax.block_until_ready(call(gradients, places))
      if turn >= 2:
        spent[name].append(1e3 * (time.perf_counter() - started))
  return {name: float(np.median(ms)) for name, ms in spent.items()}


def table(figures: dict[str, float]) -> ShownTable:
  """The times for people to read."""
  shown = ShownTable(
    title='summing gradients of duplicate rows', title_justify='left'
  )
  shown.add_column('way')
  shown.add_column('ms', justify='right')
  for name, ms in figures.items():
    shown.add_row(name, f'{ms:.2f}')
  return shown
