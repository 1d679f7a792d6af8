"""The main job as its users run it: files, resume, and mistakes."""

import contextlib
import gzip
import json
import math
import pathlib
import shutil
import subprocess
import sys

from absl import flags
from absl.testing import flagsaver
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import criteo
from experiments import run
from experiments.common import cli, datasets, record
from experiments.common import workdir as folders
from slipstream_jax.train import metrics
from tests.support.processes import no_file_above, started, wait_for

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / 'shared' / 'data'
SUMMARY_KEYS = [
  'data',
  'seed',
  'steps',
  'seconds',
  'samples_per_s',
  'auc',
  'log_loss',
  'normalized_entropy',
  'accuracy',
  'calibration',
  'bayes_auc',
  'inputs_seen',
  'inputs_trained',
  'inputs_dropped',
  'lookups',
  'hits',
  'rows_loaded',
  'rows_stored',
  'bytes_loaded',
  'bytes_stored',
  'compilations',
  'peak_rss_bytes',
]


def smoke(**changes):
  config = criteo.get_config('smoke')
  with config.unlocked():
    config.update_from_flattened_dict(changes)
  return config


@contextlib.contextmanager
def in_folder(workdir):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(['tests'])
  with flagsaver.flagsaver(workdir=str(workdir)):
    yield


def run_job(workdir, config):
  with in_folder(workdir):
    return cli.guarded(run.main, config)


def summary_of(workdir):
  return json.loads((workdir / record.SUMMARY).read_text())


def lines_of(workdir):
  text = (workdir / record.METRICS).read_text()
  return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('runs') / 'finished'
  assert run_job(workdir, smoke()) == 0
  return workdir


