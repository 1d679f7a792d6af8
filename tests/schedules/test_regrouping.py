"""Laws of Hotline's and FAE's orders: which example comes when, and how far.

Examples are told apart by their dense features.
"""

import collections

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.schedules.fae import (
  after_swap,
  fae,
  FaeOrder,
  PUBLISHED,
  Rate,
  RateHistory,
)
from slipstream_jax.schedules.hotline import hotline, hotline_micro
from slipstream_jax.schedules.rebatch import is_popular, WorkingSetQueue
from tests.support.schedule_bench import cut, examples, HOT_ROWS, Stream
from tests.support.schedule_draws import HELD_OUT

SIZE = 4


def keys(batches):
  """The examples of batches, in their order."""
  return [
    value.tobytes()
    for batch in batches
    for value in batch.dense[batch.weights > 0]
  ]


def stream(n, seed, cold=0.3):
  return cut(examples(np.ones(n), seed, cold), SIZE)


def kinds(batch):
  return is_popular(batch, HOT_ROWS)[batch.weights > 0]


class Losses:
  """A probe that answers from a script, and notes who asked for what."""

  def __init__(self, losses):
    self.script, self.asked = iter(losses), []
    self.losses = self.logits = self

  def wait(self, number):
    self.asked.append(number)
    return next(self.script)

  def row_change(self, window):
    raise AssertionError(window)

  def resume(self, number):
    pass

  forget = resume

  def knows(self, number):
    return False

  def all(self):
    return {}


def strips_of(batches, probe, rate=PUBLISHED, settle=1, epochs=1, read=None):
  """FAE's batches, as lists of one kind that follow one another."""
  source = FaeOrder(
    Stream(batches, epochs),
    HOT_ROWS,
    probe,
    read or len(batches),
    rate,
    settle,
    '',
  )
  strips = []
  for batch in source:
    here = source.take_edge()['hot_here']
    if not strips or strips[-1][0] != here:
      strips.append((here, []))
    strips[-1][1].append(batch)
  return source, strips


sizes = st.integers(1, 120)
seeds = st.integers(0, 10**6)


