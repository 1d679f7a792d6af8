"""What the bench says of the host, over a config of seconds."""

import contextlib
import itertools

import pytest

from experiments.bench import budget
from experiments.bench.contest import trainer_of
from experiments.common import datasets
from tests.support.runs import smoke

PHASES = ['unique', 'weights', 'plan', 'link', 'gather', 'put', 'get']
STEPS = 9


@pytest.fixture(scope='module')
def measured():
  config = smoke(**{'placement': 'pinned', 'skip.mode': 'off'})
  data = datasets.dataset(config)
  source = data.train(config.data.batch_size)
  batches = [*itertools.islice(source, STEPS)]
  source.close()
  return trainer_of(config, data), batches


def test_every_phase_has_its_time(measured):
  spent = budget.phases(*measured)
  assert [*spent] == [*PHASES, 'scatter', 'sequential']
  assert all(ms > 0 for ms in spent.values())
  assert spent['sequential'] == spent['plan'] + spent['link']


def test_the_step_is_the_real_one(measured):
  trainer, batches = measured
  before, update = int(trainer.state.step), trainer.update
  assert budget.real_step_ms(trainer, batches) > 0
  assert int(trainer.state.step) == before + STEPS
  assert trainer.update == update


def test_a_step_of_pinned_rows_starts_three_programs(measured):
  # Rows together, the step, and rows apart.
  assert budget.dispatches(*measured) == 3


def test_rates_are_of_all_workers_with_and_without_a_step(measured):
  trainer, batches = measured
  state, update = trainer.state, trainer.update
  lines = [*budget.rates(trainer, batches, [1, 2], [0.0, 0.5])]
  pairs = [(line['workers'], line['step ms']) for line in lines]
  assert pairs == [(1, 0.0), (1, 0.5), (2, 0.0), (2, 0.5)]
  for line in lines:
    # The threads that read ahead may have done so before a turn as short.
    ahead = line['planner cpu'], line['worker cpu']
    assert line['training cpu'] > 0 <= min(ahead)
    assert line['host cpu'] >= max(ahead)
    assert line['ms per batch'] > 0 < line['device cpu']
  assert trainer.state is state  # no step was computed
  assert trainer.update == update


def test_hotline_is_timed_with_and_without_rows_gathered_early():
  config = smoke(**{'placement': 'pinned', 'skip.mode': 'off'})
  data = datasets.dataset(config)
  with contextlib.closing(data.train(config.data.batch_size)) as source:
    batches = [*itertools.islice(source, 6 * 4)]
  trainer = trainer_of(config, data)
  (line,) = budget.rates_of_hotline(trainer, batches, [1], [0.5])
  assert line['ratio'] == line['gathered early'] / line['at the step'] > 0
  assert 'gather_early' not in vars(trainer.engine)  # it is as before


@pytest.mark.slow
def test_skipping_is_compared_per_batch_of_the_source():
  config = smoke(**{'placement': 'pinned', 'skip.mode': 'off'})
  data = datasets.dataset(config)
  with contextlib.closing(data.train(config.data.batch_size)) as source:
    batches = [*itertools.islice(source, 6 * STEPS)]
  trainers = trainer_of(config, data), trainer_of(config, data)
  lines = [*budget.rates_skipping(trainers, batches, 0.4, [1, 2], [0.5])]
  assert [line['workers'] for line in lines] == [1, 2]
  for line in lines:
    assert line['ratio'] == line['some left out'] / line['none left out']
    assert 0 < line['choosing'] < line['cpu, some']
  whole, part = (trainer.engine.counters for trainer in trainers)
  assert whole.examples_dropped == 0 < part.examples_dropped
  assert part.examples_seen > part.examples_trained


def test_calls_within_calls_count_once():
  def event(thread, begin, ms, name='PjitFunction(step)'):
    return {'tid': thread, 'ts': begin, 'dur': ms, 'name': name}

  events = [
    event(1, 10.0, 5.0),
    event(1, 11.0, 3.0, 'PjitFunction(inner)'),
    event(1, 11.0, 3.0, 'put'),
    event(2, 12.0, 1.0),
    event(1, 15.0, 2.0),
    {'name': 'process_name', 'ph': 'M'},
  ]
  assert budget.calls_of(events) == 3
