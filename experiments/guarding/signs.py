"""Signs that a run learns nothing any more: pure functions of what it told."""

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_jax.engine.counters import Counters

_POINTS = 5  # of the learning curve, that must not all be one
_SAME = 1e-9  # relative
_MOST_DROPPED = 0.99
_GROWTH = 100.0


def standing_still(lines: Sequence[Mapping[str, Any]]) -> str | None:
  """Whether a metric no longer moves, in words; None if all do.

  Args:
    lines: of the run's metrics.
  """
  points = [line for line in lines if line['kind'] == 'eval'][-_POINTS:]
  if len(points) < _POINTS:
    return None
  values = [point['log_loss'] for point in points]
  if max(values) - min(values) > _SAME * max(map(abs, values)):
    return None
  return (
    f'the log loss has been {values[-1]:.6g} at the last {_POINTS} points of'
    ' the curve: nothing is learned any more, so look at the learning rates'
    ' (config.optimizer)'
  )


def dropping_all(
  before: Counters, now: Counters, batch_size: int
) -> str | None:
  """Whether next to nothing is trained any more, in words.

  Args:
    before: what was counted some time ago.
    now: by now.
    batch_size: of the run.
  """
  seen = now.examples_seen - before.examples_seen
  dropped = now.examples_dropped - before.examples_dropped
  if seen < 10 * batch_size or dropped <= _MOST_DROPPED * seen:
    return None
  return (
    f'{dropped:,} of the last {seen:,} examples were left out: next to nothing'
    ' is trained any more, so look at config.skip.drop and'
    ' config.skip.threshold'
  )


def exploding(first: float, now: float, most: float) -> str | None:
  """Whether rows have grown beyond measure, in words.

  Args:
    first: the largest element when it was first looked at.
    now: by now.
    most: what is none of anybody's concern.
  """
  if now <= max(most, _GROWTH * first):
    return None
  return (
    f'an element of a row is {now:.4g}, and the largest was {first:.4g}: rows'
    ' explode, so lower the learning rate of the rows (config.optimizer.rows)'
  )
