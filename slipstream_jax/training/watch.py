"""Hot rows that freeze, by a schedule's windows or by `skip_stale` in a chain.

A schedule's `Watch` keeps a snapshot of the hot rows on the device. In each
step, `frozen` returns which of its rows may not change, and `touched` counts
the rows that it touched. All else runs at the edges of windows.

The entries of a chain stay on the device, too. A step attaches those of its
rows to their row state, and the chain updates both. Cold rows get an entry that
is never judged. After the step it is noted how far each hot row has moved. At
the edges of windows, a `Judge` calls the chain with that for all hot rows. So
every row is judged and thaws in time, whether a step uses it or not, and no row
is read for it.

All of these are programs of their own, so the step is the same program whether
rows are watched or not.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np
import optax

from slipstream_jax.distributed.lanes import places_by_lane
from slipstream_jax.engine.buffers import to_device, to_host
from slipstream_jax.engine.mesh import AXIS, Devices, SPLIT, WHOLE
from slipstream_jax.engine.planner import Windows
from slipstream_jax.errors import UserError
from slipstream_jax.placement import bucket
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.selection.staleness import row_change
from slipstream_jax.tables import TableSet
from slipstream_jax.transforms.row_state import (
  Entries,
  entries_after,
  entries_at,
  join,
  renewed,
  RowStateLayout,
  skip_state,
  split,
  with_entries,
  without_entries,
)
from slipstream_jax.types import HotRows, RowBlock, RowChange, Rows


class WatchedRows(NamedTuple):
  """State of H watched rows since the last window opened."""

  snapshot: Rows
  """Values of the rows [H, D] then."""
  touches: Int[jax.Array, ' H']
  """Steps since then that touched each row."""
  stale: Bool[jax.Array, ' H']
  """Whether each row is frozen now."""


class Watch(NamedTuple):
  """State of the watch over the H hot rows of a group, on the device."""

  skip: WatchedRows
  """Snapshot, touches and stale rows."""
  moved: RowChange
  """Change and touches of the rows in the last window that closed."""


HotRowsOfGroups = tuple[Float[jax.Array, '_H _D'], ...]
RowIndices = tuple[Int[jax.Array, ' _P'], ...]
Masks = tuple[Bool[jax.Array, ' _P'], ...]
Watches = tuple[Watch, ...]
"""One watch per group. Arrays over all hot rows are in the groups' order."""


@jax.jit
def start(rows: HotRowsOfGroups) -> Watches:
  """Returns watches over the hot rows [H_g, D_g] of each group, none stale."""

  def watch(rows: jax.Array) -> Watch:
    none = jnp.zeros(len(rows), jnp.int32)
    watched = WatchedRows(jnp.copy(rows), none, jnp.zeros(len(rows), bool))
    return Watch(watched, RowChange(jnp.zeros(len(rows), jnp.float32), none))

  return tuple(map(watch, rows))


def start_empty(tables: TableSet, hot: Sequence[HotRows | None]) -> Watches:
  """Returns watches over rows of zeros, which a restore will replace."""
  zeros = tuple(
    np.zeros((0 if one is None else len(one.rows), group.dim), group.dtype)
    for group, one in zip(tables.groups, hot, strict=True)
  )
  return start(to_device(zeros, owned=True))


def no_row(size: int) -> Bool[jax.Array, ' P']:
  """Returns a mask [P] of no row, for steps without watched rows."""
  # Outside of any program: the mask is cached, and one may be traced right now.
  with jax.ensure_compile_time_eval():
    mask: jax.Array = to_device(np.zeros(size, bool), owned=True)
  return mask


@functools.partial(jax.jit, donate_argnums=0)
def opened(watches: Watches, rows: HotRowsOfGroups) -> Watches:
  """Returns the watches at the opening of a window: rows copied, all thawed."""

  def reset(watch: Watch, rows: jax.Array) -> Watch:
    touches, stale = (jnp.zeros_like(x) for x in watch.skip[1:])
    return watch._replace(skip=WatchedRows(jnp.copy(rows), touches, stale))

  return tuple(map(reset, watches, rows))


@functools.partial(jax.jit, donate_argnums=0)
def closed(
  watches: Watches, rows: HotRowsOfGroups
) -> tuple[Watches, RowChange]:
  """Returns the watches after a window, and the change of all H rows in it."""
  pairs = zip(watches, rows, strict=True)
  # A copy, because a buffer must not be donated twice: as touches and as moved.
  watches = tuple(
    w._replace(
      moved=RowChange(row_change(r, w.skip.snapshot), jnp.copy(w.skip.touches))
    )
    for w, r in pairs
  )
  return watches, moved(watches)


