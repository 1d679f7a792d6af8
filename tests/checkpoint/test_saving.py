"""Chains of checkpoints: what is restored is what was trained."""

import contextlib
import functools
import itertools
import shutil
import threading

from hypothesis import given, Phase, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.checkpoint import row_snapshot
from slipstream_jax.checkpoint.chain import find_chains, merged_rows, read_chain
from slipstream_jax.checkpoint.checkpoint import Checkpoints, Saving
from slipstream_jax.checkpoint.manifest import name_of, steps_in
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.checkpoint.policies import CHECKPOINT_POLICIES
from slipstream_jax.checkpoint.quantize import to_half
from slipstream_jax.checkpoint.state import SCHEDULE
from slipstream_jax.errors import UserError
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts, planned
from tests.checkpoint.small import FullDisk
from tests.laws.test_stores import storage
from tests.support import small
from tests.support.programs import LIMIT_S
from tests.support.short_runs import (
  BATCHES,
  SCHEDULES,
  source,
  start,
  unbroken,
  WHERE,
)
from tests.support.small import assert_same_bits, everything


@contextlib.contextmanager
def saving_to(folder, **how):
  with contextlib.closing(Checkpoints(folder, Saving(**how))) as checkpoints:
    yield checkpoints


def resumed(folder, placement, schedule, depth=0):
  """A trainer with what is there, and the batches that it goes on with."""
  trainer, batches = start(placement, schedule, depth)
  with saving_to(folder) as checkpoints:
    batches.set_state(checkpoints.restore(trainer).schedule_state)
  return trainer, batches


# All is drawn at first: threads that save use `random`, which hypothesis tells
# from draws that could not be repeated.
SAVINGS = st.fixed_dictionaries(
  {
    'policy': st.sampled_from([*CHECKPOINT_POLICIES]),
    'keep': st.integers(1, 3),
    'consolidate': st.sampled_from([0, 0.1, 1.0]),
    'memory_bytes': st.sampled_from([1, 1 << 28]),
  }
)
CHECKPOINTS = st.lists(
  st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=6
)
"""Steps before each, and whether training waits for it."""
PARTS = st.lists(
  st.tuples(st.sampled_from([*WHERE]), CHECKPOINTS), min_size=1, max_size=9
)
"""Of a run, which are taken in turns until its data ends."""


@pytest.mark.slow
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(st.sampled_from(SCHEDULES), SAVINGS, PARTS)
def test_a_run_saved_at_any_steps_goes_on_as_unbroken(
  tmp_path_factory, schedule, how, parts
):
  folder = tmp_path_factory.mktemp('run')
  for number, (placement, saves) in enumerate(itertools.cycle(parts)):
    trainer, batches = start(placement, schedule, 2)
    with batches, saving_to(folder, **how) as checkpoints:
      if number:
        position = checkpoints.restore(trainer)
        assert not position.skipped
        batches.set_state(position.schedule_state)
      for steps, wait in saves:
        more = len(list(train(trainer, batches, steps))) == steps
        checkpoints.save(trainer, batches.get_state(), wait=wait)
      if not more:
        break
      list(train(trainer, batches, 2))  # lost
  rows, _ = unbroken(placement, schedule)
  assert_same_bits(everything(trainer), rows)
  assert len(steps_in(open_place(folder))) >= 1
  trainer, batches = resumed(folder, 'resident', schedule)
  batches.close()
  assert_same_bits(everything(trainer), rows)


@pytest.mark.parametrize('schedule', ['plain', 'examples'])
def test_where_batches_stand_is_written_when_it_changed(schedule, tmp_path):
  trainer, batches = start('pinned', schedule, 0)
  with batches, saving_to(tmp_path, keep=99, consolidate=0) as checkpoints:
    while list(train(trainer, batches, 1)):
      checkpoints.save(trainer, batches.get_state(), wait=False)
  place = open_place(tmp_path)
  chain = read_chain(place, steps_in(place)[-1])
  files = {link.files[SCHEDULE].name for link in chain}
  assert files == set(place.names('file-')) - {
    file.name
    for link in chain
    for key, file in link.files.items()
    if key != SCHEDULE
  }
  assert {link.payload['schedule'] for link in chain} == {
    link.files[SCHEDULE].crc for link in chain
  }
  if schedule == 'examples':
    assert 1 < len(files) < len(chain)
  else:
    assert len(files) == 1


@functools.cache
def saved_rows(placement, schedule):
  """Per checkpoint, the rows and their values."""
  folder = f'memory://increments/{placement}/{schedule}'
  trainer, batches = start(placement, schedule, 0)
  with batches, saving_to(folder, keep=99, consolidate=0) as checkpoints:
    for steps in (3, 1, 4, 2):
      list(train(trainer, batches, steps))
      checkpoints.save(trainer, batches.get_state(), wait=False)
  place = open_place(folder)
  chain = read_chain(place, 10)
  assert [link.step for link in chain] == [3, 4, 8, 10]
  return [[*merged_rows(place, (link,), '0')] for link in chain]


