"""What each job of the grid runs, and the lines that it leaves."""

from typing import Any

from experiments.reproduce.grid import Job, OFF
from experiments.reproduce.kept import Kept
from experiments.reproduce.measured import extras
from experiments.reproduce.measured.cases import Case
from experiments.reproduce.measured.measure import cell_of, Tell
from experiments.reproduce.measured.phases import phases_of, with_skipping
from experiments.reproduce.models import MODELS
from slipstream_jax.training.compiled import compiled_of


def lines_of(job: Job, case: Case, kept: Kept, tell: Tell = bool) -> list[Any]:
  """Runs a job: the lines that it leaves, what says it is finished last.

  Raises:
    UserError: settings that cannot be.
  """
  match job.kind:
    case 'skew':
      return [*extras.skew_of(case)]
    case 'phases':
      return [*phases_of(case, job.system)]
    case 'rows':
      return [*extras.rows_of(case, tell)]
    case 'naive':
      return [extras.naive_of(case, job.variant, kept.cells, tell)]
    case 'threshold':
      return [extras.threshold_of(case, job.drop_target, tell)]
  cell, points = cell_of(case, job.system, job.skip, job.seed == 0, tell)
  phases = []
  if job.skip != OFF and job.seed == 0:
    alone = kept.phases_of(job.model, job.system, job.seed)
    phases = with_skipping(alone, cell)
  return [*points, *phases, cell]


def facts_of(case: Case) -> dict[str, Any]:
  """What the report says of a model."""
  recipe = case.programs.of(1)
  tables, sizes = recipe.tables, compiled_of(recipe).row_bytes_by_table()
  rows = [table.rows for table in tables.tables.values()]
  model = MODELS[case.model]
  synthetic, name = case.config.data.path is None, case.data.name
  if synthetic and 'synthetic proxy' not in name:
    name = f'synthetic proxy: {name}'
  return {
    'title': model.title,
    'data': name,
    'synthetic': synthetic,
    'rows': sum(rows),
    'dim': case.config.model.dim,
    'tables': len(rows),
    'features_per_example': sum(
      feature.max_length for feature in tables.features.values()
    ),
    'batch_size': case.config.data.batch_size,
    'steps': case.steps,
    'hot_rows': len(case.hot.rows),
    'row_bytes': sum(a * b for a, b in zip(rows, sizes, strict=True)),
    'drop_target': case.config.skip.drop,
    'policy': case.config.skip.policy,
    'dense_parameters': case.dense_parameters,
  }
