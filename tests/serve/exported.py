"""A small trained model, as an export and as the trainer that it is of."""

import contextlib
import threading

import numpy as np

from experiments.common.loading import LoadedRun
from slip_serve import Scorer, vocabulary
from slip_serve.server import Server
from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.data.source import Dataset
from slipstream_jax.export import folder as exporting
from slipstream_jax.export.source import (
  facts_of_dataset,
  ids_of_vocabulary,
  write_ids,
)
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts, planned
from slipstream_jax.types import Batch
from tests.support import small


def batch_of(rng, size, tables, dense=small.DENSE):
  """Examples as a trainer takes them; some lookups are padding."""
  first, last = tables.column_rows
  lookups = rng.integers(first, last, (size, len(first)))
  lookups[rng.random(lookups.shape) < 0.2] = -1
  weights = None
  shape = (size, *tables.example_shape)
  if tables.is_weighted:
    weights = rng.normal(size=shape).astype(np.float32)
  return Batch(
    rng.normal(size=(size, dense)).astype(np.float32),
    lookups.reshape(shape),
    None,
    np.ones(size, np.float32),
    weights,
  )


def trained(recipe, seed=0, steps=5, placement='streamed', length=None):
  """A trainer after some steps, as a run that was loaded."""
  columns = small.columns(32 * max(steps, 1), seed=seed, length=length)
  trainer = make_parts(recipe, placement, small.DENSE, seed)
  if steps:
    with planned(trainer, ColumnBatches(columns, 32), 0) as batches:
      for _ in train(trainer, batches, steps):
        pass
  tables = recipe.tables
  data = Dataset(
    'made up',
    {name: table.rows for name, table in tables.tables.items()},
    tables.features,
    small.DENSE,
    lambda size: ColumnBatches(columns, size),
    lambda size: ColumnBatches(columns, size, epochs=1, pad_remainder=True),
  )
  return LoadedRun(None, data, trainer, steps)


def export(run, folder, codec='float32', sizes=(1, 16, 64)):
  """Writes it; returns the folder."""
  facts = facts_of_dataset(run.data)
  exporting.write_export(run.trainer, folder, facts, codec, sizes)
  return folder


@contextlib.contextmanager
def served(run, folder):
  """Exports a run and serves it. Yields the scorer and the address."""
  export(run, folder, sizes=(4,))
  with Scorer(folder) as scorer:
    server = Server(scorer, port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
      yield scorer, server.address
    finally:
      server.stop()
      thread.join()


def local_rows(tables, lookups):
  """Global rows of a batch as rows of each column's table, [n, K]."""
  flat = lookups.reshape(len(lookups), tables.num_columns)
  return np.where(flat < 0, -1, flat - tables.column_rows[0])


def saved_words(words, folder):
  """A vocabulary as an export has it, opened again."""
  opened = []
  for number, own in enumerate(words):
    saved = write_ids(ids_of_vocabulary(own), folder, number)
    opened.append(vocabulary._open(folder, number, saved, own.size))
  return opened
