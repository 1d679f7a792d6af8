"""An export scores as its trainer does: to the bit where rows are float32."""

import itertools
import os
import shutil
import sys
import threading

import numpy as np
import optax
import pytest

from slip_serve import Query, Scorer, ServeError
from slip_serve.layout import CODECS
from slip_serve.rows import decode
from slipstream_jax.errors import UserError
from slipstream_jax.export import folder as exporting
from slipstream_jax.export.folder import encoded
from slipstream_jax.export.source import facts_of_dataset
from slipstream_jax.models.adapters import Functions
from slipstream_jax.tables import Feature, Table, TableSet
from slipstream_jax.training.evaluate import predict_batch
from slipstream_jax.training.recipe import Recipe
from tests.serve import exported
from tests.support import small
from tests.support.programs import finished

KINDS = ('dlrm', 'bags', 'half', 'sequences', 'uneven')


def uneven():
  """Two groups, a shared table, weighted bags of unlike lengths, two heads."""
  tables = TableSet(
    {'a': Table(50, 8), 'b': Table(40, 4), 'c': Table(9, 8)},
    {
      'x': Feature('a', 'mean', 3, weighted=True),
      'y': Feature('b', 'sum', 2),
      'z': Feature('a'),
      'w': Feature('c', 'none', 2),
    },
  )

  return added_up(tables)


def combined():
  """Two groups, sums of bags of several lengths, and others."""
  tables = TableSet(
    {'a': Table(50, 8), 'b': Table(40, 4), 'c': Table(9, 8), 'd': Table(7, 4)},
    {
      'x': Feature('a', 'sum', 3),
      'y': Feature('b', 'sum', 5),
      'z': Feature('a', 'sum', 3),
      'w': Feature('c', 'none', 2),
      'v': Feature('c', 'sum', 4),
      'u': Feature('d'),
    },
  )
  return added_up(tables)


def added_up(tables):
  """A model of two heads that adds up all embeddings."""

  def init(key, dense, embeddings):
    return {'w': np.linspace(-1, 1, 2, dtype=np.float32)}

  def apply(params, dense, embeddings):
    parts = [e.reshape(len(dense), -1).sum(axis=1) for e in embeddings.values()]
    logits = sum(parts) + dense.sum(axis=1)
    return logits[:, None] * params['w'][None]

  return Recipe(Functions(init, apply), tables, optax.sgd(0.1), optax.sgd(0.1))


@pytest.fixture(scope='module')
def runs():
  """By kind, a run."""
  made = {
    'dlrm': exported.trained(small.recipe()),
    'bags': exported.trained(small.recipe(length=4), length=4),
    'half': exported.trained(small.recipe(table_dtype='bfloat16')),
    'sequences': exported.trained(small.sequence_recipe(), length=small.STEPS),
    'uneven': exported.trained(uneven(), steps=0),
    'combined': exported.trained(combined(), steps=0),
  }
  return made


@pytest.fixture(scope='module')
def folders(runs, tmp_path_factory):
  folder = tmp_path_factory.mktemp('exports')
  return {
    kind: exported.export(run, folder / kind) for kind, run in runs.items()
  }


def query_of(run, batch):
  tables = run.trainer.recipe.tables
  rows = exported.local_rows(tables, batch.lookups)
  weights = batch.lookup_weights
  if weights is not None:
    weights = weights.reshape(rows.shape)
  return Query(batch.dense, rows, weights)


def threads():
  return {one for one in threading.enumerate() if 'slip-serve' in one.name}


WAYS = (
  ('dram', 0.1, True),
  ('mmap', 0.1, True),
  ('ssd', 0.1, True),
  ('ssd', 0, False),
  ('ssd', 3, True),
  ('ssd', 1.0, False),
)


@pytest.mark.parametrize('kind', KINDS)
def test_scores_have_the_bits_of_the_trainer(kind, runs, folders):
  run, rng = runs[kind], np.random.default_rng(1)
  tables = run.trainer.recipe.tables
  batches = [exported.batch_of(rng, n, tables) for n in (1, 16, 64, 16, 1)]
  wanted = [predict_batch(run.trainer, batch).logits for batch in batches]
  for memory, cache, direct in WAYS:
    with Scorer(folders[kind], memory, cache, direct=direct) as scorer:
      for batch, expected in zip(batches, wanted, strict=True):
        logits = scorer.logits(query_of(run, batch))
        assert logits.dtype == expected.dtype
        np.testing.assert_array_equal(
          logits.view(np.uint32), expected.view(np.uint32)
        )
      stats = scorer.stats
      assert stats.examples == 98
      assert (stats.bytes_per_lookup > 0) == (stats.hit_rate < 1)


