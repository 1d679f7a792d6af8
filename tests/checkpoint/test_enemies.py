"""What else may happen to checkpoints while a run counts on them."""

import threading

import numpy as np
import pytest

from slipstream_jax.checkpoint import checkpoint, save
from slipstream_jax.checkpoint.chain import (
  consolidate,
  copy_as_base,
  find_chains,
  prune,
  read_chain,
)
from slipstream_jax.checkpoint.manifest import publish
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.checkpoint.row_file import leaves_of, Piece, write_row_file
from slipstream_jax.checkpoint.save import values_of
from slipstream_jax.errors import UserError
from slipstream_jax.training.loop import train
from tests.checkpoint.small import FullDisk
from tests.checkpoint.test_saving import resumed, saving_to
from tests.support.short_runs import start, unbroken
from tests.support.small import assert_same_bits, everything
from tests.support.texts.mutations import flip


def steps_and_saves(folder, trainer, batches, saves, **how):
  with saving_to(folder, **how) as checkpoints:
    for _ in range(saves):
      list(train(trainer, batches, 1))
      checkpoints.save(trainer, batches.get_state())
      checkpoints.maintenance.wait()
      yield checkpoints


@pytest.mark.parametrize('damage', ['flipped', 'gone'])
def test_nothing_more_is_put_on_a_base_that_is_damaged(damage, tmp_path):
  trainer, batches = start('pinned', 'plain', 0)
  with batches:
    saves = steps_and_saves(tmp_path, trainer, batches, 12, consolidate=2.0)
    for number, _ in enumerate(saves):
      if number == 1:
        (base,) = tmp_path.glob('base-*')
        flip(base) if damage == 'flipped' else base.unlink()
    list(train(trainer, batches, 10_000))
  other, batches = resumed(tmp_path, 'streamed', 'plain')
  with batches:
    list(train(other, batches, 10_000))
  rows, _ = unbroken('streamed', 'plain')
  assert_same_bits(everything(other), rows)


@pytest.mark.parametrize('policy', ['one_shot', 'consecutive'])
def test_what_a_checkpoint_is_on_stays_while_it_is_written(
  policy, tmp_path, monkeypatch
):
  trainer, batches = start('pinned', 'plain', 0)
  how = {'policy': policy, 'keep': 1}
  place, real = open_place(tmp_path), checkpoint.chain_before

  def then_consolidated(where, known, step, is_same):
    chain = real(where, known, step, is_same)
    if step == 3:
      own = find_chains(place).chains[0]
      maintenance.begin()
      consolidate(place, own)
      maintenance.end()
    return chain

  monkeypatch.setattr(checkpoint, 'chain_before', then_consolidated)
  with batches, saving_to(tmp_path, consolidate=0, **how) as checkpoints:
    maintenance = checkpoints.maintenance
    for step in (1, 2, 3):
      list(train(trainer, batches, 1))
      checkpoints.save(trainer, batches.get_state())
      assert read_chain(place, step)
      assert find_chains(place).chains[0][-1].step == step


def test_without_a_thread_nobody_waits_for_ever(tmp_path, monkeypatch):
  trainer, batches = start('streamed', 'plain', 0)
  real = threading.Thread.start

  def refuse(thread):
    if thread.name == 'slipstream-saving':
      raise RuntimeError("can't start new thread")
    real(thread)

  with batches, saving_to(tmp_path, memory_bytes=1) as checkpoints:
    list(train(trainer, batches, 2))
    with monkeypatch.context() as patched:
      patched.setattr(save.threading.Thread, 'start', refuse)
      with pytest.raises(RuntimeError, match='new thread'):
        checkpoints.save(trainer, batches.get_state(), wait=False)
    # The rows of that one are nobody's any more.
    list(train(trainer, batches, 3))
    checkpoints.save(trainer, batches.get_state())
  other, unused = resumed(tmp_path, 'pinned', 'plain')
  unused.close()
  assert_same_bits(everything(other), everything(trainer))


def test_who_goes_back_needs_not_what_could_not_be_written():
  trainer, batches = start('streamed', 'plain', 0)
  with batches, saving_to('full://goes/back') as checkpoints:
    list(train(trainer, batches, 2))
    checkpoints.save(trainer, batches.get_state())
    before = everything(trainer)
    FullDisk.failing = 1
    list(train(trainer, batches, 2))
    checkpoints.save(trainer, batches.get_state(), wait=False)
    position = checkpoints.restore(trainer)
  assert position.step == 2
  assert position.skipped[0].startswith('the last: a checkpoint must be')
  assert 'No space left' in position.skipped[0]
  assert_same_bits(everything(trainer), before)


def test_a_failed_one_is_nothing_to_count_changes_from(monkeypatch):
  trainer, batches = start('streamed', 'plain', 0)
  monkeypatch.setattr(FullDisk, 'failing', 0)
  how = {'on_error': lambda error: None}
  with batches, saving_to('full://failed/one', **how) as checkpoints:
    for _ in range(6):
      list(train(trainer, batches, 1))
      checkpoints.save(trainer, batches.get_state())
      FullDisk.failing = 1000
    assert checkpoints.totals.saved == 1
    for group in trainer.engine.groups:
      assert len(group.dirty._since) <= 3  # untrained, base, newest


def test_copies_of_two_runs_share_an_archive(tmp_path):
  archive = open_place(tmp_path / 'archive')
  for name, saves in (('one', 2), ('other', 3)):
    trainer, batches = start('pinned', 'examples', 0)
    with batches:
      list(steps_and_saves(tmp_path / name, trainer, batches, saves))
    place = open_place(tmp_path / name)
    copy_as_base(place, read_chain(place, saves), archive)
  chains = find_chains(archive, most=9).chains
  assert [chain[-1].step for chain in chains] == [3, 2]


@pytest.mark.parametrize('flaw', ['row', 'leaf'])
def test_rows_that_no_group_has_are_refused(flaw, tmp_path):
  """Right checksums do not say that a file is of these tables."""
  trainer, batches = start('streamed', 'plain', 0)
  with batches:
    list(steps_and_saves(tmp_path, trainer, batches, 1))
  place = open_place(tmp_path)
  (base,) = read_chain(place, 1)
  none = trainer.engine.groups[0].none
  values = {
    name: np.zeros((1, *x.shape[1:]), x.dtype)
    for name, x in values_of(none).items()
  }
  if flaw == 'leaf':
    values['rows'] = np.zeros((1, 3), np.float32)
  rows = np.array([1 << 40 if flaw == 'row' else 0])
  name = base.rows['0'].name
  facts = write_row_file(place, name, leaves_of(values), [Piece(rows, values)])
  publish(place, base._replace(rows={'0': facts}))
  other, unused = start('pinned', 'plain', 0)
  unused.close()
  with (
    saving_to(tmp_path) as checkpoints,
    pytest.raises(UserError, match='rows of a checkpoint must be of'),
  ):
    checkpoints.restore(other)
  assert prune(place, 1) == []
