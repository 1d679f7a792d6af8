"""Packs raw data, shows the progress, and says what the folder holds."""

import math
import pathlib
import resource
import time
from typing import Any

import ml_collections
import numpy as np
from rich.console import Console

from experiments.common import interrupts, loading, report
from experiments.common.datasets import raw_data
from experiments.common.progress import Bar
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import RawData
from slipstream_jax.packed import columns
from slipstream_jax.packed.columns import is_finished, open_packed, PackedData
from slipstream_jax.packed.prepare import prepare
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.learned import learned_hash

_BATCH = 1 << 14
_LEAST = 16  # rows of a table with shared rows, unless it needs fewer


def prepare_data(
  config: ml_collections.ConfigDict,
  verify: bool = False,
  pilot: str | None = None,
  fewer: float = 10,
) -> None:
  """Prepares the data set of `config.data`.

  Args:
    config: the config.
    verify: whether to compare the finished folder with its checksums.
    pilot: folder of the run whose model says which ids share rows, if any.
    fewer: by how much the rows of each table are then divided.

  Raises:
    UserError: bad settings, bad data or no room. The folder is then not
      finished.
  """
  console, data = report.console(), config.data
  finished = data.path is not None and is_finished(data.path)
  if not (finished and verify):
    _check_key(data, 'raw', 'the raw data')
    _check_key(data, 'path', 'the folder to write')
    _prepare(console, data, pilot, fewer)
    if finished:
      text = _contents(open_packed(data.path))
      console.print(text, highlight=False, soft_wrap=True)
  if verify:
    size = sum(nbytes for _, nbytes in columns.verify(data.path))
    console.print(
      f'{data.path}: {report.size(size)} as they were written', highlight=False
    )


def _check_key(data: ml_collections.ConfigDict, key: str, what: str) -> None:
  value = data[key]
  if not value or (key == 'path' and value.startswith('tfds:')):
    raise UserError(
      f'config.data.{key} must name {what}',
      got=repr(value),
      where=f'config.data.{key}',
      hint=f'add --config.data.{key}={"FILE" if key == "raw" else "DIR"}',
    )


def _prepare(
  console: Console,
  data: ml_collections.ConfigDict,
  pilot: str | None,
  fewer: float,
) -> None:
  """Prepares the data set, and shows progress and result.

  If the folder is finished, it only checks that the settings are the same.
  """
  raw = raw_data(data, data.raw)
  work = prepare(
    raw,
    data.path,
    min_count=data.min_count,
    hash_rows=data.hash_rows,
    vocabularies=(
      None if pilot is None else _learned(console, raw, pilot, fewer)
    ),
  )
  begin_s = time.monotonic()
  begin = next(work, None)
  if begin is None:
    return
  console.print(f'[bold]{raw.name}[/] to {data.path}', highlight=False)
  with Bar(console, None, '%', begin.phase) as bar:
    phase = ''
    for at in work:
      interrupts.check()  # Python drops what a signal raises in a callback
      if at.phase != phase:
        phase = at.phase
        bar.begin(phase, at.total or None)
      rate = (at.examples - begin.examples) / (time.monotonic() - begin_s)
      facts = [f'{at.examples:,} examples']
      if phase == 'reading':
        facts.append(f'{rate:,.0f} examples/s')
      bar.show(at.done, *facts)
  passed_s = time.monotonic() - begin_s
  result = _summary(open_packed(data.path), begin.examples, passed_s)
  console.print(report.facts(result))


def _learned(
  console: Console, raw: RawData, pilot: str, fewer: float
) -> list[Vocabulary]:
  """Returns a learned hash for each table of raw data.

  Raises:
    UserError: there is no such run, its data are of another format, or are no
      raw ids, or the number is below 1.
  """
  if not 1 <= fewer < math.inf:
    raise UserError(
      '--fewer must be a number of at least 1',
      got=fewer,
      where='--fewer',
      hint='leave it out for 10',
    )
  run = loading.load(pathlib.Path(pilot))
  if run.data.vocabulary is None or [*run.data.sizes] != [*raw.tables]:
    raise UserError(
      'a pilot must be trained on raw ids of the same tables',
      got=run.data.name,
      where='--pilot',
      hint='train it with the same --config on an earlier file',
    )
  counts, first = _counts(run.data), 0
  words: list[Vocabulary] = []
  vocabularies: Any = run.data.vocabulary()  # of what kind, is checked below
  with Bar(console, len(vocabularies), 'table', 'clustering ids') as bar:
    for name, known in zip(raw.tables, vocabularies, strict=True):
      interrupts.check()
      bar.show(len(words), name)
      rows = slice(first, first := first + known.size)
      size = max(_LEAST, math.ceil(known.size / fewer))
      vectors = np.asarray(run.trainer.engine.rows_of(name), np.float32)
      words.append(learned_hash(known, counts[rows], vectors, size))
  return words


def _counts(data: Dataset) -> np.ndarray:
  """Returns the lookups of each global row by the training examples, i64[N]."""
  if data.counts is not None:
    return np.asarray(data.counts(), np.int64)
  counts = np.zeros(sum(data.sizes.values()), np.int64)
  for batch in data.known[0](_BATCH):
    rows = batch.lookups[batch.lookups >= 0]
    counts += np.bincount(rows, minlength=len(counts))
  return counts


def _summary(
  packed: PackedData, begin_examples: int, passed_s: float
) -> dict[str, Any]:
  """Returns the facts of the finished data set.

  Args:
    packed: the data set.
    begin_examples: examples that an earlier process read.
    passed_s: seconds of this process.
  """
  manifest = packed.manifest
  examples, tables = manifest['examples'], manifest['tables']
  peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  splits = manifest['splits'].items()
  return {
    'examples': examples,
    **{f'... to {name}': end - start for name, (start, end) in splits},
    'bad lines skipped': manifest['bad_lines'],
    'clicks per example to train': manifest['base_rate'],
    'tables': len(tables),
    '... rows of all': _rows(manifest),
    'bytes before': sum(source['bytes'] for source in manifest['sources']),
    'bytes after': _bytes(packed),
    'seconds': passed_s,
    'examples/s': (examples - begin_examples) / max(passed_s, 1e-9),
    'peak memory': report.size(peak_rss),
    **{
      table['name']: f'{table["rows"]:,} rows, '
      f'{table["unknown"] / max(table["lookups"], 1):.2%} unknown'
      for table in tables
    },
  }


def _contents(packed: PackedData) -> str:
  """Describes a folder that was finished before."""
  manifest = packed.manifest
  return (
    f'{packed.folder} is finished: {manifest["name"]}, '
    f'{manifest["examples"]:,} examples, {len(manifest["tables"])} tables of '
    f'{_rows(manifest):,} rows, {report.size(_bytes(packed))}.'
  )


def _rows(manifest: dict[str, Any]) -> int:
  return sum(table['rows'] for table in manifest['tables'])


def _bytes(packed: PackedData) -> int:
  return sum(column.nbytes for column in packed.columns.values())
