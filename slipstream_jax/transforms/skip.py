"""Skips the updates of stale rows: rows that no longer change.

From Slipstream (arXiv 2404.04270), which drops examples whose rows are stale;
its released code leaves the rows themselves alone. Here it is one optax
transformation, composed at the end of any chain:

  >>> tx = optax.chain(
  ...   optax.adam(1e-3), skip_stale(threshold=1e-3, every=1000, window=50)
  ... )
  >>> state = tx.init(jnp.zeros((4, 2)))
  >>> optax.tree.get(state, 'stale')
  Array([False, False, False, False], dtype=bool)

The last `window` steps of every `every` are a window. When it opens, all
rows thaw and a snapshot is taken; when it closes, the rows touched in it that
moved by less than `threshold` are stale, and stand still until the next one
opens. Without the thaw a row that stands still would be stale for ever.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax

from slipstream_jax.errors import UserError
from slipstream_jax.selection.change import row_change, stale_rows, window_step
from slipstream_jax.transforms.arguments import check_windows

OnStale = Callable[[Any], None]
"""Gets the new mask on the host: a tree like the rows', of numpy bool[R]."""


class SkipStaleState(NamedTuple):
  """State of `skip_stale`; the trees are like the rows, leaves [R, ...]."""

  count: Any
  """Steps so far, i32[]."""
  snapshot: optax.Params
  """Copy of the rows when the last window opened, as the rows [R, ...]."""
  touches: optax.Params
  """i32[R]: steps that touched the row since that window opened."""
  stale: optax.Params
  """bool[R]: rows that stand still now."""


class _Rule(NamedTuple):
  """The arguments of `skip_stale`."""

  threshold: Any
  every: Any
  window: Any
  min_touches: Any
  on_stale: OnStale | None


