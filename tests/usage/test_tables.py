"""Tables of all programs fit 80 columns, however large their figures are."""

import io

import pytest
from rich.console import Console

from experiments.common import report
from experiments.compare import page
from experiments.compare.job import ANCHORS
from experiments.profile import job as profile
from experiments.profile.predictions import Prediction
from experiments.skew import job as skew
from slipstream_jax.placement import EVICTIONS, PLACEMENTS
from slipstream_jax.selection.policies import POLICIES as CHOICES
from tests.experiments.compare import drawn

ROWS = 187_767_399  # of the largest public set
LOOKUPS = 16_384 * 26
BYTES = 999_400_000


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


def test_of_compare():
  names = [n for n in {**dict.fromkeys(ANCHORS), **CHOICES} if n != 'random']
  cells = drawn.cells(['random', *names], (0.35,))
  runs, curve = drawn.comparison(2, cells)
  runs = [run._replace(examples_trained=123_456_789) for run in runs]
  assert_fits(report.table('title', page.overview(runs, curve)))


def test_of_skew():
  many = {'profile_examples': 123_456_789}
  lines = [
    line
    for name, proxy in skew.PUBLISHED.items()
    for line in skew.lines_of(
      name, proxy._replace(**many), skew.Skew(1.0, 1.0, 1.0)
    )
  ]
  assert_fits(report.table('', lines))


@pytest.mark.parametrize('value', [None, 'word', 1, 1.5])
def test_a_heading_stands_for_its_column(value):
  table = report.table('', [{'long_name': value}], headings={'long_name': 'l'})
  assert lines_of(table)[0].split() == ['l']