@given(sizes, seeds, st.sampled_from([0, 0.1, 0.5, 1]), st.integers(1, 3))
def test_fae_gives_every_example_once_an_epoch(n, seed, cold, epochs):
  batches = stream(n, seed, cold)
  _, strips = strips_of(batches, None, epochs=epochs)
  found = [batch for _, strip in strips for batch in strip]
  assert sorted(keys(found)) == sorted(keys(batches) * epochs)
  total = collections.Counter(keys(batches))
  assert collections.Counter(keys(found[: len(found) // epochs])) == total
  for here, strip in strips:
    assert all((kinds(batch) == here).all() for batch in strip)
  # Within a kind they keep their order.
  popular = np.concatenate([kinds(batch) for batch in batches])
  for kind in (False, True):
    own = keys(b for here, strip in strips if here == kind for b in strip)
    of_kind = zip(keys(batches), popular, strict=True)
    assert own == [key for key, one in of_kind if one == kind] * epochs


@given(sizes, seeds, st.floats(1, 100), st.sampled_from([0, -0.5, 0.5]))
def test_strips_have_the_published_lengths(n, seed, percent, drift):
  """By a second, plainer account of the schedule."""
  steps = np.random.default_rng(seed).normal(drift, 1, 300).round(1)
  losses = np.cumsum(steps).tolist()
  batches = stream(n, seed)
  probe = Losses(losses)
  source, strips = strips_of(batches, probe, Rate(percent), settle=1)
  popular = np.concatenate([kinds(batch) for batch in batches])
  left = [-(-np.count_nonzero(popular == kind) // SIZE) for kind in (0, 1)]
  total, rate, script = list(left), percent, iter(losses)
  kind, lengths, last, streak, swaps = 0 if left[0] else 1, [], None, 0, 0
  while any(left):
    length = min(left[kind], max(1, int(np.ceil(total[kind] * rate / 100))))
    length = length if left[1 - kind] else left[kind]
    lengths.append((bool(kind), length))
    left[kind] -= length
    if left[1 - kind]:
      kind, swaps, loss = 1 - kind, swaps + 1, next(script)
      if last is not None and loss > last:
        rate, streak = max(rate / 2, 1), 0
      elif last is not None and loss < last:
        streak += 1
        if streak == 4:
          rate, streak = min(2 * rate, 100), 0
      else:
        streak = 0
      last = loss
  assert [(here, len(strip)) for here, strip in strips] == lengths
  assert source.swaps == swaps == len(probe.asked)
  assert len(strips) == swaps + 1


def test_the_rate_goes_as_published():
  rate, past, seen = Rate(), RateHistory(), []
  for loss in [*range(9, 0, -1), *range(1, 10)]:
    rate, past = after_swap(rate, past, float(loss))
    seen.append(rate.percent)
  # The first has nothing to be compared with; then four that fall, twice.
  assert seen[:9] == [50] * 4 + [100] * 5
  assert seen[9:] == [100, 50, 25, 12.5, 6.25, 3.125, 1.5625, 1, 1]


def test_the_loss_of_a_swap_is_asked_of_the_step_settle_batches_before():
  batches = stream(200, 0, cold=0.6)
  source = FaeOrder(
    Stream(batches, 1), HOT_ROWS, Losses([1.0] * 99), 50, Rate(), 5, ''
  )
  scored, swaps, before = [], [], 0
  for number, _ in enumerate(source):
    if source.swaps > before:
      swaps.append(number)
      before = source.swaps
    if source.take_edge()['scores'] is not None:
      scored.append(number)
  assert [swap - 5 for swap in swaps] == scored[: len(swaps)]


def test_short_strips_use_losses_once_they_are_settled():
  probe = Losses([1.0] * 99)
  source, strips = strips_of(stream(200, 0, 0.6), probe, Rate(4), settle=7)
  assert len(strips) > 20
  assert probe.asked == [*range(1, len(probe.asked) + 1)]
  assert 10 < len(probe.asked) < source.swaps


def test_fae_refuses_what_it_cannot_read_twice():
  class Growing(Stream):
    def get_state(self):
      return super().get_state() | {'vocabularies': {'item': 1}}

  with pytest.raises(UserError, match='growing ones of item'):
    fae(5).make(Growing(stream(9, 0)), HOT_ROWS, Losses([]))
  for bad in ({'batches': 0}, {'settle': 0}, {'rate': Rate(0)}):
    with pytest.raises(UserError):
      fae(**{'batches': 5, 'held_out': HELD_OUT} | bad)


@given(sizes, seeds, st.integers(1, 6), st.sampled_from([0, 0.1, 0.5, 1]))
def test_hotline_regroups_working_sets(n, seed, count, cold):
  batches = stream(n, seed, cold)
  schedule = hotline(count).make(Stream(batches, 1), HOT_ROWS, Losses([]))
  found, mixed = [], 0
  for item in schedule:
    found.append(item.batch)
    popular = kinds(item.batch)
    assert popular.all() or not popular.any()
    mixed += not (item.batch.weights > 0).all()
  assert sorted(keys(found)) == sorted(keys(batches))  # every example once
  assert mixed <= 2  # padded is the end of each kind alone
  for kind in (False, True):
    alike = [batch for batch in found if kinds(batch)[0] == kind]
    order = [key for key in keys(batches) if key in set(keys(alike))]
    assert keys(alike) == order


def test_a_working_set_gives_full_popular_batches_and_then_others():
  batches = stream(40 * SIZE, 1, cold=0.5)
  schedule = hotline(4).make(Stream(batches, 1), HOT_ROWS, Losses([]))
  read, order = [], []
  for item in schedule:
    read.append(item.seen)
    order.append(bool(kinds(item.batch)[0]))
  starts = np.flatnonzero(read)
  assert {r for r in read if r} == {4 * SIZE}
  for start, end in zip(starts, [*starts[1:], len(order) - 2], strict=True):
    one = order[start:end]
    assert one == sorted(one, reverse=True)


@given(sizes, seeds, st.integers(1, 6), st.integers(0, 9))
def test_hotline_keeps_the_order_while_it_learns(n, seed, count, learn):
  batches = stream(n, seed)
  made = hotline(count, learn=learn)
  found = [
    item.batch for item in made.make(Stream(batches, 1), HOT_ROWS, Losses([]))
  ]
  whole = min(learn, n // SIZE)  # full batches
  assert keys(found[:whole]) == keys(batches[:whole])
  assert sorted(keys(found)) == sorted(keys(batches))
  rest = hotline(count).make(Stream(batches[learn:], 1), HOT_ROWS, Losses([]))
  if n > learn * SIZE:  # then as if the others were the whole source
    assert keys(found[whole:]) == keys([item.batch for item in rest])


@given(sizes, seeds, st.integers(1, 6))
def test_thinned_batches_fill_no_more_than_a_working_set(n, seed, count):
  """As skipping gives them."""
  rng, hot = np.random.default_rng(seed), HOT_ROWS
  queue = WorkingSetQueue(count, 0, hot, SIZE)
  for batch in stream(n, seed):
    kept = (rng.random(SIZE) < rng.random()) & (batch.weights > 0)
    queue.put(batch.map(lambda x, kept=kept: x[kept]))
    while queue.ready():
      assert len(kinds(queue.take())) == SIZE
    assert queue.longest <= (count + 1) * SIZE


@given(sizes, seeds)
def test_hotline_micro_keeps_the_examples_of_a_batch(n, seed):
  batches = stream(n, seed)
  schedule = hotline_micro().make(Stream(batches, 1), HOT_ROWS, Losses([]))
  for item, batch in zip(schedule, batches, strict=True):
    assert sorted(keys([item.batch])) == sorted(keys([batch]))
    order = kinds(item.batch).tolist()
    assert order == sorted(order, reverse=True)
    assert (np.diff(item.batch.weights) <= 0).all()  # padding comes last


@pytest.mark.parametrize('make', [hotline, hotline_micro])
def test_a_resumed_hotline_reads_one_working_set_again(make):
  """That it gives what was to come is a law of all schedules."""

  class Counted(Stream):
    read = 0

    def __next__(self):
      self.read += 1
      return super().__next__()

  batches = stream(20 * SIZE, 3)
  for item in make().make(Stream(batches, 1), HOT_ROWS, Losses([])):
    source = Counted(batches, 1)
    make().make(source, HOT_ROWS, Losses([])).set_state(item.state)
    assert source.read <= 4


@pytest.mark.parametrize('make', [hotline, hotline_micro])
def test_a_bad_number_of_batches_names_the_function_called(make):
  with pytest.raises(UserError, match=rf'\({make.__name__}, batches\)'):
    make(batches=-1)
