"""Checksums of what a checkpoint holds, and what it must not hold."""

import json
from typing import Any
import zlib

import jax
import numpy as np

from slipstream_jax.stream.buffers import to_host

Checksums = dict[str, int]
"""CRC-32 of the bytes of each array, by its path in the tree."""


def checksums(arrays: Any) -> Checksums:
  """The CRC-32 of each leaf of a tree of arrays, by its path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
  return {
    jax.tree_util.keystr(path): zlib.crc32(_bytes(leaf))
    for path, leaf in leaves
  }


def json_checksum(value: Any) -> int:
  """The CRC-32 of plain JSON, however its keys are ordered."""
  return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def first_not_finite(arrays: Any) -> str | None:
  """Path of the first leaf with a NaN or an infinity; None if all are well."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
  for path, leaf in leaves:
    floating = jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    if floating and not np.isfinite(to_host(leaf)).all():
      return jax.tree_util.keystr(path)
  return None


def _bytes(leaf: Any) -> memoryview:
  """The bytes of a leaf on either side; bfloat16 is no buffer by itself."""
  return np.ascontiguousarray(to_host(leaf)).reshape(-1).view(np.uint8).data
