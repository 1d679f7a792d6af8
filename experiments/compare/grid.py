"""Which policies are laid side by side, and what a config must say for them."""

from collections.abc import Sequence
from typing import NamedTuple

import ml_collections

from experiments.compare.lines import CONTROL, PLAIN
from slipstream_jax.errors import choose, UserError
from slipstream_jax.selection.policies import POLICIES

SMALL = '_small'
"""End of the name of a policy whose batches are not filled up again."""
OURS = 'surprise_offset'
ANCHORS = (
  *('random', 'random_small', 'negatives', 'local_case_control'),
  *('infobatch_once', 'surprise', 'stale', OURS),
)
"""What every comparison shows, as far as it is there: the control, what others
do, and ours."""


class Cell(NamedTuple):
  """A run of every seed."""

  policy: str
  """`PLAIN`, or a policy's name, which may end with `SMALL`."""
  target: float


KNOWN = dict.fromkeys([*POLICIES, *(f'{name}{SMALL}' for name in POLICIES)])
"""Names that may be asked for."""


def cells(asked: Sequence[str], targets: Sequence[str]) -> list[Cell]:
  """What is run for each seed; the plain run and random come first.

  Args:
    asked: policies; none for `ANCHORS`.
    targets: what they are to drop.

  Raises:
    UserError: there is no such policy, or a target is no share.
  """
  for name in asked:
    choose(KNOWN, name, '--policies')
  names = dict.fromkeys([CONTROL, *(asked or ANCHORS)])
  shares = dict.fromkeys(_share(target) for target in targets)
  return [
    Cell(PLAIN, 0.0),
    *(Cell(name, share) for share in shares for name in names if name in KNOWN),
  ]


def _share(text: str) -> float:
  try:
    share = float(text)
  except ValueError:
    share = -1.0
  if not 0 < share < 1:
    raise UserError(
      'a target must be a share of the examples above 0 and below 1',
      got=text or 'none',
      where='--targets',
      hint='write them like 0.2,0.4',
    )
  return share


def configured(
  config: ml_collections.ConfigDict, cell: Cell
) -> ml_collections.ConfigDict:
  """The config of a cell's run: a copy that says what it drops."""
  changed = config.copy_and_resolve_references()
  skip = changed.skip
  if cell.policy == PLAIN:
    skip.mode = 'off'
    return changed
  skip.mode = 'examples'  # what else is there to compare?
  skip.policy = cell.policy.removesuffix(SMALL)
  skip.drop = cell.target
  if cell.policy.endswith(SMALL):
    skip.refill = False
  elif cell.policy == CONTROL:  # the same control, whatever is the default
    skip.refill = True
  return changed


def with_epochs(config: ml_collections.ConfigDict, epochs: int | None) -> None:
  """Makes it so many passes over the data, if that is asked for."""
  if epochs is not None:
    config.train.steps, config.train.epochs = 0, epochs
