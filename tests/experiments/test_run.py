"""The main job as its users run it, and the files that it leaves."""

import json
import math
import os

import numpy as np
import pytest

from configs import criteo
from experiments.common import build, datasets
from experiments.run.summary import (
  auto_in_words,
  paid_in_words,
)
from slipstream_jax.data.source import SourceWrapper
from slipstream_jax.engine.clock import HostClock, Payoff
from slipstream_jax.scoring import best
from slipstream_jax.scoring.base import MODEL, SCORERS
from slipstream_jax.selection import gain
from tests.support.runs import lines_of, run_job, SHARED, smoke, summary_of

SUMMARY_KEYS = [
  'data',
  'seed',
  'steps',
  'seconds',
  'examples_per_s',
  'auc',
  'log_loss',
  'normalized_entropy',
  'accuracy',
  'calibration',
  'bayes_auc',
  'batches',
  'processes',
  'examples_seen',
  'examples_trained',
  'examples_dropped',
  'lookups',
  'hits',
  'rows_loaded',
  'rows_stored',
  'bytes_loaded',
  'bytes_stored',
  'compilations',
  'peak_rss_bytes',
]


def test_summary_says_it_all(finished):
  summary = summary_of(finished)
  assert not [key for key in summary if 'store_' in key]  # there is no disk
  assert set(SUMMARY_KEYS) <= set(summary)
  assert 'NOT real data' in summary['data']
  trained, dropped = summary['examples_trained'], summary['examples_dropped']
  assert trained + dropped == summary['examples_seen'] == 200 * 256
  assert 0.1 < dropped / (200 * 256) < 0.3
  assert summary['steps'] == -(-trained // 256)
  assert summary['lookups'] == trained * 26
  assert 0 < summary['rows_stored'] < summary['rows_loaded']
  assert summary['bytes_loaded'] == summary['rows_loaded'] * (16 + 1) * 4
  saved = 2 * summary['saved_rows'] * 68 + summary['bytes_loaded']
  assert summary['saved_bytes'] == saved - summary['bytes_stored']
  assert 0.5 < summary['auc'] < summary['bayes_auc'] < 1
  assert summary['step_ms'] > 0
  assert summary['step_ms_to_pay'] is None  # as the CPU is the device
  assert summary['skipping_saves_time'] in (True, False)
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
  }
  config = json.loads((finished / 'config.json').read_text())
  assert config['train']['steps'] == 200
  picture = finished / 'learning_curve.png'
  assert picture.read_bytes()[:4] == b'\x89PNG'


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
  assert train[-1]['examples_trained'] == summary['examples_trained']
  taken = np.diff([0, *(line['step'] for line in train)])
  stored = sum(taken * [line['rows_stored_per_step'] for line in train])
  assert stored == pytest.approx(summary['rows_stored'])
  assert evals[-1]['log_loss'] < evals[0]['log_loss']


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


def test_a_real_sample_reaches_its_yardstick(tmp_path):
  path = SHARED / 'criteo' / 'dac_80k.tsv.gz'
  if not path.exists():
    pytest.skip('shared samples absent')
  config = criteo.get_config('sample')
  config.data.path = str(path)
  assert run_job(tmp_path / 'run', config) == 0
  summary = summary_of(tmp_path / 'run')
  assert summary['steps'] == 250
  assert summary['examples_evaluated'] == 16_000
  assert summary['auc'] >= 0.770
  assert 0.95 < summary['calibration'] < 1.05


def test_a_target_that_cannot_be_met_is_told(tmp_path, capsys):
  """All that look up hot rows only are fewer than 90 % of all."""
  config = criteo.get_config('smoke')
  config.skip.policy, config.skip.drop = 'random', 0.9
  config.skip.period_batches = 0
  config.eval.curve_steps = 0
  assert run_job(tmp_path / 'run', config) == 0
  summary = summary_of(tmp_path / 'run')
  events = [x for x in lines_of(tmp_path / 'run') if x['kind'] == 'missed']
  assert events
  hot = events[-1]['hot_share']
  assert events[-1]['asked'] == 0.9
  assert events[-1]['dropped'] == pytest.approx(hot, abs=0.02)
  assert summary['drop_missed_share'] == pytest.approx(0.9 - hot, abs=0.05)
  assert summary['examples_hot_share'] == hot
  share = summary['examples_dropped'] / summary['examples_seen']
  assert summary['examples_dropped_share'] == pytest.approx(share)
  assert (summary['drop'], summary['drop_of']) == (0.9, 'all')
  assert '% of all examples were dropped lately, 90%' in capsys.readouterr().out


