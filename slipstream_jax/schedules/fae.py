"""FAE's order: runs of popular and of other batches (arXiv 2103.00686).

A pass over the source is cut into batches of popular examples, which look up
hot rows only, and batches of the others. A run of the others is trained, then a
run of popular ones, and so on. A run has R % of the pass's batches of its kind.
At each swap the loss of held-out examples is compared with the loss at the swap
before. If it has risen, R is halved. If it has fallen some times in a row, R is
doubled.

The batches of each kind are counted first, as FAE classifies all examples
before it trains. Then each kind is read from its own position, so only examples
that fill no batch yet are kept. One thing differs from the paper: a loss is of
the step `settle` batches before the swap, so that no step waits for it.
"""

import copy
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.schedules.base import (
  check_same,
  OrderedSource,
  PlainSchedule,
  Probe,
  Regrouping,
  ScheduleSpec,
  State,
)
from slipstream_jax.schedules.rebatch import (
  is_popular,
  positions,
  real_examples,
  Rebatcher,
)
from slipstream_jax.types import Batch, HotRows

OTHERS, POPULAR = 0, 1


class Rate(NamedTuple):
  """FAE's rate scheduler: how long its runs are."""

  percent: float = 50.0
  """R, share of a pass's batches of one kind in a run."""
  patience: int = 4
  """Swaps in a row at which the loss must fall before R is doubled."""
  floor: float = 1.0
  """Least R."""


class RateHistory(NamedTuple):
  """Loss at the swap before, and swaps in a row at which it has fallen."""

  loss: float | None = None
  fallen: int = 0


def after_swap(
  rate: Rate, history: RateHistory, loss: float
) -> tuple[Rate, RateHistory]:
  """Returns rate and history after a swap with this loss."""
  fallen = history.fallen + 1
  if history.loss is None or loss == history.loss:
    return rate, RateHistory(loss)
  if loss > history.loss:
    half = max(rate.percent / 2, rate.floor)
    return rate._replace(percent=half), RateHistory(loss)
  if fallen < rate.patience:
    return rate, RateHistory(loss, fallen)
  double = min(2 * rate.percent, 100.0)
  return rate._replace(percent=double), RateHistory(loss)


PUBLISHED = Rate()


def fae(
  batches: int,
  held_out: Batch | None = None,
  rate: Rate = PUBLISHED,
  settle: int = 20,
  passes: int | None = None,
) -> ScheduleSpec:
  """Trains runs of popular examples and of others in turn.

  Args:
    batches: of the source that make one pass. It may end before.
    held_out: examples with labels whose loss decides. None: R stays.
    rate: to begin with.
    settle: batches from a loss to the swap at which it is used.
    passes: over the source. None: until it ends.

  Raises:
    UserError: a number out of range.
  """
  check_whole(batches, 1, 'fae, batches', 'give those of an epoch')
  check_whole(settle, 1, 'fae, settle', 'use 20')
  check_whole(rate.patience, 1, 'Rate.patience', 'use 4, as published')
  if not 0 < rate.floor <= rate.percent <= 100:
    raise UserError(
      'a rate must be in [floor, 100], with a floor above 0',
      got=f'{rate.percent} with a floor of {rate.floor}',
      where='Rate.percent',
      hint='use 50 and 1, as published',
    )
  if passes is not None:
    check_whole(passes, 1, 'fae, passes', 'leave it out for no end')
  scored = held_out is not None
  words = f'fae {batches} {passes} {settle} {scored} {[*map(float, rate)]}'

  def order(source: BatchSource, hot: HotRows, probe: Probe) -> FaeOrder:
    how = batches, rate, settle, words, passes
    return FaeOrder(source, hot, probe if scored else None, *how)

  def make(
    source: BatchSource, hot: HotRows | None, probe: Probe
  ) -> PlainSchedule:
    assert hot is not None
    return PlainSchedule(order(source, hot, probe))

  asks = settle if scored else None
  regrouping = Regrouping(words, order, settle=asks, held_out=held_out)
  return ScheduleSpec(make, needs_hot=True, regrouping=regrouping)


