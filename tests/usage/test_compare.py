"""A comparison that was stopped continues; data and model may be one's own."""

import csv

from absl import flags
from absl.testing import flagsaver
from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st
import pytest

from configs import own
from experiments.common import cli
from tests.support.runs import assert_one_sentence, smoke, snapshot

# `run` and `compare` have flags of one name: this file has its own.
SEEDS, TARGETS, POLICIES = 2, ['0.5'], ['stale']
SECONDS = ('seconds', 'seconds_choosing')
FILES = {
  *('compare.csv', 'compare.html', 'compare.md', 'compare.png', 'config.json'),
  'curve.csv',
}


@pytest.fixture(scope='module')
def compare():
  """The program, whose --workdir is that of `run` here."""
  from experiments.compare import __main__ as program

  return program


def run_compare(compare, workdir, config=None, seeds=SEEDS, **more):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(['tests'])
  given = {'seeds': seeds, 'targets': TARGETS, 'policies': POLICIES, **more}
  with flagsaver.flagsaver(workdir=str(workdir), **given):
    return cli.guarded(compare.main, config or config_of())


def config_of(**changes):
  return smoke(**{'train.steps': 60} | changes)


def rows_of(workdir, name='compare.csv'):
  with (workdir / name).open(newline='') as file:
    rows = list(csv.DictReader(file))
  return [
    {key: value for key, value in row.items() if key not in SECONDS}
    for row in rows
  ]


@pytest.fixture(scope='module')
def whole(compare, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('compare') / 'whole'
  assert run_compare(compare, workdir) == 0
  return workdir


def test_it_says_how_much_there_is_to_do(compare, tmp_path, capsys):
  assert run_compare(compare, tmp_path, seeds=1) == 0
  said = capsys.readouterr().out
  assert '3 runs of 60 batches\n' in said
  places = [said.index(x) for x in ('3 runs', 'about 0:', 'seed 0  plain')]
  assert places == sorted(places)
  before = (tmp_path / 'compare.csv').read_bytes()
  assert run_compare(compare, tmp_path, seeds=1) == 0
  assert '0 runs of 60 batches; 3 are finished' in capsys.readouterr().out
  assert (tmp_path / 'compare.csv').read_bytes() == before


@settings(
  max_examples=2,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(stops=st.lists(st.integers(0, 5), min_size=1, max_size=2))
def test_one_that_is_stopped_now_and_then_comes_to_the_same(
  stops, compare, whole, tmp_path_factory, capsys
):
  """Stopped after so many runs each time; half of a line was on the disk."""
  folder = tmp_path_factory.mktemp('stopped') / 'run'
  measure, ran = compare.measure, []

  def stopping(case, cell, tell):
    if len(ran) == upto:
      raise KeyboardInterrupt
    ran.append(cell.policy)
    return measure(case, cell, tell)

  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(compare, '_warm_up', lambda *_: 1.0)
    patched.setattr(compare, 'measure', stopping)
    for upto in sorted(stops):
      assert run_compare(compare, folder) == 130
      said = capsys.readouterr().err
      assert f'{upto} of 6 runs are finished' in said
      assert not (folder / 'compare.html').exists()
      for name in ('compare.csv', 'curve.csv'):
        with (folder / name).open('a') as file:
          file.write('stale,0.5,1,12')
    upto = None
    assert run_compare(compare, folder) == 0
  assert ran == ['plain', 'random', 'stale'] * 2
  for name in ('compare.csv', 'curve.csv'):
    assert rows_of(folder, name) == rows_of(whole, name)
  assert {path.name for path in folder.iterdir()} == FILES


def test_more_seeds_and_epochs(compare, tmp_path, capsys):
  """Of a data set of one's own, whose runs go through it twice."""
  given = {'own': 'tests.usage.market_of_two:clicks', 'policies': ['surprise']}
  config = own.get_config()
  config.log_steps = 5
  for seeds in (1, 2):
    done = run_compare(compare, tmp_path, config, seeds, epochs=2, **given)
    assert done == 0, capsys.readouterr().err
  runs = rows_of(tmp_path)
  assert [run['seed'] for run in runs] == ['0'] * 3 + ['1'] * 3
  assert {run['batches'] for run in runs} == {'18'}
  assert {run['examples_seen'] for run in runs} == {str(18 * 256)}
  assert len(rows_of(tmp_path, 'curve.csv')) >= 6
  assert 'two goods' in (tmp_path / 'compare.html').read_text()


def test_runs_that_drop_may_read_more(compare, tmp_path):
  more = {'policies': ['random'], 'seeds': 1, 'longer': 1.5}
  assert run_compare(compare, tmp_path, **more) == 0
  assert [run['batches'] for run in rows_of(tmp_path)] == ['60', '90']


@pytest.mark.parametrize(
  ('name', 'said'),
  [
    ('nowhere:f', "No module named 'nowhere'"),
    ('tests.usage.market_of_two:nothing', 'must return a Dataset'),
    ('tests.usage.market_of_two:goods', 'clicks'),
  ],
)
def test_a_function_that_cannot_be(name, said, compare, tmp_path, capsys):
  config = own.get_config()
  assert run_compare(compare, tmp_path, config, own=name) == 1
  assert_one_sentence(capsys.readouterr().err, '--own', said)


def test_another_config_is_refused(compare, whole, capsys):
  before = snapshot(whole)
  other = config_of(**{'model.top': (32,)})
  assert run_compare(compare, whole, other) == 1
  assert_one_sentence(capsys.readouterr().err, 'config.model.top', '[32]')
  assert snapshot(whole) == before


def test_a_folder_of_something_else_is_refused(compare, tmp_path, capsys):
  (tmp_path / 'notes.txt').write_text('mine')
  assert run_compare(compare, tmp_path) == 1
  assert_one_sentence(capsys.readouterr().err, '--workdir')
  assert [path.name for path in tmp_path.iterdir()] == ['notes.txt']
