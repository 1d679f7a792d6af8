"""Runs that meet a bad loss: they stop, skip it, or go back and past it."""

import json
import shutil
import signal

import numpy as np
import pytest

from experiments.common import datasets
from experiments.run import guard
from slipstream_jax.data.source import SourceWrapper
from slipstream_jax.engine.counters import Counters
from tests.support.runs import (
  arrays_of,
  assert_one_sentence,
  assert_same_tree,
  lines_of,
  manifest_of,
  run_job,
  smoke,
  summary_of,
)

STEPS, EVERY = 60, 20
PLAIN = {
  'skip.mode': 'off',
  'placement': 'streamed',
  'optimizer.dense_final': 1.0,
  'train.steps': STEPS,
  'train.checkpoint_steps': EVERY,
  'eval.curve_steps': 0,
}


class Poisoned(SourceWrapper):
  """A source some of whose batches make a loss that is not finite."""

  def __init__(self, source, bad):
    super().__init__(source)
    self._bad = bad

  def __next__(self):
    batch = super().__next__()
    number = self.get_state()['delivered'] - 1
    if number in self._bad:
      signs = np.random.default_rng(0).choice([-1, 1], batch.dense.shape)
      batch = batch._replace(dense=(3e38 * signs).astype(np.float32))
    return batch


def poison(monkeypatch, *bad):
  dataset = datasets.dataset

  def poisoned(config):
    data = dataset(config)
    return data._replace(train=lambda size: Poisoned(data.train(size), bad))

  monkeypatch.setattr(datasets, 'dataset', poisoned)


def bad_lines(workdir):
  return [line for line in lines_of(workdir) if line['kind'] == 'bad_loss']


def test_it_stops_and_says_where(tmp_path, monkeypatch, capsys):
  poison(monkeypatch, 49)
  assert run_job(tmp_path / 'run', smoke(**PLAIN)) == 1
  said = 'step 50, after 12,800 examples of the source; step 40 is saved'
  assert_one_sentence(capsys.readouterr().err, 'must stay finite', said)
  assert manifest_of(tmp_path / 'run', 40).exists()
  # What it goes on from is whole: with better data it ends.
  monkeypatch.undo()
  assert run_job(tmp_path / 'run', smoke(**PLAIN, resume=True)) == 0


def test_it_skips_and_goes_on(tmp_path, monkeypatch, capsys):
  poison(monkeypatch, 3, 44)
  changes = PLAIN | {'train.on_bad_loss': 'skip', 'log_steps': 1}
  assert run_job(tmp_path, smoke(**changes)) == 0
  out = ' '.join(capsys.readouterr().out.split())
  assert out.count('it changed nothing') == 2
  assert [line['step'] for line in bad_lines(tmp_path)] == [4, 45]
  trained = [line for line in lines_of(tmp_path) if line['kind'] == 'train']
  none = [line['step'] for line in trained if line['loss'] is None]
  assert (none, len(trained)) == ([4, 45], STEPS)
  summary = summary_of(tmp_path)
  assert summary['steps'] == STEPS
  assert np.isfinite(summary['log_loss'])


def test_after_too_many_it_stops(tmp_path, monkeypatch, capsys):
  poison(monkeypatch, *range(30, 40))
  changes = PLAIN | {'train.on_bad_loss': 'skip', 'train.most_bad_losses': 4}
  assert run_job(tmp_path, smoke(**changes)) == 1
  said = 'no more than 4 losses may be bad, got 5 (step 35'
  assert_one_sentence(capsys.readouterr().err, said, 'step 20 is saved')


def test_it_goes_back_and_past_the_batch(tmp_path, monkeypatch, capsys):
  """With the bits of a run whose data never had those batches."""
  poison(monkeypatch, 47, 48, 20)
  changes = PLAIN | {'train.on_bad_loss': 'rollback'}
  assert run_job(tmp_path / 'run', smoke(**changes)) == 0
  out = ' '.join(capsys.readouterr().out.split())
  assert out.count('and past its batch') == 3
  seen = [line['examples_seen'] for line in bad_lines(tmp_path / 'run')]
  assert [line['step'] for line in bad_lines(tmp_path / 'run')] == [20, 46]
  assert seen == [21 * 256, 49 * 256]
  summary = summary_of(tmp_path / 'run')
  assert (summary['steps'], summary['batches']) == (STEPS, STEPS + 3)
  assert summary['examples_dropped'] == 3 * 256
  steps = [
    x['step'] for x in lines_of(tmp_path / 'run') if x['kind'] == 'train'
  ]
  assert steps == sorted(set(steps))

  # Killed after its last checkpoint, it goes the same way again.
  shutil.copytree(tmp_path / 'run', tmp_path / 'again')
  (tmp_path / 'again' / 'summary.json').unlink()
  assert run_job(tmp_path / 'again', smoke(**changes, resume=True)) == 0
  one, other = (arrays_of(tmp_path / n, STEPS) for n in ('run', 'again'))
  assert_same_tree(one, other)