def test_summary_says_it_all(finished):
  summary = summary_of(finished)
  assert set(SUMMARY_KEYS) <= set(summary)
  assert 'NOT real data' in summary['data']
  trained, dropped = summary['inputs_trained'], summary['inputs_dropped']
  assert trained + dropped == summary['inputs_seen'] == 200 * 256
  assert 0.1 < dropped / (200 * 256) < 0.3
  assert summary['steps'] == -(-trained // 256)
  assert summary['lookups'] == trained * 26
  assert 0 < summary['rows_stored'] < summary['rows_loaded']
  assert summary['bytes_loaded'] == summary['rows_loaded'] * (16 + 1) * 4
  saved = 2 * summary['saved_rows'] * 68 + summary['bytes_loaded']
  assert summary['saved_bytes'] == saved - summary['bytes_stored']
  assert 0.5 < summary['auc'] < summary['bayes_auc'] < 1
  for key, value in summary.items():
    assert not isinstance(value, float) or math.isfinite(value), key


def test_every_file_is_there(finished):
  names = {path.name for path in finished.iterdir()}
  assert names == {
    'checkpoints',
    'config.json',
    'learning_curve.png',
    'metrics.jsonl',
    'summary.json',
    'tensorboard',
    'transfers.png',
  }
  config = json.loads((finished / 'config.json').read_text())
  assert config['train']['steps'] == 200
  for name in ('learning_curve.png', 'transfers.png'):
    assert (finished / name).read_bytes()[:4] == b'\x89PNG'


def test_metrics_lines_agree_with_the_summary(finished):
  lines = lines_of(finished)
  train = [line for line in lines if line['kind'] == 'train']
  evals = [line for line in lines if line['kind'] == 'eval']
  decisions = [line for line in lines if line['kind'] == 'decision']
  summary = summary_of(finished)
  steps = summary['steps']
  assert [line['step'] for line in train] == [*range(10, steps, 10), steps]
  assert [line['step'] for line in evals] == [*range(50, steps, 50), steps]
  assert [line['batches_seen'] for line in decisions] == [14, 114]
  assert evals[-1]['auc'] == summary['auc']
  assert train[-1]['inputs_trained'] == summary['inputs_trained']
  taken = np.diff([0, *(line['step'] for line in train)])
  stored = sum(taken * [line['rows_stored_per_step'] for line in train])
  assert stored == pytest.approx(summary['rows_stored'])
  assert train[-1]['loss'] < train[0]['loss']


def test_tensorboard_events_can_be_read(finished):
  from tensorboard.backend.event_processing import event_accumulator

  events = event_accumulator.EventAccumulator(str(finished / 'tensorboard'))
  events.Reload()
  scalars = events.Tags()['scalars']
  assert {'train/loss', 'eval/auc', 'train/rows_loaded_per_step'} <= set(
    scalars
  )
  last = summary_of(finished)['steps']
  steps = [e.step for e in events.Scalars('eval/auc')]
  assert steps == [*range(50, last, 50), last]


def arrays_of(workdir, step):
  manager = ocp.PyTreeCheckpointer()
  return manager.restore(workdir / 'checkpoints' / str(step) / 'arrays')


def assert_same_tree(one, other):
  assert type(one) is type(other)
  if isinstance(one, dict):
    assert one.keys() == other.keys()
    for key in one:
      assert_same_tree(one[key], other[key])
  elif isinstance(one, list | tuple):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
      assert_same_tree(a, b)
  elif one is not None:
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_killed_and_resumed_equals_uninterrupted(finished, tmp_path):
  """SIGKILL in mid-run; the resumed run ends with the very same bits."""
  flags_ = [
    '--config=configs/criteo.py:smoke',
    '--config.train.checkpoint_steps=60',
    f'--workdir={tmp_path / "killed"}',
  ]
  saved = tmp_path / 'killed' / 'checkpoints' / '60' / 'commit_success.txt'
  with started('-m', 'experiments.run', *flags_) as process:
    wait_for(lambda: saved.exists() or process.poll() is not None)
  if not (tmp_path / 'killed' / record.SUMMARY).exists():
    config = smoke(**{'train.checkpoint_steps': 60, 'resume': True})
    assert run_job(tmp_path / 'killed', config) == 0
  last = summary_of(finished)['steps']
  assert_same_tree(
    arrays_of(finished, last), arrays_of(tmp_path / 'killed', last)
  )
  whole, resumed = summary_of(finished), summary_of(tmp_path / 'killed')
  for key in ('auc', 'log_loss', 'lookups', 'rows_loaded', 'inputs_trained'):
    assert whole[key] == resumed[key], key


def test_resuming_a_finished_run_with_more_steps(tmp_path):
  short, long = tmp_path / 'short', tmp_path / 'long'
  plain = {'skip.mode': 'off', 'optimizer.dense_final': 1.0}
  more = plain | {'train.steps': 50}
  assert run_job(short, smoke(**plain, **{'train.steps': 30})) == 0
  assert run_job(short, smoke(**more, resume=True)) == 0
  assert run_job(long, smoke(**more, placement='resident')) == 0
  assert_same_tree(arrays_of(short, 50), arrays_of(long, 50))
  steps = [line['step'] for line in lines_of(short)]
  assert steps == sorted(steps)


def test_resuming_a_skipping_run_with_more_steps_is_refused(tmp_path, capsys):
  assert run_job(tmp_path, smoke(**{'train.steps': 30})) == 0
  capsys.readouterr()
  assert run_job(tmp_path, smoke(**{'train.steps': 50, 'resume': True})) == 1
  assert_one_sentence(capsys.readouterr().err, '30', 'config.train.steps')


LINE = '\t'.join(['1'] + ['2'] * 13 + ['0a1b2c3d'] * 26) + '\n'


def with_field(column, value):
  fields = LINE.rstrip('\n').split('\t')
  fields[column] = value
  return '\t'.join(fields) + '\n'


BAD_FILES = {
  'too_few_columns': (LINE * 9 + '1\t2\t3\n', ['line 10', '40']),
  'too_many_columns': (LINE * 9 + LINE[:-1] + '\tff\n', ['line 10', '40']),
  'non_hex_id': (LINE * 2 + with_field(16, 'xyz'), ['line 3', 'C3', 'xyz']),
  'label': (LINE + with_field(0, 'yes'), ['line 2', 'label', 'yes']),
  'integer': (with_field(4, '1.5'), ['line 1', 'I4', '1.5']),
  'empty_file': ('', ['empty']),
}


def assert_one_sentence(text, *parts):
  assert text.startswith('error: ')
  assert text.count('\n') == 1
  assert 'Traceback' not in text
  for part in parts:
    assert part in text, text


@pytest.mark.parametrize('case', BAD_FILES)
def test_bad_file(case, tmp_path, capsys):
  text, said = BAD_FILES[case]
  path = tmp_path / 'clicks.txt'
  path.write_text(text)
  assert run_job(tmp_path / 'run', smoke(**{'data.path': str(path)})) == 1
  assert_one_sentence(capsys.readouterr().err, 'clicks.txt', *said)
  assert not (tmp_path / 'run' / record.SUMMARY).exists()


def test_truncated_gz(tmp_path, capsys):
  path = tmp_path / 'clicks.txt.gz'
  path.write_bytes(gzip.compress((LINE * 5000).encode(), 1)[:-20])
  assert run_job(tmp_path / 'run', smoke(**{'data.path': str(path)})) == 1
  assert_one_sentence(capsys.readouterr().err, 'clicks.txt.gz')
  assert not (tmp_path / 'run').exists()


HUGE_STEPS = (('rowwise_adagrad', {'learning_rate': 1e38}),)


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'data.path': 'nowhere.txt'}, ['nowhere.txt']),
    ({'model.bottom': (64, 12)}, ['got 12', 'config.model.bottom']),
    (
      {'model.normalization': 'group'},
      ['none, layer, batch', "'group'", 'config.model.normalization'],
    ),
    ({'placement': 'cloud'}, ['resident, streamed', "'cloud'"]),
    (
      {'optimizer.rows': (('lionn', {}),)},
      ['rowwise_adagrad', 'lionn', 'config.optimizer.rows'],
    ),
    (
      {'optimizer.rows': (('sgd', {'learning_rate': -1.0}),)},
      ['learning rate', 'got -1.0'],
    ),
    ({'optimizer.rows': ('sgd',)}, ['config.optimizer.rows']),
    (
      {'optimizer.dense': (('adamm', {}),)},
      ['adamm', 'config.optimizer.dense'],
    ),
    ({'optimizer.rows': HUGE_STEPS}, ['finite', 'step']),
    ({'resume': True}, ['resuming needs a checkpoint']),
    # Its only loss is finite, and what it leaves behind is not.
    (
      {'optimizer.rows': HUGE_STEPS, 'train.steps': 1},
      ['metrics must stay finite', 'after step 1'],
    ),
    ({'data.test_share': 1.5, 'data.path': 'nowhere.txt'}, ['1.5']),
    ({'data.rows': (5, 0)}, ['(5, 0)']),
    ({'train.endless_steps': 0}, ['endless_steps must be at least 1']),
    ({'data.batch_size': 0}, ['config.data.batch_size', 'got 0']),
    ({'log_steps': 0}, ['config.log_steps', 'got 0']),
    ({'prefetch': -1}, ['config.prefetch', 'got -1']),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else '',
)
def test_bad_settings(changes, said, tmp_path, capsys):
  config = smoke(**changes)
  assert run_job(tmp_path / 'run', config) == 1
  assert_one_sentence(capsys.readouterr().err, *said)
  assert not (tmp_path / 'run' / record.SUMMARY).exists()


