"""What the link model says, by hand, and against clocks that run."""

from hypothesis import example, given
from hypothesis import strategies as st
import pytest

from experiments.reproduce import link
from experiments.reproduce.link import (
  Counts,
  Link,
  LINKS,
  modelled,
  WAYS,
)
from experiments.reproduce.results import PHASES
from slipstream_jax.schedules.systems import SYSTEMS

PCIE = LINKS['PCIe 4 x16']
MS = st.fixed_dictionaries(
  dict.fromkeys(PHASES, st.integers(0, 20).map(lambda n: n / 4))
)
AHEAD = ('data', 'unique', 'plan')
IN_TURN = ('gather', 'put', 'step', 'get', 'host_update', 'scatter', 'sync')


def in_order(names, ms, first_after=()):
  """Each task waits for the one before it, and the first for the last."""
  before = [((names[-1], 1), *first_after), *([(name, 0)] for name in names)]
  return [
    (name, ms[name], after) for name, after in zip(names, before, strict=False)
  ]


def read_ahead(ms, workers):
  return [
    ('data', ms['data'], [('data', 1), ('unique', workers)]),
    ('unique', ms['unique'], [('data', 0), ('unique', workers)]),
    ('plan', ms['plan'], [('unique', 0), ('plan', 1)]),
  ]


def graphs(ms, popular, workers):
  """Lists the tasks: name, ms, and the tasks of earlier batches it awaits."""
  others = (1 - popular) * ms['step']
  ahead = read_ahead(ms, workers)
  return {
    link.parameter_server: [*ahead, *in_order(IN_TURN, ms, [('plan', 0)])],
    link.nothing_overlaps: in_order((*AHEAD, *IN_TURN), ms),
    link.working_sets: [
      *ahead,
      ('gather', ms['gather'], [('scatter', 1), ('plan', 0)]),
      ('put', ms['put'], [('gather', 0)]),
      ('popular step', ms['step'] - others, [('step', 1), ('plan', 0)]),
      ('step', others, [('put', 0), ('popular step', 0)]),
      ('get', ms['get'], [('step', 0)]),
      ('scatter', ms['scatter'], [('get', 0)]),
    ],
  }


@example(dict.fromkeys(PHASES, 0.0) | {'step': 4.0}, 1, 0.5)
@given(ms=MS, workers=st.integers(1, 4), popular=st.floats(0, 1))
def test_the_others_are_what_a_clock_shows(ms, workers, popular):
  batches = 200
  for model, tasks in graphs(ms, popular, workers).items():
    ends = {}
    for t in range(batches):
      for name, spent, after in tasks:
        waits = (ends.get((other, t - back), 0) for other, back in after)
        ends[name, t] = max(waits) + spent
    last = max(ends[name, batches - 1] for name, *_ in tasks)
    time, binds = model(ms, popular, workers)
    # A path to the last batch is whole rings, and at most each task once
    # beside; and once around the longest ring may be missing.
    assert last <= time * batches + sum(spent for _, spent, _ in tasks) + 1e-9
    assert last >= time * (batches - 2 * workers) - 1e-9
    spending = {name for name, spent, _ in tasks if spent}
    assert set(binds.split(' + ')) - {''} <= spending


@given(ms=MS, workers=st.integers(1, 4), popular=st.floats(0, 1))
def test_strips_are_batches_of_two_kinds(ms, workers, popular):
  ahead = max(ms['data'], (ms['data'] + ms['unique']) / workers, ms['plan'])
  early, in_turn = (sum(ms[x] for x in names) for names in (AHEAD, IN_TURN))
  expected = popular * max(ahead, ms['step']) + in_turn - ms['step']
  expected += (1 - popular) * (early + ms['step'])
  time = link.strips(ms, popular, workers).ms_per_batch
  assert time == pytest.approx(expected, abs=1e-9)


def of_the_engine(ms, workers, batches, depth=2):
  """Seconds of the engine's threads: its loops, with a clock in each."""
  reader = planner = host = loads = device = stores = 0
  free, taken_by_host, given_at = [0] * workers, [], []
  stepped, got = [], []
  for t in range(batches):
    own = free.index(min(free))
    room = given_at[t - workers] if t >= workers else 0
    reader = max(reader, free[own], room) + ms['data']
    free[own] = reader + ms['unique']
    given_at.append(max(planner, free[own]))
    room = taken_by_host[t - depth - 1] if t > depth else 0
    planner = max(given_at[t], room) + ms['plan']
    taken_by_host.append(max(host, planner))
    host = taken_by_host[t]
    if t >= 2:  # what left two steps before arrives, and its loss was read
      host = max(host, stepped[t - 2], got[t - 2]) + ms['scatter']
    host += ms['gather']
    loads = max(loads, host) + ms['put']
    device = max(device, loads) + ms['step']
    stepped.append(device)
    stores = max(stores, device) + ms['get']
    got.append(stores)
  return stores


@given(ms=MS, workers=st.integers(1, 4))
def test_ours_is_the_loop_of_training_with_a_clock(ms, workers):
  one = link.overlapping(ms, 0.0, workers).ms_per_batch
  times = [of_the_engine(ms, workers, n) for n in (240, 480)]
  assert one * 240 == pytest.approx(times[1] - times[0], abs=1e-6)