@functools.partial(jax.jit, donate_argnums=0)
def freeze(watches: Watches, stale: Bool[jax.Array, ' H']) -> Watches:
  """Returns the watches with the rows of this mask, over all H rows, frozen."""
  ends = np.cumsum([len(w.skip.stale) for w in watches])
  masks = jnp.split(stale, ends[:-1])
  return tuple(
    w._replace(skip=w.skip._replace(stale=mask))
    for w, mask in zip(watches, masks, strict=True)
  )


@jax.jit
def moved(watches: Watches) -> RowChange:
  """Returns the change of all H rows in the last window that closed.

  It is a copy, because the next change of the watches donates them.
  """
  if len(watches) == 1:
    return jax.tree.map(jnp.copy, watches[0].moved)
  return RowChange(
    *(jnp.concatenate(c) for c in zip(*(w.moved for w in watches), strict=True))
  )


@jax.jit
def frozen(watches: Watches, row_index: RowIndices) -> Masks:
  """Returns per group which of a step's rows are frozen.

  The place of a row among its group's hot ones is out of range if it is cold.
  """
  pairs = zip(watches, row_index, strict=True)
  # A group without hot rows has no mask to look into.
  return tuple(
    w.skip.stale.at[_inside(index, w)].get(mode='fill', fill_value=False)
    if len(w.skip.stale)
    else jnp.zeros(len(index), bool)
    for w, index in pairs
  )


@functools.partial(jax.jit, donate_argnums=0)
def touched(watches: Watches, row_index: RowIndices, rows: Masks) -> Watches:
  """Increments the touch count of every row that a step touched."""

  def count(watch: Watch, index: jax.Array, rows: jax.Array) -> Watch:
    if not len(watch.skip.touches):
      return watch
    at = watch.skip.touches.at[_inside(index, watch)]
    touches = at.add(rows.astype(jnp.int32), mode='drop')
    return watch._replace(skip=watch.skip._replace(touches=touches))

  return tuple(map(count, watches, row_index, rows))


def _inside(index: jax.Array, watch: Watch) -> jax.Array:
  # JAX would count a negative index from the end, but drops one past the end.
  return jnp.where(index < 0, len(watch.skip.stale), index)


class HotEntries(NamedTuple):
  """What `skip_stale` knows of the H hot rows of a group."""

  own: Entries
  """Its entries."""
  change: Float[jax.Array, ' H']
  """`row_change` of each row from its snapshot, after its last step."""


EntriesOfGroups = tuple[HotEntries | None, ...]
StepEntries = tuple[Entries | None, ...]
"""Per group, the entries of a step's rows."""
StepRows = tuple[tuple[Entries, Rows] | None, ...]
"""Per group, the same after the step, and its rows [P, D]."""
Layouts = tuple[RowStateLayout, ...]


class Judge(NamedTuple):
  """Judges the hot rows of one group by the chain that trains them."""

  layout: RowStateLayout
  start: Callable[[int], HotEntries]
  """Number of rows to their entries before the first step."""
  closed: Callable[..., HotEntries]
  """Entries and row globals to the entries after a window, all judged. Donates
  the entries."""
  opened: Callable[..., HotEntries]
  """The same as a window opens: all rows thaw. The next step that uses a row
  takes its snapshot."""
  reset: Callable[..., HotEntries]
  """Entries, row globals and places i32[n] to the entries with those at the
  places reset, as their rows are reassigned. Donates nothing."""

  def windows(self, row_globals: tuple[Any, ...]) -> Windows:
    """Returns `every` and `window` of the chain.

    Raises:
      UserError: they are arrays with numbers out of range.
    """
    state = _skip(self.layout, to_host(row_globals))
    windows = Windows(int(state.every), int(state.window))
    if not 1 <= windows.window <= windows.every:
      raise UserError(
        'window must be a number of steps in [1, every]',
        got=f'window {windows.window}, every {windows.every}',
        where='skip_stale, window',
        hint='give arrays of such numbers',
      )
    return windows