def snapshot(folder):
  """Every file of a folder: what it holds, and when it was written."""
  return {
    path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
    for path in folder.rglob('*')
  }


def test_a_diverged_state_is_no_checkpoint(tmp_path, capsys, monkeypatch):
  changes = {'skip.mode': 'off', 'optimizer.dense_final': 1.0}
  assert run_job(tmp_path, smoke(**changes, **{'train.steps': 20})) == 0
  before = snapshot(tmp_path / 'checkpoints')
  nothing = metrics.compute

  def diverged(predictions):
    return nothing(predictions)._replace(log_loss=math.inf)

  monkeypatch.setattr(metrics, 'compute', diverged)
  more = changes | {'train.steps': 30, 'resume': True}
  capsys.readouterr()
  assert run_job(tmp_path, smoke(**more)) == 1
  assert_one_sentence(capsys.readouterr().err, 'log_loss inf', 'after step 30')
  assert snapshot(tmp_path / 'checkpoints') == before
  assert not (tmp_path / record.SUMMARY).exists()
  for line in lines_of(tmp_path):
    json.dumps(line, allow_nan=False)


def no_work(monkeypatch):
  def work(config):
    pytest.fail('a run that cannot be built its data set')

  monkeypatch.setattr(datasets, 'dataset', work)