class OneClass(SourceWrapper):
  """The same batches, with one label for all examples."""

  def __init__(self, source, label):
    super().__init__(source)
    self.label = label

  def __next__(self):
    batch = super().__next__()
    return batch._replace(labels=np.full_like(batch.labels, self.label))


@pytest.mark.parametrize('label', [0, 1])
def test_one_class_held_out_and_a_target_out_of_reach(
  tmp_path, capsys, monkeypatch, label
):
  """The run ends with a summary that says both, and so it does if resumed."""
  make = datasets.dataset

  def one_class(config):
    data = make(config)
    return data._replace(test=lambda size: OneClass(data.test(size), label))

  monkeypatch.setattr(datasets, 'dataset', one_class)
  policy = {'skip.policy': 'stale_importance', 'skip.drop_of': 'hot'}
  config = smoke(**policy, **{'hot.bytes': 4000, 'train.steps': 60})
  workdir = tmp_path / 'run'
  assert run_job(workdir, config) == 0
  said = capsys.readouterr().out
  assert said.count('no example of the sample looks up hot rows only') == 1
  assert 'undefined: one class' in said
  whole = summary_of(workdir)
  assert whole['auc'] is None
  assert whole['times_undecided'] >= 1
  assert whole['drop_missed_share'] == 0.3
  assert whole['examples_dropped'] < 60
  evals = [line for line in lines_of(workdir) if line['kind'] == 'eval']
  assert [line['auc'] for line in evals] == [None, None]
  (workdir / 'summary.json').unlink()
  with config.unlocked():
    config.resume = True
  assert run_job(workdir, config) == 0
  resumed = summary_of(workdir)
  assert resumed['log_loss'] == whole['log_loss']
  assert resumed['times_undecided'] == whole['times_undecided']


def test_batches_that_are_not_filled_up_again(tmp_path):
  config = criteo.get_config('smoke')
  config.skip.refill, config.skip.drop, config.skip.until = False, 0.4, 0.75
  assert run_job(tmp_path / 'run', config) == 0
  summary = summary_of(tmp_path / 'run')
  assert summary['steps'] == summary['batches'] == 200
  # None while it warms up and settles, nor in the last quarter.
  expected = 0.4 * (150 - 14) / 200
  assert summary['examples_dropped_share'] == pytest.approx(expected, abs=0.02)
  assert abs(summary['drop_missed_share']) < 0.02


