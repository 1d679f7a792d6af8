"""Runs are listed, and laid side by side on a page that needs nothing else."""

import html.parser
import json
import re
import shutil
import sys

import pytest

from experiments.report import runs
from experiments.report.page import page
from slipstream_jax.errors import UserError
from tests.support.programs import finished as program


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
  record(tmp_path, 'saves', {}, policy='stale')
  record(tmp_path, 'costs', {'saved_bytes': 0, 'extra_bytes': 5e9})
  cut = record(tmp_path, 'cut')
  with (cut / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 99, "ki')
  (tmp_path / 'no run').mkdir()
  (tmp_path / 'notes.txt').write_text('')
  return tmp_path


def test_runs_are_listed(three):
  listed = {row['run']: row for row in runs.overview(runs.runs_in(three))}
  assert set(listed) == {'saves', 'costs', 'cut'}
  saves, costs, cut = listed['saves'], listed['costs'], listed['cut']
  assert (saves['saved'], costs['saved']) == ('2 MB', 'costs 5 GB')
  assert (saves['steps'], saves['AUC']) == ('40', '0.7500')
  assert saves['examples/s'] == '12,346'
  assert (cut['steps'], cut['AUC'], cut['saved']) == ('40...', '0.7000', '-')
  for row in listed.values():
    assert '-' not in row['saved'][1:]


def test_what_differs_is_said(three):
  read = [runs.read(three / name) for name in ('saves', 'costs')]
  assert runs.differences(read) == [
    {'setting': 'skip.policy', 'saves': 'stale', 'costs': '-'}
  ]
  assert runs.differences(read[:1]) == []


class Parsed(html.parser.HTMLParser):
  """Which tags there are, which are open, and what they refer to."""

  def __init__(self, text):
    super().__init__()
    self.open, self.tags, self.links, self.words = [], set(), [], []
    self.feed(text)

  def handle_starttag(self, tag, attributes):
    self.tags.add(tag)
    if tag not in ('meta', 'br'):
      self.open.append(tag)
    for name, value in attributes:
      if name in ('src', 'href', 'xlink:href'):
        self.links.append(value)

  def handle_startendtag(self, tag, attributes):
    self.handle_starttag(tag, attributes)
    if self.open and self.open[-1] == tag:
      self.open.pop()

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.words.append(data.strip())


def test_a_page_needs_nothing_else(three):
  names = ('saves', 'costs', 'cut')
  text = page([runs.read(three / name) for name in names])
  parsed = Parsed(text)
  assert parsed.open == []
  assert {'svg', 'table'} <= parsed.tags
  assert not {'script', 'link', 'img', 'iframe'} & parsed.tags
  assert all(link.startswith('#') for link in parsed.links)
  assert not re.search(r'url\((?!#)', text)
  for words in (*names, '<clicks>', 'skip.policy', 'log loss', '12,346'):
    assert words in parsed.words, words


def test_a_page_of_one_run_and_of_one_without_lines(three):
  (three / 'cut' / 'metrics.jsonl').write_text('')
  for name in ('saves', 'cut'):
    assert name in page([runs.read(three / name)])


@pytest.mark.parametrize('damage', ['config.json', 'metrics.jsonl'])
def test_a_damaged_run_is_named(damage, three):
  (three / 'cut' / damage).write_text('{\n')
  with pytest.raises(UserError, match='cut'):
    runs.runs_in(three)


def test_the_program_lists_and_writes(three, finished, tmp_path):
  shutil.copytree(finished, three / 'real')
  command = [sys.executable, '-m', 'experiments.report']
  done = program([*command, str(three)])
  assert (done.returncode, done.stderr) == (0, '')
  assert all(name in done.stdout for name in ('real', 'saves', 'costs 5 GB'))
  out = tmp_path / 'new' / 'page.html'
  words = [str(three / name) for name in ('real', 'saves')]
  done = program([*command, *words, f'--out={out}'])
  assert (done.returncode, done.stderr) == (0, '')
  assert '<svg' in out.read_text()
  done = program([*command, str(three / 'nowhere')])
  assert done.returncode == 1
  assert done.stderr.startswith('error: ')
  assert done.stderr.count('\n') == 1
