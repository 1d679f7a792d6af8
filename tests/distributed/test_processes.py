"""The number of processes changes no number.

Real processes of a CPU exchange rows over sockets. Their bits are compared with
those of one process that computes as many parts on one device.
"""

import contextlib
import functools
import json
import socket
import subprocess
import sys

import pytest

from slipstream_jax.checkpoint.manifest import read_manifest, steps_in
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.checkpoint.row_file import read_row_file
from slipstream_jax.distributed.lanes import even_lanes
from tests.support.programs import LIMIT_S, started

SHORT = (
  *('resident', 'pinned', 'bfloat16', 'stale', 'rows', 'chain'),
  *('streamed', 'tiered', 'export', 'towers', 'full'),
)
LONG = *SHORT[:-1], 'cached', 'swapped', 'none'
FEW = 'pinned', 'bfloat16', 'stale', 'chain'


def free_port():
  with socket.socket() as one:
    one.bind(('localhost', 0))
    return one.getsockname()[1]


def results(processes, devices, folder, runs, replicas=1, hosts=1):
  """Returns what each process prints of these runs."""
  address = f'localhost:{free_port()}'
  command = [sys.executable, '-m', 'tests.distributed.worker']
  more = [processes, devices, address, folder, ','.join(runs)]
  more += [replicas, hosts]
  with contextlib.ExitStack() as ended:
    all_of_them = [
      ended.enter_context(
        started(
          [*command, *map(str, [number, *more])],
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
        )
      )
      for number in range(processes)
    ]
    outputs = [one.communicate(timeout=LIMIT_S) for one in all_of_them]
  for one, (_, errors) in zip(all_of_them, outputs, strict=True):
    assert one.returncode == 0, errors
  return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def assert_rows_of_owners(folder, processes):
  """Each process of one device has written the rows of its lane alone."""
  place = open_place(folder)
  for step in steps_in(place):
    for facts in read_manifest(place, step).rows.values():
      for piece in read_row_file(place, facts):
        lanes = even_lanes(1 + int(piece.rows.max()), processes)
        assert (lanes.owners(piece.rows) == facts.owner).all()


@functools.cache
def of_one(folder, runs):
  own = folder / f'{len(runs)}'
  own.mkdir()
  (one,) = results(1, 1, own, runs)
  return one


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('one')


@pytest.mark.slow
def test_processes_change_no_number(folder, tmp_path):
  one = of_one(folder, SHORT)
  assert one['resident'] == one['pinned']
  assert one['streamed'] == one['tiered']
  *_, last = one.pop('full')
  for each in results(2, 2, tmp_path, (*SHORT, 'unlike')):
    unlike, lent = each.pop('unlike')
    assert 'every process must read the same examples' in unlike
    assert 'for step 1' in unlike
    assert 'an iterator in place of a function' in lent
    errors, of_steps, digest = each.pop('full')
    assert errors == ['"[Errno 28] No space left on device"'] * 4
    assert of_steps == {step: [0, 1] for step in ('2', '8', '20')}
    assert digest == last
    assert each == one
  assert_rows_of_owners(tmp_path / 'full', 2)
  first, second = (tmp_path / f'stale{number}.csv' for number in range(2))
  assert len(first.read_text().splitlines()) == 12
  assert not second.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(('processes', 'devices'), [(2, 4), (4, 4)])
def test_processes_of_several_devices_change_no_number(
  processes, devices, folder, tmp_path
):
  one = of_one(folder, LONG)
  assert results(processes, devices, tmp_path, LONG) == [one] * processes


@pytest.mark.slow
@pytest.mark.parametrize(
  ('runs', 'over'), [(LONG, {'replicas': 2}), (FEW, {'hosts': 2})]
)
@pytest.mark.parametrize(('processes', 'devices'), [(2, 4), (4, 4)])
def test_replicas_and_hosts_of_processes_change_no_number(
  processes, devices, runs, over, folder, tmp_path
):
  """Each of two has all rows, or is a host. Two of four share either."""
  one = of_one(folder, runs)
  found = results(processes, devices, tmp_path, runs, **over)
  assert found == [one] * processes