def test_resuming_a_finished_run_changes_nothing(finished, capsys, monkeypatch):
  before = snapshot(finished)
  no_work(monkeypatch)
  assert run_job(finished, smoke(resume=True)) == 0
  out, err = capsys.readouterr()
  assert 'is finished already' in out
  assert not err
  assert snapshot(finished) == before


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'train.steps': 210}, 'config.train.steps'),
    ({'train.steps': 90}, 'config.train.steps'),
    ({'seed': 4}, 'config.seed'),
    ({'placement': 'cloud'}, "'cloud'"),
  ],
  ids=['more', 'fewer', 'seed', 'placement'],
)
def test_a_refused_resume_changes_nothing(changes, said, finished, capsys):
  before = snapshot(finished)
  changes = {'train.steps': 210} | changes
  assert run_job(finished, smoke(resume=True, **changes)) == 1
  assert_one_sentence(capsys.readouterr().err, said)
  assert snapshot(finished) == before


def test_a_damaged_checkpoint_is_told_and_changes_nothing(
  finished, tmp_path, capsys
):
  shutil.copytree(finished, tmp_path / 'run')
  saved = tmp_path / 'run' / 'checkpoints'
  largest = max(saved.rglob('*'), key=lambda path: path.stat().st_size)
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 4
  largest.write_bytes(content)
  (tmp_path / 'run' / record.SUMMARY).unlink()  # as of a killed run
  before = snapshot(tmp_path / 'run')
  assert run_job(tmp_path / 'run', smoke(resume=True)) == 1
  assert_one_sentence(capsys.readouterr().err, 'checksum', str(saved))
  assert snapshot(tmp_path / 'run') == before


def test_resuming_where_no_run_is_makes_nothing(tmp_path, capsys, monkeypatch):
  no_work(monkeypatch)
  workdir = tmp_path / 'some' / 'run'
  assert run_job(workdir, smoke(resume=True)) == 1
  assert_one_sentence(capsys.readouterr().err, 'resuming needs a checkpoint')
  assert not list(tmp_path.iterdir())


def test_a_summary_lost_at_the_end_comes_back_the_same(finished, tmp_path):
  """A run stopped after its last step evaluates, and tells nothing twice."""
  shutil.copytree(finished, tmp_path / 'run')
  (tmp_path / 'run' / record.SUMMARY).unlink()
  assert run_job(tmp_path / 'run', smoke(resume=True)) == 0
  assert lines_of(tmp_path / 'run') == lines_of(finished)
  one, other = summary_of(finished), summary_of(tmp_path / 'run')
  for key in ('steps', 'auc', 'log_loss', 'inputs_seen', 'inputs_dropped'):
    assert one[key] == other[key], key


@pytest.mark.parametrize('resume', [False, True])
def test_a_folder_is_for_one_run_at_a_time(
  resume, finished, tmp_path, capsys, monkeypatch
):
  no_work(monkeypatch)
  workdir = finished if resume else tmp_path / 'run'
  config = smoke(resume=resume)
  with folders.claimed(workdir, config):
    before = snapshot(workdir)
    assert run_job(workdir, config) == 1
    assert_one_sentence(capsys.readouterr().err, 'one run at a time', 'process')
    assert snapshot(workdir) == before
  assert workdir.exists() == resume  # what was made for nothing is gone


