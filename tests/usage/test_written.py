"""Rows in memory as far as they were written are those of a whole table."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np

from experiments.common.written import WRITTEN
from slipstream_jax.store.base import FirstRows, RowStore
from slipstream_jax.store.memory import MEMORY
from slipstream_jax.types import RowBlock

ROWS = 40


def first_rows(seed):
  rng = np.random.default_rng(seed)
  rows = rng.normal(size=(ROWS, 3)).astype(np.float32)
  state = rng.normal(size=ROWS).astype(np.float32)

  def some(at):
    return RowBlock(rows[at], (state[at],))

  return FirstRows(ROWS, some, lambda: some(np.arange(ROWS)))


def equal(one, other):
  for a, b in zip(
    (one.rows, *one.state), (other.rows, *other.state), strict=True
  ):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


SOME = st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS)
CALLS = st.lists(
  st.tuples(st.sampled_from(['scatter', 'gather', 'reset']), SOME),
  max_size=15,
)


@given(CALLS)
def test_any_calls_have_the_answers_of_a_table_in_memory(calls):
  first = first_rows(0)
  (own,), (known,) = WRITTEN.open([first]), MEMORY.open([first])
  assert isinstance(own, RowStore)
  assert (own.num_rows, own.row_bytes) == (ROWS, known.row_bytes)
  own.reset(first)
  known.reset(first)
  written = set()
  for number, (call, some) in enumerate(calls):
    rows, other = np.array(some, np.int64), first_rows(number + 1)
    if call == 'scatter':
      block = other.rows(np.arange(len(rows) + 2) % ROWS)
      own.scatter(rows, block)
      known.scatter(rows, block)
      written.update(some)
    elif call == 'reset':
      own.reset(other)
      known.reset(other)
      written = set()
    size = len(rows) + number
    equal(own.gather(rows, size), known.gather(rows, size))
    assert own.written == len(written)
  equal(own.table(), known.table())
