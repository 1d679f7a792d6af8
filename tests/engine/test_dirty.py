"""Dirty rows: a set of rows, whatever the placement."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np

from slipstream_jax.engine.dirty import DirtyRows
from slipstream_jax.placement import Plan
from slipstream_jax.placement.base import NO_ROWS

N = 37
ROWS = st.lists(st.integers(0, N - 1), unique=True)


def rows_of(dirty, token):
  """The rows that changed since the token, ascending."""
  bits = np.unpackbits(dirty.bits(token), bitorder='little')
  return np.flatnonzero(bits).tolist()


def plan_of(rows, hot):
  rows = np.array(rows, np.int64)
  places = {row: place for place, row in enumerate(hot)}
  index = np.array([places.get(r, len(hot)) for r in rows.tolist()], np.int32)
  no = np.zeros((0, 1), np.int32)
  return Plan(rows, no, NO_ROWS, NO_ROWS, NO_ROWS, index, 0, 0)


@settings(max_examples=200)
@given(data=st.data())
def test_marks_are_sets(data):
  dirty, sets = DirtyRows(N), {None: set()}
  for number in range(data.draw(st.integers(0, 12))):
    match data.draw(st.sampled_from(['step', 'begin', 'keep', 'add', 'all'])):
      case 'step':
        rows, fresh = data.draw(ROWS), data.draw(ROWS)
        hot = data.draw(ROWS)
        still = data.draw(st.none() | st.sets(st.sampled_from(hot or [0])))
        mask = None if still is None else np.isin(hot, [*still])
        dirty.mark(plan_of(rows, hot), mask, np.array(fresh, np.int64))
        changed = set(rows) - ((still or set()) & set(hot)) | set(fresh)
        for one in sets.values():
          one |= changed
      case 'begin':
        dirty.begin(number)
        sets[number] = set()
      case 'keep':
        kept = data.draw(st.sets(st.sampled_from([*sets])))
        dirty.keep(kept)
        sets = {t: s for t, s in sets.items() if t in kept | {None}}
      case 'add':
        rows = data.draw(ROWS)
        dirty.add(np.array(rows, np.int64))
        for one in sets.values():
          one |= set(rows)
      case 'all':
        if data.draw(st.booleans()):
          dirty.add(np.arange(N))
          sets = {token: set(range(N)) for token in sets}
        else:
          rows = data.draw(ROWS)
          dirty = DirtyRows(N)
          dirty.add(np.array(rows, np.int64))
          sets = {None: set(rows)}
  for token, rows in sets.items():
    assert dirty.knows(token)
    assert rows_of(dirty, token) == sorted(rows)
    assert dirty.count(token) == len(rows)
  assert not dirty.knows('another')
