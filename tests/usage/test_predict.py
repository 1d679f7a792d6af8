"""Finished runs, loaded to score raw examples and to write rows of tables."""

import json
import shutil
import sys

import numpy as np
import polars as pl
import pytest

from configs import avazu, common, criteo
from experiments.common import cli, datasets, loading
from experiments.predict import job
from slipstream_jax.errors import UserError
from slipstream_jax.formats.avazu import avazu_raw
from slipstream_jax.formats.criteo import criteo_raw
from slipstream_jax.formats.in_memory import in_memory, new_batches
from slipstream_jax.formats.table import frame_raw
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.packed.pack import pack, packed_like
from slipstream_jax.packed.prepare import prepare
from slipstream_jax.tables import Feature
from slipstream_jax.training.evaluate import evaluate, predict
from slipstream_jax.training.metrics import probabilities
from tests.formats.text_formats import FORMATS
from tests.support.programs import finished
from tests.support.runs import (
  assert_one_sentence,
  run_job,
  smoke,
  snapshot,
  summary_of,
)
from tests.support.texts import criteo as texts

LINES = texts.lines(4200)
HELD_OUT = slice(3900, 4200)
SHARE = 300 / 4200


@pytest.fixture(scope='module')
def made_of(tmp_path_factory):
  """A folder with runs, of the same lines in memory and packed."""
  folder = tmp_path_factory.mktemp('predict')
  path = texts.write(folder / 'train.txt', LINES)
  raw = criteo_raw(path, test_share=SHARE)
  for _ in prepare(raw, folder / 'counted', min_count=2):
    pass
  for _ in prepare(raw, folder / 'hashed', hash_rows=50):
    pass
  for name, skip in ('train.txt', 'off'), ('counted', 'examples'):
    config = smoke(
      **{
        'data.path': str(folder / name),
        'data.batch_size': 100,
        'data.test_share': SHARE,
        'data.bad_lines': 3,  # of files to train on
        'eval.batch_size': 128,
        'train.steps': 30,
        'skip.mode': skip,
      }
    )
    assert run_job(folder / f'run-{name}', config) == 0
  return folder


def program_of(run, input=None, rows=None, output=None, data=None):
  """Calls the program; returns its exit code."""
  named = (None if x is None else str(x) for x in (input, rows, output, data))
  return cli.guarded(job.predict, run, *named)


def new_examples(run, path):
  return datasets.new_examples(run.config.data, path)


def unlabelled(lines):
  return [line.partition('\t')[2] for line in lines]


@pytest.fixture(scope='module')
def counted(made_of):
  return loading.load(made_of / 'run-counted')


@pytest.mark.parametrize('name', ['train.txt', 'counted'])
def test_raw_examples_get_the_bits_of_the_evaluation(made_of, name, tmp_path):
  run = made_of / f'run-{name}'
  before = snapshot(run)
  loaded = loading.load(run)
  known = predict(loaded.trainer, loaded.data.test(128))
  assert len(known.logits) == 300
  assert (
    evaluate(loaded.trainer, loaded.data.test(128)).log_loss
    == (summary_of(run)['log_loss'])
  )
  file = texts.write(tmp_path / 'labelled', LINES[HELD_OUT])
  bare = texts.write(tmp_path / 'bare', unlabelled(LINES[HELD_OUT]), True)
  for path, labels in (file, known.labels), (bare, None):
    parts = list(loading.scored(loaded, new_examples(loaded, path)))
    logits = np.concatenate([part.logits for part in parts])
    np.testing.assert_array_equal(logits, known.logits)
    assert (parts[0].labels is None) == (labels is None)
  expected = probabilities(known.logits.astype(np.float64)).astype(np.float32)
  for output in tmp_path / 'p.npy', tmp_path / 'new' / 'p.csv':
    assert program_of(run, input=bare, output=output) == 0
  np.testing.assert_array_equal(np.load(tmp_path / 'p.npy'), expected)
  frame = pl.read_csv(
    tmp_path / 'new' / 'p.csv', schema={'probability': pl.Float32}
  )
  np.testing.assert_array_equal(frame['probability'].to_numpy(), expected)
  assert snapshot(run) == before


def test_the_program_as_it_is_called(made_of, tmp_path):
  file = texts.write(tmp_path / 'new', LINES[HELD_OUT])
  run, output = made_of / 'run-counted', tmp_path / 'out.csv'
  command = [sys.executable, '-m', 'experiments.predict', str(run)]
  done = finished([*command, f'--input={file}', f'--output={output}'])
  assert (done.returncode, done.stderr) == (0, '')
  assert f'{summary_of(run)["auc"]:.4g}' in done.stdout
  assert max(map(len, done.stdout.splitlines()[:-1])) <= 80
  assert len(output.read_text().splitlines()) == 301