def test_a_summary_says_what_the_disk_did(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(build, 'in_memory', lambda folder: True)
  (tmp_path / 'disk').mkdir()
  config = smoke(
    **{
      'store.kind': 'tiered',
      'store.dram_bytes': 100_000,
      'store.path': str(tmp_path / 'disk'),
      'train.steps': 40,
      'placement': 'streamed',
    }
  )
  run_job(tmp_path / 'run', config)
  summary = summary_of(tmp_path / 'run')
  gathered = summary['store_rows_gathered']
  in_memory, missed = (
    summary[f'store_rows_{name}'] for name in ('in_memory', 'missed')
  )
  assert 0 < in_memory < gathered
  assert missed + summary['store_rows_fetched_ahead'] > 0
  assert summary['store_bytes_read'] > 0 == summary['store_bytes_read'] % 4096
  assert summary['store_bytes_written'] >= 68 * summary['store_rows_written']
  assert summary['seconds_waiting_for_store'] >= 0
  assert 'is memory (tmpfs)' in capsys.readouterr().out


@pytest.mark.skipif(not os.path.ismount('/dev/shm'), reason='is no mount here')
def test_shared_memory_is_no_disk(tmp_path):
  assert build.in_memory('/dev/shm')
  assert not build.in_memory('/proc')
  assert not build.in_memory(tmp_path / 'none')


@pytest.mark.parametrize('mode', ['off', 'examples'])
def test_a_run_prints_ten_figures(mode, tmp_path, capsys):
  few = {'train.steps': 20, 'eval.curve_steps': 0, 'skip.mode': mode}
  assert run_job(tmp_path / 'run', smoke(**few)) == 0
  lines = capsys.readouterr().out.splitlines()
  table = [line.split('│')[1].strip() for line in lines if line[:1] == '│']
  assert table[-8:] == [
    'AUC',
    'log loss',
    'calibration',
    'examples per s',
    'time',
    'examples left out',
    'bytes moved',
    'peak memory',
  ]
  assert lines[-2].startswith(f'saved in {tmp_path / "run"}')
  # A run that skips cannot be extended.
  assert ('--config.resume=True' in lines[-1]) == (mode == 'off')
  assert not [line for line in lines if 'checkpoint' in line]


@pytest.mark.parametrize('scorer', [*SCORERS, MODEL])
def test_every_scorer_chooses_in_a_run(scorer, tmp_path, monkeypatch):
  monkeypatch.setattr(best, 'TRIAL', 2000)
  settings = {'train.steps': 60, 'eval.curve_steps': 0, 'skip.scorer': scorer}
  settings |= {'skip.mode': 'examples', 'skip.drop': 0.4}
  assert run_job(tmp_path / 'run', smoke(**settings)) == 0
  summary = summary_of(tmp_path / 'run')
  assert summary['examples_dropped_share'] == pytest.approx(0.3, abs=0.08)
  assert summary['scorer'] == scorer
  assert summary['skip_refill'] is True  # the stream has no length
  assert (summary['scorer_chosen'] is None) == (scorer != 'best')


def test_skipping_that_costs_time_is_told_in_one_line(
  tmp_path, capsys, monkeypatch
):
  paid = Payoff(0.3, 0.512, 1.4, False)
  monkeypatch.setattr(HostClock, 'payoff', lambda _: paid)
  few = {'train.steps': 60, 'eval.curve_steps': 0, 'skip.drop': 'auto'}
  assert run_job(tmp_path / 'run', smoke(**few)) == 0
  lines = capsys.readouterr().out.splitlines()
  said = [line for line in lines if 'costs more time than it saves' in line]
  assert len(said) == 1
  assert '1.4 ms' in said[0]
  assert '0.512 ms' in said[0]
  summary = summary_of(tmp_path / 'run')
  assert summary['step_ms_to_pay'] == paid.step_ms_to_pay
  assert summary['skipping_saves_time'] == paid.pays
  unpaid = summary | {'choosing': None}
  assert 'costs more time' in paid_in_words(unpaid)
  assert 'here it takes' not in paid_in_words(unpaid | {'step_ms_to_pay': None})
  assert paid_in_words(unpaid | {'skipping_saves_time': True}) is None
  assert paid_in_words(unpaid | {'skipping_saves_time': None}) is None
  chosen = summary | {'choosing': gain.VERDICTS[1]}
  assert paid_in_words(chosen).startswith('does it pay to choose examples? no,')


@pytest.mark.parametrize(
  ('losses', 'says'),
  [
    ([0.5, 0.4, 0.3], 'still fell by 0.1000'),
    ([0.5, 0.4, 0.3999], ''),
    ([0.5, 0.4, 0.5], ''),
    ([0.5, 0.4], 'too few evaluations'),
    ([], 'too few evaluations'),
  ],
)
def test_a_found_drop_is_held_against_what_the_model_gained(losses, says):
  """By points of the curve: all that is held out may be easier."""
  lines = [
    {'kind': 'eval', 'examples': 9, 'examples_trained': at, 'log_loss': loss}
    for at, loss in zip((10, 50, 90), losses, strict=False)
  ]
  last = {'kind': 'eval', 'examples': 99, 'examples_trained': 100}
  lines.append(last | {'log_loss': 0.01})
  summary = {
    'drop': 'auto',
    'examples_dropped_share': 0.6,
    'examples_trained': 100,
    'log_loss_lost': 0.0004,
  }
  said = auto_in_words(lines, summary)
  assert 'experimental: it left out 60%' in said
  assert 'at most 0.0004' in said
  assert says in said
  assert bool(says) == (',' in said)
  assert auto_in_words(lines, summary | {'drop': 0.6}) is None
  assert auto_in_words(lines, summary | {'examples_dropped_share': 0.0}) is None
