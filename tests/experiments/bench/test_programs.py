"""Benches as programs: tables on the screen and figures in a file."""

import json
import sys

import pytest

from tests.support.programs import finished
from tests.support.runs import assert_one_sentence


def test_tables_fit_the_screen_and_figures_are_kept(tmp_path):
  command = [sys.executable, '-m', 'experiments.bench.vocabulary']
  output = tmp_path / 'figures.json'
  more = ['--rows=1000', '--rows=1000', f'--output={output}']
  done = finished([*command, *more])
  assert (done.returncode, done.stderr) == (0, '')
  lines = done.stdout.splitlines()
  heads = 'rows zipf zipf best even even best all new seconds'
  assert lines[-4].split() == heads.split()
  # A row has 187,767,399 in place of 1,000, and seconds of 4 digits.
  longer = len('187,767,399') - len('1,000')
  assert max(map(len, lines[-4:])) + longer <= 80
  fixed, rows = json.loads(output.read_text()).values()
  assert [*fixed[0]][1:3] == ['fitted zipf', 'fitted even']
  assert all(speed > 0 for row in fixed for speed in row.values())
  assert [row['rows'] for row in rows] == [1000, 1000]
  assert all(row['all new'] > 0 and row['even'] > 0 for row in rows)


def test_an_output_that_cannot_be_written_is_refused_first(tmp_path):
  command = [sys.executable, '-m', 'experiments.bench.vocabulary']
  (tmp_path / 'file').touch()
  for output in tmp_path, tmp_path / 'file' / 'figures.json':
    done = finished([*command, f'--output={output}'])
    assert (done.returncode, done.stdout) == (1, '')
    assert_one_sentence(done.stderr, '--output', str(output.parent))
  assert [path.name for path in tmp_path.iterdir()] == ['file']


@pytest.mark.slow
def test_embeddings_alone_are_timed_under_each_placement(tmp_path):
  command = [sys.executable, '-m', 'experiments.bench.embedding']
  output = tmp_path / 'figures.json'
  small = ['--dims=4', '--lookups=2,mlperf', '--batch=8', '--most_rows=200']
  short = ['--rounds=1', '--steps=3', '--optimizers=sgd', f'--output={output}']
  done = finished([*command, *small, *short])
  assert (done.returncode, done.stderr) == (0, '')
  figures = json.loads(output.read_text())
  lines = figures['examples/s with sgd']
  who = {line['who'] for line in lines}
  assert who > {'resident', 'pinned 10 %', 'cached 1 %', 'streamed'}
  assert all(line['best turn'] >= line['median'] > 0 for line in lines)
  assert {line['lookups'] for line in lines} == {'2', 'mlperf'}
  assert all(line['of copy rate'] > 0 for line in lines)


@pytest.mark.slow
def test_numbers_of_devices_are_compared(tmp_path, monkeypatch):
  monkeypatch.delenv('XLA_FLAGS')  # as in a shell
  command = [sys.executable, '-m', 'experiments.bench.devices']
  output = tmp_path / 'figures.json'
  small = ['--config=configs/criteo.py:smoke', '--config.data.batch_size=64']
  short = ['--devices=8', '--rounds=2', '--steps=3', '--most_devices=2']
  done = finished([*command, *small, *short, f'--output={output}'])
  assert (done.returncode, done.stderr) == (0, '')
  _, *tables = json.loads(output.read_text()).values()
  steps, processes, balance = tables
  whole, divided = steps
  assert (whole['devices'], whole['parts'], whole['sent']) == (1, 1, 0)
  # A part for each device: send, part, add, update, and those of placement.
  assert (divided['devices'], divided['parts'], divided['started']) == (8, 8, 6)
  assert divided['compiled'] > 0
  assert divided['sent'] > 0
  assert divided['busiest'] >= 1
  assert [line['processes'] for line in processes] == [1, 2]
  assert all(line['examples/s'] > 0 for line in processes)
  assert all(1 <= line['2'] <= 2 for line in balance)
