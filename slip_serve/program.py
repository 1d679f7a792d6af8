"""The model: its parameters, and the forward pass that `jax.export` wrote."""

from collections.abc import Callable
import math
import os
import pathlib
import threading
from typing import Any

import jax
from jax import export
import numpy as np

from slip_serve.errors import ServeError
from slip_serve.layout import Layout

DENSE = 'dense.bin'


class Programs:
  """The forward passes of an export, each compiled when it is first used.

  Attributes:
    sizes: examples that there is a program for, rising.
  """

  def __init__(self, folder: str | os.PathLike[str], layout: Layout) -> None:
    """Reads the parameters.

    Raises:
      ServeError: they are fewer than the layout says, or of no such type.
    """
    self._folder = pathlib.Path(folder)
    self._files = {one.examples: one.file for one in layout.programs}
    self.sizes = sorted(self._files)
    self._leaves = jax.device_put(self._read(layout))
    self._compiled: dict[int, Callable[..., Any]] = {}
    self._lock = threading.Lock()

  def _read(self, layout: Layout) -> list[np.ndarray]:
    path = self._folder / DENSE
    whole, at, leaves = path.read_bytes(), 0, []
    try:
      for dtype, shape in layout.leaves:
        # Also 'bfloat16', which numpy knows once JAX is imported.
        kind = np.dtype(dtype)
        if kind.hasobject:
          raise TypeError('objects')
        count = math.prod(shape)
        leaf = np.frombuffer(whole, kind, count, at)
        leaves.append(leaf.reshape(shape).copy())
        at += leaf.nbytes
    except (TypeError, ValueError) as error:
      raise ServeError(
        f'the parameters must be the {len(layout.leaves)} of the manifest',
        got=str(error),
        where=str(path),
        hint='export the run again',
      ) from error
    return leaves

  def __call__(
    self,
    examples: int,
    rows: tuple[np.ndarray, ...],
    inverses: tuple[np.ndarray, ...],
    dense: np.ndarray,
    weights: np.ndarray | None,
  ) -> np.ndarray:
    """Logits f32[B] or f32[B, T] of a batch of one of the sizes.

    Args:
      examples: B.
      rows: of each group, f32[B * K_g, D]; not written until this returns.
      inverses: of each group, i32[B, K_g], places in its rows; -1 is padding.
      dense: f32[B, I].
      weights: f32[B, K] where lookups have weights.

    Raises:
      ServeError: the program cannot be read.
    """
    program = self._program(examples)
    rest = (dense,) if weights is None else (dense, weights)
    # Put there by name: a program may forbid all other transfers.
    inputs = jax.device_put((rows, inverses, *rest))
    return np.asarray(jax.device_get(program(self._leaves, *inputs)))

  def _program(self, examples: int) -> Callable[..., Any]:
    with self._lock:
      if examples not in self._compiled:
        path = self._folder / self._files[examples]
        try:
          exported = export.deserialize(bytearray(path.read_bytes()))
          self._compiled[examples] = jax.jit(exported.call)
        except Exception as error:  # JAX's own readers raise what they like
          raise ServeError(
            'a program must be one that this JAX can read',
            got=f'{type(error).__name__}: {str(error)[:200]}',
            where=str(path),
            hint=f'export the run with JAX {jax.__version__}',
          ) from error
      return self._compiled[examples]
