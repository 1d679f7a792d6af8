"""The report says what the files say, and nothing that they do not."""

import csv
import html.parser
import json
import math
import re

import numpy as np
import pytest
from scipy import stats

from experiments.reproduce import page, results
from experiments.reproduce.report import findings, groups, sentences
from experiments.reproduce.report.groups import OURS, Reproduction
from experiments.reproduce.results import Cell, Phase
from slipstream_jax.errors import UserError
from tests.reproduce import drawn

VOID = {'meta', 'br'}
FAILED = [
  ('rm2', 'fae', 'off', None),
  ('rm2', 'hotline', 'off', 1),
]


class Parsed(html.parser.HTMLParser):
  """Tables by heading, text, ids and references of a page that is balanced."""

  def __init__(self, text):
    super().__init__()
    self.open, self.tags, self.ids, self.references = [], set(), [], []
    self.headings, self.tables, self.words = [], {}, []
    self.feed(text)
    self.close()
    assert self.open == []

  def handle_starttag(self, tag, attributes):
    self.tags.add(tag)
    if tag not in VOID:
      self.open.append(tag)
    for name, value in attributes:
      if name == 'id':
        self.ids.append(value)
      if name in ('src', 'href', 'xlink:href', 'data', 'action', 'srcset'):
        self.references.append(value)
    if tag in ('h1', 'h2', 'h3', 'th', 'td'):
      self.words.append('')
    if tag == 'table':
      self.tables[tuple(self.headings[-2:])] = []
    if tag == 'tr':
      next(reversed(self.tables.values())).append([])

  def handle_startendtag(self, tag, attributes):
    self.handle_starttag(tag, attributes)
    if tag not in VOID:
      self.open.pop()

  def handle_endtag(self, tag):
    assert self.open.pop() == tag
    if tag in ('td', 'th'):
      next(reversed(self.tables.values()))[-1].append(self.words[-1])
    if tag == 'h2':
      self.headings = [self.words[-1]]
    if tag == 'h3':
      self.headings = [*self.headings[:1], self.words[-1]]

  def handle_data(self, data):
    if self.words:
      self.words[-1] += data


def rows_of(parsed, section, title):
  """Rows of a table by their first cell, without the marks of notes."""
  head, *lines = parsed.tables[(section, title)]
  return {re.sub(r' \[.*', '', line[0]): line for line in lines}, head


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  where = tmp_path_factory.mktemp('reproduction')
  drawn.fill(where, models=('rm2', 'rm2_l20'), failed=FAILED)
  page.write(where)
  return where


@pytest.fixture(scope='module')
def parsed(folder):
  return Parsed((folder / page.HTML).read_text())


@pytest.fixture(scope='module')
def lines(folder):
  """The cells as CSV has them: (system, skip) to columns by seed, of RM2."""
  columns = {}
  with (folder / 'cells.csv').open(newline='') as file:
    for line in csv.DictReader(file):
      if line['model'] == 'rm2' and line['status'] == 'ok':
        for name in Cell._fields[5:]:
          key = (line['system'], line['skip'], name)
          columns.setdefault(key, {})[line['seed']] = float(line[name])
  return columns


def column(lines, system, skip, name):
  return np.array([lines[system, skip, name][seed] for seed in '012'])


def t_interval(values):
  low, high = stats.t.interval(
    0.95, len(values) - 1, np.mean(values), stats.sem(values)
  )
  return low, high


def test_ratios_of_seconds_are_those_of_the_csv(parsed, lines):
  ratio = np.log(column(lines, 'xdl', 'off', 'seconds'))
  ratio -= np.log(column(lines, 'pinned', 'ours', 'seconds'))
  low, high = np.exp(t_interval(ratio))
  expected = [f'{math.exp(ratio.mean()):.2f}', f'{low:.2f} to {high:.2f}']
  rows, head = rows_of(parsed, 'RM2', 'Time')
  at = head.index('default policy: times as fast')
  assert rows['XDL'][at : at + 2] == expected
  overview = parsed.tables[
    (
      'What wins and what loses',
      "Slipstream, default policy, against the paper's baselines",
    )
  ]
  line = next(row for row in overview if row[:2] == ['RM2', 'XDL'])
  assert line[2:5] == [*expected, '2']


