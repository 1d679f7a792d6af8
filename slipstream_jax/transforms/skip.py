"""Skips the updates of stale rows: rows that no longer change."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax

from slipstream_jax.errors import UserError
from slipstream_jax.selection.staleness import row_change, stale_rows
from slipstream_jax.transforms.arguments import check_windows


class SkipStaleState(NamedTuple):
  """State of `skip_stale`. The trees are like the rows, with leaves [R, ...].

  An entry is up to date as of the last step that had its row. The next step
  that has the row catches up on the windows in between.
  """

  count: Any  # i32[]: steps so far
  every: Any  # i32[]: the argument, for code that has only the state
  window: Any  # i32[]: the argument
  snapshot: optax.Params  # [R, ...]: the row when its last window opened
  touches: optax.Updates  # i32[R]: steps of that window that touched the row
  stale: optax.Updates  # bool[R]: whether it was frozen in its last step
  as_of: optax.Updates  # i32[R]: steps taken when the entry was updated


def skip_stale(
  threshold: jax.typing.ArrayLike | optax.Schedule,
  every: jax.typing.ArrayLike,
  window: jax.typing.ArrayLike,
  min_touches: jax.typing.ArrayLike = 1,
  on_stale: Callable[[Any], None] | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Sets the updates of stale rows to zero and passes the others on.

  The last `window` of every `every` steps are a window. When it opens, all
  rows thaw and a snapshot of them is taken. After it, rows are stale if they
  were touched in it and moved by less than `threshold`. They are frozen until
  the next window opens. Without that thaw they would stay frozen. A row is
  touched by a step in which its incoming update is not zero.

  Place it last: momentum and other state before it advance as usual. The rows
  of a leaf are the entries of its first axis. A step may be given only the rows
  that it touches, with their entries of the state.

  Args:
    threshold: a stale row's elements move by less than this in a window, in
      the rows' unit. At least 0. A number, an array f32[], or a schedule of
      the count of steps before the window's last step.
    every: steps from window to window. A number or an array i32[].
    window: steps of a window, in [1, every]. At `every`, no row is frozen.
      A number or an array i32[].
    min_touches: steps of the window that must touch a row for it to be stale.
      0 judges all rows, as published. A number or an array i32[].
    on_stale: called with the mask, a tree like the rows' of numpy bool[R], in
      each step that changes it, in the order of steps, from a thread of the
      runtime. It must not call JAX. `optax.inject_hyperparams` takes it as a
      static argument. Under `shard_map` it is called for each shard. It cannot
      run under `vmap`. Inside `optax.MultiSteps` it gets masks that are then
      discarded: chain `skip_stale` after `MultiSteps`.

  Returns:
    A transformation with state `SkipStaleState`. Its `update` needs params.

  Raises:
    UserError: a concrete argument is out of range, a leaf has no rows
      (`init`), or there are no params (`update`).

  Examples:
    >>> import jax, jax.numpy as jnp, optax
    >>> from slipstream_jax import skip_stale
    >>> tx = optax.chain(optax.sgd(0.5), skip_stale(1e-3, every=20, window=3))
    >>> goal, rows = jnp.ones((2, 4)), jnp.zeros((2, 4))
    >>> state = tx.init(rows)
    >>> for step in range(21):
    ...   goal = goal.at[1].add(0.1)  # the second row keeps moving
    ...   updates, state = tx.update(rows - goal, state, rows)
    ...   rows = optax.apply_updates(rows, updates)
    >>> optax.tree.get(state, 'stale')
    Array([ True, False], dtype=bool)

  References:
    Maboud et al., `Accelerating Recommender Model Training by Dynamically
    Skipping Stale Embeddings <https://arxiv.org/abs/2404.04270>`_, 2024. The
    paper drops examples with stale rows and does not freeze the rows.
  """
  check_windows(threshold, every, window, min_touches, on_stale)

  def init_fn(params: optax.Params) -> SkipStaleState:
    snapshot = jax.tree.map(_zeros, params)
    # all False, as no element is nonzero
    stale = jax.tree.map(touched_rows, snapshot)
    touches, as_of = (
      jax.tree.map(lambda s: s.astype(jnp.int32), stale) for _ in range(2)
    )
    count = jnp.zeros([], jnp.int32)
    # Copies, as the state may be donated and the arguments may be arrays.
    period, steps = (jnp.array(x, jnp.int32) for x in (every, window))
    return SkipStaleState(count, period, steps, snapshot, touches, stale, as_of)

  def update_fn(
    updates: optax.Updates,
    state: SkipStaleState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SkipStaleState]:
    del extra_args
    if params is None:
      raise UserError(
        'skip_stale compares rows, so update needs them',
        got=params,
        where='skip_stale, update, params',
        hint='pass the params as the third argument',
      )
    _, _, _, snapshot, touches, stale, as_of = state
    windows = _windows(state.count, every, window)

    def catch_up() -> tuple[Any, Any]:
      limit = threshold
      if callable(limit):
        limit = limit(jnp.maximum(windows.closed - 1, 0))
      judge = functools.partial(_judge, windows, limit, min_touches)
      judged = jax.tree.map(judge, params, snapshot, touches, stale, as_of)

      def copy(as_of: jax.Array, *rows: jax.Array) -> jax.Array:
        return _where(windows.unchanged(as_of), *rows)

      return jax.tree.map(copy, as_of, params, snapshot), judged

    # Most steps are not at a window's edge and copy and compare nothing.
    at_edge = jax.tree.map(lambda a: windows.due(a) | windows.thaws(a), as_of)
    snapshot, frozen = jax.lax.cond(
      _any(at_edge), catch_up, lambda: (snapshot, stale)
    )
    if on_stale is not None:
      _call_if_changed(on_stale, stale, frozen)
    count_touches = functools.partial(_count_touches, windows)
    touches = jax.tree.map(count_touches, as_of, touches, updates)
    count = optax.safe_increment(state.count)
    as_of = jax.tree.map(lambda a: jnp.maximum(a, count), as_of)
    state = SkipStaleState(count, *state[1:3], snapshot, touches, frozen, as_of)
    return jax.tree.map(_zero_stale, frozen, updates), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Windows(NamedTuple):
  """Where a step is among the windows. All are counts of steps, i32[]."""

  steps: jax.Array
  """Steps before this one."""
  opened: jax.Array
  """When the last closed window opened."""
  closed: jax.Array
  """When it closed: a multiple of `every`, 0 if there was none."""
  opens: jax.Array
  """When the next window opens, or the open one opened."""

  def due(self, as_of: jax.Array) -> jax.Array:
    """Whether an entry was not judged since the last window closed."""
    return (self.closed > 0) & (as_of <= self.closed)

  def thaws(self, as_of: jax.Array) -> jax.Array:
    """Whether an entry was not updated since the open window opened."""
    return (self.steps >= self.opens) & (as_of <= self.opens)

  def unchanged(self, as_of: jax.Array) -> jax.Array:
    """Whether a row is as it was when its last window opened."""
    # No step had the row since then.
    return self.thaws(as_of) | (as_of <= self.opened)


