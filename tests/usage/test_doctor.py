"""What the doctor finds, where all is well and where something is wrong."""

import collections
import shutil
import sys

import pytest

from experiments.common import build
from experiments.doctor import job
from tests.support.programs import finished
from tests.support.runs import assert_one_sentence, smoke

NAMES = [
  *('versions', 'device', 'disk', 'config', 'data', 'memory'),
  *('disk of checkpoints', 'step', 'memory of the device', 'checkpoint'),
]


def looked(tmp_path, **changes):
  found = list(job.findings(smoke(**changes), tmp_path / 'run'))
  assert not list(tmp_path.iterdir())  # nothing is left
  return {finding.name: finding for finding in found}


@pytest.mark.parametrize('mode', ['off', 'examples', 'rows'])
def test_where_all_is_well(mode, tmp_path):
  found = looked(tmp_path, **{'skip.mode': mode})
  assert [*found] == NAMES
  bad = [finding for finding in found.values() if finding.verdict == 'bad']
  assert not bad
  assert 'restored' in found['checkpoint'].words


@pytest.mark.parametrize(
  ('changes', 'name', 'said'),
  [
    ({'train.steps': -1}, 'config', 'config.train.steps'),
    ({'data.path': 'nowhere'}, 'data', 'nowhere'),
    ({'model.bottom': (64, 12)}, 'model', 'config.model.bottom'),
    ({'placement': 'cloud'}, 'model', 'cloud'),
    (
      {'optimizer.rows': (('sgd', {'learning_rate': 1e38}),)},
      'step',
      'finite',
    ),
  ],
)
def test_a_mistake_is_told_in_its_place(changes, name, said, tmp_path):
  *_, last = looked(tmp_path, **changes).values()
  assert (last.name, last.verdict) == (name, 'bad')
  assert said in last.words


def test_what_does_not_fit_is_told(tmp_path, monkeypatch):
  usage = collections.namedtuple('usage', 'total used free')
  with monkeypatch.context() as patched:
    patched.setattr(shutil, 'disk_usage', lambda _: usage(10**6, 0, 10**6))
    found = looked(tmp_path)
  assert found['disk of checkpoints'].verdict == 'bad'
  monkeypatch.setattr(job, 'memory_left', lambda: 1 << 16)
  found = looked(tmp_path)
  assert found['memory'].verdict == 'bad'
  assert 'step' not in found  # which would take the memory


def test_bounds():
  for wanted, there, verdict in (
    (80, 100, 'good'),
    (95, 100, 'doubtful'),
    (101, 100, 'bad'),
    (5, None, 'doubtful'),
  ):
    found = job.fits('x', wanted, there, 'it takes', 'take less')
    assert found.verdict == verdict


def test_rows_on_a_disk_count_at_their_full_size(tmp_path, monkeypatch):
  changes = {'store.kind': 'tiered', 'store.path': str(tmp_path)}
  found = looked(tmp_path, **changes, **{'store.dram_bytes': 1 << 12})
  assert 'rows kept in memory take 4.1 kB' in found['memory'].words
  assert found['disk of rows'].verdict == 'good'
  monkeypatch.setattr(job.workdirs, 'free_bytes', lambda _: 1 << 16)
  found = looked(tmp_path, **changes)
  assert found['disk of rows'].verdict == 'bad'


def test_a_disk_of_rows_that_is_memory_is_told(tmp_path, monkeypatch):
  monkeypatch.setattr(build, 'in_memory', lambda folder: True)
  changes = {'store.kind': 'file', 'store.path': str(tmp_path)}
  found = looked(tmp_path, **changes)['disk of rows']
  assert found.verdict == 'doubtful'
  assert 'tmpfs' in found.words
  assert '--config.store.path' in found.words
  assert 'disk of rows' not in looked(tmp_path)  # in memory anyway


@pytest.mark.slow
def test_the_program_as_it_is_called(tmp_path):
  command = [sys.executable, '-m', 'experiments.doctor']
  good = ['--config=configs/criteo.py:smoke', f'--workdir={tmp_path / "run"}']
  done = finished([*command, *good])
  assert (done.returncode, done.stderr) == (0, '')
  assert 'bad ' not in done.stdout
  done = finished([*command, *good, '--config.data.path=nowhere.txt'])
  assert done.returncode == 1
  assert_one_sentence(done.stderr, 'data')
  assert 'nowhere.txt' in done.stdout
  assert_one_sentence(finished(command).stderr, '--config')
  assert_one_sentence(finished([*command, str(tmp_path)]).stderr, 'RUN')
  assert not list(tmp_path.iterdir())
