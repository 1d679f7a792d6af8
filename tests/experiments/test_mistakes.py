"""A mistake of the user ends a run with one sentence, and leaves no summary."""

import gzip
import sys

import pytest

from experiments.common import record
from tests.support.programs import finished
from tests.support.runs import assert_one_sentence, run_job, smoke

LINE = '\t'.join(['1'] + ['2'] * 13 + ['0a1b2c3d'] * 26) + '\n'


FAR = (('rowwise_adagrad', {'learning_rate': 1e38}),)
BAD_FILES = {
  'too_few_columns': (LINE * 9 + '1\t2\t3\n', ['line 10', '40']),
  'label': (LINE + 'yes' + LINE[1:], ['line 2', 'label', 'yes']),
  'empty_file': ('', ['empty']),
}


@pytest.mark.parametrize('case', BAD_FILES)
def test_bad_file(case, tmp_path, capsys):
  text, said = BAD_FILES[case]
  path = tmp_path / 'clicks.txt'
  path.write_text(text)
  assert run_job(tmp_path / 'run', smoke(**{'data.path': str(path)})) == 1
  assert_one_sentence(capsys.readouterr().err, 'clicks.txt', *said)
  assert not (tmp_path / 'run' / record.SUMMARY).exists()


def test_truncated_gz(tmp_path, capsys):
  path = tmp_path / 'clicks.txt.gz'
  path.write_bytes(gzip.compress((LINE * 5000).encode(), 1)[:-20])
  assert run_job(tmp_path / 'run', smoke(**{'data.path': str(path)})) == 1
  assert_one_sentence(capsys.readouterr().err, 'clicks.txt.gz')
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'data.path': 'nowhere.txt'}, ['nowhere.txt']),
    ({'optimizer.rows': FAR}, ['finite', 'step']),
    # Its only loss is finite, and what it leaves behind is not.
    (
      {'optimizer.rows': FAR, 'train.steps': 1},
      ['metrics must stay finite', 'after step 1'],
    ),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else '',
)
def test_bad_settings(changes, said, tmp_path, capsys):
  config = smoke(**changes)
  assert run_job(tmp_path / 'run', config) == 1
  assert_one_sentence(capsys.readouterr().err, *said)
  assert not (tmp_path / 'run' / record.SUMMARY).exists()


@pytest.mark.parametrize(
  ('setting', 'said'),
  [('trian.steps=5', 'config.train.steps'), ('train.steps=ten', "'ten'")],
)
def test_a_bad_command_line_ends_a_program(setting, said, tmp_path):
  """All else that can be wrong with one: tests/usage/test_usage.py."""
  command = [sys.executable, '-m', 'experiments.run']
  command += ['--config=configs/criteo.py', f'--config.{setting}']
  command.append(f'--workdir={tmp_path / "run"}')
  result = finished(command)
  assert result.returncode == 1
  assert_one_sentence(result.stderr, said)
  assert not (tmp_path / 'run').exists()