def judge_of(
  optimizer: optax.GradientTransformation, layout: RowStateLayout, dim: int
) -> Judge:
  """Returns the judge of rows [H, dim] for a chain with `skip_stale`."""
  chain = optax.with_extra_args_support(optimizer)

  @functools.partial(jax.jit, static_argnums=0)
  def start(rows: int) -> HotEntries:
    state = chain.init(jnp.zeros((rows, dim), jnp.float32))
    _, own = without_entries(layout, split(layout, state)[0])
    return HotEntries(own, jnp.zeros(rows, jnp.float32))

  def updated(
    entries: HotEntries, row_globals: tuple[jax.Array, ...]
  ) -> Entries:
    own, change = entries
    # As far from 0 as each row is from its snapshot.
    now = jnp.broadcast_to(change[:, None], own.snapshot.shape)
    moved = own._replace(snapshot=jnp.zeros_like(own.snapshot))
    # Any state will do for what comes before `skip_stale`: its results are not
    # used, so XLA does not compute them.
    others, _ = without_entries(layout, split(layout, chain.init(now))[0])
    leaves = with_entries(layout, others, moved)
    _, state = chain.update(
      jnp.zeros_like(now),
      join(layout, leaves, row_globals),
      now,
      batches_seen=jnp.float32(0),
      example_weight=jnp.ones(len(now), jnp.float32),
      value=jnp.float32(0),
    )
    new = without_entries(layout, split(layout, state)[0])[1]
    return new._replace(snapshot=own.snapshot)

  @functools.partial(jax.jit, donate_argnums=0)
  def closed(
    entries: HotEntries, row_globals: tuple[jax.Array, ...]
  ) -> HotEntries:
    return entries._replace(own=updated(entries, row_globals))

  @functools.partial(jax.jit, donate_argnums=0)
  def opened(
    entries: HotEntries, row_globals: tuple[jax.Array, ...]
  ) -> HotEntries:
    stale = updated(entries, row_globals).stale
    return entries._replace(own=entries.own._replace(stale=stale))

  @jax.jit
  def reset(
    entries: HotEntries,
    row_globals: tuple[jax.Array, ...],
    row_index: Int[jax.Array, ' n'],
  ) -> HotEntries:
    own = renewed(entries.own, row_index, _skip(layout, row_globals))
    return entries._replace(own=own)

  return Judge(layout, start, closed, opened, reset)


def _skip(layout: RowStateLayout, row_globals: tuple[Any, ...]) -> Any:
  """Returns the state of `skip_stale` without the leaves with a row axis."""
  none = (None,) * len(layout.of_skip)
  return skip_state(join(layout, none, row_globals))


class HotOfLanes:
  """Places of the entries of hot rows while several devices train the rows.

  Each device has those of its lane, in the order of the hot rows, padded to as
  many as the lane with most of them has.
  """

  def __init__(self, devices: Devices, hot: Sequence[HotRows | None]) -> None:
    """Takes the hot rows of each group."""
    self._devices = devices
    self._local, self._lane = list[np.ndarray](), list[np.ndarray]()
    at, back = [], []
    for one in hot:
      rows = NO_ROWS if one is None else one.rows
      places = places_by_lane(rows, devices.lanes)
      lane, local = np.nonzero(places >= 0)
      own, width = places[lane, local], places.shape[1]
      order = np.argsort(own)
      self._lane.append(lane[order])
      self._local.append(np.append(local[order], width).astype(np.int32))
      at.append(np.where(places < 0, len(rows), places).reshape(-1))
      back.append((lane * width + local)[order])
    self._at = devices.split(tuple(one.astype(np.int32) for one in at))
    self._back = devices.whole(tuple(one.astype(np.int32) for one in back))

  def index(self, group: int, places: np.ndarray) -> np.ndarray:
    """Returns the places of hot rows in their lanes. Cold rows are past all."""
    local: np.ndarray = self._local[group][places]
    return local

  def index_in_lanes(self, group: int, places: np.ndarray) -> np.ndarray:
    """Returns per lane the places there of some hot rows, i32[W * n]."""
    size, local = bucket(len(places), 16), self._local[group]
    out = np.full((self._devices.lanes, size), local[-1], np.int32)
    out[self._lane[group][places], np.arange(len(places))] = local[places]
    return out.reshape(-1)

  def spread(self, entries: EntriesOfGroups) -> EntriesOfGroups:
    """Returns entries of all hot rows, in their order, on their devices."""
    leaves = jax.tree.leaves(entries)
    if all(getattr(leaf.sharding, 'spec', None) == SPLIT for leaf in leaves):
      return entries
    whole: EntriesOfGroups = self._devices.whole(entries)
    spread: EntriesOfGroups = self._devices.run(
      _spread, whole, self._at, whole=(0,)
    )
    return spread

  def collected(self, entries: Any) -> Any:
    """Returns parts of what `spread` gave, in the order of the hot rows."""
    return self._devices.run(
      _collected, entries, self._back, whole=(1,), results=WHOLE
    )

  def at(
    self, entries: EntriesOfGroups, row_index: RowIndices
  ) -> tuple[StepEntries, Masks]:
    """Returns the entries of rows at places in their lanes, and the masks."""
    own: tuple[StepEntries, Masks] = self._devices.run(_at, entries, row_index)
    return own

  def put(
    self, entries: EntriesOfGroups, row_index: RowIndices, some: StepRows
  ) -> EntriesOfGroups:
    """Returns all entries with those at the places replaced. Donates them."""
    replaced: EntriesOfGroups = self._devices.run(
      _put, entries, row_index, some, donate=(0,)
    )
    return replaced

  def judge(
    self,
    judge: Callable[..., HotEntries],
    entries: HotEntries,
    row_globals: tuple[jax.Array, ...],
  ) -> HotEntries:
    """Runs `Judge.closed` or `Judge.opened` on each device."""
    judged: HotEntries = self._devices.run(
      judge, entries, row_globals, donate=(0,), whole=(1,)
    )
    return judged

  def reset(
    self,
    group: int,
    judge: Judge,
    entries: HotEntries,
    row_globals: tuple[jax.Array, ...],
    places: np.ndarray,
  ) -> HotEntries:
    """Runs `Judge.reset` on each device, given places among all hot rows."""
    own = self._devices.split(self.index_in_lanes(group, places))
    reset: HotEntries = self._devices.run(
      judge.reset, entries, row_globals, own, whole=(1,)
    )
    return reset