def skip_stale(
  threshold: Any,
  every: Any,
  window: Any,
  min_touches: Any = 1,
  on_stale: OnStale | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Gives stale rows an update of exactly zero; passes the others on.

  Place it last: momentum and other state before it go on as ever. A row is
  touched by a step in which its incoming update is not zero.

  Leaf row i is table row i unless `update` gets the extra argument
  `row_index`, a tree like the updates of i32[U]: leaf row i is then watched
  row row_index[i], or not watched if negative, and the others pass through.
  The state is then that of the watched rows, `init(watched_rows)`, its mask
  changes only by `open_window` and `close_window`, which the caller applies
  at the edges of its own windows, and `update` needs no params.

  `on_stale` is called once per step that changes the mask, in the order of
  steps, from a thread of the runtime; JAX must not be called in it. Under
  `shard_map` it is called for each device's own shard; under `vmap` it cannot
  run. Inside `optax.MultiSteps` it gets masks that are then discarded: put
  `MultiSteps` into the chain instead, before `skip_stale`.

  Args:
    threshold: how far an element of a stale row may not move in a window, in
      the rows' unit; at least 0. A number or f32[].
    every: steps from window to window. A number or i32[].
    window: steps of a window, in [1, every]; at `every` rows are judged but
      never stand still. A number or i32[].
    min_touches: steps of the window that must touch a row, else it is not
      stale; 0 judges all rows, as published. A number or i32[].
    on_stale: gets every new mask; static in `optax.inject_hyperparams`.

  Returns:
    A transformation of leaves [R, ...] with state `SkipStaleState`. Its
    `update` raises UserError without params (nor `row_index`).

  Raises:
    UserError: an argument that is a plain number is out of range.
  """
  check_windows(threshold, every, window, min_touches)
  rule = _Rule(threshold, every, window, min_touches, on_stale)
  return optax.GradientTransformationExtraArgs(
    initial_state, functools.partial(_update, rule)
  )


def initial_state(params: optax.Params) -> SkipStaleState:
  """The state before the first step, over rows [R, ...]: none is stale."""
  # An alias would be donated together with the rows.
  snapshot = jax.tree.map(_copy, params)
  never = jax.tree.map(_never_stale, snapshot)
  return SkipStaleState(
    count=jnp.zeros([], jnp.int32),
    snapshot=snapshot,
    touches=jax.tree.map(lambda s: s.astype(jnp.int32), never),
    stale=never,
  )


def _update(
  rule: _Rule,
  updates: optax.Updates,
  state: SkipStaleState,
  params: optax.Params | None = None,
  *,
  row_index: Any = None,
  **extra_args: Any,
) -> tuple[optax.Updates, SkipStaleState]:
  del extra_args
  if row_index is not None:
    kept, state = _streamed(updates, state, row_index)
  elif params is not None:
    state, stale = _advance(rule, updates, state, params)
    kept = jax.tree.map(_zero_rows, updates, stale)
  else:
    raise UserError(
      'skip_stale compares rows, so update needs them',
      got=params,
      where='skip_stale, update, params',
      hint='pass the params as the third argument',
    )
  return kept, state._replace(count=optax.safe_increment(state.count))


def _advance(
  rule: _Rule,
  updates: optax.Updates,
  state: SkipStaleState,
  params: optax.Params,
) -> tuple[SkipStaleState, Any]:
  """The next state but for its count, and the mask for this step.

  They differ where the step closes a window: its rows still move, and those
  found stale stand still from the next step on.
  """
  step = window_step(state.count, rule.every, rule.window)

  def judge(state: SkipStaleState) -> SkipStaleState:
    # The rows as they will be after this step, which optax has yet to add.
    kept = jax.tree.map(_zero_rows, updates, state.stale)
    rows = optax.apply_updates(params, kept)
    return close_window(state, rows, rule.threshold, rule.min_touches)

  def inside(state: SkipStaleState) -> tuple[SkipStaleState, Any]:
    opened = jax.lax.cond(
      step.opens, lambda s: open_window(s, params), lambda s: s, state
    )
    counted = _count_touches(opened, updates)
    closed = jax.lax.cond(step.closes, judge, lambda s: s, counted)
    if rule.on_stale is not None:
      _tell_if_changed(rule.on_stale, state.stale, closed.stale)
    return closed, opened.stale

  # One branch for all of it: outside windows nothing is computed or copied.
  return jax.lax.cond(step.inside, inside, lambda s: (s, s.stale), state)


def open_window(state: SkipStaleState, rows: optax.Params) -> SkipStaleState:
  """The state as a window opens: rows [R, ...] copied, thawed, untouched."""
  # The operators, unlike fresh zeros, keep how the arrays are sharded.
  return state._replace(
    snapshot=jax.tree.map(jnp.copy, rows),
    touches=jax.tree.map(lambda touches: touches * 0, state.touches),
    stale=jax.tree.map(lambda stale: stale & False, state.stale),
  )


def close_window(
  state: SkipStaleState,
  rows: optax.Params,
  threshold: Any,
  min_touches: Any = 1,
) -> SkipStaleState:
  """The state as a window closes: rows [R, ...] judged by `stale_rows`."""

  def judge(
    rows: jax.Array, snapshot: jax.Array, touches: jax.Array
  ) -> jax.Array:
    change = row_change(rows, snapshot)
    return stale_rows(change, threshold, touches, min_touches)

  return state._replace(
    stale=jax.tree.map(judge, rows, state.snapshot, state.touches)
  )


def _tell_if_changed(on_stale: OnStale, before: Any, after: Any) -> None:
  """Calls `on_stale(after)` on the host if two trees of bool[R] differ."""
  pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
  changed = [jnp.any(old != new) for old, new in pairs]

  def on_host(mask: Any) -> None:
    on_stale(jax.tree.map(np.asarray, mask))

  if changed:
    jax.lax.cond(
      jnp.any(jnp.stack(changed)),
      lambda mask: jax.experimental.io_callback(on_host, None, mask),
      lambda mask: None,
      after,
    )


def touched_rows(updates: jax.Array) -> jax.Array:
  """Rows [R, ...] of which an element is not zero: bool[R]."""
  return (updates != 0).any(axis=tuple(range(1, updates.ndim)))


def stale_at(stale: jax.Array, row_index: jax.Array) -> jax.Array:
  """Which leaf rows, of `row_index` i32[U], are stale in the mask bool[R]."""
  at = stale.at[_inside(row_index, stale)]
  return at.get(mode='fill', fill_value=False)


def touches_after(
  touches: jax.Array, row_index: jax.Array, touched: jax.Array
) -> jax.Array:
  """The touches i32[R] with one more for each leaf row `touched` bool[U]."""
  at = touches.at[_inside(row_index, touches)]
  return at.add(touched.astype(jnp.int32), mode='drop')


def _inside(row_index: jax.Array, watched: jax.Array) -> jax.Array:
  # A negative index would count from the end; past it, it is dropped.
  return jnp.where(row_index < 0, watched.shape[0], row_index)


def _streamed(
  updates: optax.Updates, state: SkipStaleState, row_index: Any
) -> tuple[optax.Updates, SkipStaleState]:
  """`update` where leaf row i is watched row row_index[i]."""
  stale = jax.tree.map(stale_at, state.stale, row_index)
  kept = jax.tree.map(_zero_rows, updates, stale)
  touched = jax.tree.map(touched_rows, updates)
  touches = jax.tree.map(touches_after, state.touches, row_index, touched)
  return kept, state._replace(touches=touches)


def _count_touches(
  state: SkipStaleState, updates: optax.Updates
) -> SkipStaleState:
  return state._replace(
    touches=jax.tree.map(
      lambda t, u: t + touched_rows(u), state.touches, updates
    )
  )


def _zero_rows(updates: jax.Array, stale: jax.Array) -> jax.Array:
  """Updates [R, ...] with zero in stale rows, even where they were NaN."""
  stale = stale.reshape(stale.shape + (1,) * (updates.ndim - 1))
  # Minus zero: 0.0 would turn a row's -0.0 into 0.0, another bit pattern.
  return jnp.where(stale, jnp.asarray(-0.0, updates.dtype), updates)


def _never_stale(rows: jax.Array) -> jax.Array:
  """bool[R] of False, sharded over rows [R, ...] as they are."""
  if not rows.ndim:
    raise UserError(
      'skip_stale needs leaves with a row axis',
      got='a scalar',
      where='skip_stale, init(params)',
      hint='leave the others out with optax.masked or multi_transform',
    )
  # As in open_window, an operator: jit shards fresh zeros as it likes.
  return touched_rows(rows) & False


def _copy(rows: Any) -> jax.Array:
  """A copy of rows [R, ...]; zeros where only their shape is known."""
  is_known = not isinstance(rows, jax.ShapeDtypeStruct)
  return jnp.copy(rows) if is_known else jnp.zeros_like(rows)