def _windows(count: jax.Array, every: Any, window: Any) -> _Windows:
  period, steps = (jnp.asarray(x, jnp.int32) for x in (every, window))
  closed = count - count % period  # the last window was before this step
  return _Windows(count, closed - steps, closed, closed + period - steps)


def _judge(
  windows: _Windows,
  limit: Any,
  min_touches: Any,
  rows: jax.Array,
  snapshot: jax.Array,
  touches: jax.Array,
  stale: jax.Array,
  as_of: jax.Array,
) -> jax.Array:
  """Returns which rows are frozen in this step: bool[R]."""
  missed = as_of <= windows.opened
  change = row_change(rows, _where(missed, rows, snapshot))
  touches = jnp.where(missed, 0, touches)
  judged = stale_rows(change, limit, touches, min_touches)
  return jnp.where(windows.due(as_of), judged, stale) & ~windows.thaws(as_of)


def _count_touches(
  windows: _Windows, as_of: jax.Array, touches: jax.Array, updates: Any
) -> jax.Array:
  """Returns the touches of the open window, this step included: i32[R]."""
  touches = jnp.where(windows.unchanged(as_of), 0, touches)
  if updates is None:
    return touches
  inside = windows.steps >= windows.opens
  return touches + (inside & touched_rows(updates))


def touched_rows(updates: jax.Array) -> jax.Array:
  """Returns which rows [R, ...] have a nonzero element: bool[R]."""
  return (updates != 0).any(axis=tuple(range(1, updates.ndim)))


def _zero_stale(stale: jax.Array, updates: Any) -> Any:
  """Sets updates [R, ...] of stale rows to zero, even if they are NaN."""
  if updates is None:  # optax's marker for a leaf without an update
    return None
  # Minus zero, as adding 0.0 turns -0.0 into 0.0, another bit pattern.
  return _where(stale, jnp.asarray(-0.0, updates.dtype), updates)


def _where(mask: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """Applies `jnp.where` with a mask bool[R] to rows y [R, ...]."""
  return jnp.where(mask.reshape(mask.shape + (1,) * (y.ndim - 1)), x, y)


def _any(masks: Any) -> jax.Array:
  """Whether any entry of a tree of masks is true, bool[]."""
  some = jax.tree.map(jnp.any, masks)
  return jax.tree.reduce(jnp.logical_or, some, jnp.zeros([], bool))


def _call_if_changed(on_stale: Callable, old: Any, new: Any) -> None:
  def on_host(stale: Any) -> None:
    on_stale(jax.tree.map(np.asarray, stale))

  jax.lax.cond(
    _any(jax.tree.map(jnp.not_equal, old, new)),
    lambda stale: jax.experimental.io_callback(on_host, None, stale),
    lambda stale: None,
    new,
  )


def _zeros(rows: Any) -> jax.Array:
  """Returns zeros [R, ...], sharded like the rows."""
  if not rows.ndim:
    raise UserError(
      'skip_stale needs leaves with a row axis',
      got='a scalar',
      where='skip_stale, init(params)',
      hint='exclude scalars with optax.masked or multi_transform',
    )
  zeros = jnp.zeros_like(rows)
  if isinstance(rows, jax.ShapeDtypeStruct):
    return zeros
  # jit chooses the sharding of new zeros, but keeps that of a `where`.
  return jnp.where((rows != rows) & False, rows, zeros)
