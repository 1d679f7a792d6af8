"""Hot rows that freeze, by a schedule's windows or by `skip_stale` in a chain.

What is known of the hot rows stays on the device, and no row is read for it.
Before a step, the snapshots of those of its rows are taken that no step had
since the window opened. After it, it is noted how far each row has moved. So at
the edges of windows, every row is judged and thaws, whether a step uses it or
not.

For a schedule, a `Watch` does this: `before` and `after` a step, and as a
window `opened` and `closed`. A chain does it by itself: a step attaches the
entries of its rows to their row state, and the chain updates both. Cold rows
get an entry that is never judged. At the edges of windows, a `Judge` calls the
chain for all hot rows.

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

from slipstream_jax.distributed.lanes import Lanes
from slipstream_jax.engine import apply
from slipstream_jax.engine.buffers import to_device, to_host
from slipstream_jax.engine.mesh import Devices, LANES, WHOLE
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
  """Values of the rows [H, D] then, of those that a step had since."""
  change: Float[jax.Array, ' H']
  """`row_change` of each row from its snapshot, after its last step. Below 0 if
  no step had it since."""
  touches: Int[jax.Array, ' H']
  """Steps since then that touched each row."""
  stale: Bool[jax.Array, ' H']
  """Whether each row is frozen now."""


class Watch(NamedTuple):
  """State of the watch over the H hot rows of a group, on the device."""

  skip: WatchedRows
  """Their snapshot, change and touches since the last window opened."""
  moved: RowChange
  """Change and touches of the rows in the last window that closed."""


RowsOfGroups = tuple[Float[jax.Array, '_P _D'], ...]
RowIndices = tuple[Int[jax.Array, ' _P'], ...]
Masks = tuple[Bool[jax.Array, ' _P'], ...]
Watches = tuple[Watch, ...]
"""One watch per group. Arrays over all hot rows are in the groups' order."""


def start(tables: TableSet, hot: Sequence[HotRows | None]) -> Watches:
  """Returns watches over the hot rows of each group, none of them stale."""
  return _started(
    tuple(
      (0 if one is None else len(one.rows), group.dim, group.dtype)
      for group, one in zip(tables.groups, hot, strict=True)
    )
  )


@functools.partial(jax.jit, static_argnums=0)
def _started(shapes: tuple[tuple[int, int, str], ...]) -> Watches:
  def watch(rows: int, dim: int, dtype: str) -> Watch:
    none = jnp.zeros(rows, jnp.int32)
    watched = WatchedRows(
      jnp.zeros((rows, dim), dtype),
      jnp.full(rows, -1, jnp.float32),
      none,
      jnp.zeros(rows, bool),
    )
    return Watch(watched, RowChange(jnp.zeros(rows, jnp.float32), none))

  return tuple(watch(*shape) for shape in shapes)


def no_row(size: int) -> Bool[jax.Array, ' P']:
  """Returns a mask [P] of no row, for steps without watched rows."""
  # Outside of any program: the mask is cached, and one may be traced right now.
  with jax.ensure_compile_time_eval():
    mask: jax.Array = to_device(np.zeros(size, bool), owned=True)
  return mask


@functools.partial(jax.jit, donate_argnums=0)
def opened(watches: Watches) -> Watches:
  """Returns the watches at the opening of a window: all rows thaw."""

  def reset(watch: Watch) -> Watch:
    _, change, touches, stale = watch.skip
    skip = watch.skip._replace(
      change=jnp.full_like(change, -1),
      touches=jnp.zeros_like(touches),
      stale=jnp.zeros_like(stale),
    )
    return watch._replace(skip=skip)

  return tuple(map(reset, watches))


@functools.partial(jax.jit, donate_argnums=0)
def closed(watches: Watches) -> Watches:
  """Returns the watches after a window, with the change of all rows in it."""

  def moved(watch: Watch) -> Watch:
    change = jnp.maximum(watch.skip.change, 0)
    # A copy, because a buffer must not be donated twice: as touches and moved.
    return watch._replace(moved=RowChange(change, jnp.copy(watch.skip.touches)))

  return tuple(map(moved, watches))


def freeze(watches: Watches, stale: Masks) -> Watches:
  """Returns the watches with the rows of these masks frozen."""
  return tuple(
    watch._replace(skip=watch.skip._replace(stale=mask))
    for watch, mask in zip(watches, stale, strict=True)
  )


@jax.jit
def joined(moved: tuple[RowChange, ...]) -> RowChange:
  """Returns the change of all H rows from that of each group.

  It is a copy, because the next change of the watches donates them.
  """
  if len(moved) == 1:
    return jax.tree.map(jnp.copy, moved[0])
  return RowChange(*(jnp.concatenate(c) for c in zip(*moved, strict=True)))