def test_the_speed_without_overhead_is_that_of_the_csv(parsed, lines):
  pinned = column(lines, 'pinned', 'off', 'seconds')
  ratios = column(lines, 'xdl', 'off', 'seconds') / pinned
  saved = column(lines, 'pinned', 'ours', 'examples_dropped')
  saved = np.mean(saved / column(lines, 'pinned', 'ours', 'examples_seen'))
  ideal = stats.gmean(ratios) / (1 - saved)
  rows, head = rows_of(parsed, 'RM2', 'Time')
  assert rows['XDL'][head.index('without overhead')] == f'{ideal:.2f}'


def test_bytes_per_example_are_those_of_the_csv(parsed, lines):
  def whole(system, skip, *more):
    names = ('bytes_loaded', 'bytes_stored', *more)
    parts = [column(lines, system, skip, name) for name in names]
    return sum(parts) / column(lines, system, skip, 'examples_seen')

  rows, head = rows_of(parsed, 'RM2', 'Bytes moved')
  xdl = rows['XDL']
  both = whole('xdl', 'off', 'dense_bytes')
  assert xdl[head.index('in all')] == f'{both.mean():,.0f}'
  ratio = stats.gmean(whole('xdl', 'off') / whole('pinned', 'ours'))
  at = head.index("tables, times the default policy's")
  assert xdl[at] == f'{ratio:.2f}'
  ratio = stats.gmean(both / whole('pinned', 'ours', 'dense_bytes'))
  assert xdl[head.index('with dense')] == f'{ratio:.2f}'
  assert xdl[head.index('paper, GB')] == '23.2'
  # FAE has failed: nothing is a multiple of it but the paper's own numbers.
  assert xdl[head.index("paper, times FAE's")] == f'{23.2 / 15:.2f}'
  assert "tables, times FAE's" not in head


def test_quality_and_its_intervals_are_those_of_the_csv(parsed, lines):
  rows, head = rows_of(parsed, 'RM2', 'Quality')
  auc = column(lines, 'dlrm_hybrid', 'off', 'auc')
  low, high = t_interval(auc)
  row = rows['Intel DLRM']
  assert row[1:3] == [f'{auc.mean():.4f}', f'{low:.4f} to {high:.4f}']
  lead = (auc - column(lines, 'plain', 'off', 'auc')).mean()
  shown = float(row[head.index("AUC less streamed's")])
  assert shown == pytest.approx(lead, abs=5e-5)
  # Hanley and McNeil (1982), with the sizes that the generator draws.
  a, n1, n0 = auc.mean(), 10_400, 29_600
  q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
  variance = a * (1 - a) + (n1 - 1) * (q1 - a * a) + (n0 - 1) * (q2 - a * a)
  half = 1.959964 * math.sqrt(variance / n1 / n0)
  assert row[3] == f'{a - half:.4f} to {a + half:.4f}'


def test_drop_rates_and_overhead_are_those_of_the_csv(parsed, lines):
  def of(name):
    return column(lines, 'pinned', 'published', name)

  dropped = of('examples_dropped') / of('examples_seen')
  spent = (of('choose_seconds') + of('window_seconds')) / of('seconds')
  rows, head = rows_of(parsed, 'RM2', 'What is skipped, and what that costs')
  row = rows['Slipstream, as published']
  assert row[head.index('dropped, of all')] == f'{dropped.mean():.1%}'
  assert row[head.index('dropped, of hot')] == f'{(dropped / 0.76).mean():.1%}'
  assert row[head.index('both')] == f'{spent.mean():.1%}'