def same_bits(one, other):
  np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize('codec', CODECS)
@pytest.mark.parametrize('kind', ['bags', 'combined'])
def test_bags_that_are_kept_change_no_bit(kind, codec, runs, tmp_path):
  run, rng = runs[kind], np.random.default_rng(11)
  tables = run.trainer.recipe.tables
  folder = exported.export(run, tmp_path / 'x', codec)
  known = query_of(run, exported.batch_of(rng, 40, tables))
  queries, spans = [], [*tables.columns.values()]
  for size in rng.choice([1, 16, 64, 5, 100], 25):
    rows = np.empty((size, tables.num_columns), np.int64)
    for columns in spans:  # of each feature one of 40 bags
      chosen = rng.integers(0, 40, size)
      rows[:, columns] = known.rows[chosen][:, columns]
    dense = known.dense[rng.integers(0, 40, size)]
    queries.append(Query(dense, rows))
  with Scorer(folder) as scorer:
    wanted = [scorer.logits(query) for query in queries]
  read = []
  for cache, bags in (0.9, 0.0), (0.9, 0.5), (1.0, 1.0), (20, 0.3), (2, 0.1):
    pinned = ['c'] if (kind, bags) == ('combined', 0.5) else []
    with Scorer(folder, 'ssd', cache, pinned=pinned, bags=bags) as scorer:
      for query, expected in zip(queries, wanted, strict=True):
        same_bits(scorer.logits(query), expected)
      stats = scorer.stats
      assert (stats.bags_found > 0) == (bags > 0.1)
      for expected, got in zip(wanted, scorer.stream(queries), strict=True):
        same_bits(got, expected)
    read.append(stats.unique_rows)
  assert max(read[1:3]) < read[0]


