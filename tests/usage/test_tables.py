"""Tables of all programs fit 80 columns, however large their figures are."""

import io
import sys

import pytest
from rich.console import Console

from experiments.bench import __main__ as bench
from experiments.bench.baselines import BASELINES
from experiments.bench.rows import LOOK_AHEADS, MovedBy
from experiments.common import report
from experiments.compare import page
from experiments.compare.job import ANCHORS
from experiments.profile import job as profile
from experiments.profile.predictions import Prediction
from experiments.skew import __main__ as skew
from slipstream_jax.placement import EVICTIONS, PLACEMENTS
from slipstream_jax.selection.policies import POLICIES as CHOICES
from slipstream_jax.synthetic.proxies import PROXIES
from tests.experiments.compare import drawn
from tests.support.programs import finished

ROWS = 187_767_399  # of the largest public set
LOOKUPS = 16_384 * 26
BYTES = 999_400_000
SPEED = 123_456_789.0


def lines_of(table):
  screen = Console(file=io.StringIO(), width=80)
  screen.print(table)
  return screen.file.getvalue().splitlines()


def assert_fits(table):
  """Each cell stands in one line; wider screens would show nothing more."""
  lines = lines_of(table)
  assert max(map(len, lines)) <= 80
  assert lines[-table.row_count - 1].strip('─ ') == ''
  wide = Console(file=io.StringIO(), width=300)
  wide.print(table)
  rows = wide.file.getvalue().splitlines()[-table.row_count :]
  assert [line.split() for line in lines[-table.row_count :]] == [
    line.split() for line in rows
  ]
  assert '…' not in ''.join(lines)


def test_of_profile():
  names = [(name, '') for name in PLACEMENTS]
  names += [('cached', policy) for policy in EVICTIONS]
  predictions = [
    Prediction(
      *(name, policy, ROWS, 1.0, float(LOOKUPS), LOOKUPS - 0.5),
      *(BYTES, 999.4e9, 99.9e9),
    )
    for name, policy in names
  ]
  assert_fits(profile.table(predictions, predictions[-1], BYTES))
  outcome = {
    **{'steps': 100_000, 'hit_rate': 1.0, 'rows_loaded': 1e6},
    **{'rows_stored': 1e6, 'device_bytes': BYTES},
  }
  assert_fits(profile.outcome_table(predictions[-1], outcome))


def figures():
  moved = [
    MovedBy(*(name, policy, 1.0, 1.0, LOOKUPS, LOOKUPS, 1234.0))._asdict()
    for name in (*PLACEMENTS, 'cached')
    for policy in [f'{p} {max(LOOK_AHEADS)}' for p in EVICTIONS]
  ]
  phases = dict.fromkeys(('data', 'plan', 'load', 'step', 'store'), 1234.5)
  speeds = {
    'examples_per_s': SPEED,
    'ours_examples_per_s': SPEED,
    'ratio': 1234.56,
  }
  of_link = {'gb_per_s': 1234.5, 'bytes_per_step': BYTES, 'share_of_step': 1.0}
  return {
    'phases': phases,
    'products_ms': 1234.5,
    'link': {
      f'{way}_{key}': value
      for way in ('load', 'store')
      for key, value in of_link.items()
    },
    'baselines': dict.fromkeys(BASELINES, speeds),
    'placements': moved,
    'engine': {'lookups_per_s_by_rows': {ROWS: SPEED}},
  }


@pytest.mark.parametrize('number', range(6))
def test_of_bench(number):
  title, frame = [*bench._frames(figures())][number]
  assert_fits(report.table(title, frame))


def test_of_the_vocabulary():
  # Started: its flags are called as those of bench are.
  command = [sys.executable, '-m', 'experiments.bench.vocabulary']
  done = finished([*command, '--rows=1000', '--rows=1000'])
  assert (done.returncode, done.stderr) == (0, '')
  lines = done.stdout.splitlines()
  heads = 'rows power law best even best all new state'
  assert lines[-4].split() == heads.split()
  # A row has 187,767,399 in place of 1,000, and seconds of 4 digits.
  longer = len('187,767,399') - len('1,000')
  assert max(map(len, lines[-4:])) + longer + 3 <= 80
  assert len(lines[-1].split()) == 8  # of which the last is the unit


def test_of_compare():
  names = [n for n in {**dict.fromkeys(ANCHORS), **CHOICES} if n != 'random']
  cells = drawn.cells(['random', *names], (0.35,))
  runs, curve = drawn.comparison(2, cells)
  runs = [run._replace(examples_trained=123_456_789) for run in runs]
  assert_fits(report.table('title', page.overview(runs, curve)))


def test_of_skew():
  frame = [
    {
      **{'proxy': name, 'ranked on': 123_456_789},
      **{'hot_bytes_share': 1.0, 'published_bytes_share': 1.0},
      **{'bytes less published': '+99.9', 'hot_examples_share': 1.0},
      **{'published_examples_share': 1.0, 'examples less published': '+99.9'},
    }
    for name in PROXIES
  ]
  assert_fits(skew.table_of(frame))


@pytest.mark.parametrize('value', [None, 'word', 1, 1.5])
def test_a_heading_stands_for_its_column(value):
  table = report.table('', [{'long_name': value}], headings={'long_name': 'l'})
  assert lines_of(table)[0].split() == ['l']
