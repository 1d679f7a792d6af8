"""A page holds all that it shows, as text that no browser takes for markup."""

import html
import re
import shutil

import pytest

from experiments.common import page
from tests.support.pages import assert_complete, Page
from tests.support.programs import finished as program

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chrome'))), None)
# A frame may be narrower than a browser's window. What is found in it is
# written where `--dump-dom` prints it.
_MEASURE = """<html style="color-scheme: light dark"><body>
<iframe width="{width}" height="900" srcdoc="{page}" onload="
  const page = this.contentDocument, view = this.contentWindow;
  document.title = JSON.stringify([
    page.documentElement.scrollWidth - view.innerWidth,
    view.getComputedStyle(page.body).color,
    ...[...page.querySelectorAll('svg')].map(
      e => Math.round(e.getBoundingClientRect().width))])"></iframe>"""


def drawing():
  figure, axes = page.figure(3.0, rows=2)
  axes[0].plot([1, 10, 1000], [1, 2, 3], color=page.color(3), label='a < b')
  page.log_axis(axes[0].xaxis)
  axes[1].barh([0, 1], [1, 2], color=page.color('c1'))
  page.legend(figure)
  return figure


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  path = tmp_path_factory.mktemp('page') / 'page.html'
  rows = [
    {
      'system': '<b>XDL',
      'seconds': 1.234,
      'bytes_moved': 3_150_000,
      'why': 'x',
    },
    {'system': 'FAE', 'seconds': None, 'bytes_moved': 7, 'why': 'y'},
  ]
  wide = [{f'column_{n}': 'words' * 3 for n in range(30)}]
  page.write(
    path,
    'Two & <three>',
    [
      page.Section(
        'Runs',
        [
          'A <p>.',
          ['one', '<two>'],
          page.Table('Time', rows, 'About.', ['[1] note'], [1]),
          page.Table('Wide', wide),
          page.Table('Nothing', []),
        ],
      ),
      page.Section('Empty', [page.Table('', [])]),
      page.Section('Curves', [page.Picture('P & Q', drawing(), 'As <i>.')] * 2),
    ],
    warning='SYNTHETIC <DATA>',
    about='2 runs',
  )
  return path


def test_a_page_shows_what_it_was_given(file):
  parsed = Page(file.read_text())
  assert parsed.tables['Runs', 'Time'] == [
    ['system', 'seconds', 'bytes moved', 'why'],
    ['<b>XDL', '1.23 s', '3.15 MB', 'x'],
    ['FAE', '-', '7 B', 'y'],
  ]
  assert {key[1] for key in parsed.tables} == {'Time', 'Wide'}
  shown = {'A <p>.', '<two>', 'As <i>.', 'SYNTHETIC <DATA>', 'Two & <three>'}
  assert {*shown, 'a < b', 'About.', '[1] note'} <= set(parsed.words)
  assert 'Empty' not in parsed.words


def test_a_page_needs_nothing_beside_it(file):
  text = file.read_text()
  assert_complete(text)
  drawings = re.findall(r'<svg.*?</svg>', text, flags=re.DOTALL)
  assert len(drawings) == 2
  # A drawing with colors of its own would be dark on dark.
  assert not any(re.search(r'#[0-9a-f]{6}\b', x) for x in drawings)


def test_a_page_is_the_same_each_time(file, tmp_path):
  texts = []
  for name in 'ab':
    section = page.Section('s', [page.Picture('p', drawing())])
    page.write(tmp_path / name, 'title', [section])
    texts.append((tmp_path / name).read_text())
  assert texts[0] == texts[1]


@pytest.mark.skipif(CHROMIUM is None, reason='no Chromium on the PATH')
@pytest.mark.parametrize(('width', 'dark'), [(390, False), (1400, True)])
def test_nothing_is_wider_than_the_window(file, width, dark, tmp_path):
  frame = tmp_path / 'frame.html'
  text = html.escape(file.read_text())
  frame.write_text(_MEASURE.format(width=width, page=text))
  options = [
    *('--headless', '--no-sandbox', '--disable-gpu', '--dump-dom'),
    *('--disable-dev-shm-usage', f'--user-data-dir={tmp_path}/profile'),
    '--window-size=1500,1000',
    f'--blink-settings=preferredColorScheme={0 if dark else 1}',
  ]
  done = program([CHROMIUM, *options, frame.as_uri()])
  found = re.search(r'<title>\[(.*?)\]</title>', done.stdout)[1]
  too_wide, red, _, _, first, second = re.findall(r'-?\d+', found)
  assert int(too_wide) <= 0
  assert red == ('228' if dark else '29')
  assert first == second
  assert 250 < int(first) <= width