@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('placement', ['resident', 'pinned', 'look_ahead'])
def test_increments_are_the_same_under_every_placement(placement, schedule):
  pairs = saved_rows('streamed', schedule), saved_rows(placement, schedule)
  for mine, theirs in zip(*pairs, strict=True):
    assert_same_bits(mine, theirs)


@pytest.fixture
def chain_of_five(tmp_path):
  """A trainer, its batches, and a folder with a base and four increments."""
  trainer, batches = start('pinned', 'rows', 0)
  with batches, saving_to(tmp_path, consolidate=0) as checkpoints:
    for _ in range(5):
      list(train(trainer, batches, 2))
      checkpoints.save(trainer, batches.get_state())
  chain = read_chain(open_place(tmp_path), 10)
  assert len(chain) == 5
  return trainer, chain


def consolidated(folder, chain):
  with saving_to(folder, consolidate=0.1, keep=1) as checkpoints:
    assert checkpoints.maintenance.error is None
    checkpoints.maintenance.consider(chain)
    checkpoints.maintenance.wait()
    return checkpoints.maintenance.error


def test_a_chain_that_cannot_become_a_base_stays_and_it_is_known(
  chain_of_five, tmp_path
):
  _, chain = chain_of_five
  damaged = tmp_path / chain[1].rows['0'].name
  damaged.write_bytes(damaged.read_bytes()[:-1])
  assert damaged.name in str(consolidated(tmp_path, chain))
  assert read_chain(open_place(tmp_path), 10) == chain


def test_a_base_is_as_good_as_its_chain(chain_of_five, tmp_path):
  trainer, chain = chain_of_five
  assert consolidated(tmp_path, chain) is None
  place = open_place(tmp_path)
  assert len(read_chain(place, 10)) == len(steps_in(place)) == 1
  other, batches = start('streamed', 'rows', 0)
  with batches, saving_to(tmp_path, consolidate=0) as checkpoints:
    batches.set_state(checkpoints.restore(other).schedule_state)
    assert_same_bits(everything(other), everything(trainer))
    # An increment on it has what changed since.
    list(train(other, batches, 2))
    checkpoints.save(other, batches.get_state())
    assert checkpoints.totals.bases == 0
    assert checkpoints.totals.rows < 300


