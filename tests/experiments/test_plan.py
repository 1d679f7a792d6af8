"""What a plan says of several devices is what a run on them counts."""

import contextlib
import itertools
import json
import shlex
import sys
import types

import numpy as np
import pytest

from configs import criteo
from experiments.common import build, datasets
from experiments.plan import job, rivals, times
from experiments.plan.machine import (
  as_facts,
  Link,
  machine_of,
  MACHINES,
)
from slipstream_jax.distributed.exchange import Traffic
from slipstream_jax.errors import UserError
from slipstream_jax.tables import Table, TableSet
from tests.support.programs import finished
from tests.support.runs import changed

STEPS = 12
PLACEMENTS = 'resident', 'streamed', 'pinned', 'cached'
FEW = (1, 1, 'pinned', 'float32'), (8, 2, 'cached', 'bfloat16')
MORE = [
  pytest.param(devices, replicas, placement, 'float32', marks=pytest.mark.slow)
  for devices, replicas in ((1, 1), (2, 1), (4, 1), (8, 1), (8, 4), (2, 2))
  for placement in PLACEMENTS
]


BAR = types.SimpleNamespace(begin=lambda *_: None, show=lambda *_: None)


def setting(**changes):
  config = changed(criteo.get_config('smoke'), {'skip.mode': 'off'} | changes)
  data = datasets.dataset(config)
  recipe = build.recipe(config, data, STEPS)
  return config, data, recipe, build.hot(config, data, recipe)


@pytest.mark.parametrize(
  ('devices', 'replicas', 'placement', 'exchange'), [*FEW, *MORE]
)
def test_counts_are_those_of_a_run(devices, replicas, placement, exchange):
  changes = {'placement': placement, 'cache.capacity': 0.05}
  check_counts(devices, replicas, exchange, changes)


