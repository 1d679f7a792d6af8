"""A schedule, its planner and a trainer of twelve rows, in numpy alone.

So small that thousands of schedules run in a test, and so strict that a wait
for a step that is not going to be taken is an error rather than a hang.
"""

import collections
import copy
from typing import Any, NamedTuple

import numpy as np

from slipstream_jax.checkpoint.state import pack, unpack
from slipstream_jax.data.numbered import pad_batch
from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.schedules.slipstream import slipstream
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.types import Batch, RowChange

ROWS, HOT = 14, 12
HOT_ROWS = hot_rows(np.arange(HOT), ROWS)
DENSE = 2


class Deadlock(Exception):
  """A schedule waits for a step, and no batch is left to take one with."""


class Stream(BatchSource):
  """Batches of a list, again and again; of examples that are told apart."""

  def __init__(self, batches, epochs=None):
    self.batches, self.epochs, self.delivered = batches, epochs, 0
    self.closed = 0

  def __next__(self):
    epoch, at = divmod(self.delivered, len(self.batches))
    if self.epochs is not None and epoch >= self.epochs:
      raise StopIteration
    self.delivered += 1
    return self.batches[at]

  def get_state(self):
    return {'delivered': self.delivered}

  def set_state(self, state):
    self.delivered = state['delivered']

  def close(self):
    self.closed += 1


def examples(weights, seed=0, cold=0.1, offset=False):
  """Random examples of these weights; some of them look up a cold row."""
  n, rng = len(weights), np.random.default_rng(seed)
  skewed = (rng.random((n, 3)) ** 2 * HOT).astype(np.int64)
  skewed[rng.random((n, 3)) < cold / 3] = ROWS - 1
  return Batch(
    np.arange(n * DENSE, dtype=np.float32).reshape(n, DENSE) / n,
    skewed,
    (rng.random(n) < 0.4).astype(np.float32),
    np.asarray(weights, np.float32),
    offset=rng.normal(size=n).astype(np.float32) if offset else None,
  )


def cut(whole, size, fresh=False):
  """Batches of `size` examples, the last one padded; some with fresh rows."""
  rng = np.random.default_rng(len(whole.labels))

  def part(start):
    batch = whole.map(lambda column: column[start : start + size])
    rows = rng.integers(0, ROWS, rng.integers(1, 4))
    rows = rows if fresh and rng.random() < 0.5 else None
    return pad_batch(batch, size)._replace(fresh=rows)

  return [part(start) for start in range(0, len(whole.labels), size)]


class TrainerParts:
  """Rows that move less and less, watched as the real ones are."""

  def __init__(self):
    self.rows = np.linspace(0, 1, HOT)
    self.snapshot, self.touches = self.rows.copy(), np.zeros(HOT, np.int32)
    self.stale = np.zeros(HOT, bool)
    self.window, self.change = 0, None
    self.losses, self.logits = {}, {}
    self.steps = 0

  def step(self, item):
    edge = item.edge
    if edge.refreezes:
      self.stale = np.zeros(HOT, bool) if edge.opens else edge.stale.copy()
    if edge.opens:
      assert edge.stale is None
      self.snapshot, self.touches = self.rows.copy(), self.touches * 0
    if item.batch.fresh is not None:
      places = HOT_ROWS.places(item.batch.fresh)
      places = places[places < HOT]
      assert not self.stale[places].any(), 'they could not learn'
      self.rows = self.rows.copy()
      self.rows[places] = 0
    self.steps += 1
    moved = np.zeros(HOT + 1)
    real = item.batch.weights > 0
    places = HOT_ROWS.places(item.batch.lookups[real])
    push = item.batch.labels[real] - 0.3 + item.batch.dense[real, 0]
    push = np.repeat(push * item.batch.weights[real], 3)
    np.add.at(moved, places.reshape(-1), push / self.steps)
    moved = np.where(self.stale, 0, moved[:-1])
    self.rows = self.rows + moved
    self.touches = self.touches + (moved != 0).astype(np.int32)
    if edge.closes is not None:
      change = abs(self.rows - self.snapshot).astype(np.float32)
      self.window, self.change = edge.closes, RowChange(change, self.touches)
    if edge.scores is not None:
      # Rises and falls, and depends on all that was trained.
      loss = float(abs(self.rows).sum() * 1e3 % 7)
      self.losses = self.losses | {edge.scores: loss}
    if edge.tells is not None:
      loss = float(abs(self.rows).sum() * 1e3 % 7)
      self.losses = self.losses | {edge.tells: loss}
    if edge.predicts is not None:
      batches, since = edge.predicts
      rows = np.append(self.rows, 0.1).astype(np.float32)
      logits = {
        number: rows[HOT_ROWS.places(batch.lookups)].sum(axis=1) - 1
        for number, batch in batches
      }
      kept = {n: x for n, x in self.logits.items() if n >= since}
      self.logits = kept | logits


