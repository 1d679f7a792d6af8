"""Ownership of rows, placements over lanes, and what devices exchange."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

from slipstream_jax.distributed.exchange import exchange, traffic
from slipstream_jax.distributed.lanes import even_lanes, in_lanes, over_lanes
from slipstream_jax.engine.planner import HostTowers, Slices
from slipstream_jax.placement import cached, PLACEMENTS
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.store.host_table import unique_rows
from slipstream_jax.synthetic.proxies import PROXIES
from slipstream_jax.tables import tables_of

LANES = st.sampled_from([1, 2, 4, 8])


@given(st.integers(1, 2000), st.integers(1, 70))
def test_ownership_is_a_bijection_that_keeps_the_order(num_rows, lanes):
  rows = np.arange(num_rows)
  ways = even_lanes(num_rows, lanes)
  owner = ways.owners(rows)
  assert ((owner >= 0) & (owner < lanes)).all()
  for lane in range(lanes):
    own = rows[owner == lane]
    # One row of each whole block, in the order of blocks.
    assert len(own) in (num_rows // lanes, -(-num_rows // lanes))
    np.testing.assert_array_equal(ways.rows_of(lane, ways.numbers(own)), own)


@pytest.mark.parametrize('name', ['kaggle', 'terabyte', 'avazu', 'taobao'])
@pytest.mark.parametrize(
  'lanes',
  [2, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 16, 64))],
)
def test_unique_rows_are_balanced(name, lanes):
  """Of a batch of 2,048 examples for each device."""
  proxy = PROXIES[name]
  examples = proxy.law(proxy.spec, np.arange(2048 * lanes))
  total = sum(proxy.spec.rows)
  rows = unique_rows(examples.columns.lookups, total).rows
  owner = even_lanes(total, lanes).owners(rows)
  counts = np.bincount(owner, minlength=lanes)
  assert counts.max() <= 1.06 * counts.mean()


@st.composite
def batches(draw):
  lookups = draw(
    hnp.arrays(np.int64, (16, draw(st.integers(1, 4))), elements=IDS)
  )
  lanes = draw(LANES)
  return (
    lookups,
    lanes,
    draw(st.sampled_from([r for r in (1, 2, 4, 8) if r * lanes <= 8])),
  )


IDS = st.integers(-1, 40)


@given(batches())
@example((np.full((8, 1), -1), 2, 1))  # no row at all
def test_exchange_is_that_of_dictionaries(drawn):
  lookups, lanes, replicas = drawn
  slices = lanes * replicas
  parts, each = 8, 8 // slices
  found = unique_rows(lookups, 41)
  ways = even_lanes(41, lanes)
  unique = in_lanes(found, ways)
  real = lookups >= 0
  np.testing.assert_array_equal(
    unique.rows[unique.inverse[real]], lookups[real]
  )
  assert (unique.inverse[~real] == -1).all()
  assert dict(zip(unique.rows, unique.counts, strict=True)) == dict(
    zip(found.rows, found.counts, strict=True)
  )
  way = exchange(unique, ways, slices, parts)
  bounds = ways.bounds(unique.rows)
  lane_rows = np.full((lanes, way.size), -1)
  for lane in range(lanes):
    own = unique.rows[bounds[lane] : bounds[lane + 1]]
    assert (ways.owners(own) == lane).all()
    lane_rows[lane, : len(own)] = own
  padded = np.pad(lane_rows, [(0, 0), (0, 1)], constant_values=-1)
  of_replicas = way.wanted.reshape(replicas, lanes, lanes, -1)
  # What each lane of each replica sends to each slice of it.
  sent = np.stack(
    [[padded[lane][own[lane]] for lane in range(lanes)] for own in of_replicas]
  )
  summed = way.summed.reshape(replicas, lanes, lanes, -1)
  np.testing.assert_array_equal(way.traffic.used, np.diff(bounds))
  counted = traffic(unique, ways, slices)
  np.testing.assert_array_equal(counted.counts, way.traffic.counts)
  received = sent.swapaxes(1, 2).reshape(slices, -1)
  known = way.rows(unique.rows, bounds)
  np.testing.assert_array_equal(np.where(received < 0, -1, known), received)
  for number in range(slices):
    replica, own_slice = divmod(number, lanes)
    got = np.append(sent[replica, :, own_slice].reshape(-1), -1)
    wanted = set(lookups.reshape(slices, -1)[number].tolist()) - {-1}
    # Each row that a slice looks up comes once, from its owner.
    assert sorted(got[got >= 0].tolist()) == sorted(wanted)
    for lane in range(lanes):
      own = [row for row in wanted if ways.owners(np.array([row])) == lane]
      assert way.traffic.counts[lane, number] == len(own)
    for part in range(number * each, (number + 1) * each):
      rows = got[way.picked[part]]
      looked_up = lookups.reshape(parts, -1)[part]
      there = way.inverse[part].reshape(-1)
      np.testing.assert_array_equal(
        np.where(there < 0, -1, rows[there]), looked_up
      )
      # A gradient of each of the part's rows goes back to its place.
      back = np.append(rows, -1)[way.returned[part]]
      here = np.isin(got[:-1], looked_up)
      np.testing.assert_array_equal(back, np.where(here, got[:-1], -1))
  for lane in range(lanes):
    # From each slice that looks a row up, its gradient arrives once.
    for number in range(slices):
      at = number // lanes, lane, number % lanes
      got = np.append(sent[at], -1)[summed[at]]
      wanted = lookups.reshape(slices, -1)[number]
      here = (lane_rows[lane] >= 0) & np.isin(lane_rows[lane], wanted)
      np.testing.assert_array_equal(got, np.where(here, lane_rows[lane], -1))


@given(batches(), st.data())
def test_two_levels_exchange_as_dictionaries_say(drawn, data):
  """A row goes to each host once, and from there to the slices."""
  lookups, lanes, replicas = drawn
  if lanes == 1:
    return
  hosts = data.draw(st.sampled_from([h for h in (2, 4, 8) if h <= lanes]))
  slices, own, parts = lanes * replicas, lanes // hosts, 8
  ways = even_lanes(41, lanes)
  unique = in_lanes(unique_rows(lookups, 41), ways)
  bounds = ways.bounds(unique.rows)
  way = exchange(unique, ways, slices, parts, None, hosts)
  of_lanes = np.full((lanes, way.size + 1), -1)
  for lane in range(lanes):
    mine = unique.rows[bounds[lane] : bounds[lane + 1]]
    of_lanes[lane, : len(mine)] = mine
  # From lane (g, j) of a replica to device j of each of its hosts.
  devices = np.arange(slices).reshape(replicas, hosts, own)
  sent = np.stack([of_lanes[d % lanes][way.to_hosts[d]] for d in range(slices)])
  held = np.stack(
    [sent[devices[r, :, j], h] for r, h, j in np.ndindex(devices.shape)]
  ).reshape(slices, -1)
  known = way.held(unique.rows, bounds)
  np.testing.assert_array_equal(np.where(held < 0, -1, known), held)
  owner = ways.owners(np.arange(41))
  wanted = [{*one.tolist()} - {-1} for one in lookups.reshape(slices, -1)]
  for r, h, j in np.ndindex(devices.shape):
    of_host = set.union(*(wanted[n] for n in devices[r, h]))
    expected = sorted(row for row in of_host if owner[row] % own == j)
    got = held[devices[r, h, j]]
    assert sorted(got[got >= 0].tolist()) == expected
  padded = np.pad(held, [(0, 0), (0, 1)], constant_values=-1)
  received = way.rows(unique.rows, bounds)
  for number in range(slices):
    unit, place = divmod(number, own)
    peers = range(unit * own, (unit + 1) * own)
    got = np.concatenate([padded[d][way.wanted[d, place]] for d in peers])
    assert sorted(got[got >= 0].tolist()) == sorted(wanted[number])
    np.testing.assert_array_equal(np.where(got < 0, -1, received[number]), got)
    for part in range(number * parts // slices, (number + 1) * parts // slices):
      rows = np.append(got, -1)[way.picked[part]]
      there = way.inverse[part].reshape(-1)
      looked_up = lookups.reshape(parts, -1)[part]
      found = np.where(there < 0, -1, rows[there])
      np.testing.assert_array_equal(found, looked_up)
      back = np.append(rows, -1)[way.returned[part]]
      here = np.isin(got, looked_up)
      np.testing.assert_array_equal(back, np.where(here, got, -1))
    for device in peers:  # gradients of the slice come back to what it got
      rows = padded[device][way.wanted[device, place]]
      back = np.append(rows, -1)[way.summed[device, place]]
      here = np.isin(held[device], [*wanted[number]])
      np.testing.assert_array_equal(back, np.where(here, held[device], -1))
  for device, host in np.ndindex(slices, hosts):  # and those of a host
    lane = device % lanes
    back = np.append(sent[device, host], -1)[way.from_hosts[device, host]]
    mine = of_lanes[lane, :-1]
    here = np.isin(mine, sent[device, host])
    np.testing.assert_array_equal(back, np.where(here, mine, -1))
  counted = traffic(unique, ways, slices, hosts)
  np.testing.assert_array_equal(counted.of_hosts, way.traffic.of_hosts)
  assert_bytes(way.traffic, wanted, owner, devices)


def assert_bytes(found, wanted, owner, devices):
  """Bytes are those of each row to each host and each slice that wants it."""
  (group,) = tables_of({'t': 41}).groups
  replicas, hosts, own = devices.shape
  far = near = 0
  for r, h in np.ndindex(replicas, hosts):
    of_host = set.union(*(wanted[n] for n in devices[r, h]))
    far += sum(owner[row] // own != h for row in of_host)
    for place, number in enumerate(devices[r, h]):
      near += sum(owner[row] % own != place for row in wanted[number])
  of_pairs = found._pairs()
  here = np.arange(hosts * own) // own
  others = here[:, None] != here
  assert (of_pairs * others).sum() == far
  assert (of_pairs * (~others & ~np.eye(len(here), dtype=bool))).sum() == near
  assert found.between_hosts(group, 4) == far * group.dim * 2 * 4
  if replicas == 1:
    sent = [int(one.sum()) for one in found.sent(group, 4, own)]
    assert sent == [one * group.dim * 2 * 4 for one in (near, far)]


@st.composite
def towers(draw):
  """Lookups of tables, and the tables that each host has."""
  hosts = draw(st.sampled_from([2, 4]))
  sizes = draw(st.lists(st.integers(1, 30), min_size=hosts, max_size=7))
  host_of = draw(st.permutations([i % hosts for i in range(len(sizes))]))
  ids = [
    draw(hnp.arrays(np.int64, 16, elements=st.integers(-1, size - 1)))
    for size in sizes
  ]
  return (
    {f't{i}': size for i, size in enumerate(sizes)},
    tuple(
      tuple(f't{i}' for i, own in enumerate(host_of) if own == host)
      for host in range(hosts)
    ),
    np.stack(ids, axis=1),
    draw(st.sampled_from([n for n in (2, 4, 8) if n >= hosts])),
  )


@given(towers())
def test_hosts_with_towers_exchange_as_dictionaries_say(drawn):
  """Rows stay on the host of their table, and reach each slice by it."""
  sizes, of_hosts, ids, lanes = drawn
  tables = tables_of(sizes)
  hosts, parts, own = len(of_hosts), 8, lanes // len(of_hosts)
  (group,) = tables.groups
  over = Slices(lanes, parts, hosts=hosts, towers=HostTowers(of_hosts, 16))
  ways, columns = over.lanes_of(group), over.columns_of(group)
  rows = np.arange(group.num_rows)
  owner, numbers = ways.owners(rows), ways.numbers(rows)
  for lane in range(lanes):
    mine = owner == lane
    np.testing.assert_array_equal(ways.rows_of(lane, numbers[mine]), rows[mine])
    assert (np.diff(numbers[mine]) > 0).all()
    # Numbers that no row has give the one behind the last.
    free = np.setdiff1d(np.arange(ways.size), numbers[mine])
    assert (ways.rows_of(lane, free) == len(rows)).all()
  lookups = tables.lookups(ids)
  unique = in_lanes(unique_rows(lookups, len(rows)), ways)
  bounds = ways.bounds(unique.rows)
  way = exchange(unique, ways, lanes, parts, columns)
  of_lanes = np.full((lanes, way.size + 1), -1)
  for lane in range(lanes):
    mine = unique.rows[bounds[lane] : bounds[lane + 1]]
    assert (ways.owners(mine) == lane).all()
    of_lanes[lane, : len(mine)] = mine
  sent = np.stack([of_lanes[i][way.wanted[i]] for i in range(lanes)])
  known = way.rows(unique.rows, bounds, hosts).reshape(lanes, hosts, -1)
  number, share = 0, parts // lanes
  for device in range(lanes):
    tower, place = divmod(device, own)
    from_lanes = slice(tower * own, (tower + 1) * own)
    for host in range(hosts):
      of_slice = host * own + place
      got = sent[from_lanes, of_slice].reshape(-1)
      np.testing.assert_array_equal(
        np.where(got < 0, -1, known[device, host]), got
      )
      for part in range(of_slice * share, (of_slice + 1) * share):
        wanted = lookups.reshape(parts, -1, ids.shape[1])[part]
        wanted = wanted[:, [*columns[tower]]]
        own_rows = np.append(got, -1)[way.picked[number]]
        there = way.inverse[number]
        values = np.where(there < 0, -1, np.append(own_rows, -1)[there])
        assert (values[:, wanted.shape[1] :] == -1).all()
        np.testing.assert_array_equal(values[:, : wanted.shape[1]], wanted)
        back = np.append(own_rows, -1)[way.returned[number]]
        here = np.isin(got, wanted) & (got >= 0)
        np.testing.assert_array_equal(back, np.where(here, got, -1))
        number += 1
  for lane, of_slice in itertools.product(range(lanes), range(lanes)):
    got = np.append(sent[lane, of_slice], -1)[way.summed[lane, of_slice]]
    wanted = lookups.reshape(lanes, -1)[of_slice]
    mine = of_lanes[lane, :-1]
    here = (mine >= 0) & np.isin(mine, wanted)
    np.testing.assert_array_equal(got, np.where(here, mine, -1))
  near, far = way.traffic.sent(group, 4, own)
  assert not far.any()
  crossing = sum(
    (owner[row] % own != of_slice % own)
    for of_slice in range(lanes)
    for row in {*lookups.reshape(lanes, -1)[of_slice].tolist()} - {-1}
  )
  assert near.sum() == crossing * group.dim * 2 * 4


NAMES = ['resident', 'streamed', 'pinned']
PLACED = {name: PLACEMENTS[name] for name in NAMES} | {
  f'cached_{name}': cached(6, name, look_ahead=2)
  for name in ('look_ahead', 'lru', 'lfu')
}


@pytest.mark.parametrize('name', PLACED)
@given(st.lists(hnp.arrays(np.int64, (4, 3), elements=IDS), min_size=3), LANES)
def test_a_lane_is_planned_as_a_group_of_its_own(name, batches, lanes):
  ways = even_lanes(41, lanes)
  placement = over_lanes(PLACED[name], ways)
  assert over_lanes(PLACED[name], ways) == placement
  hot = hot_rows(np.arange(5, 29, 2), 41)
  keeps = placement.keeps(41, hot).copy()
  state = placement.start(41, hot, None)
  known = [in_lanes(unique_rows(one, 41, hot), ways) for one in batches]
  slots = len(keeps) // lanes
  for number in range(len(known)):
    ahead = known[number : number + 1 + placement.look_ahead]
    state, plan = placement.plan(state, ahead)
    lane = ways.owners(plan.rows)
    np.testing.assert_array_equal(
      plan.lanes, np.searchsorted(lane, np.arange(lanes + 1))
    )
    has_slot = plan.slots >= 0
    if slots:
      assert (plan.slots[has_slot] // slots == lane[has_slot]).all()
    np.testing.assert_array_equal(keeps[plan.evict_slots], plan.evict)
    assert not np.isin(plan.evict, plan.rows).any()
    there = has_slot.copy()
    there[plan.load] = False
    np.testing.assert_array_equal(keeps[plan.slots[there]], plan.rows[there])
    assert (there | np.isin(np.arange(len(there)), plan.load)).all()
    loaded = plan.load[has_slot[plan.load]]
    keeps[plan.slots[loaded]] = plan.rows[loaded]
    assert plan.lookups == (batches[number] >= 0).sum()
