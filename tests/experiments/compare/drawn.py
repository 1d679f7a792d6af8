"""Runs of a comparison, drawn by a seeded generator."""

import numpy as np

from experiments.compare.job import ANCHORS
from experiments.compare.results import Cell, PLAIN, Point, Run

SEEN = 100_000
_LOST = {'random': 1.0, 'stale': 1.3, 'negatives': 0.4}


def cells(policies=ANCHORS, targets=(0.2, 0.4, 0.6)):
  return [
    Cell(PLAIN, 0.0),
    *(Cell(policy, target) for target in targets for policy in policies),
  ]


def run(cell, seed, rng, base=0.77):
  """A run of made-up figures, and its learning curve.

  Args:
    cell: its policy and target.
    seed: of the run.
    rng: draws it.
    base: AUC of the plain run.
  """
  dropped = round(SEEN * cell.target * rng.uniform(0.97, 1.01))
  lost = _LOST.get(cell.policy, 0.2) * 0.02 * cell.target**1.5
  auc = base - lost + rng.normal(0, 2e-4)
  seconds = 2 * (1 - 0.9 * cell.target) * rng.normal(1, 0.02)
  line = Run(
    *cell,
    seed,
    batches=400,
    steps=(SEEN - dropped) // 250,
    examples_seen=SEEN,
    examples_trained=SEEN - dropped,
    examples_dropped=dropped,
    examples_hot=0.75 if cell.target else None,
    seconds=seconds,
    seconds_choosing=0.02 * seconds * bool(cell.target),
    auc=auc,
    log_loss=0.44 + lost + rng.normal(0, 1e-4),
    calibration=float(rng.normal(1, 0.01)),
    test_examples=20_000,
    bytes_loaded=int(67e6 * (1 - cell.target)),
    bytes_stored=int(67e6 * (1 - cell.target)),
  )
  points = [
    Point(
      *cell,
      seed,
      number,
      SEEN * number // 10,
      (SEEN - dropped) * number // 10,
      seconds * number / 10,
      auc - 0.1 * (1 / number - 0.1) + 0.0004 * (number == 9),
      0.44 + 0.1 / number,
    )
    for number in range(1, 11)
  ]
  return line, points


def comparison(seeds=3, of=None, seed=0):
  """All runs of a grid and their points, seed by seed."""
  rng = np.random.default_rng(seed)
  drawn = []
  for number in range(seeds):
    base = 0.77 + rng.normal(0, 1e-3)
    drawn += [run(cell, number, rng, base) for cell in of or cells()]
  runs, curves = zip(*drawn, strict=True)
  return list(runs), [point for curve in curves for point in curve]
