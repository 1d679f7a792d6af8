"""What a checkpoint is of: all that training is, at one moment between steps.

Dense state, position and counters are copied at once. Rows are not: which ones
go is settled, and a `RowSnapshot` hands out their values of that moment while
steps already change them.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

from jaxtyping import Int
import numpy as np

from slipstream_jax.checkpoint.chain import Chain
from slipstream_jax.checkpoint.facts import as_json, facts_of
from slipstream_jax.checkpoint.manifest import Manifest, new_id
from slipstream_jax.checkpoint.packing import (
  arrays_of,
  check_finite,
  checksums,
  copies_of,
  pack,
  Packed,
  shapes_of,
  tables_of,
)
from slipstream_jax.checkpoint.policies import CHECKPOINT_POLICIES
from slipstream_jax.checkpoint.row_file import Leaf, leaves_of, ROWS
from slipstream_jax.checkpoint.row_snapshot import (
  begin_snapshot,
  Budget,
  RowSnapshot,
)
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.schedules.base import State
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.types import RowBlock

VERSION = 7
"""Of what a checkpoint holds; raised when a name or meaning changes."""
_SAME = ('checksums', 'schedule_state', 'schedule')
"""What tells a checkpoint of the same moment, its rows aside."""


class Dense(NamedTuple):
  """All of a checkpoint but its rows."""

  step: int
  payload: dict[str, Any]
  """What its manifest says of it, as JSON."""
  arrays: dict[str, Any]
  """A tree of numpy's arrays, which nobody writes."""
  schedule: Packed
  """Where its batches stand."""
  hot: Int[np.ndarray, ' H'] | None
  """As in `Facts`."""
  id: str
  """Of the manifest that it will have."""

  @property
  def identity(self) -> int:
    """As of the manifest that it will have."""
    return Manifest(self.step, None, {}, {}, {}, id=self.id).identity


class Snapshot(NamedTuple):
  """A checkpoint that is being written."""

  dense: Dense
  parent: int | None
  """Step of the one that it is an increment on; None: it is a base."""
  drains: tuple[RowSnapshot, ...]
  """Of each group its rows."""
  leaves: tuple[tuple[Leaf, ...], ...]
  """Of each group what a row consists of."""


def dense_of(
  trainer: TrainerParts, schedule_state: State, before: Packed | None = None
) -> Dense:
  """Copies all but the rows; waits for the step before.

  Args:
    trainer: whose.
    schedule_state: position of its batches.
    before: as of `pack`.

  Raises:
    UserError: the trainer is torn, or a parameter is not finite.
  """
  trainer.check_whole()
  step = int(to_host(trainer.state.step))
  check_finite('the model', trainer.state.variables, step)
  schedule = pack({'of': schedule_state, 'grown': trainer.grown}, before)
  arrays = copies_of(arrays_of(trainer))
  facts = facts_of(trainer)
  payload = {
    'version': VERSION,
    'schedule_state': schedule.state['of'],
    'grown': schedule.state['grown'],
    'schedule': schedule.checksum,
    'window': trainer.probe.window,
    'losses': list(trainer.probe.losses.items()),
    'hot_here': trainer.engine.hot_here,
    'counters': trainer.counters_of_steps._asdict(),
    'shapes': shapes_of(trainer, arrays),
    'tables': tables_of(trainer),
    'seed': trainer.engine.untrained.seed,
    'checksums': checksums(arrays),
    'facts': as_json(facts),
  }
  return Dense(step, payload, arrays, schedule, facts.hot, new_id())


def token_of(url: str, step: int, identity: int) -> Hashable:
  """By what a trainer's dirty rows know a checkpoint."""
  return url, step, identity


def tokens_of(url: str, chain: Chain) -> list[Hashable]:
  """The same of each link of a chain."""
  return [token_of(url, link.step, link.identity) for link in chain]


def is_same(
  trainer: TrainerParts, dense: Dense, url: str, newest: Manifest
) -> bool:
  """Whether a checkpoint has all that this trainer would save, as it is.

  Args:
    trainer: whose rows.
    dense: all else.
    url: of the checkpoint's place.
    newest: its manifest.
  """
  if any(newest.payload.get(key) != dense.payload[key] for key in _SAME):
    return False
  (token,) = tokens_of(url, (newest,))
  return all(
    group.dirty.knows(token) and not group.dirty.count(token)
    for group in trainer.engine.groups
  )


def begin(
  trainer: TrainerParts,
  dense: Dense,
  chain: Chain,
  url: str,
  policy: str,
  codec: str,
  budget: Budget,
) -> Snapshot:
  """Settles which rows go; they can be drained from here on.

  `save_device_rows` of each group is to follow, before the next step.

  Args:
    trainer: whose rows; changes are counted from here on, too.
    dense: all else.
    chain: of the newest checkpoint of the place; empty if there is none.
    url: of the place.
    policy: of `CHECKPOINT_POLICIES`.
    codec: of the rows.
    budget: of what is copied of them.
  """
  parent = _parent(trainer, chain, url, policy)
  since: Hashable = None
  if parent is not None:
    (since,) = tokens_of(url, tuple(m for m in chain if m.step == parent))
  own = token_of(url, dense.step, dense.identity)
  drains, leaves = list[RowSnapshot](), []
  try:
    for group in trainer.engine.groups:
      drains.append(begin_snapshot(group, group.dirty.bits(since), budget))
      group.dirty.begin(own)
      leaves.append(leaves_of(values_of(group.none), codec))
  except BaseException:  # nobody will take their rows
    for drain in drains:
      drain.close()
    raise
  return Snapshot(dense, parent, tuple(drains), tuple(leaves))


def _parent(
  trainer: TrainerParts, chain: Chain, url: str, policy: str
) -> int | None:
  """Step of the parent; of rows that changed since then enough is known."""
  step = CHECKPOINT_POLICIES[policy](chain)
  links = tuple(link for link in chain if link.step == step)
  known = all(
    group.dirty.knows(token)
    for token in tokens_of(url, links)
    for group in trainer.engine.groups
  )
  return step if links and known else None


def values_of(block: RowBlock) -> dict[str, np.ndarray]:
  """The arrays [n, ...] of some rows, by the names that files have for them."""
  states = {f'state_{i}': leaf for i, leaf in enumerate(block.state)}
  return {ROWS: block.rows, **states}


def block_of(values: dict[str, np.ndarray]) -> RowBlock:
  """The inverse of `values_of`."""
  states = (values[f'state_{i}'] for i in range(len(values) - 1))
  return RowBlock(values[ROWS], tuple(states))
