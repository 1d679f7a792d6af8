"""Builders of Criteo Kaggle and Avazu for TensorFlow Datasets.

Importing this file makes both sets known to TFDS, and nothing else in the
library imports it. Their files are fetched by hand, as their owners' terms
must be accepted first:

    import slipstream_jax.raw.tfds_builders
    import tensorflow_datasets as tfds

    source = tfds.data_source(
      'criteo_kaggle',
      split='train[:80%]',
      download_and_prepare_kwargs={
        'download_config': tfds.download.DownloadConfig(manual_dir=FOLDER)
      },
    )

Examples keep the order of the file, which is that of time, so a split at the
end is a split in time. TFDS writes some ten thousand examples a second: for
the full sets, `packed.prepare` is the fast way.
"""

from collections.abc import Iterator
import pathlib
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from slipstream_jax.errors import UserError
from slipstream_jax.raw import avazu, criteo, lines
from slipstream_jax.raw.base import BadLines

MISSING_INTEGER = -(2**31)
"""Stands for an empty integer field; no integer of the sets is as low."""

_Examples = Iterator[tuple[int, dict[str, Any]]]


class _Builder(
  tfds.core.GeneratorBasedBuilder,
  skip_registration=True,  # type: ignore[call-arg]
):
  """A builder that writes array_record, which needs no TensorFlow."""

  def __init__(self, *, file_format: str = 'array_record', **arguments: Any):
    super().__init__(file_format=file_format, **arguments)


class CriteoKaggle(_Builder):
  """Criteo's Display Advertising Challenge of 2014: 45.8 M lines, 7 days.

  Features: `label` i64 (0 or 1), I1 to I13 i64 (`MISSING_INTEGER` where
  empty), C1 to C26 text (8 hex digits; '' where empty).
  """

  VERSION = tfds.core.Version('1.0.0')
  MANUAL_DOWNLOAD_INSTRUCTIONS = (
    "Accept Criteo's terms, fetch dac.tar.gz (4.3 GB) and unpack train.txt"
    ' into manual_dir, plain or as train.txt.gz.'
  )

  def _info(self) -> tfds.core.DatasetInfo:
    return _info(self, criteo.COLUMNS, criteo.TABLES, {})

  def _split_generators(self, dl_manager: Any) -> dict[str, _Examples]:
    path = _find(dl_manager, ('train.txt', 'train.txt.gz'))
    return {'train': self._generate_examples(path)}

  def _generate_examples(self, path: pathlib.Path) -> _Examples:
    yield from _examples(path, criteo.SCHEMA, criteo.TABLES)


class Avazu(_Builder):
  """Avazu's click-through rate prediction of 2014: 40.4 M lines, 10 days.

  Features: the columns of the file, i64, but `id` and those of hex digits,
  which are text; and `hour_of_day`, f32, from 0.0 to 23/24.
  """

  VERSION = tfds.core.Version('1.0.0')
  MANUAL_DOWNLOAD_INSTRUCTIONS = (
    "Accept the terms of Kaggle's competition avazu-ctr-prediction and put"
    ' its train.gz, or train.csv, into manual_dir.'
  )

  def _info(self) -> tfds.core.DatasetInfo:
    texts = ('id', *avazu.HEX)
    hour_of_day = tfds.features.Scalar(np.float32)
    return _info(self, avazu.COLUMNS, texts, {'hour_of_day': hour_of_day})

  def _split_generators(self, dl_manager: Any) -> dict[str, _Examples]:
    path = _find(dl_manager, ('train.csv', 'train.gz', 'train.csv.gz'))
    return {'train': self._generate_examples(path)}

  def _generate_examples(self, path: pathlib.Path) -> _Examples:
    examples = _examples(path, avazu.SCHEMA, ('id', *avazu.HEX))
    for number, example in examples:
      hour_of_day = np.float32(example['hour'] % 100) / np.float32(24)
      yield number, {**example, 'hour_of_day': hour_of_day}


def _info(
  builder: Any,
  columns: tuple[str, ...],
  texts: tuple[str, ...],
  more: dict[str, Any],
) -> tfds.core.DatasetInfo:
  features = {
    column: tfds.features.Text()
    if column in texts
    else tfds.features.Scalar(np.int64)
    for column in columns
  }
  return tfds.core.DatasetInfo(
    builder=builder,
    features=tfds.features.FeaturesDict({**features, **more}),
    disable_shuffling=True,  # keeps the order of time
  )


def _find(dl_manager: Any, names: tuple[str, ...]) -> pathlib.Path:
  folder = pathlib.Path(dl_manager.manual_dir)
  for name in names:
    if (folder / name).is_file():
      return folder / name
  raise UserError(
    f'manual_dir must hold one of {", ".join(names)}',
    got='none',
    where=str(folder),
    hint='fetch it as the instructions of the builder say',
  )


def _examples(
  path: pathlib.Path, schema: lines.Schema, texts: tuple[str, ...]
) -> _Examples:
  """Numbers the lines from 0; a header counts, as it is a line."""
  names = [column.name for column in schema.columns]
  # No bad line is allowed, so that every one is an example or the header.
  for block, fields in lines.read(path, schema, BadLines()):
    of_block = block.text.split(b'\n')
    for line in fields.lines.tolist():
      values = of_block[line - block.first_line].split(schema.delimiter)
      yield (
        line - 1,
        {
          name: value.decode() if name in texts else _integer(value)
          for name, value in zip(names, values, strict=True)
        },
      )


def _integer(field: bytes) -> int:
  return int(field) if field else MISSING_INTEGER
