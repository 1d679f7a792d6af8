"""A run that goes on ends with the bits of one that was never stopped."""

import json
import shutil
import signal

import numpy as np
import pytest

from experiments.common import meter, record
from slipstream_jax.training import loop, metrics
from tests.support.programs import no_file_above, python, wait_until
from tests.support.runs import (
  arrays_of,
  assert_one_sentence,
  assert_same_tree,
  lines_of,
  manifest_of,
  no_work,
  run_job,
  smoke,
  snapshot,
  summary_of,
)


def test_killed_and_resumed_equals_uninterrupted(finished, tmp_path):
  """SIGKILL in mid-run; the resumed run ends with the very same bits."""
  flags_ = [
    '--config=configs/criteo.py:smoke',
    '--config.train.checkpoint_steps=60',
    f'--workdir={tmp_path / "killed"}',
  ]
  saved = manifest_of(tmp_path / 'killed', 60)
  with python('-m', 'experiments.run', *flags_) as process:
    wait_until(lambda: saved.exists() or process.poll() == 0, process)
  if not (tmp_path / 'killed' / record.SUMMARY).exists():
    config = smoke(**{'train.checkpoint_steps': 60, 'resume': True})
    assert run_job(tmp_path / 'killed', config) == 0
  last = summary_of(finished)['steps']
  assert_same_tree(
    arrays_of(finished, last), arrays_of(tmp_path / 'killed', last)
  )
  whole, resumed = summary_of(finished), summary_of(tmp_path / 'killed')
  for key in ('auc', 'log_loss', 'lookups', 'rows_loaded', 'examples_trained'):
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
  for key in ('steps', 'auc', 'log_loss', 'examples_seen', 'examples_dropped'):
    assert one[key] == other[key], key


def test_resuming_with_another_model_is_refused(finished, capsys):
  config = smoke(**{'resume': True, 'model.top': (32,)})
  assert run_job(finished, config) == 1
  assert_one_sentence(capsys.readouterr().err, 'config.model')
  assert (finished / record.SUMMARY).exists()


def test_a_diverged_state_is_no_checkpoint(tmp_path, capsys, monkeypatch):
  changes = {'skip.mode': 'off', 'optimizer.dense_final': 1.0}
  assert run_job(tmp_path, smoke(**changes, **{'train.steps': 20})) == 0
  before = snapshot(tmp_path / 'checkpoints')
  diverged = metrics.MeanMetric(
    'log_loss', lambda labels, _: [np.full(len(labels), np.inf)], float
  )
  monkeypatch.setattr(metrics, 'CLICKS', (diverged,))
  more = changes | {'train.steps': 30, 'resume': True}
  capsys.readouterr()
  assert run_job(tmp_path, smoke(**more)) == 1
  assert_one_sentence(capsys.readouterr().err, 'log_loss inf', 'after step 30')
  assert snapshot(tmp_path / 'checkpoints') == before
  assert not (tmp_path / record.SUMMARY).exists()
  for line in lines_of(tmp_path):
    json.dumps(line, allow_nan=False)


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
  assert before.items() <= snapshot(tmp_path / 'checkpoints').items()
  assert run_job(tmp_path, more) == 0
  assert summary_of(tmp_path)['steps'] == 40


def test_totals_are_those_of_all_processes(tmp_path, monkeypatch):
  """Each process adds its own to what the run had spent before."""
  clock = iter(range(10**9))
  monkeypatch.setattr(meter, 'now', lambda: 0.5 * next(clock))
  changes = {'train.checkpoint_steps': 20, 'train.steps': 60}
  plain = {'skip.mode': 'off', 'eval.curve_steps': 0} | changes
  assert run_job(tmp_path / 'whole', smoke(**plain)) == 0
  with monkeypatch.context() as patched:
    patched.setattr(loop, 'take_step', Interrupted(loop.take_step, 31))
    assert run_job(tmp_path / 'parts', smoke(**plain)) == 130
  assert run_job(tmp_path / 'parts', smoke(**plain, resume=True)) == 0
  whole, parts = (summary_of(tmp_path / name) for name in ('whole', 'parts'))
  assert (whole['processes'], parts['processes']) == (1, 2)
  assert parts['batches'] == parts['steps'] == 60
  assert parts['examples_trained'] == whole['examples_trained'] == 60 * 256
  totals = [x for x in lines_of(tmp_path / 'parts') if x['kind'] == 'totals']
  assert [line['step'] for line in totals] == [20, 31, 40, 60]
  assert totals[-1]['examples_timed'] == 60 * 256
  waited = 'seconds_waiting_for_checkpoints'
  assert parts[waited] >= totals[-1][waited] > totals[0][waited] == 0
  keys = 'seconds', 'seconds_compiling', 'compilations', 'examples_timed'
  for key in (*keys, waited):
    values = [line[key] for line in totals]
    assert values == sorted(values), key
  seconds = [line['seconds'] for line in totals]
  assert parts['seconds'] == seconds[-1] > seconds[1] > 0
  speed = parts['examples_trained'] / parts['seconds']
  assert parts['examples_per_s'] == pytest.approx(speed)


class Interrupted:
  """A callable that sends SIGINT to this process at its call number `at`."""

  def __init__(self, call, at):
    self.call, self.at, self.calls = call, at, 0

  def __call__(self, *args):
    self.calls += 1
    if self.calls == self.at:
      signal.raise_signal(signal.SIGINT)
    return self.call(*args)


def test_a_checkpoint_that_is_not_kept(tmp_path, capsys):
  plain = {'skip.mode': 'off', 'eval.curve_steps': 0, 'train.steps': 20}
  plain |= {'train.keep_checkpoint': False, 'train.checkpoint_steps': 10}
  workdir = tmp_path / 'run'
  assert run_job(workdir, smoke(**plain)) == 0
  assert 'keep_checkpoint is False' in capsys.readouterr().out
  assert not (workdir / 'checkpoints').exists()
  assert summary_of(workdir)['steps'] == 20
  before = snapshot(workdir)
  assert run_job(workdir, smoke(**plain, resume=True)) == 0
  assert 'finished already' in capsys.readouterr().out
  more = plain | {'train.steps': 30, 'resume': True}
  assert run_job(workdir, smoke(**more)) == 1
  assert_one_sentence(capsys.readouterr().err, 'config.train.keep_checkpoint')
  assert snapshot(workdir) == before


def test_an_interrupted_run_keeps_its_checkpoint_until_it_is_through(
  tmp_path, monkeypatch
):
  plain = {'skip.mode': 'off', 'eval.curve_steps': 0, 'train.steps': 20}
  plain |= {'train.keep_checkpoint': False}
  workdir = tmp_path / 'run'
  with monkeypatch.context() as patched:
    patched.setattr(loop, 'take_step', Interrupted(loop.take_step, 7))
    assert run_job(workdir, smoke(**plain)) == 130
  assert manifest_of(workdir, 7).exists()
  assert run_job(workdir, smoke(**plain, resume=True)) == 0
  assert not (workdir / 'checkpoints').exists()
