"""Writes small packed folders from arrays, as `prepare` does."""

import collections
import json

import numpy as np

from slipstream_jax.packed.columns import (
  BLOCKS,
  Column,
  finish,
  MANIFEST,
  open_packed,
  smallest_uint,
)
from slipstream_jax.packed.prepare import prepare
from slipstream_jax.tables import features_of, offsets


def features_facts(features):
  """What a manifest says of one label of 0 or 1, and of these features."""
  # Manifests say `pooling` for `combiner`, as folders written before do.
  keys = ('table', 'pooling', 'max_length', 'weighted')
  return {
    'labels': 0,
    'label_dtype': 'uint8',
    'hash_rows': None,
    'features': [
      {'name': name, **dict(zip(keys, feature, strict=True))}
      for name, feature in features.items()
    ],
  }


def write_columns(folder, arrays, facts):
  folder.mkdir(parents=True, exist_ok=True)
  forms = [
    Column(name, array.dtype.name, array.shape)
    for name, array in arrays.items()
  ]
  for form, array in zip(forms, arrays.values(), strict=True):
    array.tofile(folder / form.file)
  finish(folder, forms, facts)
  return folder


def write_folder(folder, columns, rows, train_end=None, **facts):
  """A folder of these examples.

  Args:
    folder: where to; made.
    columns: `Columns` with global rows [n, F] or [n, F, L], -1 = padding.
    rows: R of each table; they are called t0, t1, ...
    train_end: first example to test on; by default, four fifths are trained.
    facts: of the manifest, instead of those made from the arrays.
  """
  examples, lookups = len(columns.labels), columns.lookups
  train_end = examples * 4 // 5 if train_end is None else train_end
  arrays = {'labels': columns.labels.astype(np.uint8), 'dense': columns.dense}
  for table, (size, start) in enumerate(
    zip(rows, offsets(rows)[:-1], strict=True)
  ):
    ids = lookups[:, table].astype(np.int64)
    local = np.where(ids < 0, size, ids - start)
    arrays[f't{table}'] = local.astype(smallest_uint(size))
  for table, size in enumerate(rows):
    seen = arrays[f't{table}'][:train_end].reshape(-1)
    counts = np.bincount(seen, minlength=size + 1)[:size]
    arrays[f'frequency_t{table}'] = counts.astype(np.uint32)
  features = features_of(
    [f't{i}' for i in range(len(rows))],
    lookups.shape[2] if lookups.ndim == 3 else None,
  )
  made = {
    'name': 'clicks',
    'dense_features': columns.dense.shape[1],
    **features_facts(features),
    'tables': [{'name': f't{i}', 'rows': r} for i, r in enumerate(rows)],
    'examples': examples,
    'splits': {'train': [0, train_end], 'test': [train_end, examples]},
    'parts': [{'name': 'day 1', 'examples': examples}],
    'base_rate': float(columns.labels[:train_end].mean()) if train_end else 0,
    'min_count': 1,
    'hash_rows': None,
    'bad_lines': 0,
    'sources': [],
  }
  return write_columns(folder, arrays, made | facts)


def prepared(raw, folder, **arguments):
  """What `prepare` makes of raw data, opened."""
  collections.deque(prepare(raw, folder, **arguments), maxlen=0)
  return open_packed(folder)


def checksums(folder):
  """Those of each column, by name."""
  entries = open_packed(folder).manifest['columns']
  return {entry['name']: entry['crc32'] for entry in entries}


def made_older(folder, change=lambda facts: None):
  """Turns a folder into one from before blocks and manifests had checksums.

  Args:
    folder: a finished one.
    change: changes the facts of its manifest further.
  """
  facts = json.loads((folder / MANIFEST).read_text())
  del facts['checksum'], facts['blocks']
  change(facts)
  (folder / MANIFEST).write_text(json.dumps(facts))
  (folder / BLOCKS).unlink()
  return folder