@pytest.mark.parametrize('where', ['file/run', 'file'])
def test_a_folder_that_cannot_be_written_is_told_first(
  where, tmp_path, capsys, monkeypatch
):
  no_work(monkeypatch)
  (tmp_path / 'file').write_text('')
  assert run_job(tmp_path / where, smoke()) == 1
  assert_one_sentence(capsys.readouterr().err, str(tmp_path / where))
  assert [path.name for path in tmp_path.iterdir()] == ['file']


@pytest.mark.parametrize('url', ['gs://bucket/run', 's3://bucket/run', 'gs:/x'])
def test_a_url_is_no_workdir(url, tmp_path, capsys, monkeypatch):
  no_work(monkeypatch)
  monkeypatch.chdir(tmp_path)
  assert run_job(url, smoke()) == 1
  assert_one_sentence(capsys.readouterr().err, url, '--workdir')
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('size', [0, 3000, 200_000])
def test_without_room_a_run_ends_with_a_sentence(size, tmp_path, capsys):
  plain = {'skip.mode': 'off', 'optimizer.dense_final': 1.0}
  more = smoke(**plain, **{'train.steps': 40, 'resume': True})
  assert run_job(tmp_path, smoke(**plain, **{'train.steps': 20})) == 0
  before = snapshot(tmp_path / 'checkpoints')
  capsys.readouterr()
  with no_file_above(size):
    assert run_job(tmp_path, more) == 1
  assert_one_sentence(capsys.readouterr().err, str(tmp_path))
  assert snapshot(tmp_path / 'checkpoints' / '20').items() <= before.items()
  assert run_job(tmp_path, more) == 0
  assert summary_of(tmp_path)['steps'] == 40


def test_a_finished_workdir_is_not_overwritten(finished, capsys):
  before = (finished / record.SUMMARY).read_text()
  assert run_job(finished, smoke()) == 1
  assert_one_sentence(capsys.readouterr().err, str(finished))
  assert (finished / record.SUMMARY).read_text() == before


def test_resuming_with_another_model_is_refused(finished, capsys):
  config = smoke(**{'resume': True, 'model.top': (32,)})
  assert run_job(finished, config) == 1
  assert_one_sentence(capsys.readouterr().err, 'config.model')
  assert (finished / record.SUMMARY).exists()


@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    (
      ['--config=configs/criteo.py', '--config.data.pathh=x'],
      'Did you mean "path"',
    ),
    (['--config=configs/criteo.py:huge'], "variant must be '', 'sample' or"),
    (['--config=configs/criteo.py', '--config.train.steps=ten'], "'ten'"),
    (['--config=configs/none.py'], 'configs/none.py'),
    (['--confg=configs/criteo.py'], 'confg'),
    ([], '--config=configs/criteo.py'),
    (['--config=configs/criteo.py', 'seed=3', 'x y'], "got seed=3 'x y'"),
  ],
  ids=['key', 'variant', 'value', 'file', 'flag', 'none', 'stray'],
)
def test_bad_command_line(arguments, said, tmp_path):
  command = [sys.executable, '-m', 'experiments.run', *arguments]
  command.append(f'--workdir={tmp_path / "run"}')
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert result.returncode == 1
  errors = [x for x in result.stderr.splitlines() if x.startswith('error: ')]
  assert len(errors) == 1
  assert said in errors[0]
  assert 'Traceback' not in result.stderr
  assert not (tmp_path / 'run').exists()


def test_a_real_sample_reaches_its_yardstick(tmp_path):
  path = SHARED / 'criteo' / 'dac_80k.tsv.gz'
  if not path.exists():
    pytest.skip('shared samples absent')
  config = criteo.get_config('sample')
  config.data.path = str(path)
  assert run_job(tmp_path / 'run', config) == 0
  summary = summary_of(tmp_path / 'run')
  assert summary['steps'] == 250
  assert summary['inputs_evaluated'] == 16_000
  assert summary['auc'] >= 0.770
  assert 0.95 < summary['calibration'] < 1.05
