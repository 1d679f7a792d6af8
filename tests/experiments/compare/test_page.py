"""Every number of the page is of the files; it needs nothing beside itself."""

import csv
import html.parser
import io
import itertools
import re
import statistics

import pytest

from experiments.compare import page
from experiments.compare.grid import ANCHORS
from experiments.compare.results import Results, RUNS
from tests.experiments.compare import drawn
from tests.reproduce import browser
from tests.support.runs import smoke

needs_browser = pytest.mark.skipif(
  browser.path() is None, reason='no Chromium on the PATH'
)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  where = tmp_path_factory.mktemp('comparison')
  runs, curve = drawn.comparison(5)
  kept = Results(where, smoke(), longer=1.0, own=None)
  for run in runs:
    kept.add(run, [point for point in curve if point[:3] == run[:3]])
  page.write(where, comparison(kept.runs, kept.curve))
  return where


def comparison(runs, curve):
  title = 'a log of <clicks>, lines 1-80,000'
  return page.Comparison(title, True, runs, curve, drawn.MACHINE, smoke())


class Tables(html.parser.HTMLParser):
  """The tables of a page, by the heading before them and in order."""

  def __init__(self, text):
    super().__init__()
    self.section, self.tables, self.tag = '', [], ''
    self.feed(text)

  def handle_starttag(self, tag, attributes):
    self.tag = tag
    if tag == 'table':
      self.tables.append((self.section, []))
    if tag == 'tr':
      self.tables[-1][1].append([])
    if tag in ('td', 'th'):
      self.tables[-1][1][-1].append('')

  def handle_data(self, data):
    if self.tag in ('td', 'th'):
      self.tables[-1][1][-1][-1] += data
    if self.tag == 'h2':
      self.section = data

  def handle_endtag(self, tag):
    self.tag = ''

  def table(self, section, column):
    """Rows by their first cell, each a dict of its columns."""
    for name, (head, *rows) in self.tables:
      if name == section and column in head:
        return {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    raise AssertionError(f'no {column} in {section}')


def lines_of(folder, policy, target):
  """The lines of a policy by seed, as anybody would read them."""
  text = (folder / RUNS).read_bytes().decode()
  return {
    line['seed']: {k: float(v) for k, v in line.items() if k != 'policy' and v}
    for line in csv.DictReader(io.StringIO(text))
    if line['policy'] == policy and float(line['target']) == target
  }


def test_numbers_of_the_page_follow_from_the_file(folder):
  tables = Tables((folder / page.HTML).read_text())
  plain = lines_of(folder, 'plain', 0)
  for policy in ('surprise', 'stale'):
    runs = lines_of(folder, policy, 0.4)
    quality = tables.table('40% asked', 'AUC lost')[policy]
    time = tables.table('40% asked', 'wall time saved')[policy]
    lost = [plain[seed]['auc'] - runs[seed]['auc'] for seed in runs]
    middle, half = statistics.mean(lost), 2.7764451 * statistics.stdev(lost)
    half /= len(lost) ** 0.5
    assert quality['n'] == '5'
    assert quality['AUC lost'] == f'{middle:+.4f}'
    assert quality['95 %'] == f'{middle - half:+.4f} to {middle + half:+.4f}'
    dropped = [
      run['examples_dropped'] / run['examples_seen'] for run in runs.values()
    ]
    assert quality['dropped'] == f'{statistics.mean(dropped):.1%}'
    saved = [1 - runs[s]['seconds'] / plain[s]['seconds'] for s in runs]
    assert time['wall time saved'] == f'{statistics.mean(saved):.1%}'


def test_the_share_of_randoms_loss_follows_from_the_file(folder):
  """The policy drops nearly what random does, so that few must be bridged."""
  tables = Tables((folder / page.HTML).read_text())
  row = tables.table('40% asked', "log loss, of random's")['surprise']
  plain, runs = lines_of(folder, 'plain', 0), lines_of(folder, 'surprise', 0.4)
  own, others = 0.0, 0.0
  for seed, run in runs.items():
    ends = [lines_of(folder, 'random', t)[seed] for t in (0.2, 0.4, 0.6)]
    ends = sorted(
      (x['examples_trained'], x['auc']) for x in [plain[seed], *ends]
    )
    at = run['examples_trained']
    (x0, y0), (x1, y1) = next(
      pair for pair in itertools.pairwise(ends) if at <= pair[1][0]
    )
    there = y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    own += plain[seed]['auc'] - run['auc']
    others += plain[seed]['auc'] - there
  assert row["of random's, equal examples"] == f'{own / others:.2f}'


def test_a_page_says_all_and_needs_nothing_else(folder):
  text = (folder / page.HTML).read_text()
  tables = Tables(text)
  assert not re.search(r'<(script|link|img|iframe)\b', text)
  assert not re.search(r'url\((?!#)|(src|href)="(?!#)', text)
  assert text.count('<svg') == 4
  assert 'SYNTHETIC DATA' in text
  assert '&lt;clicks&gt;' in text
  assert 'experiments.compare --own=x:&lt;y&gt;' in text
  settings = tables.table('Settings', 'key')
  assert settings['config.data.batch_size']['value'] == '256'
  for target in ('20%', '40%', '60%'):
    table = tables.table(f'{target} asked', 'AUC lost')
    assert list(table) == list(ANCHORS)
  short = (folder / page.MARKDOWN).read_text()
  assert '| surprise\\_offset |' in short or '| **surprise' in short
  assert (folder / page.PICTURE).stat().st_size > 5000


@pytest.mark.parametrize('seeds', [0, 1])
def test_a_page_of_little_can_be_read(seeds, tmp_path):
  runs, curve = drawn.comparison(1)
  runs, curve = runs[: 2 * seeds], curve[: 20 * seeds]
  page.write(tmp_path, comparison(runs, curve))
  assert 'how to read' in (tmp_path / page.HTML).read_text().lower()
  assert len(page.overview(runs, curve)) == len(runs)


@needs_browser
@pytest.mark.parametrize(('width', 'scheme'), [(390, 'light'), (1200, 'dark')])
def test_a_page_opens_without_complaint(folder, width, scheme, tmp_path):
  measured, complaints = browser.opened(
    folder / page.HTML, tmp_path, width, scheme
  )
  assert complaints == []
  assert measured['wide'] <= 0
  assert len(measured['drawings']) == 4
  assert all(250 < drawing <= width for drawing in measured['drawings'])
