"""A line of progress: it fits, and what matters is in it."""

import io

from hypothesis import given
from hypothesis import strategies as st
import pytest
from rich.cells import cell_len
from rich.console import Console

from experiments.common import progress as bar
from experiments.common import report
from experiments.common.progress import Bar, line_of, Progress

LINE = {
  'loss': 0.4712,
  'examples_per_s': 52_345.6,
  'mb_loaded_per_step': 1.234,
  'mb_stored_per_step': 0.056,
}
RUN = Progress('', 'batch', 1234, 2000, 41.0, report.rates(LINE))
WIDTHS = range(40, 201)


@pytest.mark.parametrize('width', WIDTHS)
def test_a_run_fits_and_says_what_matters(width):
  line = line_of(RUN, width)
  assert cell_len(line) <= width
  assert line.startswith('batch 1,234/2,000')
  assert '0:41 left' in line
  assert ('loss 0.4712' in line) == (width >= 41)
  assert ('52,346 examples/s' in line) == (width >= 60)
  if width >= 70:
    assert '━' in line
  assert ('load 1.23 MB/step' in line) == (width >= 89)
  assert ('store 56 kB/step' in line) == (width >= 107)


words = st.text('abc ', max_size=30)


@given(
  at=st.builds(
    Progress,
    words,
    st.sampled_from(['batch', '%', 'line']),
    st.integers(0, 10**12),
    st.none() | st.integers(1, 10**12),
    st.none() | st.floats(0, 1e9),
    st.lists(words, max_size=6).map(tuple),
  ),
  width=st.integers(1, 200),
  draws=st.booleans(),
)
def test_nothing_is_wider_than_its_terminal(at, width, draws):
  line = line_of(at, width, draws)
  assert cell_len(line) <= width
  assert '\n' not in line
  if not draws:
    assert '━' not in line


@pytest.mark.parametrize('width', [40, 57, 80, 120, 200])
def test_a_terminal_of_any_width_shows_one_line(width):
  file = io.StringIO()
  screen = Console(
    file=file, width=width, force_terminal=True, color_system=None
  )
  with Bar(screen, 2000, 'batch', done=7) as progress:
    for done in range(8, 30):
      progress.show(done, *report.rates(LINE))
    screen.print('between')
    progress.begin('another phase', 3, 'turn')
    progress.show(2)
  for line in file.getvalue().replace('\r', '\n').splitlines():
    text = Console().render_str(line, emoji=False).plain
    for code in ('\x1b[2K', '\x1b[1A', '\x1b[?25l', '\x1b[?25h'):
      text = text.replace(code, '')
    assert cell_len(text) <= width, text
  assert 'another phase' in file.getvalue()


def test_without_a_terminal_a_line_comes_now_and_then(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(bar.time, 'monotonic', lambda: now[0])
  file = io.StringIO()
  screen = Console(file=file, width=120)
  with Bar(screen, 1000, 'batch', 'training') as progress:
    for done in range(1, 1001):
      now[0] += 0.125
      progress.show(done, 'loss 0.5')
  lines = file.getvalue().splitlines()
  assert len(lines) == 12
  assert lines[3] == 'training  batch 320/1,000  1:25 left  loss 0.5'


def test_time_left_is_that_of_the_last_while(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(bar.time, 'monotonic', lambda: now[0])
  progress = Bar(Console(file=io.StringIO()), 10_000, 'batch', done=500)
  now[0] = 1000.0  # to compile, and to go on where another process ended
  progress.show(501)
  assert progress._at.seconds_left is None
  for done in range(502, 600):
    now[0] += 1.0
    progress.show(done)
  assert progress._at.seconds_left == pytest.approx(10_000 - 599)
  for done in range(600, 700):  # ten times as fast from here on
    now[0] += 0.1
    progress.show(done)
  for done in range(700, 1100):
    now[0] += 0.1
    progress.show(done)
  assert progress._at.seconds_left == pytest.approx(890.1, rel=0.01)


@pytest.mark.parametrize(
  ('seconds', 'said'),
  [(0, '0:00'), (41.2, '0:41'), (725, '12:05'), (3723, '1:02:03')],
)
def test_a_clock(seconds, said):
  assert bar.clock(seconds) == said