class Told:
  """Values under numbers, which steps put into a field of the trainer."""

  def __init__(self, field, trainer, planned):
    self.field, self.trainer, self.planned = field, trainer, planned

  def all(self):
    return getattr(self.trainer, self.field)

  def knows(self, number):
    return number in self.all()

  def wait(self, number):
    while not self.knows(number):
      if not self.planned:
        raise Deadlock(f'{number} of the {self.field} {sorted(self.all())}')
      self.trainer.step(self.planned.popleft())
    return np.asarray(self.all()[number])

  def forget(self, number):
    self._keep(lambda n: n >= number)

  def resume(self, number):
    assert self.field != 'losses' or number == max(self.all(), default=0)
    self._keep(lambda n: n <= number)

  def _keep(self, keeps):
    kept = {n: x for n, x in self.all().items() if keeps(n)}
    setattr(self.trainer, self.field, kept)


class Probe:
  """Lets the steps that are planned be taken while the schedule waits."""

  def __init__(self, trainer, planned):
    self.trainer, self.planned = trainer, planned
    self.losses = Told('losses', trainer, planned)
    self.logits = Told('logits', trainer, planned)

  def row_change(self, window):
    while self.trainer.window != window:
      if not self.planned:
        raise Deadlock(f'window {window}, {self.trainer.window} is the last')
      self.trainer.step(self.planned.popleft())
    return self.trainer.change

  def resume(self, window):
    assert window in (None, self.trainer.window)


class Position(NamedTuple):
  """What a checkpoint holds."""

  trainer: TrainerParts
  state: Any
  emitted: int


class Run(NamedTuple):
  """What came of a schedule."""

  emitted: list
  """All that it gave, as `facts`."""
  positions: list[Position]
  """After each step, and before the first."""
  rows: np.ndarray
  """In the end."""
  unreported: tuple[int, int] | None
  error: str | None
  """What the user is told, if it is a mistake."""


def facts(item):
  """An item without its position and its times, ready to be compared."""
  event = dict(item.event or {})
  event.pop('seconds_choosing', None)
  return item._replace(state=None, event=event)


def same(one, other):
  """Whether two lists of facts are equal to the bit."""
  return repr([_bytes(i) for i in one]) == repr([_bytes(i) for i in other])


def _bytes(item):
  stale = None if item.edge.stale is None else item.edge.stale.tolist()
  edge = item.edge._replace(stale=stale)
  if edge.predicts is not None:  # positions differ in how far back they go
    batches = [(n, _columns(batch)) for n, batch in edge.predicts.batches]
    edge = edge._replace(predicts=batches)
  return item._replace(batch=_columns(item.batch), edge=edge)


def _columns(batch):
  return [c if c is None else c.tobytes() for c in batch]


def run(
  source,
  schedule,
  *,
  batches=None,
  ahead=0,
  prefetch=0,
  most=200,
  position=None,
  keep=False,
):
  """Trains up to `most` batches behind a planner.

  Args:
    source: a fresh `Stream`.
    schedule: its `ScheduleSpec`, or settings of Slipstream.
    batches: of the source that Slipstream is to read.
    ahead: batches held to look ahead.
    prefetch: batches planned ahead of the step.
    most: batches that the schedule may give.
    position: to resume from.
    keep: whether to keep the positions.
  """
  trainer, emitted = TrainerParts(), 0
  if position is not None:
    trainer, emitted = copy.deepcopy(position.trainer), position.emitted
  held, planned = collections.deque(), collections.deque()
  if isinstance(schedule, Skip):
    schedule = slipstream(schedule, batches)
  schedule = schedule.make(source, HOT_ROWS, Probe(trainer, planned))
  if position is not None:
    packed = pack(position.state)
    schedule.set_state(unpack(packed.state, packed.data))
  found, positions, ended, error = [], [], False, None

  def take():
    item = planned.popleft()
    trainer.step(item)
    if keep:
      at = emitted - len(held) - len(planned)
      positions.append(Position(copy.deepcopy(trainer), item.state, at))

  while not ended or held or planned:
    while not ended and len(held) < 1 + ahead:
      try:
        item = next(schedule) if emitted < most else None
      except StopIteration:
        item = None
      except UserError as told:
        item, error = None, str(told)
      if item is None:
        ended = True
        break
      emitted += 1
      held.append(item)
      found.append(facts(item))
    if held:
      planned.append(held.popleft())
    while len(planned) > prefetch or (ended and not held and planned):
      take()
  unreported = None if error or emitted == most else schedule.unreported()
  return Run(found, positions, trainer.rows, unreported, error)