@jax.jit
def before(
  watches: Watches, row_index: RowIndices, rows: RowsOfGroups
) -> tuple[RowsOfGroups, Masks]:
  """Returns per group the snapshots of a step's rows, and which are frozen.

  A row that no step had since the window opened is its own snapshot. The place
  of a row among its group's hot ones is out of range if it is cold.
  """

  def look(
    watch: Watch, index: jax.Array, rows: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    skip = watch.skip
    if not len(skip.stale):  # a group without hot rows has nothing to look into
      # Not the rows themselves, which the step donates.
      return jnp.zeros_like(rows), jnp.zeros(len(index), bool)
    at = _inside(index, watch)
    is_new = skip.change.at[at].get(mode='fill', fill_value=0) < 0
    snapshot = skip.snapshot.at[at].get(mode='fill', fill_value=0)
    snapshot = jnp.where(is_new[:, None], rows, snapshot)
    return snapshot, skip.stale.at[at].get(mode='fill', fill_value=False)

  of_groups = zip(watches, row_index, rows, strict=True)
  snapshots, frozen = zip(*(look(*one) for one in of_groups), strict=True)
  return snapshots, frozen


@functools.partial(jax.jit, donate_argnums=0)
def after(
  watches: Watches,
  row_index: RowIndices,
  snapshots: RowsOfGroups,
  rows: RowsOfGroups,
  touched: Masks,
) -> Watches:
  """Returns the watches after a step on these rows, of which some were touched.

  Touches are counted, and it is noted how far each row is from its snapshot,
  which `before` has returned.
  """

  def note(
    watch: Watch,
    index: jax.Array,
    snapshot: jax.Array,
    rows: jax.Array,
    touched: jax.Array,
  ) -> Watch:
    skip = watch.skip
    if not len(skip.stale):
      return watch
    at = _inside(index, watch)
    moved = row_change(rows, snapshot)
    return watch._replace(
      skip=skip._replace(
        snapshot=skip.snapshot.at[at].set(snapshot, mode='drop'),
        change=skip.change.at[at].set(moved, mode='drop'),
        touches=skip.touches.at[at].add(touched, mode='drop'),
      )
    )

  of_groups = zip(watches, row_index, snapshots, rows, touched, strict=True)
  return tuple(note(*one) for one in of_groups)


def _inside(index: jax.Array, watch: Watch) -> jax.Array:
  # JAX would count a negative index from the end, but drops one past the end.
  return jnp.where(index < 0, len(watch.skip.stale), index)


class HotEntries(NamedTuple):
  """Entries of `skip_stale` for the H hot rows of a group, and their change."""

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
    # As `init` makes them. XLA would compute with its zeros as it compiles, for
    # half a minute where there are many rows.
    none = jnp.zeros(rows, jnp.int32)
    snapshot = jnp.zeros((rows, dim), jnp.float32)
    own = Entries(snapshot, none, jnp.zeros(rows, bool), none)
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
      lax.optimization_barrier(jnp.zeros_like(now)),  # see `start`
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


_NEVER = np.int32(np.iinfo(np.int32).max)


class HotOfLanes:
  """Places of hot rows, where several devices know something of them.

  Each device has those of its lane, in the order of the hot rows, padded to as
  many as the lane with most of them has.
  """

  def __init__(
    self,
    devices: Devices,
    lanes: Sequence[Lanes],
    hot: Sequence[HotRows | None],
  ) -> None:
    """Takes the lanes and the hot rows of each group."""
    self._devices = devices
    self._local, self._lane = list[np.ndarray](), list[np.ndarray]()
    at, back = [], []
    for of_group, one in zip(lanes, hot, strict=True):
      rows = NO_ROWS if one is None else one.rows
      places = of_group.places_by_lane(rows)
      lane, local = np.nonzero(places >= 0)
      own, width = places[lane, local], places.shape[1]
      order = np.argsort(own)
      self._lane.append(lane[order])
      self._local.append(np.append(local[order], width).astype(np.int32))
      at.append(np.where(places < 0, len(rows), places).reshape(-1))
      back.append((lane * width + local)[order])
    self._places = tuple(one.astype(np.int32) for one in at)
    self._at = devices.split(self._places)
    self._back = devices.whole(tuple(one.astype(np.int32) for one in back))

  def index(self, group: int, places: np.ndarray) -> np.ndarray:
    """Returns the places of hot rows in their lanes. Cold rows are past all."""
    local: np.ndarray = self._local[group][places]
    return local

  def index_in_lanes(self, group: int, places: np.ndarray) -> jax.Array:
    """Returns per lane the places there of some hot rows, i32[W * n]."""
    size, local = bucket(len(places), 16), self._local[group]
    out = np.full((self._devices.lanes, size), local[-1], np.int32)
    out[self._lane[group][places], np.arange(len(places))] = local[places]
    index: jax.Array = self._devices.split(out.reshape(-1))
    return index

  def spread(self, known: Any) -> Any:
    """Returns what is known of all hot rows, in their order, on their devices.

    A tree per group, with leaves [H, ...].
    """
    if all(map(self._devices.is_split, jax.tree.leaves(known))):
      return known
    whole = self._devices.whole(known)
    return self._devices.run(_spread, whole, self._at, whole=(0,))

  def masks(self, masks: Sequence[np.ndarray]) -> Masks:
    """Puts masks of all hot rows of each group on their devices."""
    pairs = zip(masks, self._places, strict=True)
    split: Masks = self._devices.split(
      tuple(np.append(mask, False)[at] for mask, at in pairs)
    )
    return split

  def call(
    self, function: Callable[..., Any], known: Any, *arguments: Any
  ) -> Any:
    """Runs a function on each device that changes what is known there.

    It donates that. The arguments are split.
    """
    return self._devices.run(function, known, *arguments, donate=(0,))

  def collected(self, known: Any) -> Any:
    """Returns parts of what `spread` gave, in the order of the hot rows."""
    if not known:
      return known
    return self._devices.run(
      _collected, known, self._back, whole=(1,), results=WHOLE
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
    own = self.index_in_lanes(group, places)
    reset: HotEntries = self._devices.run(
      judge.reset, entries, row_globals, own, whole=(1,)
    )
    return reset


def _spread(known: Any, at: RowIndices) -> Any:
  def own(leaf: jax.Array, at: jax.Array) -> jax.Array:
    if not len(leaf):
      return leaf
    # So that the entries of padding are up to date, and never judged.
    fill = _NEVER if leaf.dtype == _NEVER.dtype else 0
    return leaf.at[at].get(mode='fill', fill_value=fill)

  return tuple(
    jax.tree.map(lambda leaf, at=of_group: own(leaf, at), one)
    for one, of_group in zip(known, at, strict=True)
  )


def _collected(known: Any, back: RowIndices) -> Any:
  def of_all(leaf: jax.Array, back: jax.Array) -> jax.Array:
    return lax.all_gather(leaf, LANES, tiled=True)[back] if len(back) else leaf

  return tuple(
    jax.tree.map(lambda leaf, back=of_group: of_all(leaf, back), one)
    for one, of_group in zip(known, back, strict=True)
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


def set_by_hand(
  known: Any, group: int, places: np.ndarray, hot: HotOfLanes | None = None
) -> Any:
  """Returns watches or entries after hot rows were set between two steps.

  They have moved by NaN from their snapshots, so no window calls them stale.
  """
  if not known or known[group] is None or not len(places):
    return known
  one: Any = known[group]
  own: Any = one.skip if isinstance(one, Watch) else one.own
  pair = own.snapshot, (own if isinstance(one, Watch) else one).change
  if hot is None:
    size = bucket(len(places), 16)
    index = to_device(apply.padded(places, len(pair[1]), size))
    snapshot, change = _displaced(pair, index)
  else:
    index = hot.index_in_lanes(group, places)
    snapshot, change = hot.call(_displaced, pair, index)
  own = own._replace(snapshot=snapshot)
  if isinstance(one, Watch):
    one = one._replace(skip=own._replace(change=change))
  else:
    one = HotEntries(own, change)
  return (*known[:group], one, *known[group + 1 :])


@functools.partial(jax.jit, donate_argnums=0)
def _displaced(
  pair: tuple[jax.Array, jax.Array], index: Int[jax.Array, ' n']
) -> tuple[jax.Array, jax.Array]:
  snapshot, change = pair
  return (
    snapshot.at[index].set(jnp.nan, mode='drop'),
    change.at[index].set(jnp.nan, mode='drop'),
  )


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
    if not len(one.change):
      return one
    as_of = one.own.as_of.at[at].get(mode='fill', fill_value=_NEVER)
    # A step that changed nothing, as its loss was not finite, is not noted.
    moved = jnp.where(
      new.as_of == as_of,
      one.change.at[at].get(mode='fill', fill_value=0),
      row_change(rows, new.snapshot),
    )
    change = one.change.at[at].set(moved, mode='drop')
    return HotEntries(entries_after(one.own, at, new), change)

  groups = zip(entries, row_index, some, strict=True)
  return tuple(
    None if one is None or new is None else put(one, index, *new)
    for one, index, new in groups
  )
