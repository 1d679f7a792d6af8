"""What an export needs to know of the data that a model was trained on."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from slip_serve.layout import Dense, TRANSFORMS
from slipstream_jax.data.source import BatchSource, Dataset
from slipstream_jax.export.rows import Counts
from slipstream_jax.export.vocabulary import (
  ids_of_dataset,
  ids_of_features,
  TableIds,
)
from slipstream_jax.inputs.arrays import PackedExamples, Unbound
from slipstream_jax.packed.columns import open_packed
from slipstream_jax.training.evaluate import frozen_vocabularies
from slipstream_jax.training.parts import TrainerParts


class SourceFacts(NamedTuple):
  """What is known of the data."""

  ids: tuple[TableIds, ...]
  """The vocabulary of each table."""
  name: str = ''
  dense: tuple[Dense, ...] = ()
  """The dense features in order, if they have names."""
  counts: Counts | None = None
  """Uses of each row, if they were counted."""


def facts_of_dataset(data: Dataset) -> SourceFacts:
  """Returns what a data set says.

  Raises:
    UserError: it has a vocabulary that cannot be exported.
  """
  words = data.vocabulary() if data.vocabulary else None
  ids = ids_of_dataset(words, len(data.sizes))
  return SourceFacts(tuple(ids), data.name, counts=data.counts)


def facts_of(source: Unbound | BatchSource, parts: TrainerParts) -> SourceFacts:
  """Returns what a source says.

  Args:
    source: examples with the ids that the model is for.
    parts: a trainer on such examples. Growing vocabularies are as trained.

  Raises:
    UserError: the source has a vocabulary that cannot be exported.
  """
  tables, columns = parts.recipe.tables, parts.names.dense or {}
  if isinstance(source, PackedExamples):
    facts = facts_of_dataset(source.dataset)
    settings = open_packed(source.folder).manifest.get('settings')
    settings = settings if isinstance(settings, dict) else {}
    width = parts.shape.dense_features
    return facts._replace(dense=_dense(columns, settings, width))
  if isinstance(source, Unbound):
    words = source.vocabularies(tables, frozen_vocabularies(parts.grown))
    ids = ids_of_features(words, tables)
  else:  # batches of rows
    ids = [TableIds()] * len(tables.tables)
  return SourceFacts(tuple(ids), 'slip.Trainer', _dense(columns, {}, 0))


def _dense(
  columns: Mapping[str, int | None], settings: Mapping[str, Any], width: int
) -> tuple[Dense, ...]:
  """Returns the dense features, as the settings of a packed folder say.

  Args:
    columns: their widths by name, as a trainer learned them.
    settings: of `slip.pack` or of a TFDS set; both have the names in `dense`.
    width: number of columns of a packed folder.
  """
  given = settings.get('dense')
  fills = given if isinstance(given, dict) else {}
  if columns:
    return tuple(
      Dense(name, size or 1, float(fills[name]) if name in fills else None)
      for name, size in columns.items()
    )
  transform, names = settings.get('transform'), given or ()
  if transform in TRANSFORMS and len(names) == width:
    return tuple(Dense(name, 1, None, transform) for name in names)
  return ()
