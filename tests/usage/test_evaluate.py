"""A checkpoint evaluated anew has the numbers of its run; and exports do."""

import io
import json
import random
import shutil
import sys

import numpy as np
import pytest
from rich.console import Console

from experiments.bench import exports
from experiments.checkpoints import job as checkpoints
from experiments.common import build, loading
from experiments.common.progress import Bar
from experiments.evaluate import job
from slip_serve import Scorer
from slip_serve.bodies import examples_of
from slipstream_jax.checkpoint.manifest import name_of, read_manifest
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.errors import UserError
from slipstream_jax.export.folder import popular_rows, write_export
from slipstream_jax.export.source import facts_of_dataset
from slipstream_jax.formats.criteo import (
  COLUMNS,
  criteo_raw,
  INTEGERS,
  TABLES,
)
from slipstream_jax.packed.prepare import prepare
from slipstream_jax.training.evaluate import predict
from tests.support.programs import finished
from tests.support.runs import run_job, smoke, snapshot, summary_of
from tests.support.texts import criteo as texts
from tests.support.texts.mutations import flip

LINES = texts.lines(2000)
SHARE = 300 / 2000
HELD_OUT = slice(1700, 2000)


def config_of(folder, **changes):
  plain = {
    'data.path': str(folder / 'packed'),
    'data.batch_size': 100,
    'eval.batch_size': 128,
    'train.steps': 15,
    'skip.mode': 'off',
    'placement': 'streamed',
    'eval.curve_steps': 0,
  }
  return smoke(**plain | changes)


def evaluation(folder, path=None, config=None, step=None):
  run = loading.load(folder, other=config, step=step)
  return job.evaluation(run, path)


@pytest.fixture(scope='module')
def made_of(tmp_path_factory):
  folder = tmp_path_factory.mktemp('evaluate')
  path = texts.write(folder / 'train.txt', LINES)
  raw = criteo_raw(path, test_share=SHARE)
  for _ in prepare(raw, folder / 'packed', min_count=2):
    pass
  assert run_job(folder / 'run', config_of(folder)) == 0
  return folder


def test_the_held_out_examples_have_the_metrics_of_the_run(made_of):
  before = snapshot(made_of / 'run')
  values = evaluation(made_of / 'run')
  summary = summary_of(made_of / 'run')
  for name in 'auc', 'log_loss', 'accuracy', 'calibration':
    assert values[name] == summary[name], name
  assert (values['examples'], values['steps_trained']) == (300, 15)
  assert snapshot(made_of / 'run') == before
  unfinished = made_of / 'unfinished'
  shutil.copytree(made_of / 'run', unfinished)
  (unfinished / 'summary.json').unlink()
  assert evaluation(unfinished)['auc'] == summary['auc']


def test_a_run_of_quantized_rows_is_evaluated_and_exported(made_of, tmp_path):
  run, codec = tmp_path / 'run', {'checkpoint.codec': 'int8'}
  assert run_job(run, config_of(made_of, **codec)) == 0
  known = summary_of(run)['auc']
  assert evaluation(run)['auc'] == pytest.approx(known, abs=0.005)
  loaded = loading.load(run)
  facts = facts_of_dataset(loaded.data)
  write_export(loaded.trainer, tmp_path / 'export', facts, 'float32', (128,))


def test_no_program_takes_an_older_checkpoint_unasked(made_of, tmp_path):
  run, saves = tmp_path / 'run', {'train.checkpoint_steps': 10}
  assert run_job(run, config_of(made_of, **saves)) == 0
  place = checkpoints.place_of(str(run))
  rng, older = random.Random(0), loading.load(run, step=10)
  numbers = evaluation(run, step=10)
  assert (older.step, numbers['steps_trained']) == (10, 10)
  assert numbers['auc'] != evaluation(run)['auc']
  manifest = read_manifest(place, 15)
  files = [*manifest.rows.values(), *manifest.files.values()]
  own = [name for name, *_ in files if '-000000000015-' in name]
  for name in [name_of(15), *own]:
    path = run / 'checkpoints' / name
    whole = path.read_bytes()
    flip(path, rng)
    for load in (
      lambda: evaluation(run),
      lambda: loading.load(run),
      lambda: checkpoints.copied(place, open_place(tmp_path / 'copy'), 'raw'),
    ):
      with pytest.raises(UserError, match=rf'got step 15: .*{name}.*step=10'):
        load()
    told = []
    again = loading.load(run, step=10, tell=told.append)
    for table in again.trainer.recipe.tables.tables:
      one, other = (x.trainer.engine.rows_of(table) for x in (again, older))
      np.testing.assert_array_equal(one, other)
    assert told[0] == 'step 10 is loaded, as asked'
    assert name in told[1]
    path.write_bytes(whole)
  assert evaluation(run)['steps_trained'] == 15