@pytest.mark.parametrize(
  ('hosts', 'devices'),
  [(2, 4), *(pytest.param(4, n, marks=pytest.mark.slow) for n in (4, 8))],
)
def test_counts_of_towers_are_those_of_a_run(hosts, devices):
  towers = tuple(tuple(range(i, 26, hosts)) for i in range(hosts))
  changes = {'model.name': 'dmt', 'model.width': 8, 'model.towers': towers}
  found = check_counts(devices, 1, 'float32', changes | {'hosts': hosts})
  assert found.counters.bytes_between_hosts
  # Hosts of as many devices as a tower has: all that crosses are vectors.
  given = setting(devices=devices, **changes, hosts=hosts)
  counts = job.simulated(*given, devices, 2, within=devices // hosts)
  vectors = counts.counters.bytes_between_hosts / 2
  np.testing.assert_allclose(counts.far_bytes.sum(), vectors)
  assert counts.crossing.far == 2 * (hosts - 1)
  padded = hosts * len(towers[0]) / 26
  np.testing.assert_allclose(
    counts.crossing.far_bytes, vectors / devices * padded
  )


@pytest.mark.parametrize(
  ('devices', 'replicas', 'hosts', 'exchange'),
  [
    (8, 1, 2, 'bfloat16'),
    *(
      pytest.param(*sizes, 'float32', marks=pytest.mark.slow)
      for sizes in ((4, 1, 4), (8, 1, 4), (8, 2, 2))
    ),
  ],
)
def test_counts_in_two_levels_are_those_of_a_run(
  devices, replicas, hosts, exchange
):
  found = check_counts(devices, replicas, exchange, {'hosts': hosts})
  crossed = found.counters.bytes_between_hosts
  assert 0 < crossed <= found.counters.bytes_exchanged
  if replicas == 1:
    given = setting(devices=devices, hosts=hosts)
    given[0].exchange = exchange
    counts = job.simulated(*given, devices, STEPS, within=devices // hosts)
    assert counts.far_bytes.sum() * STEPS == pytest.approx(crossed)
    groups = 2 * len(given[2].tables.groups)  # there and back
    assert counts.crossing.far == groups * (hosts - 1)
    assert counts.crossing.near == groups * (devices // hosts - 1)


def check_counts(devices, replicas, exchange, changes):
  from slipstream_jax.training.loop import train

  given = setting(devices=devices, replicas=replicas, **changes)
  if devices > 1:
    given[0].exchange = exchange
  found = job.simulated(*given, devices, STEPS, replicas=replicas)
  config, data, recipe, hot = given
  trainer = build.trainer(config, data, recipe, hot)
  before = trainer.engine.counters
  batches = build.batches(config, trainer, data, STEPS)
  with contextlib.closing(batches):
    *_, last = train(trainer, batches, STEPS)
  counted = np.subtract(last.counters, before)
  np.testing.assert_array_equal(found.counters, counted)
  kept = sum(group.kept.block.rows.nbytes for group in trainer.engine.groups)
  states = [group.kept.block.state for group in trainer.engine.groups]
  kept += sum(leaf.nbytes for state in states for leaf in state)
  assert found.kept_bytes.sum() == kept * replicas
  counts = found.counters
  sent = counts.bytes_exchanged
  if 'model.towers' in changes:  # whose vectors are not rows
    sent += counts.bytes_between_hosts
  for own, total in (
    (found.used, counts.rows_used),
    (found.sent_bytes, sent),
    (found.loaded_bytes, counts.bytes_loaded),
  ):
    assert own.shape == (devices,)
    copies = 1 if total is sent else replicas
    np.testing.assert_allclose(own.sum() * STEPS, total * copies)
  of_tables = [line['used a step'] for line in found.of_tables]
  np.testing.assert_allclose(sum(of_tables) * STEPS, counts.rows_used)
  return found


def planned(
  config,
  devices,
  steps=3,
  room=None,
  machine='h100',
  measure=(),
  batch_each=False,
):
  more = machine, [*measure], batch_each
  return dict(job.plan(config, BAR, devices, steps, room, *more))


def test_more_devices_than_there_are():
  figures = planned(setting()[0], ['1', '64'], machine='gb200')
  assert len(figures['tables on 64 devices']) == 26
  one, many = figures['devices']
  assert one['max_over_mean'] == 1
  assert one['near_MB'] == one['far_MB'] == 0
  plans = [line for line in figures['plans'] if line['devices'] == 64]
  ways = [(line['replicas'], line['hosts']) for line in plans]
  assert ways == [(1, 1), (1, 16), (16, 1), (64, 1)]
  (best,) = (line for line in plans if line['plan'] == 'best')
  assert best['step_ms'] == min(line['step_ms'] for line in plans)
  assert best['replicas'] == many['replicas']
  assert one | many == json.loads(json.dumps(one | many))
  names = [line['plan'] for line in figures['rivals']]
  assert sorted(names)[-1] == 'rows of each table on all devices'
  assert sorted(names)[0] == 'a tower on each host, vectors / 2'
  assert len(names) == 5


def test_capacities_of_a_cache_are_compared():
  config = setting(**{'placement': 'cached', 'cache.capacity': 0.001})[0]
  name = 'capacities of a cache on each of 4 devices'
  figures = planned(config, ['4'])
  lines, step = figures[name], figures['devices'][0]['step_MB']
  capacities = [line['capacity'] for line in lines]
  assert capacities == sorted(capacities)
  assert (np.diff([line['loaded_MB'] for line in lines]) <= 0).all()
  kept = [line['kept_MB'] for line in lines]
  for at in range(1, len(lines) - 1):
    # The largest that fits is among them, and none is best that does not.
    room = 1e6 * (step + (kept[at] + kept[at + 1]) / 2)
    found = planned(config, ['4'], room=room)[name]
    fitting = [line for line in found if line['plan'] != 'no room']
    assert capacities[at] < fitting[-1]['capacity'] < capacities[at + 1]
    assert found[: len(fitting)] == fitting
    (best,) = (line for line in fitting if line['plan'] == 'best')
    assert best['step_ms'] <= 1.01 * min(line['step_ms'] for line in fitting)


def test_a_batch_of_each_device():
  figures = planned(setting()[0], ['1', '4'], batch_each=True)
  one, *_ = (line for line in figures['plans'] if line['devices'] == 4)
  assert 0 < one['efficiency'] < 1
  assert figures['setting']['examples a step'] == '256 of each device'


@pytest.mark.parametrize('replicas', [1, 2, 4, 8])
@pytest.mark.parametrize('within', [1, 2, 4, 8])
def test_bytes_between_hosts_are_those_of_pairs(replicas, within):
  rng, lanes = np.random.default_rng(replicas), 8 // replicas
  counts, used = rng.integers(0, 50, (lanes, 8)), rng.integers(0, 99, lanes)
  tables = TableSet({'a': Table(100, 4)}, {})
  near, far = Traffic(counts, used).sent(tables.groups[0], 2, within)
  expected = np.zeros((2, 8), int)
  for device in range(8):
    replica, lane = divmod(device, lanes)
    for other in range(replica * lanes, (replica + 1) * lanes):
      if other != device:
        rows = counts[lane, other] + counts[other % lanes, device]
        at = int(device // within != other // within)
        expected[at, device] += rows * 4 * 2
    distance = lanes
    while distance < 8:
      at = int(device // within != (device ^ distance) // within)
      expected[at, device] += used[lane] * 4 * 2
      distance *= 2
  np.testing.assert_array_equal([near, far], expected)


@pytest.mark.parametrize(
  ('devices', 'room', 'words'),
  [
    ('3', None, 'devices must be powers of two'),
    ('512', None, '512 parts must divide each batch of 256'),
    ('8', 1000, 'bytes of rows must fit on each of 8 devices'),
  ],
)
def test_what_cannot_be_is_refused(devices, room, words):
  with pytest.raises(UserError, match=words):
    planned(setting()[0], [devices], 1, room)


@pytest.mark.parametrize('measure', ['many', '0', '12'])
def test_steps_that_cannot_be_measured_are_refused(measure):
  with pytest.raises(UserError, match='must have a multiple of 8 examples'):
    planned(setting()[0], ['1'], measure=['64', measure])


def test_other_systems_are_refused():
  with pytest.raises(UserError, match='keep the order of examples'):
    planned(setting(system='hotline')[0], ['1'])


def test_a_machine_is_read_as_it_was_written(tmp_path):
  path = tmp_path / 'machine.json'
  for machine in MACHINES.values():
    path.write_text(json.dumps({'machine': as_facts(machine)}))
    assert machine_of(str(path)) == machine


@pytest.mark.parametrize('text', ['', '{}', '{"machine": {"name": "one"}}'])
def test_another_file_is_no_machine(text, tmp_path):
  path = tmp_path / 'machine.json'
  path.write_text(text)
  with pytest.raises(UserError, match='a machine must be known'):
    machine_of(str(path))


def test_the_time_of_a_step_by_hand():
  machine = MACHINES['h100']._replace(
    devices=2,
    products=1e12,
    memory=1e12,
    program=1e-5,
    find=8e-8,
    plan=Link(1e-5, 5e-9),
    threads=4,
    load=Link(1e-5, 1e-10),
    store=Link(2e-5, 1e-10),
    inside=Link(1e-6, 1e-9),
    between=Link(1e-5, 1e-8),
  )
  work = times.Work(operations=1e6, dense_bytes=1000, lookups=10)
  crossing = times.Crossing(2, 1000, 4, 3000)
  found = times.step_time(machine, work, 4, 800, 1e6, 5e5, 1e5, crossing)
  expected = times.StepTime(
    device=6e-5 + 200 * 1e6 / 1e12 + 6 * 1e6 / 1e12,
    copies=1e-5 + 5e-5,
    host=max(8000 * 2e-8, 4e-5 + 8000 * 5e-9),
    exchange=4e-5 + 3e-5,
    # In pairs of a host, and then of hosts, f32 and counts.
    sums=(2 * 1e-6 + 1e-6) + (2 * 1e-5 + 1e-5),
  )
  np.testing.assert_allclose(found, expected)
  np.testing.assert_allclose(
    found.total, sum(found) - found.copies - found.host
  )
  assert found.binds == 'device'
  # Two replicas have two lanes to plan, not four.
  few = machine._replace(find=0.0)
  found = times.step_time(
    few, work, 4, 800, 1e6, 5e5, 1e5, crossing, replicas=2
  )
  np.testing.assert_allclose(found.host, 2e-5 + 8000 * 5e-9)
  # Processes that share cores compute, and plan, one after the other there.
  step = times.Measured(Link(1e-3, 1e-6), Link(5e-5, 1e-6))
  shared = machine._replace(shared=True)
  found = times.step_time(shared, work, 4, 800, 1, 1, 1, crossing, step)
  messages = 4 * 1e-5
  np.testing.assert_allclose(found.exchange, messages + 3e-5)
  crowded = shared._replace(threads=1)  # of two hosts
  found = times.step_time(crowded, work, 4, 800, 1, 1, 1, crossing, step)
  np.testing.assert_allclose(found.exchange, 2 * messages + 3e-5)
  found = times.step_time(shared, work, 4, 800, 1, 1, 1, crossing, step)
  expected = 1e-3 + 800e-6 + (5e-5 + 800e-6) / 4
  np.testing.assert_allclose(found.device, expected)
  found = times.step_time(machine, work, 4, 800, 1, 1, 1, crossing, step)
  np.testing.assert_allclose(found[:3], (1e-3 + 200e-6, 2e-5, 850e-6), 1e-4)


@pytest.mark.parametrize(('count', 'devices'), [(1, 4), (8, 2), (6, 4)])
@pytest.mark.parametrize('seed', range(3))
def test_no_plan_of_tables_is_faster_than_all_rows_everywhere(
  count, devices, seed
):
  """Brute force over all plans in which a table is on some of the devices."""
  rng = np.random.default_rng(seed)
  names = [f'{number}' for number in range(count)]
  group = TableSet({name: Table(9, 16) for name in names}, {}).groups[0]
  used = rng.pareto(1.0, count) * 1000
  share = rng.uniform(0.2, 0.9, count)
  tables = rivals.Tables(
    used,
    used * rng.uniform(0, 1, count),
    np.repeat((used * share)[:, None], devices, 1),
    np.repeat((used * share)[:, None], 2, 1),
    [(group, [*range(count)])],
    np.full(count, 68.0),
  )
  work = times.Work(1e5, 10000, 26)
  machine = MACHINES[rng.choice([*MACHINES])]._replace(devices=2)

  def seconds(spread):
    load = rivals.load_of(tables, spread, 4, 2)
    moved = load.row_bytes, load.loaded, load.loaded, load.crossing
    return times.step_time(machine, work, devices, 2048, *moved).total

  sizes = [n for n in (1, 2, 4) if n <= devices]
  ways = [(first, n) for n in sizes for first in range(0, devices, n)]
  least = min(map(seconds, itertools.product(ways, repeat=count)))
  assert seconds(rivals.everywhere(tables)) <= 1.000001 * least
  for spread in (rivals.in_turn(tables), rivals.costliest_first(tables, 2)):
    rows = rivals.load_of(tables, spread, 4, 2).rows
    np.testing.assert_allclose(rows.sum(), used.sum())


def test_the_program_as_it_is_called(tmp_path):
  command = [sys.executable, '-m', 'experiments.plan', '--steps=2']
  config = '--config=configs/criteo.py:smoke'
  done = finished([*command, config, f'--output={tmp_path}/plan.json'])
  assert done.returncode == 0, done.stderr
  assert 'tables on 8 devices' in done.stdout
  written = json.loads((tmp_path / 'plan.json').read_text())
  assert [line['devices'] for line in written['devices']] == [1, 2, 4, 8]
  # Its last line is the command of a run.
  best = written['devices'][-1]
  words = [sys.executable, '-m', 'experiments.run', config]
  words += ['--config.devices=8', f'--config.replicas={best["replicas"]}']
  words += ['--config.hosts=1']
  said = shlex.split(done.stdout.splitlines()[-1])
  assert said == ['python', *words[1:], '--config.data.batch_size=256']
  assert written['to train so'] == done.stdout.splitlines()[-1]


@pytest.mark.parametrize('ratio', [1, 2, 4])
def test_towers_send_vectors_alone_between_hosts(ratio):
  counts = job.simulated(*setting(), 8, 2, within=2)
  recipe = setting()[2]
  tables = job._looked_up(counts, recipe)
  assert tables.wanted_near.shape == (26, 2)
  # A row that several slices look up is one of their union.
  assert (tables.wanted_near <= tables.used[:, None]).all()
  most = tables.wanted.reshape(26, 4, 2).max(1)
  assert (tables.wanted_near >= most).all()
  load = rivals.towers_of(tables, 4, 256, ratio)
  # 32 examples, 26 features, 16 elements, of which 3 of 4 hosts get theirs.
  assert load.crossing.far_bytes == 2 * 32 * 26 * 16 / ratio * 4 * 3 / 4
  assert (load.crossing.near, load.crossing.far) == (2, 6)


@pytest.mark.slow
def test_a_machine_is_measured_and_planned_for(tmp_path):
  machine = tmp_path / 'machine.json'
  config = '--config=configs/criteo.py:smoke'
  link = [sys.executable, '-m', 'experiments.bench.link', config]
  done = finished([*link, '--rounds=1', '--steps=60', f'--output={machine}'])
  assert done.returncode == 0, done.stderr
  found = machine_of(str(machine))
  assert (found.devices, found.shared) == (1, True)
  assert min(found.products, found.memory, found.find) > 0
  assert found.between.byte > 0
  command = [sys.executable, '-m', 'experiments.plan', config, '--steps=2']
  asked = ['--devices=2,4', f'--machine={machine}', '--measure=64,128']
  done = finished([*command, *asked])
  assert done.returncode == 0, done.stderr
  assert 'from steps of' in done.stdout
