"""What is on the device does not change with the host's arrays."""

import jax
import numpy as np
import pytest

from slipstream_jax.engine.buffers import to_device, to_host


def at_offset(size, offset):
  """An f32 array that starts `offset` bytes after a cache line's start."""
  memory = np.zeros(size + 64, np.float32)
  start = (-memory.ctypes.data % 64 + offset) // 4
  return memory[start : start + size]


@pytest.mark.parametrize('offset', [0, 4, 16, 32])
@pytest.mark.parametrize('size', [1, 300, 1 << 12, 1 << 20])
def test_writing_an_array_changes_no_copy_of_it(size, offset):
  ours = at_offset(size, offset)
  ours[:] = 1
  theirs = to_device({'a': ours, 'b': (ours[::-1],)})
  ours[:] = 2  # at once: a copy may not be on its way still
  for leaf in jax.tree.leaves(to_host(theirs)):
    np.testing.assert_array_equal(leaf, np.ones(size, np.float32))


def test_copies_keep_shape_dtype_and_bits():
  rng = np.random.default_rng(0)
  arrays = [
    rng.normal(size=(3, 1, 5)).astype(np.float16).swapaxes(0, 2),
    np.zeros((0, 4), np.int32),
    np.array(7, np.int64 if jax.config.jax_enable_x64 else np.int32),
    rng.random(11) < 0.5,
    None,
  ]
  copies = to_host(to_device(arrays))
  for ours, theirs in zip(arrays, copies, strict=True):
    if ours is None:
      assert theirs is None
    else:
      np.testing.assert_array_equal(theirs, ours, strict=True)


def test_what_is_handed_over_arrives():
  ours = at_offset(1 << 12, 0)
  ours[:] = np.arange(1 << 12)
  np.testing.assert_array_equal(
    to_host(to_device(ours, owned=True)), np.arange(1 << 12, dtype=np.float32)
  )