def test_what_failed_says_so_in_its_cell(parsed, folder):
  rows, _ = rows_of(parsed, 'RM2', 'Time')
  assert set(rows['FAE'][1:4]) == {'failed'}
  assert rows['Hotline'][1] == '2'  # seeds
  text = (folder / page.HTML).read_text()
  sentence = 'rows must fit the host (got &lt;40 GB&gt; &amp; &quot;more&quot;)'
  assert f'] RM2, FAE, seeds 0, 1 and 2: {sentence}' in text
  assert f'] RM2, Hotline, seed 1: {sentence}' in text


def test_the_page_needs_nothing_else(parsed, folder):
  text = (folder / page.HTML).read_text()
  assert 'http' not in text
  assert all(x.startswith('#') for x in parsed.references)
  assert {x[1:] for x in parsed.references} <= set(parsed.ids)
  assert len(parsed.ids) == len(set(parsed.ids))
  assert not {'script', 'link', 'img', 'iframe'} & parsed.tags
  assert not re.search(r'url\((?!#)|@import', text)
  assert 'prefers-color-scheme: dark' in text
  # Colors are of the page; a drawing that names its own is dark on dark.
  drawings = re.findall(r'<svg.*?</svg>', text, flags=re.DOTALL)
  assert len(drawings) == 14
  assert not any(re.search(r'#[0-9a-f]{6}\b', x) for x in drawings)


def test_markdown_has_the_same_tables_and_pictures(parsed, folder):
  text = (folder / page.MARKDOWN).read_text()
  tables = []
  for line in text.splitlines():
    if line.startswith('| '):
      cells = [
        re.sub(r'\\(.)', r'\1', cell.strip()).strip('*')
        for cell in re.split(r'(?<!\\)\|', line)[1:-1]
      ]
      if not line.startswith('| ---'):
        tables[-1].append(cells)
    elif tables == [] or tables[-1]:
      tables.append([])
  ours = [
    [[cell.strip() for cell in row] for row in table]
    for table in parsed.tables.values()
  ]
  assert [table for table in tables if table] == ours
  for name in re.findall(r'\((pictures/.*?)\)', text):
    picture = (folder / name).read_text()
    assert picture.startswith('<svg ')
    assert 'xmlns="http://www.w3.org/2000/svg"' in picture
  assert text.count('](pictures/') == 14


@pytest.mark.parametrize('kind', list(results.FILES))
def test_nothing_is_said_of_files_that_are_absent(kind, folder, tmp_path):
  name = results.FILES[kind]
  whole = (folder / name).read_bytes()
  one = [x for x in whole.splitlines(keepends=True) if b'_l20' not in x]
  (tmp_path / name).write_bytes(b''.join(one))
  page.write(tmp_path)
  parsed = Parsed((tmp_path / page.HTML).read_text())
  titles = {title for key in parsed.tables for title in key[1:]}
  own = {
    'Skew': {'Access skew'},
    'RowChange': set(),
    'Naive': {'Naive skipping'},
    'Threshold': {'Threshold, drop rate and quality'},
    'Phase': {'Time by phase, ms per batch'},
    'Point': {'Time to quality'},
    'Modelled': {'RM2, a device step of 0.5 ms, modelled'},
  }
  if kind is not Cell:
    assert titles == own[kind.__name__]
  else:
    assert not titles & set.union(*own.values())
  assert 'SYNTHETIC' not in (tmp_path / page.MARKDOWN).read_text()


def test_an_empty_folder_gives_a_page(tmp_path):
  page.write(tmp_path)
  assert 'Nothing was run' in (tmp_path / page.HTML).read_text()
  assert not (tmp_path / 'pictures').exists()


def test_one_seed_has_no_interval(tmp_path):
  (rng, failed) = (np.random.default_rng(1), [('rm4', 'pinned', 'ours', 0)])
  results.append(tmp_path, drawn.cells(rng, ('rm4',), 1, failed))
  page.write(tmp_path)
  parsed = Parsed((tmp_path / page.HTML).read_text())
  rows, head = rows_of(parsed, 'RM4', 'Time')
  assert rows['XDL'][head.index('as published: times as fast')] != '-'
  assert '95 % interval' not in head  # of which nothing is known
  assert 'FAILED in every run of RM4' in ''.join(parsed.words)


