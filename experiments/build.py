"""Config to objects: the data set, the recipe, the placement."""

from typing import TypeVar

import ml_collections
import optax

from slipstream_jax.data.batches import Dataset
from slipstream_jax.data.criteo import criteo_text
from slipstream_jax.data.synthetic import KAGGLE_ROWS, synthetic_criteo
from slipstream_jax.errors import UserError
from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.placement import Placement, PLACEMENTS
from slipstream_jax.tables import Table, TableSet, Uniform
from slipstream_jax.train.state import Recipe
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS

T = TypeVar('T')


def dataset(config: ml_collections.ConfigDict) -> Dataset:
  """The data set of `config.data`: a file, or the synthetic stream.

  Raises:
    UserError: the file is missing or malformed.
  """
  data = config.data
  if data.path is None:
    return synthetic_criteo(
      rows=data.rows or KAGGLE_ROWS,
      seed=config.seed,
      test_inputs=data.test_inputs,
    )
  return criteo_text(
    data.path,
    test_share=data.test_share,
    min_count=data.min_count,
    hash_rows=data.hash_rows,
    missing_flags=data.missing_flags,
    shuffle_seed=config.seed if data.shuffle else None,
  )


def recipe(
  config: ml_collections.ConfigDict, data: Dataset, steps: int
) -> Recipe:
  """Model, tables and optimizers of the config, for a run of `steps` steps.

  Raises:
    UserError: an optimizer's name or arguments do not exist.
  """
  model, optimizer = config.model, config.optimizer
  return Recipe(
    model=DLRM(tuple(model.bottom), tuple(model.top), model.first_order),
    tables=TableSet(_initialised(data.tables, model.init_scale), model.dim),
    row_optimizer=_row_optimizer(optimizer),
    dense_optimizer=optax.chain(
      *map(_factory, optimizer.dense),
      optax.scale_by_schedule(
        optax.linear_schedule(1.0, optimizer.dense_final, steps)
      ),
    ),
  )


def _initialised(
  tables: tuple[Table, ...], scale: float | None
) -> tuple[Table, ...]:
  init = None if scale is None else Uniform(scale)
  return tuple(table._replace(init=table.init or init) for table in tables)


def _row_optimizer(
  optimizer: ml_collections.ConfigDict,
) -> optax.GradientTransformation:
  factory = choose(ROW_OPTIMIZERS, optimizer.rows, 'config.optimizer.rows')
  if 'adagrad' in optimizer.rows:
    return factory(optimizer.rows_learning_rate, optimizer.rows_accumulator)
  return factory(optimizer.rows_learning_rate)


def placement(config: ml_collections.ConfigDict) -> Placement:
  """The placement that `config.placement` names."""
  return choose(PLACEMENTS, config.placement, 'config.placement')


def choose(members: dict[str, T], name: str, where: str) -> T:
  """The member of that name.

  Raises:
    UserError: there is none.
  """
  if name not in members:
    raise UserError(
      f'{where} must be one of {", ".join(members)}',
      got=repr(name),
      where=where,
      mend='pick one of them',
    )
  return members[name]


def _factory(step: tuple[str, dict]) -> optax.GradientTransformation:
  name, arguments = step
  try:
    return getattr(optax, name)(**arguments)
  except (AttributeError, TypeError) as error:
    raise UserError(
      'the dense optimizer must be a chain of (optax factory, arguments)',
      got=f'{step!r}, {error}',
      where='config.optimizer.dense',
      mend='see the factories in the optax documentation',
    ) from error
