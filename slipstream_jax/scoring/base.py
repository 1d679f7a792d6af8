"""Interface of a scorer, and the scorers by name.

A scorer predicts the click of every example that a schedule reads, before the
example is kept or dropped, and learns whether or not it is kept. So its scores
do not depend on the choices. It must be cheap compared with a training step, as
it scores each example read. It need not be accurate: scores affect variance,
never the mean.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import choose
from slipstream_jax.scoring.best import BestScorer
from slipstream_jax.scoring.linear import LinearScorer
from slipstream_jax.scoring.pairs import PairScorer
from slipstream_jax.types import HotRows, Lookups


@runtime_checkable
class Scorer(Protocol):
  """A model that learns from the examples that it scores, in their order.

  A score may depend on earlier examples, but not on how they are cut into
  batches. Otherwise prefetching and resuming would change bits.
  """

  def learn(
    self,
    lookups: Lookups,
    dense: Float[np.ndarray, 'n I'],
    labels: Float[np.ndarray, ' n'],
  ) -> Float[np.ndarray, ' n']:
    """Returns click probabilities f32[n], each computed before learning.

    Args:
      lookups: global rows, [n, F] or [n, F, L]. -1 is padding.
      dense: dense features, f32.
      labels: 1.0 for a click, else 0.0, or a click probability, f32.
    """
    ...

  def get_state(self) -> dict[str, Any]:
    """Returns copies of all that was learned, as numbers and arrays by name.

    Positions and checkpoints of a run contain it: a few MB.
    """
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Copies a state from `get_state` of a scorer with the same arguments."""
    ...


@runtime_checkable
class FrozenScorer(Protocol):
  """A scorer as it was at one moment. Its arrays do not change."""

  def score(
    self, lookups: Lookups, dense: Float[np.ndarray, 'n I']
  ) -> Float[np.ndarray, ' n']:
    """Returns click probabilities f32[n]. Called by several threads at once."""
    ...

  def get_state(self) -> dict[str, Any]:
    """Returns what it knows, as numbers and arrays by name."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Copies a state from `get_state`, before it scores."""
    ...


@runtime_checkable
class FreezableScorer(Scorer, Protocol):
  """A scorer that can score apart from learning.

  Then threads score batches by frozen weights at once, and only learning goes
  in the order of the source. `schedules/scored.py` refreshes the weights after
  a number of batches.
  """

  def teach(
    self,
    lookups: Lookups,
    dense: Float[np.ndarray, 'n I'],
    labels: Float[np.ndarray, ' n'],
  ) -> None:
    """Learns as `learn` does, and does not score what it leaves out."""
    ...

  def frozen(self) -> FrozenScorer | None:
    """Returns what it knows now, which scores as `learn` would.

    None: it scores only as it learns, until the next call.
    """
    ...


ScorerFn = Callable[[HotRows, int, int], Scorer]
"""Makes an untrained scorer from the hot rows, F and I."""


def _pairs(hot: HotRows, features: int, dense: int) -> Scorer:
  return PairScorer.create(features, dense)


def _linear(hot: HotRows, features: int, dense: int) -> Scorer:
  return LinearScorer.create(features, dense)


def _best(hot: HotRows, features: int, dense: int) -> Scorer:
  return BestScorer(features, dense)


SCORERS: dict[str, ScorerFn] = {
  'pairs': _pairs,
  'linear': _linear,
  'best': _best,
}
"""The scorers by name."""


MODEL = 'model'
"""Name that stands for the model that is trained."""


def scorer_named(scorer: ScorerFn | str) -> ScorerFn | None:
  """Returns the scorer's function, given itself or by its name in `SCORERS`.

  None: it is `MODEL`.

  Raises:
    UserError: there is no scorer of that name.
  """
  if callable(scorer):
    return scorer
  names: dict[str, ScorerFn | None] = {**SCORERS, MODEL: None}
  return choose(names, scorer, 'Skip.scorer')


def in_words(scorer: ScorerFn | str) -> str:
  """Returns a name for a scorer's function that is stable across processes."""
  if isinstance(scorer, str):
    return scorer
  named = (name for name, make in SCORERS.items() if make == scorer)
  path = (getattr(scorer, n, '') for n in ('__module__', '__qualname__'))
  return next(named, '.'.join(filter(None, path)) or type(scorer).__name__)
