"""What a scorer is, and the list of them.

A scorer predicts the click of every example that a schedule reads, before the
example is chosen or left out, and learns from all of them; so it never sees
what was chosen. It must be cheap against a training step, for it is paid for
per example read, and it need not be good: it moves variance, never the mean.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import choose
from slipstream_jax.scoring.linear import LinearScorer
from slipstream_jax.scoring.pairs import pair_scorer
from slipstream_jax.types import HotRows, Lookups


@runtime_checkable
class Scorer(Protocol):
  """Learns from the examples that it scores, in their order.

  A score may depend on the examples before, not on how they are cut into
  batches: else prefetching and resuming would change bits.
  """

  def learn(
    self,
    lookups: Lookups,
    dense: Float[np.ndarray, 'n I'],
    labels: Float[np.ndarray, ' n'],
  ) -> Float[np.ndarray, ' n']:
    """Click probability of n examples, before it learned from each; f32.

    Args:
      lookups: global rows, [n, F] or [n, F, L]; -1 is padding.
      dense: dense features, f32.
      labels: 1.0 for a click, else 0.0, or its chance; f32.
    """
    ...

  def get_state(self) -> dict[str, Any]:
    """All that was learned, as numbers and arrays by name; not changed later.

    A position of the run holds it, and so does a checkpoint: a few MB.
    """
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from a `get_state` of one made alike, which is not changed."""
    ...


ScorerFn = Callable[[HotRows, int, int], Scorer]
"""Makes a scorer that knows nothing, of the hot rows, F and I."""

SCORERS: dict[str, ScorerFn] = {
  'pairs': pair_scorer,
  'linear': LinearScorer.create,
}
"""Every scorer by its name."""


def scorer_named(scorer: ScorerFn | str) -> ScorerFn:
  """A scorer's function given by itself, or by its name in `SCORERS`.

  Raises:
    UserError: there is no scorer of that name.
  """
  return scorer if callable(scorer) else choose(SCORERS, scorer, 'Skip.scorer')


def in_words(scorer: ScorerFn | str) -> str:
  """A scorer's function, or its name, as one that is made anew is called."""
  if isinstance(scorer, str):
    return scorer
  named = (name for name, make in SCORERS.items() if make == scorer)
  path = (getattr(scorer, n, '') for n in ('__module__', '__qualname__'))
  return next(named, '.'.join(filter(None, path)) or type(scorer).__name__)