@pytest.mark.parametrize('kind', ['rows', 'dense', 'manifest', 'gone'])
def test_a_damaged_checkpoint_is_passed_by_only_when_asked(kind, tmp_path):
  trainer, batches = start('streamed', 'plain', 0)
  with batches, saving_to(tmp_path, keep=3) as checkpoints:
    for _ in range(3):
      list(train(trainer, batches, 2))
      checkpoints.save(trainer, batches.get_state())
  newest = find_chains(open_place(tmp_path)).chains[0][-1]
  files = {'dense': newest.files['dense'].name, 'manifest': name_of(6)}
  name = files.get(kind, newest.rows['0'].name)
  content = bytearray((tmp_path / name).read_bytes())
  content[len(content) // 2] ^= 1
  (tmp_path / name).write_bytes(content)
  if kind == 'gone':
    (tmp_path / name).unlink()
  other, batches = start('streamed', 'plain', 0)
  with batches, saving_to(tmp_path) as checkpoints:
    before = everything(other)
    for step, said in (
      (None, f'newest checkpoint must be whole .*got step 6: .*{name}.*step=4'),
      (6, f'the checkpoint must be.*{name}'),
      (5, r'got step 5 .*the steps are'),
    ):
      with pytest.raises(UserError, match=said):
        checkpoints.restore(other, step=step)
      assert_same_bits(everything(other), before)
    assert checkpoints.restore(other, step=4).step == 4
    position = checkpoints.restore(other, or_older=True)
    assert position.step == 4
    (skipped,) = position.skipped
    assert skipped.startswith('step 6: ')
    assert name in skipped
    batches.set_state(position.schedule_state)
    list(train(other, batches, 1))
    assert checkpoints.save(other, batches.get_state()) == 5  # before step 6
    assert checkpoints.newest() == 5


@pytest.mark.parametrize('policy', CHECKPOINT_POLICIES)
def test_what_fails_behind_is_told_at_the_next_one(policy, monkeypatch):
  trainer, batches = start('pinned', 'plain', 0)
  monkeypatch.setattr(FullDisk, 'failing', 0)
  folder, errors = f'full://fails/{policy}', []
  with batches:
    how = {'policy': policy, 'on_error': errors.append}
    with saving_to(folder, **how) as checkpoints:
      for failing in (0, 0, 1, 1, 0):
        list(train(trainer, batches, 2))
        checkpoints.wait()
        FullDisk.failing = failing
        checkpoints.save(trainer, batches.get_state(), wait=False)
    assert len(errors) == 2
    assert 'must be written whole, got "[Errno 28]' in str(errors[0])
    other, unused = resumed(folder, 'streamed', 'plain')
    unused.close()
    # The one after has what they missed.
    assert_same_bits(everything(other), everything(trainer))
    with saving_to(folder) as checkpoints:
      list(train(trainer, batches, 1))
      FullDisk.failing = 1
      checkpoints.save(trainer, batches.get_state(), wait=False)
      list(train(trainer, batches, 1))
      with pytest.raises(UserError, match='must be written whole'):
        checkpoints.save(trainer, batches.get_state(), wait=False)
      assert checkpoints.save(trainer, batches.get_state()) == 12


def test_steps_go_on_while_one_is_written_and_never_two(tmp_path, monkeypatch):
  trainer, batches = start('streamed', 'plain', 0)
  may_go_on, publish = threading.Event(), row_snapshot.RowSnapshot.pieces

  def slow(drain):
    for number, piece in enumerate(publish(drain)):
      if number == 1:
        assert may_go_on.wait(LIMIT_S)
      yield piece

  with batches, saving_to(tmp_path) as checkpoints:
    list(train(trainer, batches, 2))
    for group in trainer.engine.groups:
      group.dirty.add(np.arange(group.num_rows))
    monkeypatch.setattr(row_snapshot.RowSnapshot, 'pieces', slow)
    monkeypatch.setattr(
      'slipstream_jax.checkpoint.row_snapshot._PIECE_BYTES', 900
    )
    before = everything(trainer)
    checkpoints.save(trainer, batches.get_state(), wait=False)
    list(train(trainer, batches, 5))
    assert not steps_in(open_place(tmp_path))
    threading.Timer(0.2, may_go_on.set).start()
    checkpoints.save(trainer, batches.get_state(), wait=False)
    assert steps_in(open_place(tmp_path))[0] == 2
    assert checkpoints.totals.seconds_waiting > 0.1
    checkpoints.wait()
    shutil.copytree(tmp_path, tmp_path / 'first')
    (tmp_path / 'first' / 'manifest-000000000007.json').unlink()
    other, unused = resumed(tmp_path / 'first', 'pinned', 'plain')
    unused.close()
    assert_same_bits(everything(other), before)


def test_no_run_goes_on_from_quantized_rows(tmp_path):
  trainer, batches = start('streamed', 'plain', 0)
  with batches, saving_to(tmp_path, codec='int8') as checkpoints:
    list(train(trainer, batches, 6))
    checkpoints.save(trainer, batches.get_state())
    other, unused = start('pinned', 'plain', 0)
    unused.close()
    with pytest.raises(UserError, match='rows in full precision, got codec'):
      checkpoints.restore(other)
    assert checkpoints.restore(other, exact=False).step == 6
  (own,), (rows,) = trainer.engine.read_back(), other.engine.read_back()
  for exact, got in zip(own.state, rows.state, strict=True):
    halved = to_half(np.array(exact)).astype(np.float32)
    # Rows that no step touched are not in the checkpoint.
    assert ((got == halved) | (got == exact)).all()
    assert (got != exact).any()
  assert 0 < np.abs(own.rows - rows.rows).max() < 0.01


def test_a_chain_of_fewer_bits_ends_with_a_base(tmp_path):
  trainer, batches = start('streamed', 'plain', 0)
  place, lengths = open_place(tmp_path), []
  with batches, saving_to(tmp_path, codec='int4', keep=1) as checkpoints:
    for step in range(1, 13):
      list(train(trainer, batches, 1))
      checkpoints.save(trainer, batches.get_state())
      chain = read_chain(place, step)
      lengths.append(len(chain))
      *increments, _ = chain[1:] or [None]
      sizes = sum(link.bytes for link in increments)
      assert sizes < chain[0].bytes
  assert 1 < lengths.count(1) < 12


@pytest.mark.parametrize(('name', 'kept'), [('file', 60), ('tiered', 3)])
def test_rows_on_a_disk_are_saved_and_restored(name, kept, tmp_path):
  def of_disk(part):
    at = tmp_path / f'{name}{part}'
    at.mkdir()
    parts = make_parts(
      small.recipe('adagrad'),
      'streamed',
      small.DENSE,
      3,
      storage=storage(name, at, kept),
    )
    return parts, planned(parts, source(), 2)

  for part in range(3):
    trainer, batches = of_disk(part)
    with batches, saving_to(tmp_path / 'saved') as checkpoints:
      if part:
        position = checkpoints.restore(trainer)
        batches.set_state(position.schedule_state)
      for _ in range(BATCHES if part == 2 else 3):
        list(train(trainer, batches, 3))
        checkpoints.save(trainer, batches.get_state(), wait=False)
  hostless, batches = start('streamed', 'plain', 0)
  with batches:
    list(train(hostless, batches, 10_000))
  assert_same_bits(everything(trainer), everything(hostless))


@pytest.mark.parametrize(
  ('how', 'said'),
  [
    ({'policy': 'some'}, 'policy must be one of full'),
    ({'codec': 'int7'}, 'codec must be one of raw'),
    ({'keep': 0}, 'keep must be a whole number'),
    ({'memory_bytes': 0.5}, 'memory_bytes must be a whole number'),
    ({'consolidate': float('nan')}, 'consolidate must be a number'),
  ],
)
def test_settings_that_cannot_be_are_told(how, said, tmp_path):
  with pytest.raises(UserError, match=said):
    Checkpoints(tmp_path, Saving(**how))
