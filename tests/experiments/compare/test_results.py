"""A comparison's folder, cut off at any byte, goes on as if it had not been."""

import pathlib
import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from experiments.compare.results import Cell, CURVE, Results, RUNS
from slipstream_jax.errors import UserError
from tests.experiments.compare import drawn
from tests.support.runs import smoke

CELLS = drawn.cells(('random', 'stale'), (0.4,))


def curves(runs, points):
  return [(run, [p for p in points if p[:3] == run[:3]]) for run in runs]


DRAWN = curves(*drawn.comparison(2, CELLS))


def opened(folder, **given):
  return Results(folder, smoke(), **{'longer': 1.0, 'own': None} | given)


def fill(folder, until=None):
  kept = opened(folder)
  for run, points in DRAWN[:until]:
    if not kept.has(run.seed, Cell(*run[:2])):
      kept.add(run, points)
  return kept


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp('whole')
  fill(folder)
  return {name: (folder / name).read_bytes() for name in (RUNS, CURVE)}


@settings(max_examples=25)
@given(data=st.data())
def test_what_is_cut_off_anywhere_continues_to_the_same_files(whole, data):
  """Lines are only added: points of a run, and then its line."""
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    until = data.draw(st.integers(1, len(DRAWN)), 'runs')
    fill(folder, until - 1)
    before = {name: (folder / name).stat().st_size for name in (RUNS, CURVE)}
    fill(folder, until)
    cut = data.draw(st.sampled_from([RUNS, CURVE]), 'cut')
    size = (folder / cut).stat().st_size
    at = data.draw(st.integers(before[cut], size - 1), 'at')
    with (folder / cut).open('r+b') as file:
      file.truncate(at)
    if cut == CURVE:  # the run's line comes after its points
      with (folder / RUNS).open('r+b') as file:
        file.truncate(before[RUNS])
    again = opened(folder)
    assert [run[:3] for run in again.runs] == [
      run[:3] for run, _ in DRAWN[: until - 1]
    ]
    assert {p[:3] for p in again.curve} == {run[:3] for run in again.runs}
    fill(folder)
    for name, expected in whole.items():
      assert (folder / name).read_bytes() == expected, name


def test_what_is_read_is_what_was_written(tmp_path):
  strange = DRAWN[0][0]._replace(calibration=None, examples_hot=None)
  kept = opened(tmp_path)
  kept.add(strange, [])
  run, points = DRAWN[1]
  kept.add(run._replace(auc=float('nan')), points)
  again = opened(tmp_path)
  assert again.runs[0] == strange
  assert again.runs[1].auc != again.runs[1].auc
  assert again.curve == points


@pytest.mark.parametrize(
  ('given', 'where'), [({'longer': 2.0}, '--longer'), ({'own': 'a:b'}, '--own')]
)
def test_other_flags_are_refused(given, where, tmp_path):
  fill(tmp_path, 2)
  with pytest.raises(UserError, match='must keep') as raised:
    opened(tmp_path, **given)
  assert raised.value.where == where


@pytest.mark.parametrize('damage', ['policy,auc\r\nx,1\r\n', 'plain,x\r\n'])
@pytest.mark.parametrize('name', [RUNS, CURVE])
def test_a_file_of_another_version_is_refused(name, damage, tmp_path):
  fill(tmp_path, 2)
  header = (tmp_path / name).read_text().splitlines()[0]
  whole = damage if damage.startswith('policy') else f'{header}\r\n{damage}'
  (tmp_path / name).write_text(whole, newline='')
  with pytest.raises(UserError, match='another version, or damaged') as raised:
    opened(tmp_path)
  assert name in raised.value.where


def test_a_config_that_is_not_json_is_refused(tmp_path):
  fill(tmp_path, 1)
  (tmp_path / 'config.json').write_text('{')
  with pytest.raises(UserError, match='must be JSON'):
    opened(tmp_path)
