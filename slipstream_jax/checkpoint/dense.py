"""The file of a checkpoint's dense state: an npz with an array per leaf.

Members are named by the paths of the leaves. An array whose dtype numpy lacks,
such as bfloat16, is stored as unsigned integers of the same bits. The manifest
has the dtypes, shapes and checksums.

Checkpoints of version 7 have a zip of the files that orbax wrote instead. They
are read by orbax if it is installed.
"""

from collections.abc import Iterator
import io
import tempfile
from typing import Any
import zipfile

import jax
import numpy as np

from slipstream_jax.checkpoint.row_file import LOST
from slipstream_jax.checkpoint.state import named
from slipstream_jax.engine.buffers import to_device
from slipstream_jax.errors import UserError

_RULE = 'a checkpoint must be whole to be restored'


class _Stream(io.RawIOBase):
  """Collects what is written until it is taken. It cannot be rewound."""

  def __init__(self) -> None:
    self._pieces: list[bytes] = []

  def writable(self) -> bool:
    return True

  def write(self, data: Any) -> int:
    self._pieces.append(bytes(data))
    return len(self._pieces[-1])

  def taken(self) -> list[bytes]:
    pieces, self._pieces = self._pieces, []
    return pieces


def packed(arrays: Any) -> Iterator[bytes]:
  """Yields the bytes of the file. Memory is that of the largest array.

  Args:
    arrays: a tree of numpy arrays that are no longer written.
  """
  stream = _Stream()
  with zipfile.ZipFile(stream, 'w') as archive:
    for name, array in named(arrays):
      if array.dtype.isbuiltin != 1:
        array = array.view(f'u{array.itemsize}')
      with archive.open(f'{name}.npy', 'w', force_zip64=True) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)
      yield from stream.taken()
  yield from stream.taken()


def unpacked(data: bytes, like: Any, where: str) -> Any:
  """Returns the arrays of a file that is known to be unchanged, on the device.

  Args:
    data: the bytes of the file.
    like: a tree of arrays with the same dtypes and shapes.
    where: for errors.

  Raises:
    UserError: the file has other arrays.
  """
  leaves, form = named(like), jax.tree.structure(like)
  try:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
      arrays = [
        file[name].view(own.dtype).reshape(own.shape) for name, own in leaves
      ]
  except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
    raise _other(f'{type(error).__name__}: {error}', where) from error
  return to_device(jax.tree.unflatten(form, arrays), owned=True)


def unpacked_by_orbax(data: bytes, like: Any, where: str) -> Any:
  """Does what `unpacked` does for a file of version 7.

  Raises:
    UserError: orbax is not installed, or cannot read the file.
  """
  try:
    import orbax.checkpoint as ocp
  except ImportError as error:
    raise UserError(
      'orbax must be installed to restore a checkpoint of version 7',
      got=str(error),
      where=where,
      hint='pip install orbax-checkpoint',
    ) from error
  with tempfile.TemporaryDirectory(prefix='slipstream-') as folder:
    try:
      with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(folder)
      args = ocp.checkpoint_utils.construct_restore_args(like)
      restore = ocp.args.PyTreeRestore(like, restore_args=args)
      handler = ocp.PyTreeCheckpointHandler(use_compression=False)
      with ocp.Checkpointer(handler) as checkpointer:
        return checkpointer.restore(folder, args=restore)
    except Exception as error:  # of any kind, some of them many lines long
      message = ' '.join(str(error).split())[:300] or type(error).__name__
      raise _other(f'"{message}"', where) from error


def _other(got: str, where: str) -> UserError:
  return UserError(_RULE, got=got, where=where, hint=LOST)