def test_a_signal_may_come_right_after_a_batch_was_left_out(
  tmp_path, monkeypatch, capsys
):
  """At the step of a checkpoint, and further on in the source than it."""
  poison(monkeypatch, 20)
  changes = PLAIN | {'train.on_bad_loss': 'rollback'}
  assert run_job(tmp_path / 'run', smoke(**changes)) == 0
  call = guard.leave_out

  def signalled(*args):
    call(*args)
    signal.raise_signal(signal.SIGTERM)

  with monkeypatch.context() as patched:
    patched.setattr(guard, 'leave_out', signalled)
    assert run_job(tmp_path / 'parts', smoke(**changes)) == 143
  assert 'step 20 is saved' in capsys.readouterr().err
  assert run_job(tmp_path / 'parts', smoke(**changes, resume=True)) == 0
  one, other = (arrays_of(tmp_path / n, STEPS) for n in ('run', 'parts'))
  assert_same_tree(one, other)


def test_before_the_first_checkpoint_there_is_no_way_back(
  tmp_path, monkeypatch, capsys
):
  poison(monkeypatch, 5)
  changes = PLAIN | {'train.on_bad_loss': 'rollback'}
  assert run_job(tmp_path, smoke(**changes)) == 1
  said = 'step 6, after 1,536 examples of the source; no checkpoint yet'
  assert_one_sentence(capsys.readouterr().err, said)


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'train.on_bad_loss': 'rollback'}, 'config.train.checkpoint_steps'),
    (
      {
        'train.on_bad_loss': 'rollback',
        'train.checkpoint_steps': 20,
        'checkpoint.codec': 'int8',
      },
      'config.checkpoint.codec',
    ),
    (
      {'train.on_bad_loss': 'skip', 'system': 'xdl', 'skip.mode': 'off'},
      'config.train.on_bad_loss',
    ),
  ],
)
def test_settings_that_cannot_be(changes, said, tmp_path, capsys):
  assert run_job(tmp_path / 'run', smoke(**changes)) == 1
  assert_one_sentence(capsys.readouterr().err, said)


def test_rows_that_explode_are_told_of_once(tmp_path, monkeypatch, capsys):
  sizes = iter([0.5, 40.0, 1e4, 1e5, 1e6])
  monkeypatch.setattr(guard, 'largest_element', lambda *_: next(sizes))
  changes = {'eval.curve_steps': 10, 'train.checkpoint_steps': 0}
  assert run_job(tmp_path, smoke(**PLAIN | changes)) == 0
  out = ' '.join(capsys.readouterr().out.split())
  assert out.count('rows explode') == 1
  assert 'an element of a row is 1e+04, and the largest was 0.5' in out
  assert next(sizes, None) is None  # looked at once a point


def lines_with(*losses):
  return [{'kind': 'eval', 'log_loss': loss} for loss in losses]


def test_signs():
  assert guard.constant_loss(lines_with(*[0.5] * 4)) is None
  assert '0.5 at the last 5' in guard.constant_loss(lines_with(*[0.5] * 5))
  assert guard.constant_loss(lines_with(*[0.5] * 4, 0.4999)) is None
  assert guard.constant_loss(lines_with(0.6, *[0.5] * 5)) is not None
  few, many = Counters(), Counters(examples_seen=5000, examples_dropped=4990)
  assert '4,990 of the last 5,000' in guard.dropping_all(few, many, 100)
  assert guard.dropping_all(few, many, 501) is None
  fair = many._replace(examples_dropped=4000)
  assert guard.dropping_all(few, fair, 100) is None
  assert guard.exploding(0.5, 900.0, 1000.0) is None
  assert guard.exploding(50.0, 4000.0, 1000.0) is None
  assert 'explode' in guard.exploding(0.5, 2000.0, 1000.0)
  assert json.dumps(guard.exploding(0.5, float('inf'), 1000.0))