def test_threads_share_what_bags_combine_to(runs, folders):
  run, rng, failed = runs['combined'], np.random.default_rng(12), []
  query = query_of(run, exported.batch_of(rng, 64, run.trainer.recipe.tables))
  with (
    Scorer(folders['combined']) as dram,
    Scorer(folders['combined'], 'ssd', 0.9, bags=0.9) as scorer,
  ):

    def ask(seed):
      own = np.random.default_rng(seed)
      for _ in range(40):
        some = own.integers(0, 64, 16)
        one = Query(query.dense[some], query.rows[some])
        if not np.array_equal(scorer.logits(one), dram.logits(one)):
          failed.append(seed)

    threads = [threading.Thread(target=ask, args=[seed]) for seed in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert scorer.stats.bags_found
  assert not failed


def test_pinned_tables_are_never_read(runs, folders):
  run, rng = runs['dlrm'], np.random.default_rng(13)
  tables = run.trainer.recipe.tables
  query = query_of(run, exported.batch_of(rng, 64, tables))
  for name in tables.tables:
    alone = np.full_like(query.rows, -1)
    alone[:, tables.columns[name]] = query.rows[:, tables.columns[name]]
    with Scorer(folders['dlrm'], 'ssd', 1.0, pinned=[name]) as scorer:
      scorer.logits(Query(query.dense, alone))
      assert scorer.stats.hit_rate == 1.0
      assert scorer.stats.bytes_per_lookup == 0
      scorer.logits(query)
      assert scorer.stats.hit_rate < 1.0


@pytest.mark.parametrize('kind', ['dlrm', 'uneven'])
def test_what_was_counted_is_in_memory_from_the_start(
  kind, runs, folders, tmp_path
):
  run, rng = runs[kind], np.random.default_rng(7)
  tables = run.trainer.recipe.tables
  counts = rng.permutation(tables.num_rows)
  counted = run._replace(data=run.data._replace(counts=lambda: counts))
  folder = exported.export(counted, tmp_path / 'x')
  batch, hits, layouts = exported.batch_of(rng, 64, tables), [], []
  expected = predict_batch(run.trainer, batch).logits
  for path in folder, folders[kind]:
    with Scorer(path, 'ssd', 0.2) as scorer:
      logits = scorer.logits(query_of(run, batch))
      np.testing.assert_array_equal(logits, expected)
      hits.append(scorer.stats.hit_rate)
      layouts.append(scorer.layout)
  assert hits[0] > hits[1] == 0
  for group in layouts[0].groups:
    rows = np.fromfile(folder / group.popular, '<i8')
    assert len(np.unique(rows)) == len(rows) == -(-group.rows // 4)
    if kind == 'dlrm':  # one group: its numbers are global
      np.testing.assert_array_equal(rows, np.argsort(-counts)[: len(rows)])


def test_other_sizes_are_padded_or_cut(runs, folders):
  run, rng = runs['dlrm'], np.random.default_rng(2)
  tables = run.trainer.recipe.tables
  with Scorer(folders['dlrm']) as scorer:
    for size in 0, 2, 15, 17, 65, 200:
      batch = exported.batch_of(rng, size, tables)
      logits = scorer.logits(query_of(run, batch))
      assert logits.shape == (size,)
      if size:
        expected = predict_batch(run.trainer, batch).logits
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_streaming_changes_no_score_and_leaves_nothing_under_way(runs, folders):
  run, rng = runs['bags'], np.random.default_rng(3)
  tables, before = run.trainer.recipe.tables, threads()
  queries = [
    query_of(run, exported.batch_of(rng, size, tables))
    for size in (16, 3, 64, 0, 70)
  ]
  bad = queries[0]._replace(rows=queries[0].rows + 10_000)
  with Scorer(folders['bags'], 'ssd', 8) as scorer:
    alone = [scorer.logits(query) for query in queries]
    for ahead in (1, 2, 9):
      streamed = scorer.stream(queries, ahead)
      for one, other in zip(alone, streamed, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ServeError, match='column'):
      list(scorer.stream([queries[0], bad]))
    stream = scorer.stream(itertools.repeat(queries[0]), 3)
    np.testing.assert_array_equal(next(stream), alone[0])
    stream.close()
    asked = scorer.stats.examples
    np.testing.assert_array_equal(scorer.logits(queries[0]), alone[0])
    assert scorer.stats.examples == asked + 16
  assert threads() == before


@pytest.mark.parametrize('codec', CODECS)
def test_a_codec_keeps_its_bounds(codec):
  rng = np.random.default_rng(4)
  rows = rng.normal(size=(300, 7)).astype(np.float32)
  rows *= np.exp(rng.normal(0, 4, (300, 1))).astype(np.float32)
  rows[0], rows[1] = 0, 3.25
  rows[2, :] = 1e-40  # too small for a scale
  out = np.empty_like(rows)
  records = encoded(codec, rows, 't')
  decoded = out
  if codec == 'float32':
    decoded = records.view(np.float32)
  else:
    decode(codec, records, out)
  span = rows.max(axis=1, keepdims=True) - rows.min(axis=1, keepdims=True)
  size = np.abs(rows).max(axis=1, keepdims=True)
  bound = {
    'float32': 0 * size,
    'float16': size * 2.0**-11 + 2.0**-25,
    'int8': span / 510 + size * 2.0**-21 + 1e-37,
  }[codec]
  assert (np.abs(decoded - rows) <= bound).all()
  large = np.full((2, 3), 1e6, np.float32)
  if codec == 'float16':
    with pytest.raises(UserError, match='float16'):
      encoded(codec, large, 't')
  else:
    assert np.isfinite(encoded(codec, large * 1e32, 't')).all()


@pytest.mark.parametrize('codec', ['float16', 'int8'])
def test_smaller_rows_score_nearly_alike(codec, runs, tmp_path):
  run, rng = runs['dlrm'], np.random.default_rng(5)
  folder = exported.export(run, tmp_path / 'x', codec, (64,))
  batch = exported.batch_of(rng, 64, run.trainer.recipe.tables)
  expected = predict_batch(run.trainer, batch).logits
  for memory in 'dram', 'ssd':
    with Scorer(folder, memory, 10) as scorer:
      logits = scorer.logits(query_of(run, batch))
    np.testing.assert_allclose(logits, expected, atol=0.02)


def test_bad_queries_are_refused(runs, folders):
  run, rng = runs['uneven'], np.random.default_rng(6)
  good = query_of(run, exported.batch_of(rng, 4, run.trainer.recipe.tables))
  with Scorer(folders['uneven']) as scorer:
    for change, words in (
      ({'rows': good.rows[:, :3]}, 'lookups must be'),
      ({'rows': good.rows.astype(float)}, 'lookups must be'),
      ({'rows': np.where(good.rows < 99, 50, 0)}, r'\[0, 50\)'),
      ({'rows': good.rows - 5}, 'rows of column'),
      ({'dense': good.dense[:, :2]}, 'dense must be'),
      ({'dense': good.dense * np.nan}, 'finite'),
      ({'dense': [['x'] * 4] * 4}, 'finite numbers'),
      ({'weights': good.weights[:, :2]}, 'weights must be'),
    ):
      with pytest.raises(ServeError, match=words):
        scorer.logits(good._replace(**change))
    assert scorer.logits(good._replace(weights=None)).shape == (4, 2)
    with pytest.raises(ServeError, match=r'ids of'):
      scorer.query(good.dense, good.rows + 10_000)


def test_bad_calls_are_refused(folders, tmp_path):
  for given, words in (
    ({'memory': 'tape'}, 'dram, mmap, ssd'),
    ({'cache': -1}, 'share'),
    ({'cache': float('nan')}, 'share'),
    ({'depth': 0}, 'share'),
    ({'pinned': ['nobody']}, "pinned tables must be .* got 'nobody'"),
    ({'pinned': 'a'}, 'give a list'),
    ({'memory': 'ssd', 'cache': 2, 'pinned': ['t1']}, 'fit the 2'),
    ({'bags': 1.5}, 'from 0 to 1'),
    ({'bags': 0.5}, 'no such feature'),
  ):
    with pytest.raises(ServeError, match=words):
      Scorer(folders['dlrm'], **given)
  for kind in 'uneven', 'sequences':
    with pytest.raises(ServeError, match='no weights'):
      Scorer(folders[kind], bags=0.5)
  with pytest.raises(ServeError, match=r'trainer\.export or python'):
    Scorer(tmp_path)


def test_a_changed_byte_is_told_by_its_checksum(folders, tmp_path):
  for name in os.listdir(folders['dlrm']):
    shutil.copytree(folders['dlrm'], tmp_path / name)
    path = tmp_path / name / name
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16
    path.write_bytes(content)
    with pytest.raises(ServeError, match=name.replace('.', r'\.')):
      Scorer(tmp_path / name)
    path.unlink()
    with pytest.raises(ServeError, match=name.replace('.', r'\.')):
      Scorer(tmp_path / name)


def test_an_export_is_whole_or_absent(runs, tmp_path, monkeypatch):
  run = runs['dlrm']
  facts = facts_of_dataset(run.data)

  def write(folder, *how):
    exporting.write_export(run.trainer, folder, facts, *how)

  with pytest.raises(UserError, match='new or empty'):
    write(exported.export(run, tmp_path / 'x'), 'float32', (1,))
  for sizes in (1, 'x'), (0,), (), (1 << 25,):
    with pytest.raises(UserError, match='batch_sizes'):
      write(tmp_path / 'y', 'float32', sizes)
  with pytest.raises(UserError, match="cpu, cuda, rocm, tpu, got 'abacus'"):
    write(tmp_path / 'y', 'float32', (1,), ('abacus',))
  monkeypatch.setattr(exporting, 'serialized', lambda *_: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    write(tmp_path / 'y', 'float32', (1,))
  assert {path.name for path in tmp_path.iterdir()} == {'x'}


SCRIPT = """
import json, sys
import numpy as np
import slip_serve
with slip_serve.load(sys.argv[1], 'ssd', 4) as scorer:
  dense = np.zeros((3, {dense}), np.float32)
  scores = scorer.probabilities(dense, np.zeros((3, 4), np.int64))
  assert scores.shape == (3,)
names = sorted({{name.split('.')[0] for name in sys.modules}})
print(json.dumps(names))
"""


def test_who_serves_loads_nothing_of_training(folders):
  script = SCRIPT.format(dense=small.DENSE)
  done = finished([sys.executable, '-c', script, str(folders['dlrm'])])
  assert done.returncode == 0, done.stderr
  ours = {'experiments', 'configs'}
  training = {'optax', 'flax', 'orbax', 'polars', 'fsspec', 'ml_collections'}
  loaded = {*done.stdout.replace('"', ' ').replace(',', ' ').split()}
  assert 'slip_serve' in loaded
  assert loaded & (ours | training) == set()
