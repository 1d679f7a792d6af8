"""Where the host keeps rows changes no number either."""

import pytest

from slipstream_jax.store.base import Storage
from slipstream_jax.store.tiered import STORES, TieredStore
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from tests.laws.test_placements import everything_after
from tests.support import small
from tests.support.small import assert_same_bits, BATCH

COLUMNS = small.columns(BATCH * 20, length=2)
# Rows in memory of each group, fewer than a batch has, more, and all. Batches
# ahead and threads.
KEPT = [
  (3, (0, 1)),
  (3, (8, 2)),
  (60, (2, 1)),
  (200, (8, 2)),
  (sum(small.ROWS), (0, 1)),
]


def storage(name, folder, kept=60):
  if name != 'tiered':
    return STORES[name](1 << 20, str(folder))
  return Storage(
    name,
    lambda groups: tuple(TieredStore(one, folder, kept) for one in groups),
  )


@pytest.fixture(scope='module')
def expected():
  return everything_after('streamed', 'adagrad', COLUMNS, length=2)


@pytest.mark.parametrize('name', STORES)
@pytest.mark.parametrize(
  'placement', ['streamed', 'pinned', 'resident', 'look_ahead_100', 'lru_20']
)
def test_no_store_changes_a_number(name, placement, expected, tmp_path):
  kept = storage(name, tmp_path)
  others = everything_after(
    placement, 'adagrad', COLUMNS, length=2, storage=kept
  )
  assert_same_bits(expected, others)


@pytest.mark.parametrize(('rows', 'ahead'), KEPT)
def test_no_room_in_memory_changes_a_number(rows, ahead, expected, tmp_path):
  kept = storage('tiered', tmp_path, rows)
  others = everything_after(
    'streamed', 'adagrad', COLUMNS, 30, *ahead, length=2, storage=kept
  )
  assert_same_bits(expected, others)


@pytest.mark.parametrize('optimizer', ROW_OPTIMIZERS)
def test_rows_of_any_state_are_kept(optimizer, tmp_path):
  first, other = (
    everything_after('streamed', optimizer, COLUMNS, 20, length=2, storage=one)
    for one in (storage('memory', tmp_path), storage('tiered', tmp_path))
  )
  assert_same_bits(first, other)
  assert list(tmp_path.iterdir()) == []  # of the files nothing is left
