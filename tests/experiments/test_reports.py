"""Runs are listed, and laid side by side on a page that needs nothing else."""

import json
import shutil
import sys

import pytest
from rich.console import Console

from experiments.report import job
from slipstream_jax.errors import UserError
from tests.support.pages import assert_complete
from tests.support.programs import finished as program
from tests.support.runs import assert_one_sentence


def record(folder, name, summary=None, steps=40, **config):
  """The files of a run, with curves of made-up numbers."""
  where = folder / name
  where.mkdir(parents=True)
  config = {'seed': 0, 'skip': {'mode': 'off', **config}}
  (where / 'config.json').write_text(json.dumps(config))
  lines = []
  for step in [*range(10, steps + 1, 10), steps + 1]:
    lines.append(
      {
        'step': step,
        'kind': 'train',
        'loss': 1 / step if step <= steps else 99.0,
        'examples_per_s': 1e5,
        'examples_trained': 256 * step,
        'mb_loaded_per_step': 0.5,
        'mb_stored_per_step': 0.5,
      }
    )
  auc = {'auc': 0.7, 'log_loss': 0.5, 'examples_trained': 256 * steps}
  lines.append({'step': steps, 'kind': 'eval'} | auc)
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (where / 'metrics.jsonl').write_text(text)
  if summary is not None:
    whole = {'data': '<clicks>', 'steps': steps, 'saved_bytes': 2_000_000}
    whole |= {'auc': 0.75, 'log_loss': 0.45, 'examples_per_s': 12_345.6}
    (where / 'summary.json').write_text(json.dumps(whole | summary))
  return where


@pytest.fixture
def three(tmp_path):
  record(tmp_path, 'saves', {'examples_dropped_share': 0.4}, policy='stale')
  record(tmp_path, 'costs', {'auc': None, 'saved_bytes': 0, 'extra_bytes': 5e9})
  cut = record(tmp_path, 'cut')
  with (cut / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 99, "ki')
  (tmp_path / 'no run').mkdir()
  (tmp_path / 'notes.txt').write_text('')
  return tmp_path


def test_runs_are_listed(three):
  listed = {row['run']: row for row in job.overview(job.runs_in(three))}
  assert set(listed) == {'saves', 'costs', 'cut'}
  saves, costs, cut = listed['saves'], listed['costs'], listed['cut']
  assert (saves['saved'], costs['saved']) == ('2 MB', 'costs 5 GB')
  assert (saves['dropped'], costs['dropped']) == ('40.0%', '-')
  assert (saves['steps'], saves['AUC']) == ('40', '0.7500')
  assert saves['examples/s'] == '12,346'
  assert (cut['steps'], cut['AUC'], cut['saved']) == ('40...', '0.7000', '-')
  assert 'undefined' in costs['AUC']


def test_a_run_that_ranks_items_has_recall_in_place_of_log_loss(three):
  """Its training loss is a softmax over the batch."""
  ranks = {'recall_at_10': 0.25, 'ndcg_at_10': 0.125}
  record(three, 'ranks', {'auc': None, **ranks})
  with (three / 'ranks' / 'metrics.jsonl').open('a') as file:
    line = {'step': 99, 'kind': 'eval', 'examples_trained': 9, 'log_loss': 7}
    file.write(json.dumps(line | ranks) + '\n')
  runs = job.runs_in(three)
  listed = {row['run']: row for row in job.overview(runs)}
  names = 'AUC', 'log loss', 'recall at 10', 'NDCG at 10'
  figures = {run: [row[name] for name in names] for run, row in listed.items()}
  assert figures['ranks'] == ['-', '-', '0.2500', '0.1250']
  assert figures['saves'] == ['0.7500', '0.4500', '-', '-']
  job.write(three / 'page.html', runs)
  words = {*assert_complete((three / 'page.html').read_text()).words}
  assert {'Held-out recall', 'recall at 10', 'loss'} <= words


def test_no_column_is_cut_on_a_narrow_screen(three, monkeypatch, capsys):
  record(three, 'a-run-whose-name-is-a-good-deal-too-long', {'auc': 0.6})
  runs = job.runs_in(three)
  monkeypatch.setattr(job.report, 'console', lambda: Console(width=60))
  job.show(runs)
  said = capsys.readouterr().out
  assert '…' not in said
  for row in job.overview(runs):
    for cell in [*row.values()][1:]:
      assert cell in said


def test_what_differs_is_said(three):
  saves, costs = (job.read(three / name) for name in ('saves', 'costs'))
  settings = {run.name: run.config for run in (saves, costs)}
  assert job.differences(settings) == [
    {'setting': 'skip.policy', 'saves': 'stale', 'costs': '-'}
  ]


def test_a_page_needs_nothing_else(three, tmp_path):
  names = ('saves', 'costs', 'cut')
  path = tmp_path / 'new' / 'page.html'
  job.write(path, job.read_all([three / name for name in names]))
  parsed = assert_complete(path.read_text())
  assert [*parsed.frame('Runs', '')] == [*names]
  figures = parsed.frame('Figures', '')
  assert figures['log loss'] == {
    **{'figure': 'log loss', 'saves': '0.45', 'costs': '0.45'},
  }
  assert {'<clicks>', 'Held-out AUC', 'million examples trained'} <= {
    *parsed.words
  }


def test_runs_of_one_name_are_told_apart(three, tmp_path):
  other = record(three / 'more', 'saves', {})
  names = [run.name for run in job.read_all([three / 'saves', other])]
  assert names == [str(three / 'saves'), str(other)]


def test_a_page_of_one_run_without_lines(three, tmp_path):
  (three / 'cut' / 'metrics.jsonl').write_text('')
  job.write(tmp_path / 'page.html', [job.read(three / 'cut')])
  assert_complete((tmp_path / 'page.html').read_text())


@pytest.mark.parametrize('text', ['{\n', '[]\n'])
@pytest.mark.parametrize('damage', ['config.json', 'metrics.jsonl'])
def test_a_damaged_run_is_named(damage, text, three):
  (three / 'cut' / damage).write_text(text)
  with pytest.raises(UserError, match='cut'):
    job.runs_in(three)


@pytest.mark.slow
def test_the_program_lists_and_writes(three, finished, tmp_path):
  shutil.copytree(finished, three / 'real')
  command = [sys.executable, '-m', 'experiments.report']
  done = program([*command, str(three)])
  assert (done.returncode, done.stderr) == (0, '')
  assert all(name in done.stdout for name in ('real', 'saves', 'costs 5 GB'))
  out = tmp_path / 'new' / 'page.html'
  words = [str(three / name) for name in ('real', 'saves')]
  done = program([*command, *words, f'--output={out}'])
  assert (done.returncode, done.stderr) == (0, '')
  assert '<svg' in out.read_text()
  done = program([*command, str(three / 'nowhere')])
  assert done.returncode == 1
  assert_one_sentence(done.stderr, 'nowhere')
  done = program([*command, *words, f'--output={three}'])
  assert done.returncode == 1
  assert_one_sentence(done.stderr, '--output', 'Is a directory')
