"""A comparison that was stopped continues, and says what it is about."""

import csv

from absl import flags
from absl.testing import flagsaver
import pytest

from experiments.common import cli
from tests.support.runs import assert_one_sentence, smoke, snapshot

# `run` and `compare` have flags of one name: this file has its own.
SEEDS, TARGETS, POLICIES = 2, ['0.5'], ['stale']
KEYS = ('policy', 'drop_target', 'seed', 'auc', 'log_loss', 'examples_trained')


@pytest.fixture(scope='module')
def compare():
  """The program, whose --workdir is that of `run` here."""
  define = flags.DEFINE_string
  with pytest.MonkeyPatch.context() as patched:
    from experiments import run

    def shared(name, *rest, **more):
      return run._WORKDIR if name == 'workdir' else define(name, *rest, **more)

    patched.setattr(flags, 'DEFINE_string', shared)
    from experiments.compare import __main__ as program
  return program


def run_compare(compare, workdir, config=None, seeds=SEEDS, targets=TARGETS):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(['tests'])
  given = {'seeds': seeds, 'targets': targets, 'policies': POLICIES}
  with flagsaver.flagsaver(workdir=str(workdir), **given):
    return cli.guarded(compare.main, config or settings())


def settings(**changes):
  return smoke(**{'train.steps': 60} | changes)


def rows_of(workdir, name='compare.csv'):
  with (workdir / name).open(newline='') as file:
    rows = list(csv.DictReader(file))
  return [{key: row[key] for key in KEYS} for row in rows]


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


@pytest.mark.parametrize('at', [2, 3])
def test_a_stopped_one_continues(
  at, compare, whole, tmp_path, monkeypatch, capsys
):
  """Stopped in a run after `at` others; half of a line was on the disk."""
  measure, runs = compare._measure, []

  def stopping(case, policy, target, *rest):
    if case.steps == 60:
      runs.append(policy)
      if len(runs) == at + 1:
        raise KeyboardInterrupt
    return measure(case, policy, target, *rest)

  monkeypatch.setattr(compare, '_warm_up', lambda *_: 1.0)
  with monkeypatch.context() as patched:
    patched.setattr(compare, '_measure', stopping)
    assert run_compare(compare, tmp_path / 'run') == 130
  assert f'{at} of 6 runs are finished' in capsys.readouterr().err
  for name in ('compare.csv', 'curve.csv'):
    with (tmp_path / 'run' / name).open('a') as file:
      file.write('stale,0.5,1,12')
  again = []

  def counting(case, policy, *rest):
    again.append(policy)
    return measure(case, policy, *rest)

  monkeypatch.setattr(compare, '_measure', counting)
  assert run_compare(compare, tmp_path / 'run') == 0
  assert runs[:-1] + again == ['plain', 'random', 'stale'] * 2
  for name in ('compare.csv', 'curve.csv'):
    assert rows_of(tmp_path / 'run', name) == rows_of(whole, name)
  for name in ('compare.md', 'compare.png'):
    assert (tmp_path / 'run' / name).stat().st_size > 500


def test_another_config_is_refused(compare, whole, capsys):
  before = snapshot(whole)
  other = settings(**{'model.top': (32,)})
  assert run_compare(compare, whole, other) == 1
  assert_one_sentence(capsys.readouterr().err, 'config.model.top', '[32]')
  assert snapshot(whole) == before


def test_a_folder_of_something_else_is_refused(compare, tmp_path, capsys):
  (tmp_path / 'notes.txt').write_text('mine')
  assert run_compare(compare, tmp_path) == 1
  assert_one_sentence(capsys.readouterr().err, '--workdir')
  assert [path.name for path in tmp_path.iterdir()] == ['notes.txt']
