"""`config.profile` shows what a step is made of, and changes nothing else."""

import gzip
import json

import pytest

from experiments.run.job import TRACE_STEPS as STEPS
from tests.support.runs import (
  arrays_of,
  assert_same_tree,
  run_job,
  smoke,
  summary_of,
)

READ_AHEAD = {'data', 'unique', 'plan'}
NAMES = READ_AHEAD | {'gather', 'put', 'step', 'get', 'scatter'}
WORKERS = 2
# Batches that threads have read as a step begins: one per worker, one that is
# planned, two that wait, and the step's own.
AHEAD = WORKERS + 4
SHORT = {
  'train.steps': 70,
  'eval.curve_steps': 0,
  'workers': WORKERS,
  'skip.mode': 'off',
}


def events_of(workdir):
  """By name, what the one trace of a run holds; no file, no events."""
  (path,) = (workdir / 'trace').rglob('*.trace.json.gz')
  events = {}
  with gzip.open(path) as file:
    for event in json.load(file)['traceEvents']:
      events.setdefault(event.get('name'), []).append(event)
  return events


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
  """A run without a trace, by its system."""
  runs = {}

  def of(system):
    if system not in runs:
      runs[system] = tmp_path_factory.mktemp('plain') / system
      assert run_job(runs[system], smoke(**SHORT, system=system)) == 0
    return runs[system]

  return of


@pytest.mark.parametrize('system', ['plain', 'dlrm_hybrid'])
def test_a_trace_has_every_name_and_moves_no_bit(system, plain, tmp_path):
  assert run_job(tmp_path, smoke(**SHORT, system=system, profile=True)) == 0
  events = events_of(tmp_path)
  assert set(events) >= NAMES
  steps = [int(x['args']['step_num']) for x in events['train']]
  # After the record of step n, step n + 1 is taken already.
  assert steps == list(range(32, 32 + STEPS))
  for name in NAMES - {'get'}:  # of a step that is taken, each of them is
    before = AHEAD if name in READ_AHEAD else 2  # the trace began
    assert len(events[name]) >= STEPS - before, name
  threads = {
    name: {x['tid'] for x in events[name]} for name in (*NAMES, 'train')
  }
  assert threads['gather'] == threads['scatter'] == threads['train']
  assert threads['train'].isdisjoint(threads['plan'])
  assert len(threads['unique']) == WORKERS
  assert threads['plan'].isdisjoint(threads['unique'])

  untraced = plain(system)
  assert not (untraced / 'trace').exists()
  names = {path.name for path in tmp_path.iterdir()}
  assert names == {path.name for path in untraced.iterdir()} | {'trace'}
  assert_same_tree(arrays_of(tmp_path, 70), arrays_of(untraced, 70))
  one, other = summary_of(tmp_path), summary_of(untraced)
  for key in ('auc', 'log_loss', 'examples_trained', 'bytes_loaded'):
    assert one[key] == other[key]


def test_few_steps_are_traced_from_their_middle(tmp_path):
  few = SHORT | {'train.steps': 10, 'profile': True}
  assert run_job(tmp_path, smoke(**few)) == 0
  assert set(events_of(tmp_path)) >= NAMES


def test_a_pause_ends_it(tmp_path):
  paused = SHORT | {'eval.curve_steps': 35, 'profile': True}
  assert run_job(tmp_path, smoke(**paused)) == 0
  steps = [int(x['args']['step_num']) for x in events_of(tmp_path)['train']]
  assert steps == [32, 33, 34, 35]