class FaeOrder(OrderedSource):
  """A source of the examples of another one in FAE's order.

  Attributes:
    swaps: number of times that a run of one kind followed one of the other.
  """

  def __init__(
    self,
    source: BatchSource,
    hot: HotRows,
    probe: Probe | None,
    batches: int,
    rate: Rate,
    settle: int,
    words: str,
    passes: int | None = None,
  ) -> None:
    """Takes over `source` and reads it twice. Arguments are those of `fae`."""
    super().__init__(source)
    self._hot, self._probe = hot, probe
    self._batches, self._settle, self._words = batches, settle, words
    self._rate, self._history, self._passes = rate, RateHistory(), passes
    self.swaps = 0
    position: State = source.get_state()
    if 'vocabularies' in position:
      raise UserError(
        'a source is read at two places only where its vocabularies are frozen',
        got=f'growing ones of {", ".join(position["vocabularies"])}',
        where='train, source',
        hint='fit the vocabularies before, or train in the order of the source',
      )
    self._begin(position)
    self._kind: int | None = None
    # Batches read, and the one to be scored. Numbers of losses to be used, and
    # of deliveries before each was asked for.
    self._given, self._scored = 0, -1
    self._losses: list[list[int]] = []
    self._delivered, self._number, self._passed = 0, 0, 0
    self._ask: int | None = None

  def _begin(self, position: State) -> None:
    """Begins a pass over the source, from a position of it."""
    # By kind, where it is read, batches read, and its batches in the pass.
    self._positions, self._read = [position, position], [0, 0]
    self._total, self._left = [0, 0], [0, 0]
    self._queues: list[Rebatcher] | None = None
    self._after, self._end = position, 0  # end of the pass, once counted
    self._strip = 0  # batches left of the run
    self._at: int | None = None  # the kind that the source is read for

  def __next__(self) -> Batch:
    if self._queues is None and not self._count():
      raise StopIteration
    if not self._strip:
      if not any(self._left):
        if self._passed + 1 == self._passes:
          raise StopIteration
        self._passed += 1
        self._begin(self._after)
        return next(self)
      self._next_run()
    assert self._kind is not None
    batch = self._take(self._kind)
    if self._given == self._scored:
      self._number += 1
      self._ask = self._number  # in place of one that was never delivered
    self._given += 1
    self._strip -= 1
    self._left[self._kind] -= 1
    return batch

  def _count(self) -> bool:
    """Counts the batches of each kind in the pass. False if there is none."""
    start, sizes, counts = self._after, [], np.zeros(2, int)
    self._source.set_state(start)
    for batch in itertools.islice(self._source, self._batches):
      sizes.append(len(batch.labels))
      popular = is_popular(batch, self._hot)
      counts += np.bincount(popular[batch.weights > 0], minlength=2)
    after = self._source.get_state()
    self._source.set_state(start)
    self._end = len(sizes)
    if not counts.sum():
      return False
    self._after, size = after, sizes[0]
    self._total = [int(n) for n in -(-counts // size)]
    self._left = list(self._total)
    self._queues = [Rebatcher(size) for _ in counts]
    return True

  def _next_run(self) -> None:
    kind = POPULAR if self._kind == OTHERS else OTHERS
    if not self._left[kind]:
      kind = 1 - kind
    if self._kind not in (None, kind):
      self.swaps += 1
      self._compare()
    self._kind = kind
    left = self._left[kind]
    alone = not self._left[1 - kind]  # the other kind is used up
    length = max(1, math.ceil(self._total[kind] * self._rate.percent / 100))
    self._strip = left if alone else min(length, left)
    last = self._given + self._strip - self._settle
    self._scored = max(last, self._given) if self._probe else -1

  def _compare(self) -> None:
    """Updates the rate by the losses that are `settle` batches old."""
    while self._losses and self._probe is not None:
      number, delivered = self._losses[0]
      if self._delivered - delivered < self._settle:
        return
      del self._losses[0]
      loss = float(self._probe.losses.wait(number))
      self._rate, self._history = after_swap(self._rate, self._history, loss)

  def _take(self, kind: int) -> Batch:
    """Returns the next batch of a kind. The last one of the pass is padded."""
    assert self._queues is not None
    queue = self._queues[kind]
    while not queue.ready() and self._read[kind] < self._end:
      if self._at != kind:
        self._source.set_state(self._positions[kind])
        self._at = kind
      batch = real_examples(next(self._source))
      self._positions[kind] = self._source.get_state()
      self._read[kind] += 1
      popular = is_popular(batch, self._hot)
      queue.put(batch, positions(batch, popular == (kind == POPULAR)))
    return queue.take()

  @property
  def counts(self) -> bool:
    """Whether the last batch is of popular examples."""
    return self._kind == POPULAR

  def take_edge(self) -> dict[str, Any]:
    """See `OrderedSource.take_edge`."""
    ask, self._ask = self._ask, None
    if ask is not None:
      self._losses.append([ask, self._delivered])
    self._delivered += 1
    return {'hot_here': self._kind == POPULAR, 'scores': ask}

  def get_state(self) -> State:
    """Returns the position. Resuming reads nothing again."""
    queues = self._queues
    counts = {name: getattr(self, f'_{name}') for name in _COUNTS}
    return {
      **copy.deepcopy(counts),
      'words': self._words,
      'positions': list(self._positions),
      'after': self._after,
      'queues': queues and [queue.get_state() for queue in queues],
      'batch_size': queues and queues[0].batch_size,
      'past': list(self._history),
      'percent': self._rate.percent,
      'swaps': self.swaps,
    }

  def set_state(self, state: State) -> None:
    """Continues right after `state`.

    Raises:
      UserError: it is of another schedule, or of other settings.
    """
    check_same(state, 'words', 'order examples in the same way', self._words)
    self._begin(state['positions'][OTHERS])
    self._positions, self._after = list(state['positions']), state['after']
    self._source.set_state(self._positions[OTHERS])
    if state['queues'] is not None:
      size = state['batch_size']
      self._queues = [Rebatcher(size, one) for one in state['queues']]
    self._history = RateHistory(*state['past'])
    self._rate = self._rate._replace(percent=state['percent'])
    for name in _COUNTS:
      setattr(self, f'_{name}', copy.deepcopy(state[name]))
    self.swaps = state['swaps']

  def resumed(self) -> None:
    """Forgets losses of steps to come."""
    if self._probe is not None:
      asked = self._number if self._ask is None else self._number - 1
      self._probe.losses.resume(asked)


_COUNTS = (
  *('read', 'total', 'left', 'end', 'strip', 'kind', 'given', 'scored'),
  *('delivered', 'number', 'ask', 'passed', 'losses'),
)
