"""Progress fits any terminal, and says what matters."""

import io
import re
import time

import pytest
from rich.cells import cell_len
from rich.console import Console

from experiments.common import progress, report
from experiments.common.progress import Bar

LINE = {
  'loss': 0.4712,
  'examples_per_s': 52_345.6,
  'mb_loaded_per_step': 1.234,
  'mb_stored_per_step': 0.056,
}
CODES = re.compile(r'\x1b\[[0-9;?]*[A-Za-z]')


def terminal(width):
  return Console(
    file=io.StringIO(), width=width, force_terminal=True, color_system=None
  )


def lines_of(screen):
  text = CODES.sub('', screen.file.getvalue()).replace('\r', '\n')
  return [line.rstrip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize('width', [40, 57, 80, 120, 200])
def test_a_terminal_of_any_width_shows_one_line(width):
  screen = terminal(width)
  with Bar(screen, 2000, 'batch', done=7) as bar:
    for done in range(8, 30):
      bar.show(done, *report.rates(LINE))
    screen.print('between')
    bar.begin('another phase', 3, 'turn')
    bar.show(2, *report.rates(LINE))
  lines = lines_of(screen)
  assert max(map(cell_len, lines)) <= width
  starts = 'batch', 'between', 'another phase'
  assert [line for line in lines if not line.startswith(starts)] == []
  assert 'between' in lines
  assert lines[-1].startswith('another phase  turn 2/3')
  assert '━' in lines[-1]


@pytest.mark.parametrize(
  ('width', 'facts'), [(60, 1), (80, 2), (100, 3), (140, 4)]
)
def test_a_wider_terminal_shows_more_facts(width, facts):
  rates = report.rates(LINE)
  screen = terminal(width)
  with Bar(screen, 2000, 'batch') as bar:
    bar.show(1234, *rates)
  (line,) = {line for line in lines_of(screen) if 'batch 1,234/2,000' in line}
  assert [rate in line for rate in rates] == [True] * facts + [False] * (
    len(rates) - facts
  )


@pytest.mark.parametrize(
  ('total', 'unit', 'done', 'shown'),
  [
    (None, 'batch', 5, 'training  batch 5'),
    (8, 'batch', 5, 'training  batch 5/8'),
    (8, '%', 2, 'training  25%'),
    (None, '%', 2, 'training'),
    (None, '', 0, 'training'),
    (8, 'batch', 9, 'training  batch 8/8'),  # never more than all
  ],
)
def test_a_bar_counts_units_or_a_share(total, unit, done, shown):
  screen = terminal(80)
  with Bar(screen, total, unit, 'training') as bar:
    bar.show(done)
  assert lines_of(screen)[-1].split('  ━')[0].rstrip('━╺╸ ') == shown


def test_without_a_terminal_a_line_comes_now_and_then(monkeypatch):
  monkeypatch.setattr(progress, 'QUIET_S', 0.01)
  screen = Console(file=io.StringIO(), width=120)
  with Bar(screen, 1000, 'batch', 'training') as bar:
    bar.show(320, 'loss 0.5', 'fast')
    while '320' not in screen.file.getvalue():
      pass
  assert 'training  batch 320/1,000  loss 0.5  fast' in lines_of(screen)
  count = len(lines_of(screen))
  monkeypatch.setattr(progress, 'QUIET_S', 1000.0)
  with Bar(screen, 1000, 'batch') as bar:
    bar.show(1)
  assert len(lines_of(screen)) == count


def test_it_says_when_programs_compile(monkeypatch):
  screen = terminal(80)
  with Bar(screen, 10, 'batch') as bar:
    bar.show(1)
    monkeypatch.setattr(progress, 'is_compiling', lambda: True)
    bar.show(2, *report.rates(LINE))
  lines = lines_of(screen)
  assert lines[0].startswith('batch')
  assert lines[-1].startswith('compiling  batch 2/10')


def test_time_left_is_that_of_the_last_while(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])
  screen = terminal(80)
  with Bar(screen, 10_000, 'batch', done=500) as bar:
    now[0] = 1000.0  # programs were compiled
    bar.show(501)
    for done in range(502, 600):
      now[0] += 1.0
      bar.show(done)
    for done in range(600, 1300):  # ten times as fast from here on
      now[0] += 0.1
      bar.show(done)
  assert '14:31 left' in lines_of(screen)[-1]


@pytest.mark.parametrize(
  ('seconds', 'said'),
  [(0, '0:00'), (41.2, '0:41'), (725, '12:05'), (3723, '1:02:03')],
)
def test_a_clock(seconds, said):
  assert progress.clock(seconds) == said