def test_hot_rows_are_those_of_the_checkpoint(made_of, tmp_path, monkeypatch):
  run, skips = tmp_path / 'run', {'skip.mode': 'examples'}
  assert run_job(run, config_of(made_of, **skips)) == 0
  with monkeypatch.context() as patch:
    patch.setattr(build, 'row_counts', lambda *_: 1 / 0)
    assert evaluation(run)['auc'] == summary_of(run)['auc']
    loaded = loading.load(run)
    (popular,) = popular_rows(loaded.trainer, loaded.data.counts)
  known = build.hot(loaded.config, loaded.data, loaded.trainer.recipe)
  np.testing.assert_array_equal(loaded.trainer.engine.hot.rows, known.rows)
  np.testing.assert_array_equal(popular, known.rows)
  trained = loaded.trainer.engine.groups[0].host.written
  assert 0 < trained < loaded.trainer.recipe.tables.num_rows


def test_a_file_of_them_has_the_same(made_of, tmp_path):
  path = texts.write(tmp_path / 'held-out', LINES[HELD_OUT])
  values = evaluation(made_of / 'run', path=str(path))
  assert values['auc'] == summary_of(made_of / 'run')['auc']
  bare = [line.partition('\t')[2] for line in LINES[HELD_OUT]]
  path = texts.write(tmp_path / 'bare', bare)
  with pytest.raises(UserError, match=r'experiments\.predict'):
    evaluation(made_of / 'run', path=str(path))


def test_another_config_may_evaluate_otherwise(made_of):
  other = config_of(made_of, **{'eval.batch_size': 77, 'eval.split': 'test'})
  other.seed = 99  # which the run keeps
  values = evaluation(made_of / 'run', config=other)
  assert values['log_loss'] == pytest.approx(
    summary_of(made_of / 'run')['log_loss'], rel=1e-6
  )
  other.eval.split = 'none'
  with pytest.raises(UserError, match='none'):
    evaluation(made_of / 'run', config=other)


def test_exports_of_a_run_score_raw_ids_with_its_bits(made_of, tmp_path):
  run = loading.load(made_of / 'run')
  facts = facts_of_dataset(run.data)
  write_export(run.trainer, tmp_path / 'export', facts, 'float32', (128,))
  known = predict(run.trainer, run.data.test(128)).logits
  raw = criteo_raw(texts.write(tmp_path / 'x', LINES[HELD_OUT]))
  (part,) = raw.parts
  ((chunk, _),) = part.chunks()
  for memory in 'dram', 'ssd':
    with Scorer(tmp_path / 'export', memory, 100) as scorer:
      query = scorer.query(chunk.dense, chunk.ids)
      np.testing.assert_array_equal(scorer.logits(query), known)
      lines = [line.split('\t') for line in LINES[HELD_OUT]]
      fields = dict(zip(COLUMNS, zip(*lines, strict=True), strict=True))
      integers = {
        name: [int(one) if one else None for one in fields[name]]
        for name in INTEGERS
      }
      named = scorer.query(integers, {name: fields[name] for name in TABLES})
      np.testing.assert_array_equal(scorer.logits(named), known)
      body = {
        'dense': integers,
        'ids': {name: fields[name] for name in TABLES},
      }
      examples = examples_of(scorer.layout, json.dumps(body).encode())
      posted = scorer.query(*examples)
      np.testing.assert_array_equal(scorer.logits(posted), known)
      unknown = np.full_like(chunk.ids, 1 << 40)
      assert not scorer.query(chunk.dense, unknown).rows.any()


@pytest.mark.slow
def test_the_programs_as_they_are_called(made_of, tmp_path):
  run = made_of / 'run'
  command = [sys.executable, '-m', 'experiments.evaluate']
  output = tmp_path / 'metrics.json'
  done = finished([*command, str(run), f'--output={output}'])
  assert (done.returncode, done.stderr) == (0, '')
  values = json.loads(output.read_text())
  assert values['auc'] == summary_of(run)['auc']
  assert finished(command).stderr.startswith('error: beside flags there must')
  with pytest.raises(UserError, match='write its output'):
    job.write_metrics(None, run, output=str(tmp_path))
  with pytest.raises(UserError, match='step 7'):
    job.write_metrics(None, run, output=f'{tmp_path}/new/a.json', step=7)
  assert not (tmp_path / 'new').exists()
  command = [sys.executable, '-m', 'experiments.export', str(run)]
  folder = tmp_path / 'export'
  again = [f'--output={folder}', '--dtype=int8', '--batch_sizes=2,8']
  done = finished([*command, *again])
  assert (done.returncode, done.stderr) == (0, '')
  with Scorer(folder) as scorer:
    assert [one.examples for one in scorer.layout.programs] == [2, 8]
    assert scorer.layout.codec == 'int8'
  done = finished([*command, *again])
  assert done.returncode == 1
  assert 'new or empty folder' in done.stderr
  asked = {'batch': 32, 'cache': 0.5, 'warm': 1, 'turn': 2, 'turns': 4}
  with Bar(Console(file=io.StringIO()), None, '') as bar:
    ((_, figures),) = exports.measure(
      run, bar, str(folder), **asked, pinned=['C3'], bags=0.0
    )
  assert figures['same bits']
  assert figures['ratio ssd, changed/not'] > 0
  assert all(value > 0 for key, value in figures.items() if 'queries/s' in key)