def test_rows_come_with_their_ids(made_of, counted, tmp_path):
  loaded = counted
  output = tmp_path / 'rows.npz'
  moved = tmp_path / 'moved'
  shutil.copytree(made_of / 'counted', moved)
  given = {'rows': 'C3', 'output': output, 'data': moved}
  assert program_of(made_of / 'run-counted', **given) == 0
  arrays = np.load(output)
  assert set(arrays) == {'rows', 'ids', 'unknown'}
  whole = loaded.trainer.engine.rows_of('C3')
  np.testing.assert_array_equal(arrays['rows'], whole[1:])
  np.testing.assert_array_equal(arrays['unknown'], whole[0])
  at = loaded.data.vocabulary()[2].rows(arrays['ids'])
  np.testing.assert_array_equal(at, np.arange(1, len(whole)))
  words = packed_dataset(made_of / 'hashed').vocabulary
  hashed = loaded._replace(data=loaded.data._replace(vocabulary=words))
  assert set(loading.rows_of(hashed, 'C3')) == {'rows'}


def test_rows_that_are_drawn_have_no_raw_examples(made_of, counted, tmp_path):
  loaded = counted
  bare = loaded._replace(data=loaded.data._replace(vocabulary=None))
  arrays = loading.rows_of(bare, 'C3')
  assert arrays['ids'].tolist() == list(range(len(arrays['rows'])))
  file = texts.write(tmp_path / 'new', LINES[:3])
  with pytest.raises(UserError, match='vocabulary'):
    next(loading.scored(bare, new_examples(loaded, file)))
  for key, words in ('path', 'made-up clicks'), ('format', 'taobao'):
    config = smoke(**{'data.path': 'x', f'data.{key}': None})
    if key == 'format':
      config.data.format = 'taobao'
    with pytest.raises(UserError, match=words):
      new_examples(loaded._replace(config=config), file)


def test_wrong_calls_end_in_a_sentence(
  made_of, counted, tmp_path, capsys, monkeypatch
):
  load = loading.load

  def cached(folder, data, **how):
    same = (folder, data) == (run, None)
    return counted if same else load(folder, data, **how)

  monkeypatch.setattr(loading, 'load', cached)
  run, output = made_of / 'run-counted', tmp_path / 'out.csv'
  good = texts.write(tmp_path / 'good', LINES[:3])
  bad = texts.write(tmp_path / 'bad', [*LINES[:200], 'no line'])
  (tmp_path / 'dir.csv').mkdir()
  (tmp_path / 'file').write_text('')
  unkept = shutil.copytree(run, tmp_path / 'unkept')
  shutil.rmtree(unkept / 'checkpoints')
  for folder, given, words in (
    (run, {}, '--input and --rows'),
    (run, {'input': good, 'rows': 'C1'}, 'both'),
    (run, {'input': good, 'output': tmp_path / 'out.txt'}, '.csv or .npy'),
    (run, {'input': good, 'output': tmp_path / 'dir.csv'}, 'dir.csv'),
    (run, {'input': good, 'output': tmp_path / 'file' / 'x.csv'}, 'file'),
    (run, {'input': tmp_path / 'none'}, 'No such file'),
    (run, {'input': bad}, 'line 201'),
    (run, {'rows': 'C99', 'output': tmp_path / 'x.npz'}, 'C26'),
    (run, {'input': good, 'data': tmp_path / 'gone'}, 'gone'),
    (run, {'input': good, 'data': made_of / 'hashed'}, 'checkpoint'),
    (tmp_path / 'none', {'input': good}, 'config.json'),
    (unkept, {'input': good}, 'keep_checkpoint'),
  ):
    given = {'output': output, **given}
    assert program_of(folder, **given) == 1, words
    assert_one_sentence(capsys.readouterr().err, words)
    assert not list(tmp_path.glob('out*'))
    assert not list(tmp_path.glob('x.npz*'))


