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
from slipstream_jax.selection.change import row_change, stale_rows
from slipstream_jax.transforms.arguments import check_windows


class SkipStaleState(NamedTuple):
  """State of `skip_stale`; the trees are like the rows, leaves [R, ...].

  An entry is its row's own, and true as of the last step that had the row: the
  next one that has it makes up for the windows in between.
  """

  count: Any  # i32[]: steps so far
  every: Any  # i32[]: that of `init`, for those who have the state alone
  window: Any  # i32[]: likewise
  snapshot: optax.Params  # [R, ...]: the row when its last window opened
  touches: optax.Updates  # i32[R]: steps of that window that touched it
  stale: optax.Updates  # bool[R]: whether it stood still in its last step
  as_of: optax.Updates  # i32[R]: steps taken when the entry was true


def skip_stale(
  threshold: jax.typing.ArrayLike | optax.Schedule,
  every: jax.typing.ArrayLike,
  window: jax.typing.ArrayLike,
  min_touches: jax.typing.ArrayLike = 1,
  on_stale: Callable[[Any], None] | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Gives stale rows an update of exactly zero; passes the others on.

  The last `window` of every `every` steps are a window. When it opens, all
  rows thaw and a snapshot of them is taken. After it, rows are stale if they
  were touched in it and moved by less than `threshold`: they stand still until
  the next one opens. Without the thaw they would do so for ever. A row is
  touched by a step in which its incoming update is not zero.

  Place it last: momentum and other state before it go on as ever. The rows of
  a leaf are the entries of its first axis. A row that a step does not touch may
  be left out of it, together with its entries of the state.

  Args:
    threshold: how far an element of a stale row may not move in a window, in
      the rows' unit; at least 0. A number, an array f32[], or a schedule, which
      gets the count of steps before the last one of the window.
    every: steps from window to window. A number or an array i32[].
    window: steps of a window, in [1, every]; at `every`, no row stands still.
      A number or an array i32[].
    min_touches: steps of the window that must touch a row, else it is not
      stale; 0 judges all rows, as published. A number or an array i32[].
    on_stale: gets the mask, a tree like the rows' of numpy bool[R], in each
      step that changes it, in the order of steps, from a thread of the runtime;
      JAX must not be called in it. `optax.inject_hyperparams` takes it as a
      static argument; under `shard_map` it is called for each shard; under
      `vmap` it cannot run. Inside `optax.MultiSteps` it gets masks that are
      then discarded: chain `skip_stale` after `MultiSteps` instead.

  Returns:
    A transformation with state `SkipStaleState`; its `update` needs params.

  Raises:
    UserError: an argument that is known by now is out of range; a leaf has no
      rows (`init`); there are no params (`update`).

  Examples:
    >>> import jax, jax.numpy as jnp, optax
    >>> from slipstream_jax import skip_stale
    >>> tx = optax.chain(optax.sgd(0.5), skip_stale(1e-3, every=20, window=3))
    >>> goal, rows = jnp.ones((2, 4)), jnp.zeros((2, 4))
    >>> state = tx.init(rows)
    >>> for step in range(21):
    ...   goal = goal.at[1].add(0.1)  # that of the second row moves on
    ...   updates, state = tx.update(rows - goal, state, rows)
    ...   rows = optax.apply_updates(rows, updates)
    >>> optax.tree.get(state, 'stale')
    Array([ True, False], dtype=bool)

  References:
    Maboud et al., `Accelerating Recommender Model Training by Dynamically
    Skipping Stale Embeddings <https://arxiv.org/abs/2404.04270>`_, 2024. There
    examples are dropped whose rows are stale; the rows themselves are not held.
  """
  check_windows(threshold, every, window, min_touches, on_stale)

  def init_fn(params: optax.Params) -> SkipStaleState:
    snapshot = jax.tree.map(_zeros, params)
    stale = jax.tree.map(touched_rows, snapshot)  # all are zero: none is
    touches, as_of = (
      jax.tree.map(lambda s: s.astype(jnp.int32), stale) for _ in range(2)
    )
    count = jnp.zeros([], jnp.int32)
    # Copies, for the state may be donated, and the arguments are arrays maybe.
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
    count, _, _, snapshot, touches, stale, as_of = state
    period, steps = (jnp.asarray(x, jnp.int32) for x in (every, window))
    closed = count - count % period  # the last window was before this step
    opened, opens = closed - steps, closed + period - steps
    inside = count >= opens

    def due(as_of: jax.Array) -> jax.Array:
      return (closed > 0) & (as_of <= closed)

    def thaws(as_of: jax.Array) -> jax.Array:
      return inside & (as_of <= opens)

    def fresh(as_of: jax.Array) -> jax.Array:
      # No step had the row since the last window opened: it is as it was then.
      return thaws(as_of) | (as_of <= opened)

    def judge(
      rows: jax.Array,
      snapshot: jax.Array,
      touches: jax.Array,
      stale: jax.Array,
      as_of: jax.Array,
    ) -> jax.Array:
      limit = threshold
      if callable(limit):
        limit = limit(jnp.maximum(closed - 1, 0))
      missed = as_of <= opened
      change = row_change(rows, _where(missed, rows, snapshot))
      touches = jnp.where(missed, 0, touches)
      judged = stale_rows(change, limit, touches, min_touches)
      return jnp.where(due(as_of), judged, stale) & ~thaws(as_of)

    def catch_up() -> tuple[Any, Any]:
      copy = functools.partial(jax.tree.map, lambda a, *x: _where(fresh(a), *x))
      judged = jax.tree.map(judge, params, snapshot, touches, stale, as_of)
      return copy(as_of, params, snapshot), judged

    # Steps at no edge of a window, nearly all, copy and compare nothing.
    at_edge = jax.tree.map(lambda a: due(a) | thaws(a), as_of)
    snapshot, standing = jax.lax.cond(
      _any(at_edge), catch_up, lambda: (snapshot, stale)
    )
    if on_stale is not None:
      _call_if_changed(on_stale, stale, standing)

    def count_touch(as_of: jax.Array, touches: jax.Array, u: Any) -> jax.Array:
      touches = jnp.where(fresh(as_of), 0, touches)
      return touches if u is None else touches + (inside & touched_rows(u))

    touches = jax.tree.map(count_touch, as_of, touches, updates)
    count = optax.safe_increment(count)
    as_of = jax.tree.map(lambda a: jnp.maximum(a, count), as_of)
    state = SkipStaleState(
      count, *state[1:3], snapshot, touches, standing, as_of
    )
    return jax.tree.map(_hold, standing, updates), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def touched_rows(updates: jax.Array) -> jax.Array:
  """Rows [R, ...] of which an element is not zero: bool[R]."""
  return (updates != 0).any(axis=tuple(range(1, updates.ndim)))


def _hold(stale: jax.Array, updates: Any) -> Any:
  """Updates [R, ...] with zero in stale rows, even where they were NaN."""
  if updates is None:  # as optax has it for a leaf that stays as it is
    return None
  # Minus zero: 0.0 would turn a row's -0.0 into 0.0, another bit pattern.
  return _where(stale, jnp.asarray(-0.0, updates.dtype), updates)


def _where(mask: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """`jnp.where` for a mask bool[R] of rows y [R, ...]."""
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
  """Zeros [R, ...], sharded as the rows are."""
  if not rows.ndim:
    raise UserError(
      'skip_stale needs leaves with a row axis',
      got='a scalar',
      where='skip_stale, init(params)',
      hint='leave the others out with optax.masked or multi_transform',
    )
  zeros = jnp.zeros_like(rows)
  if isinstance(rows, jax.ShapeDtypeStruct):
    return zeros
  # jit shards fresh zeros as it likes, but a choice as what is chosen from.
  return jnp.where((rows != rows) & False, rows, zeros)
