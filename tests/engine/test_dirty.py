"""Dirty rows: a set of rows, whatever the placement."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from slipstream_jax.engine.dirty import DirtyRows
from slipstream_jax.placement import Plan
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.training.loop import train
from tests.support.short_runs import SCHEDULES, start, WHERE

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


@functools.cache
def marked(placement, schedule):
  """Rows marked since some steps, of a run; what they were before it."""
  trainer, batches = start(placement, schedule, 0)
  before = jax.tree.map(np.array, trainer.engine.read_back())
  of_steps = []
  with batches:
    for number, taken in enumerate((3, 4, 6, 1, 100)):
      for group in trainer.engine.groups:
        group.dirty.begin(number)
      list(train(trainer, batches, taken))
      of_steps.append(
        [
          rows_of(g.dirty, t)
          for g in trainer.engine.groups
          for t in (number, None)
        ]
      )
  return of_steps, before, jax.tree.map(np.array, trainer.engine.read_back())


@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('placement', WHERE)
def test_placement_changes_no_mark(placement, schedule):
  steps, before, after = marked(placement, schedule)
  for own, others in zip(steps, marked('streamed', schedule)[0], strict=True):
    for rows, expected in zip(own, others, strict=True):
      np.testing.assert_array_equal(rows, expected)
  for group, (old, new) in enumerate(zip(before, after, strict=True)):
    moved = [
      (a != b).reshape(len(a), -1).any(axis=1)
      for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    ]
    changed = np.flatnonzero(np.any(moved, axis=0))
    assert set(changed.tolist()) <= set(steps[-1][2 * group + 1])