def test_units_and_what_binds():
  counts = Counts('pinned', 24e6, 12e6, {'plan': 0.3})
  # 24 MB at 24 GB/s are 1 ms, and 8 copies wait 10 us each to begin.
  assert modelled(counts, PCIE, 0.5) == (pytest.approx(1.08), 'put')
  assert modelled(counts, PCIE, 3.0) == (3.0, 'step')
  # There and back, in two steps.
  time = modelled(counts, PCIE, 0.9)
  assert time.ms_per_batch == pytest.approx((1.08 + 0.9 + 0.52) / 2)
  assert time.binds == 'put + step + get'
  # Nothing is stored: nobody waits for a copy to begin.
  hybrid = Counts('dlrm_hybrid', 24e6, 0, {'host_update': 2.0})
  assert modelled(hybrid, PCIE, 0.5) == (
    pytest.approx(1.04 + 0.5 + 2.0),
    'put + step + host_update',
  )


def test_a_step_with_skipping_reads_more_than_one_batch():
  ms = {'data': 0.4, 'choose': 0.2}
  counts = Counts('pinned', 0, 0, ms, read=1.25)
  # A step takes 1 ms, and a batch of the source 4/5 of a step.
  assert modelled(counts, PCIE, 1.0) == (pytest.approx(0.8), 'step')
  assert modelled(counts, PCIE, 0.5) == (pytest.approx(0.7 / 1.25), 'data')


def test_what_was_measured_of_link_and_device_is_not_read():
  ms = {'gather': 0.25, 'scatter': 0.25}
  counts = Counts('xdl', 1e6, 1e6, ms)
  also = counts._replace(host_ms={**ms, 'put': 9, 'step': 99, 'get': 9})
  assert modelled(also, PCIE, 0.5) == modelled(counts, PCIE, 0.5)


COUNTS = st.builds(
  Counts,
  st.sampled_from(sorted(WAYS)),
  st.floats(0, 1e8),
  st.floats(0, 1e8),
  MS,
  st.floats(0, 1),
  st.integers(1, 8),
  st.floats(1, 4),
)


@given(counts=COUNTS, faster=st.floats(1, 30), step_ms=st.floats(0, 4))
def test_less_to_do_never_takes_longer(counts, faster, step_ms):
  time = modelled(counts, PCIE, step_ms).ms_per_batch
  wide = Link(24.0 * faster, 24.0 * faster, PCIE.latency_us)
  fewer = counts._replace(bytes_loaded=counts.bytes_loaded / faster)
  more = counts._replace(workers=counts.workers + 1)
  rounding = 1e-9
  assert step_ms <= counts.read * time + rounding
  assert modelled(counts, wide, step_ms).ms_per_batch <= time + rounding
  assert modelled(fewer, PCIE, step_ms).ms_per_batch <= time + rounding
  assert modelled(more, PCIE, step_ms).ms_per_batch <= time + rounding
  assert modelled(counts, PCIE, 0).ms_per_batch <= time + rounding


@given(counts=COUNTS, step_ms=st.floats(0.01, 4))
def test_a_system_that_overlaps_is_no_slower_than_one_that_does_not(
  counts, step_ms
):
  times = [
    modelled(counts._replace(system=system), PCIE, step_ms).ms_per_batch
    for system in ('pinned', 'xdl', 'dlrm_hybrid')
  ]
  latencies = (WAYS['pinned'].loads + 1) * PCIE.latency_us / 1e3
  assert times[0] <= times[1] + latencies
  assert times[1] <= times[2] + latencies


def test_every_system_has_its_way():
  assert set(WAYS) == {*SYSTEMS, 'pinned'}


def runs(system, skip, *dropped_and_loaded):
  return [
    {
      'system': system,
      'skip': skip,
      'status': 'ok',
      'step': 10,
      'examples_seen': 10_000 + dropped,
      'examples_trained': 10_000,
      'examples_dropped': dropped,
      'bytes_loaded': 10 * loaded,
      'bytes_stored': 10_000_000,
      'dense_bytes': 80_000_000,
      'examples_hot_share': 0.6,
    }
    for dropped, loaded in dropped_and_loaded
  ]


def test_counts_are_means_over_seeds():
  model = {'batch_size': 1000, 'features_per_example': 6}
  ms = {'gather': 2.0, 'host_update': 2.0, 'put': 2.0}
  xdl = runs('xdl', 'off', (0, 2_000_000), (0, 4_000_000))
  # Its rows and their places, and half of the dense parameters each way.
  expected = Counts('xdl', 3e6 + 24e3 + 4e6, 1e6 + 4e6, ms)
  assert link.counts_of(xdl, ms, model)._replace(popular=0.0) == expected
  # Of 12,000 examples 7,200 were popular, and 2,000 of these were dropped.
  fae = runs('fae', 'ours', (2000, 3_000_000))
  expected = Counts('fae', 3e6, 1e6, ms, 0.52, read=1.2)
  assert link.counts_of(fae, ms, model) == expected
  assert link.counts_of([], ms, model) is None
  assert link.counts_of(xdl, {}, model) is None