def _spread(entries: EntriesOfGroups, at: RowIndices) -> EntriesOfGroups:
  def own(one: HotEntries, at: jax.Array) -> HotEntries:
    if not len(one.change):
      return HotEntries(entries_at(one.own, at)[0], jnp.zeros(len(at)))
    change = one.change.at[at].get(mode='fill', fill_value=0)
    return HotEntries(entries_at(one.own, at)[0], change)

  pairs = zip(entries, at, strict=True)
  return tuple(None if one is None else own(one, index) for one, index in pairs)


def _collected(entries: Any, back: RowIndices) -> Any:
  def of_all(leaf: jax.Array, back: jax.Array) -> jax.Array:
    return lax.all_gather(leaf, AXIS, tiled=True)[back] if len(back) else leaf

  return tuple(
    jax.tree.map(lambda leaf, back=one_back: of_all(leaf, back), one)
    for one, one_back in zip(entries, back, strict=True)
  )


def attach(
  layouts: Layouts,
  blocks: tuple[RowBlock, ...],
  entries: EntriesOfGroups,
  row_index: RowIndices,
  hot: HotOfLanes | None = None,
) -> tuple[tuple[RowBlock, ...], Masks]:
  """Returns a step's rows with their entries, and masks of frozen rows.

  The place of a row among its group's hot ones is H_g if the row is cold. `hot`
  says where the entries are, if several devices have them.
  """
  some, frozen = (_at if hot is None else hot.at)(entries, row_index)
  blocks = tuple(
    block
    if one is None
    else block._replace(state=with_entries(layout, block.state, one))
    for layout, block, one in zip(layouts, blocks, some, strict=True)
  )
  return blocks, frozen


def detach(
  layouts: Layouts,
  blocks: tuple[RowBlock, ...],
  entries: EntriesOfGroups,
  row_index: RowIndices,
  hot: HotOfLanes | None = None,
) -> tuple[tuple[RowBlock, ...], EntriesOfGroups]:
  """Returns the rows after a step, and all entries, which are donated."""
  rows: list[Any] = []
  some: list[tuple[Entries, Rows] | None] = []
  for layout, block, one in zip(layouts, blocks, entries, strict=True):
    leaves, own = block.state, None
    if one is not None:
      leaves, after = without_entries(layout, leaves)
      own = after, block.rows
    rows.append(block._replace(state=leaves))
    some.append(own)
  put = _put if hot is None else hot.put
  return tuple(rows), put(entries, row_index, tuple(some))


@jax.jit
def stale_rows(entries: EntriesOfGroups) -> tuple[jax.Array | None, ...]:
  """Returns per group a mask bool[H] of its stale rows, as a copy."""
  return tuple(
    None if one is None else jnp.copy(one.own.stale) for one in entries
  )


@jax.jit
def _at(
  entries: EntriesOfGroups, row_index: RowIndices
) -> tuple[StepEntries, Masks]:
  pairs = [
    (None, jnp.zeros(len(index), bool))
    if one is None
    else entries_at(one.own, index)
    for one, index in zip(entries, row_index, strict=True)
  ]
  some, frozen = zip(*pairs, strict=True)
  return some, frozen


@functools.partial(jax.jit, donate_argnums=0)
def _put(
  entries: EntriesOfGroups, row_index: RowIndices, some: StepRows
) -> EntriesOfGroups:
  def put(
    one: HotEntries, at: jax.Array, new: Entries, rows: jax.Array
  ) -> HotEntries:
    moved = row_change(rows, new.snapshot)
    change = one.change.at[at].set(moved, mode='drop')
    return HotEntries(entries_after(one.own, at, new), change)

  groups = zip(entries, row_index, some, strict=True)
  return tuple(
    None if one is None or new is None else put(one, index, *new)
    for one, index, new in groups
  )