def cell(system, skip, seed, **figures):
  figures = {'examples_seen': 100, 'bytes_loaded': 50, 'bytes_stored': 50} | (
    figures
  )
  return Cell('rm2', system, skip, seed, **figures)


def test_the_summary_says_what_is_lost():
  cells = []
  for seed in range(3):
    wobble = 1 + 0.001 * seed
    cells += [
      cell(*OURS, seed, seconds=2.0, auc=0.780),
      cell('pinned', 'off', seed, seconds=2.1 * wobble, auc=0.7802),
      cell('fae', 'off', seed, seconds=1.5 * wobble, auc=0.7812),
      cell('xdl', 'off', seed, seconds=(1, 2, 4)[seed], auc=0.7),
      cell('dlrm_hybrid', 'off', seed, seconds=5.0 * wobble, bytes_loaded=5),
      cell('plain', 'off', seed, seconds=5.0),
    ]
  whole = Reproduction({}, cells)
  said = sentences.summary(whole, OURS)
  assert [x for x in said if 'SLOWER than FAE (RM2: 0.75)' in x]
  assert [x for x in said if 'not to be told apart from XDL (RM2: 1.00)' in x]
  assert [x for x in said if 'Faster than pinned' in x and 'DLRM (2.50)' in x]
  assert [
    x for x in said if 'MORE bytes of tables than Intel DLRM (RM2: 0.55)' in x
  ]
  assert [x for x in said if 'As many bytes of tables as pinned' in x]
  assert [x for x in said if 'AUC LOWER than that of FAE (-0.0012)' in x]
  assert [x for x in said if 'AUC higher than that of XDL (+0.0800)' in x]
  assert [x for x in said if 'AUC within 0.0005 of pinned' in x]
  assert "The mean reaches the paper's speed in 1 of 3 comparisons." in said
  (pooled,) = sentences.pooling(whole)
  assert 'which takes 1.82 times as many bytes' in pooled


def test_steps_of_one_program_say_how_noisy_the_machine_was():
  steps = [('pinned', 16.37), ('hotline', 30.48), ('dlrm_hybrid', 40.0)]
  phases = [Phase('rm2', key, 'off', 0, 'step', ms) for key, ms in steps]
  about = findings.phases(Reproduction({}, phases=phases), 'rm2').about
  assert 'Hotline, but took 16.4 to 30.5 ms.' in about
  assert '40' not in about
  one = findings.phases(Reproduction({}, phases=phases[:1]), 'rm2').about
  assert 'one after another' not in one


def test_a_run_that_is_there_twice_counts_as_it_was_last():
  cells = [
    cell('fae', 'off', 0, status='no memory'),
    cell('fae', 'off', 0, seconds=3.0),
  ]
  (group,) = groups.groups(Reproduction({}, cells), 'rm2').values()
  assert (group.failures, group.cells[0].seconds) == ({}, 3.0)


def test_a_damaged_setting_is_named(tmp_path):
  (tmp_path / results.SETTING).write_text('{')
  with pytest.raises(UserError, match='setting'):
    page.write(tmp_path)


def test_the_setting_stands_beside_the_papers(parsed, folder):
  setting = json.loads((folder / results.SETTING).read_text())
  rows, _ = rows_of(parsed, 'RM2', 'Setting')
  ours = setting['models']['rm2']
  assert rows['rows of all tables'] == [
    'rows of all tables',
    f'{ours["rows"]:,}',
    '33,800,000',
  ]
  assert rows['examples of a run'][1:] == ['409,600', '45,000,000']
  assert 'SYNTHETIC DATA' in (folder / page.MARKDOWN).read_text()
