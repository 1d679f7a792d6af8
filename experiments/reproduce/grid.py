"""What a reproduction runs, and in which order: pure.

All systems of a seed take turns before the next seed begins, so that what a
machine does beside them hits them alike. The phases of every system come
first, which also compiles what the cells run.
"""

from collections.abc import Sequence
from typing import NamedTuple

from experiments.reproduce.models import PINNED

CELL, PHASES, SKEW, ROWS, NAIVE, THRESHOLD = (
  *('cell', 'phases', 'skew', 'rows', 'naive', 'threshold'),
)
OFF, PUBLISHED, OURS = 'off', 'published', 'ours'
ALONE = ('xdl', 'dlrm_hybrid', 'fae', 'fae_pinned', 'hotline') + (
  ('hotline_micro', 'cached', 'plain', PINNED)
)
"""Systems without skipping, in their order."""
SKIPPING = (
  *((PINNED, PUBLISHED), (PINNED, OURS)),
  *(('fae', OURS), ('hotline', OURS), ('xdl', OURS)),
)
"""Systems and ways to skip that they are composed with."""
VARIANTS = ('none', 'hot', 'cold')
"""Rows that are naively left as they are after the warm-up."""
TARGETS = (0.15, 0.3, 0.6)
"""Drop targets that thresholds are sought for."""
WITH = {'rm2': ('rm2_l20',)}
"""Models that come with another one."""


class Job(NamedTuple):
  """One thing to run, of one model."""

  kind: str
  """'cell', 'phases', 'skew', 'rows', 'naive' or 'threshold'."""
  model: str
  seed: int
  system: str = PINNED
  skip: str = OFF
  variant: str = ''
  """Of `VARIANTS`, where it is a naive one."""
  drop_target: float = 0.0
  """Where a threshold is sought for it."""


def jobs_of(models: Sequence[str], seeds: Sequence[int]) -> list[Job]:
  """All jobs, each once, in the order in which they are run.

  Args:
    models: of `MODELS`, in their order; those that come with them are added.
    seeds: at least one; what one seed is enough for takes the first.
  """
  with_others = [[name, *WITH.get(name, ())] for name in models]
  names = dict.fromkeys(name for some in with_others for name in some)
  return [job for name in names for job in _of_model(name, seeds)]


def _of_model(model: str, seeds: Sequence[int]) -> list[Job]:
  first = seeds[0]
  pairs = [*((system, OFF) for system in ALONE), *SKIPPING]
  return [
    Job(SKEW, model, first),
    *(Job(PHASES, model, first, system) for system in ALONE),
    *(Job(CELL, model, seed, *pair) for seed in seeds for pair in pairs),
    Job(ROWS, model, first),
    *(Job(NAIVE, model, first, variant=variant) for variant in VARIANTS),
    *(
      Job(THRESHOLD, model, first, skip=PUBLISHED, drop_target=target)
      for target in TARGETS
    ),
  ]
