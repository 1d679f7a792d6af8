"""Lists the jobs of a reproduction, in the order in which they run.

All systems of a seed take turns before the next seed begins, so that other load
on the machine affects all of them alike. The phases of every system come first,
which also compiles the programs of the runs.
"""

from collections.abc import Sequence

from experiments.reproduce.results import Job

ALONE = (
  *('xdl', 'dlrm_hybrid', 'fae', 'fae_pinned', 'hotline', 'hotline_micro'),
  *('cached', 'plain', 'pinned'),
)
"""Systems that skip nothing."""
SKIPPING = (
  *(('pinned', 'published'), ('pinned', 'ours')),
  *(('fae', 'ours'), ('hotline', 'ours'), ('xdl', 'ours')),
)
"""Systems with skipping."""
VARIANTS = ('none', 'hot', 'cold')
"""Rows that are frozen after the warm-up."""
TARGETS = (0.15, 0.3, 0.6)
"""Drop targets for which a threshold is sought."""
WITH = {'rm2': ('rm2_l20',)}
"""Models that come with another one."""


def jobs_of(models: Sequence[str], seeds: Sequence[int]) -> list[Job]:
  """Returns all jobs, each once, in the order in which they are run.

  Args:
    models: names of models. Those that come with them are added.
    seeds: at least one. Jobs for which one seed is enough take the first.
  """
  with_others = [[name, *WITH.get(name, ())] for name in models]
  names = dict.fromkeys(name for some in with_others for name in some)
  return [job for name in names for job in _of_model(name, seeds)]


def _of_model(model: str, seeds: Sequence[int]) -> list[Job]:
  first = seeds[0]
  pairs = [*((system, 'off') for system in ALONE), *SKIPPING]
  return [
    Job('skew', model, first),
    *(Job('phase', model, first, system) for system in ALONE),
    *(Job('run', model, seed, *pair) for seed in seeds for pair in pairs),
    Job('row', model, first),
    *(Job('naive', model, first, variant=variant) for variant in VARIANTS),
    *(
      Job('threshold', model, first, skip='published', drop_target=target)
      for target in TARGETS
    ),
  ]