def test_avazu_is_scored_with_and_without_clicks(tmp_path):
  of = FORMATS['avazu']
  lines = [
    of.with_field('C17', str(n % 7), of.with_field('click', c))
    for n, c in enumerate('0110100110')
  ]
  path = of.write(tmp_path / 'train.csv', lines)
  data = in_memory(avazu_raw(path))
  words = data.vocabulary()
  bare = tmp_path / 'test.csv'
  without = [line.split(',') for line in path.read_text().splitlines()]
  bare.write_text(''.join(','.join([a, *z]) + '\n' for a, _, *z in without))
  (labelled,) = new_batches(avazu_raw(path, labelled=None), words, 10)
  (batch,) = new_batches(avazu_raw(bare, labelled=None), words, 10)
  assert labelled.labels.tolist() == [0, 1, 1, 0, 1, 0, 0, 1, 1, 0]
  assert batch.labels is None
  np.testing.assert_array_equal(batch.lookups, labelled.lookups)
  np.testing.assert_array_equal(batch.dense, labelled.dense)
  with pytest.raises(UserError, match='the only one with clicks'):
    in_memory(avazu_raw(bare))
  with pytest.raises(UserError, match='must have labels'):
    in_memory(avazu_raw(bare, labelled=None))
  assert avazu.get_config().data.format == 'avazu'
  assert criteo.get_config().data.format == 'criteo'


def frame(count, seed=0):
  rng = np.random.default_rng(seed)
  items = rng.integers(0, 9, count)
  return pl.DataFrame(
    {
      'user': rng.integers(0, 60, count),
      'item': [f'item {item}' for item in items],
      'seen': [
        '|'.join(f'item {x}' for x in rng.integers(0, 9, rng.integers(0, 4)))
        for _ in range(count)
      ],
      'age': rng.normal(size=count),
      'click': items % 2,
    }
  )


def test_a_table_of_ones_own(tmp_path):
  """Text ids, lists, missing numbers; labels are there or not."""
  whole = frame(2000)
  whole[5, 'age'] = None
  whole.write_csv(tmp_path / 'train.csv')
  folder = tmp_path / 'packed'
  features = {
    'user': Feature('user'),
    'item': Feature('item'),
    'seen': Feature('item', 'mean', 3),
  }
  data = pack(
    tmp_path / 'train.csv',
    folder,
    features=features,
    dense=['age'],
    label='click',
    fill=0.5,
    min_count=2,
  )
  config = common.start('', ('',))
  common.files(config, None, batch_size=100)
  config.data.path = str(folder)
  common.dlrm(config, dim=4, bottom=(4,), top=(8,))
  config.model.pooling = 'mean'
  common.optimizers(
    config,
    rows=(('rowwise_adagrad', {'learning_rate': 0.1}),),
    dense=(('adam', {'learning_rate': 1e-2}),),
    dense_final=1.0,
  )
  common.hot_rows(config, bytes=1 << 12, profile_examples=1000)
  common.skipping(config, 'surprise')
  common.phases(config, warm_up=2, window=3, settle=2, period=10)
  common.training(config)
  config.eval.batch_size = 128
  assert run_job(tmp_path / 'run', config) == 0
  loaded = loading.load(tmp_path / 'run')
  known = predict(loaded.trainer, data.test(128)).logits
  held_out = whole.tail(len(known))
  held_out.drop('click').write_parquet(tmp_path / 'new.parquet')
  held_out.write_csv(tmp_path / 'new.csv')
  for name in 'new.parquet', 'new.csv':
    output = tmp_path / f'{name}.npy'
    assert (
      program_of(tmp_path / 'run', input=tmp_path / name, output=output) == 0
    )
    expected = probabilities(known.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(np.load(output), expected)
  held_out.head(0).write_csv(tmp_path / 'none.csv')
  with pytest.raises(UserError, match=r'an example to score, got none.*none'):
    next(loading.scored(loaded, new_examples(loaded, tmp_path / 'none.csv')))
  with pytest.raises(UserError, match='that pack wrote'):
    packed_like(tmp_path / 'new.csv', _criteo_folder(tmp_path))
  bare = frame_raw(whole, features=features, label=None)
  with pytest.raises(UserError, match='must have labels'):
    next(prepare(bare, tmp_path / 'bare'))
  assert not (tmp_path / 'bare').exists()
  assert json.loads((folder / 'manifest.json').read_text())['tables']


def _criteo_folder(tmp_path):
  path = texts.write(tmp_path / 'criteo.txt', LINES[:100])
  for _ in prepare(criteo_raw(path), tmp_path / 'criteo'):
    pass
  return tmp_path / 'criteo'


@pytest.mark.parametrize('batch_size', [1, 7, 64, 1000])
def test_batches_are_the_examples_in_order(made_of, batch_size):
  raw = criteo_raw(made_of / 'train.txt')
  words = in_memory(raw).vocabulary()
  ((whole,), parts) = (
    list(new_batches(raw, words, size)) for size in (4200, batch_size)
  )
  assert {len(part.weights) for part in parts} == {batch_size}
  real = np.concatenate([part.weights for part in parts]) > 0
  assert real.sum() == 4200
  for name in 'lookups', 'labels', 'dense':
    column = np.concatenate([getattr(part, name) for part in parts])
    np.testing.assert_array_equal(column[real], getattr(whole, name))
