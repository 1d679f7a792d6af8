"""The file of the dense state, and those that orbax wrote before."""

import io
import pathlib
import shutil
import sys

import jax
import ml_dtypes
import numpy as np
import optax
import pytest

from slipstream_jax.checkpoint import state
from slipstream_jax.checkpoint.chain import find_chains, merged_rows, read_chain
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.engine.buffers import to_device
from slipstream_jax.errors import UserError
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts
from tests.checkpoint.test_saving import resumed, saving_to
from tests.support import small
from tests.support.short_runs import start
from tests.support.small import assert_same_bits, everything

# Two steps of `start('pinned', 'plain', 0)`, saved after each.
VERSION_7 = pathlib.Path(__file__).parent / 'version_7'
TREE = {
  'a/b': np.arange(6, dtype=np.float32).reshape(2, 3),
  'none': None,
  'scalar': np.array(3, np.int32),
  'half': np.array([1.5, -2.0, np.nan], ml_dtypes.bfloat16),
  'small': np.array([[1.5]], ml_dtypes.float8_e4m3fn),
  'flags': [np.array([True, False]), np.uint32([2**32 - 1])],
}


def test_arrays_of_any_dtype_are_read_as_they_were_written():
  data = b''.join(state.dense_file(TREE))
  read = state.read_dense(data, TREE, 'here')
  assert jax.tree.structure(read) == jax.tree.structure(TREE)
  for one, other in zip(
    jax.tree.leaves(read), jax.tree.leaves(TREE), strict=True
  ):
    assert isinstance(one, jax.Array)
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert np.asarray(one).tobytes() == other.tobytes()
  with np.load(io.BytesIO(data), allow_pickle=False) as file:
    np.testing.assert_array_equal(file["['a/b']"], TREE['a/b'])
  assert data == b''.join(state.dense_file(TREE))


@pytest.mark.parametrize('flaw', ['cut', 'missing', 'size'])
def test_a_file_of_other_arrays_is_refused(flaw):
  data, other = b''.join(state.dense_file(TREE)), {}
  if flaw == 'cut':
    data = data[:-30]
  elif flaw == 'missing':
    other = {'other': TREE['scalar']}
  else:
    other = {'a/b': np.zeros((7,), np.float32)}
  with pytest.raises(UserError, match='must be whole to be restored'):
    state.read_dense(data, TREE | other, 'here')


def test_random_keys_of_an_optimizer_are_saved(tmp_path):
  def trainer(seed):
    key = jax.random.wrap_key_data(to_device(np.uint32([0, seed])))
    noise = optax.add_noise(0.01, 0.5, key=key)
    recipe = small.recipe('adagrad')._replace(dense_optimizer=noise)
    return make_parts(recipe, 'streamed', small.DENSE, 3)

  def arrays(trainer):
    return jax.tree.map(np.asarray, state.arrays_of(trainer))

  one, other = trainer(7), trainer(8)
  with pytest.raises(AssertionError):
    assert_same_bits(arrays(one), arrays(other))
  with saving_to(tmp_path) as checkpoints:
    checkpoints.save(one, {})
    checkpoints.restore(other)
  assert_same_bits(arrays(one), arrays(other))


def test_what_orbax_wrote_is_restored_and_built_on(tmp_path):
  folder = shutil.copytree(VERSION_7, tmp_path / 'run')
  place = open_place(folder)
  chain = read_chain(place, 2)
  assert [link.payload['version'] for link in chain] == [7, 7]
  trainer, batches = start('streamed', 'plain', 0)
  with batches, saving_to(folder, consolidate=0) as checkpoints:
    position = checkpoints.restore(trainer)
    assert position.step == 2
    saved = state.checksums(state.arrays_of(trainer))
    assert saved == chain[-1].payload['checksums']
    (table,) = trainer.engine.read_back()
    for rows, values in merged_rows(open_place(VERSION_7), chain, '0'):
      np.testing.assert_array_equal(table.rows[rows], values['rows'])
    batches.set_state(position.schedule_state)
    list(train(trainer, batches, 2))
    checkpoints.save(trainer, batches.get_state())
  [chain] = find_chains(place).chains
  assert [link.payload['version'] for link in chain] == [7, 7, 8]
  again, unused = resumed(folder, 'streamed', 'plain')
  unused.close()
  assert_same_bits(everything(again), everything(trainer))


def test_without_orbax_the_sentence_says_to_install_it(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, 'orbax', None)
  monkeypatch.setitem(sys.modules, 'orbax.checkpoint', None)
  with pytest.raises(UserError, match='pip install orbax-checkpoint'):
    resumed(shutil.copytree(VERSION_7, tmp_path / 'run'), 'streamed', 'plain')


def test_a_file_that_orbax_cannot_read_is_refused():
  name = VERSION_7 / 'file-000000000002-dense.zip'
  like = {'state': to_device(np.zeros(3))}
  with pytest.raises(UserError, match='must be whole') as caught:
    state.read_orbax(name.read_bytes(), like, 'here')
  assert '\n' not in str(caught.value)
