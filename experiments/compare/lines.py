"""What a comparison keeps of its runs: lines of two files."""

from typing import NamedTuple

PLAIN, CONTROL = 'plain', 'random'


class Run(NamedTuple):
  """One line of compare.csv: a run at its end."""

  policy: str
  target: float
  """Examples to drop, as the config's `skip.drop`; 0 of the plain run."""
  seed: int
  batches: int
  """Of the source, as many as were asked for."""
  steps: int
  examples_seen: int
  """Of the source, trained or dropped."""
  examples_trained: int
  examples_dropped: int
  examples_hot: float | None
  """Share of them, at the last decision."""
  seconds: float
  """Of training alone, without compiling."""
  seconds_choosing: float
  """CPU time that choosing took, within these."""
  auc: float
  log_loss: float
  calibration: float | None
  test_examples: int
  bytes_loaded: int
  bytes_stored: int

  @property
  def dropped(self) -> float:
    """Share of the examples seen."""
    return self.examples_dropped / max(self.examples_seen, 1)

  @property
  def pace(self) -> float:
    """Seconds per example seen."""
    return self.seconds / max(self.examples_seen, 1)


class Point(NamedTuple):
  """One line of curve.csv: a run on its way, scored on some test examples."""

  policy: str
  target: float
  seed: int
  number: int
  """From 1 on; points of one number have read as much of the source."""
  examples_seen: int
  examples_trained: int
  seconds: float
  auc: float
  log_loss: float
