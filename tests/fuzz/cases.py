"""What a case is, and how hypothesis draws one."""

import dataclasses
import math
from typing import NamedTuple

from hypothesis import strategies as st
import numpy as np

import slipstream_jax as slip
from slipstream_jax.placement import EVICTIONS
from tests.fuzz.spoils import SPOILS
from tests.fuzz.worlds import tables, World, WORLDS

ID_DTYPES = ('int64', 'int32', 'int16', 'uint16', 'uint32', 'uint64', 'uint8')


class Skips(NamedTuple):
  """A round that skips: arguments of `slipstream`."""

  settings: slip.Skip
  batches: int | None


class Round(NamedTuple):
  """Some steps of a trainer, from a source of their own."""

  skips: Skips | None
  """None: every example is trained."""
  steps: int
  depth: int
  epochs: int | None
  shuffle: int | None
  own: bool
  """From a batch source of the user's own, with weights, or ColumnBatches."""
  reuses: bool
  """Whether such a source writes all batches to the same memory."""


@dataclasses.dataclass(frozen=True)
class Case:
  """All that decides what a case does."""

  world: World
  seed: int
  batch: int
  whole: int
  rest: int
  placements: tuple[str, ...]
  """One for all groups, or one for each."""
  capacity: int
  look_ahead: int
  hot: bool
  id_dtype: str
  zeros: float
  weights: bool
  pads: bool
  rounds: tuple[Round, ...]
  evaluates: bool
  spoil: str | None

  @property
  def examples(self):
    """n."""
    return self.batch * self.whole + self.rest


def _phases(draw):
  small = st.integers(0, 3)
  phases = slip.Phases(
    draw(small), draw(small) or 1, draw(small) + 1, 0, draw(st.booleans())
  )
  if draw(st.booleans()):
    return phases
  needed = phases.warm_up + phases.window + phases.settle
  return phases._replace(period=needed + 1 + draw(small))


@st.composite
def settings(draw, world):
  """Ones that may be; whether they suit the data is another matter."""
  alpha = draw(st.sampled_from([None, None, 'all', 'tables']))
  if alpha == 'all':
    alpha = draw(st.integers(1, world.lookups))
  elif alpha == 'tables':
    # Of uneven features, each column is a list of its own.
    even = len({*world.lengths}) == 1
    most = world.lengths if even else [1] * world.lookups
    alpha = tuple(draw(st.integers(1, length)) for length in most)
  return slip.Skip(
    draw(st.sampled_from([0, 0.3, 0.6, 0.9, 1.0])),
    slip.POLICIES[draw(st.sampled_from(list(slip.POLICIES)))],
    draw(st.sampled_from(['examples', 'examples', 'rows'])),
    _phases(draw),
    alpha,
    draw(st.integers(0, 2)),
    draw(st.sampled_from([None, None, 0.0, 1e-2, math.inf])),
    draw(st.integers(0, 2)),
    refill=draw(st.sampled_from([None, True])),
  )


@st.composite
def rounds(draw, world, skips):
  """One Round."""
  chosen = None
  if skips:
    most = draw(st.none() | st.integers(1, 14))
    chosen = Skips(draw(settings(world)), most)
  return Round(
    chosen,
    draw(st.integers(6, 14) if skips else st.integers(0, 6)),
    draw(st.sampled_from([0, 1, 2, 7])),
    draw(st.sampled_from([None, 1, 2])),
    draw(st.none() | st.integers(0, 3)),
    draw(st.booleans()),
    draw(st.booleans()),
  )


PLACED = (*slip.PLACEMENTS, *EVICTIONS)


@st.composite
def placements(draw, world, placement=None):
  """That one for all groups, or at least for one of them."""
  first = placement or draw(st.sampled_from(PLACED))
  if world.groups == 1 or draw(st.booleans()):
    return (first,)
  others = [draw(st.sampled_from(PLACED)) for _ in range(world.groups - 1)]
  return tuple(draw(st.permutations([first, *others])))


@st.composite
def cases(draw, kind, placement=None, spoil=None):
  """Of a kind: 'plain', 'skips' or 'spoilt'."""
  if kind == 'spoilt':
    spoil = spoil or draw(st.sampled_from(list(SPOILS)))
  dense = bool(spoil) and SPOILS[spoil].at == 'dense'
  names = [
    name
    for name, world in WORLDS.items()
    if (world.dense or not dense) and not (spoil and world.is_mixed)
  ]
  world = WORLDS[draw(st.sampled_from(names))]
  skips = kind == 'skips'
  if kind == 'spoilt':
    skips = SPOILS[spoil].at == 'settings' or draw(st.integers(0, 3)) == 0
  batch = draw(st.sampled_from(world.sizes))
  first = draw(rounds(world, skips))
  if spoil:  # so that what is spoilt is sure to be trained
    own = SPOILS[spoil].at in ('weights', 'batch', 'source') or (
      first.own
      and SPOILS[spoil].at != 'batch_size'
      and spoil != 'labels too few'  # of which the first batch has enough
    )
    first = first._replace(
      shuffle=None, own=own, reuses=False, steps=max(1, first.steps)
    )
  more = draw(st.lists(st.booleans(), max_size=0 if spoil else 1))
  return Case(
    world,
    draw(st.integers(0, 2**32 - 1)),
    batch,
    draw(st.integers(1, 8)),
    draw(st.integers(0, batch - 1)),
    draw(placements(world, placement)),
    draw(st.sampled_from(world.capacities)),
    draw(st.sampled_from([0, 1, 3])),
    draw(st.booleans()),
    draw(st.sampled_from(ID_DTYPES)),
    draw(st.sampled_from([0, 0, 0.2, 0.5, 1.0])),
    draw(st.booleans()),
    # A batch size that is too large is one only where nothing is padded.
    draw(st.booleans()) and spoil != 'a batch size too large',
    (first, *(draw(rounds(world, each)) for each in more)),
    draw(st.booleans()),
    spoil,
  )


def columns(case):
  """Local ids, dense features, labels and weights; of good values."""
  world, rng = case.world, np.random.default_rng(case.seed)
  sizes, n = [], case.examples
  for feature in world.features.values():
    sizes += [world.tables[feature.table].rows] * feature.max_length
  ids = rng.random((n, len(sizes))) ** rng.choice([1, 3]) * sizes
  ids = ids.astype(np.int64)
  if max(world.lengths) > 1 and case.id_dtype[0] != 'u':
    ids[rng.random(ids.shape) < rng.choice([0, 0.3, 0.9])] = -1
  shape = tables(world).example_shape
  ids = ids.reshape(n, *shape)
  weights = np.ones(n, np.float32)
  if case.weights:
    weights = rng.choice([0.25, 1, 3], n).astype(np.float32)
  weights[rng.random(n) < case.zeros] = 0
  if case.spoil:  # what is spoilt is in the first batch
    weights[: case.batch] = 1
  made = {
    'ids': ids.astype(case.id_dtype),
    'dense': rng.normal(size=(n, world.dense)).astype(np.float32),
    'labels': (rng.random(n) < 0.4).astype(np.float32),
    'weights': weights,
  }
  if any(feature.weighted for feature in world.features.values()):
    each = rng.choice([-1, 0, 0.5, 1, 2], ids.shape)
    made['lookup_weights'] = each.astype(np.float32)
  return made
