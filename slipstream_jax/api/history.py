"""What training did, for who did not look at each step."""

from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np

from slipstream_jax.engine.counters import Counters


class History(NamedTuple):
  """What `Trainer.train` did."""

  losses: Float[np.ndarray, ' steps']
  """Weighted mean loss of each step's batch, f32."""
  counters: Counters
  """Totals since the start of training."""
  events: tuple[dict[str, Any], ...]
  """What the schedule decided, in order."""
