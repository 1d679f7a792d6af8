"""A comparison that was stopped continues; data and model may be one's own."""

import csv

from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from configs import own
from experiments.common import cli
from experiments.compare import job
from experiments.compare.figures import are_known
from experiments.compare.results import Results
from tests.experiments.compare import drawn
from tests.support.runs import assert_one_sentence, smoke, snapshot

SECONDS = ('seconds', 'seconds_choosing')
FILES = {
  *('compare.csv', 'compare.html', 'compare.png', 'config.json', 'curve.csv'),
}


def compare(
  workdir, config=None, seeds=2, own=None, longer=1.0, policies=('stale',)
):
  config = config or config_of()
  rest = own, policies, ['0.5'], seeds, None, longer, str(workdir)
  return cli.guarded(job.compare, config, *rest)


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
def whole(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('compare') / 'whole'
  assert compare(workdir) == 0
  return workdir


@settings(
  max_examples=2,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.slow
@given(stops=st.lists(st.integers(0, 5), min_size=1, max_size=2))
def test_one_that_is_stopped_now_and_then_comes_to_the_same(
  stops, whole, tmp_path_factory, capsys
):
  """Stopped after so many runs each time, with half of a line on the disk."""
  folder = tmp_path_factory.mktemp('stopped') / 'run'
  measure, ran = job.measure, []

  def stopping(case, cell, tell):
    if case.batches[0] < 60:  # warming up
      return None
    if len(ran) == upto:
      raise KeyboardInterrupt
    ran.append(cell.policy)
    return measure(case, cell, tell)

  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(job, 'measure', stopping)
    for upto in sorted(stops):
      assert compare(folder) == 130
      said = capsys.readouterr().err
      assert f'{upto} of 6 runs are finished' in said
      assert not (folder / 'compare.html').exists()
      for name in ('compare.csv', 'curve.csv'):
        with (folder / name).open('a') as file:
          file.write('stale,0.5,1,12')
    upto = None
    assert compare(folder) == 0
  assert ran == ['plain', 'random', 'stale'] * 2
  for name in ('compare.csv', 'curve.csv'):
    assert rows_of(folder, name) == rows_of(whole, name)
  assert {path.name for path in folder.iterdir()} == FILES


def test_without_a_number_there_are_seeds_until_differences_are_known(
  tmp_path, monkeypatch, capsys
):
  rng = np.random.default_rng(0)
  drawn_of = lambda case, cell, tell: drawn.run(cell, case.config.seed, rng)  # noqa: E731
  monkeypatch.setattr(job, 'measure', drawn_of)
  assert compare(tmp_path, seeds=None) == 0
  assert 'up to 18 runs' in ' '.join(capsys.readouterr().out.split())
  runs = Results(tmp_path, config_of(), longer=1.0, own=None).runs
  seeds = len(runs) // 3
  assert [run.seed for run in runs] == [n // 3 for n in range(3 * seeds)]
  assert 2 < seeds < 6
  assert are_known(runs, job.HALF)
  assert not are_known(runs[:-3], job.HALF)
  assert compare(tmp_path, seeds=None) == 0
  assert '0 runs' in capsys.readouterr().out
  monkeypatch.setattr(job, 'HALF', 0.0)
  assert compare(tmp_path, seeds=None) == 0
  assert len(rows_of(tmp_path)) == 3 * 6


@pytest.mark.slow
def test_more_seeds_may_be_added(tmp_path, capsys):
  """Of a data set of one's own, whose runs go through it twice."""
  config = own.get_config()
  config.log_steps, config.train.epochs = 5, 2
  for seeds in (1, 2, 2):
    given = {'own': 'tests.usage.market_of_two:clicks'}
    given['policies'] = ['surprise']
    before = [path.read_bytes() for path in tmp_path.glob('*.csv')]
    assert compare(tmp_path, config, seeds, **given) == 0
  said = capsys.readouterr().out
  assert '3 runs of 18 batches, 3 are finished' in said
  assert '0 runs of 18 batches, 6 are finished' in said
  assert [path.read_bytes() for path in tmp_path.glob('*.csv')] == before
  runs = rows_of(tmp_path)
  assert [run['seed'] for run in runs] == ['0'] * 3 + ['1'] * 3
  assert {run['examples_seen'] for run in runs} == {'4608'}
  # The phases fit the nine batches of a pass: the warm-up is one of them.
  left_out = [int(run['examples_dropped']) for run in runs]
  assert [count > 0.25 * 18 * 256 for count in left_out] == [
    False,
    True,
    True,
  ] * 2
  assert 'two goods' in (tmp_path / 'compare.html').read_text()


@pytest.mark.slow
def test_runs_that_drop_may_read_more(tmp_path):
  assert compare(tmp_path, seeds=1, longer=1.5, policies=['random']) == 0
  assert [run['batches'] for run in rows_of(tmp_path)] == ['60', '90']


@pytest.mark.parametrize(
  ('name', 'said'),
  [
    ('nowhere:f', "No module named 'nowhere'"),
    ('tests.usage.market_of_two:nothing', 'must return a Dataset'),
    ('tests.usage.market_of_two:goods', 'clicks'),
  ],
)
def test_a_function_that_cannot_be(name, said, tmp_path, capsys):
  assert compare(tmp_path, own.get_config(), own=name) == 1
  assert_one_sentence(capsys.readouterr().err, '--own', said)


@pytest.mark.slow
def test_another_config_is_refused(whole, capsys):
  before = snapshot(whole)
  assert compare(whole, config_of(**{'model.top': (32,)})) == 1
  assert_one_sentence(capsys.readouterr().err, 'config.model.top', '[32]')
  assert snapshot(whole) == before


def test_a_folder_of_something_else_is_refused(tmp_path, capsys):
  (tmp_path / 'notes.txt').write_text('mine')
  assert compare(tmp_path) == 1
  assert_one_sentence(capsys.readouterr().err, '--workdir')
  assert [path.name for path in tmp_path.iterdir()] == ['notes.txt']
