"""Inverse roots of matrices on the host, in float64, also by a thread."""

from collections.abc import Sequence
from concurrent import futures
import hashlib
import threading
from typing import Any

import numpy as np

Leaves = Sequence[tuple[Any, ...]]
"""Per leaf, arrays [N, n, n] for each of its w axes: a matrix per block."""

_MOST = 16  # others are computed when they are asked for
_begun: dict[bytes, futures.Future[Leaves]] = {}
"""Roots that a thread computes or has computed, by a digest of their job."""
_one_at_a_time = threading.Lock()
_looking = threading.Lock()  # several devices call at once


def inverse_root(matrix: np.ndarray, order: int, eps: float) -> np.ndarray:
  """Returns (A / a + eps I)^(-1/order) of symmetric A [..., n, n], in float64.

  `a` is the largest eigenvalue of each matrix. The root of a matrix of zeros is
  the identity. That of one with elements that are not finite is NaN.
  """
  matrix = np.asarray(matrix, np.float64)
  finite = np.isfinite(matrix).all((-2, -1))
  values, vectors = np.linalg.eigh(np.where(finite[..., None, None], matrix, 0))
  largest = values[..., -1:]
  values = np.maximum(values, 0) / np.where(largest > 0, largest, 1)
  # A matrix of zeros, whose eigenvalues become 1.
  values = np.where(largest > 0, values + eps, 1)
  root = (vectors * values[..., None, :] ** (-1 / order)) @ np.swapaxes(
    vectors, -1, -2
  )
  return np.where(finite[..., None, None], root, np.nan)


def begin(leaves: Leaves, counts: Any, eps: Any) -> None:
  """Lets a thread begin with what `roots` will be asked for."""
  key, copies = _job(leaves, counts, eps)
  with _looking:
    if key in _begun:
      return
    while len(_begun) >= _MOST:  # those of runs that were stopped
      _begun.pop(next(iter(_begun)))
    pool = futures.ThreadPoolExecutor(1, 'slipstream-roots')
    _begun[key] = pool.submit(_computed, copies, counts, float(eps))
    pool.shutdown(wait=False)


def roots(leaves: Leaves, counts: Any, eps: Any) -> Leaves:
  """Returns the inverse roots of a leaf's first matrices, as many as counted.

  Their order is twice the leaf's number of axes. Other matrices are returned as
  they are. If no thread has begun with them, as after a restore, the caller's
  computes them, with the same result.
  """
  key, copies = _job(leaves, counts, eps)
  with _looking:
    future = _begun.pop(key, None)
  if future is None:
    return _computed(copies, counts, float(eps))
  return future.result()


def _job(leaves: Leaves, counts: Any, eps: Any) -> tuple[bytes, Leaves]:
  """Returns a digest of the arguments, and copies of the matrices.

  XLA may write other values where the matrices are, once it goes on.
  """
  copies = [tuple(map(np.array, leaf)) for leaf in leaves]
  digest = hashlib.blake2b(np.array(counts).data, digest_size=16)
  digest.update(np.array(eps).data)
  for leaf in copies:
    for matrices in leaf:
      digest.update(matrices.data)
  return digest.digest(), copies


def _computed(leaves: Leaves, counts: Any, eps: float) -> Leaves:
  """Overwrites the first matrices of each leaf with their roots."""
  import threadpoolctl  # which nothing else needs

  # More threads of BLAS would go on spinning for 20 ms, beside the next steps.
  # The limit is of the process, so another thread must not set it meanwhile.
  with _one_at_a_time, threadpoolctl.threadpool_limits(1, 'blas'):
    for leaf, count in zip(leaves, np.array(counts).tolist(), strict=True):
      for matrices in leaf:
        first = matrices[:count]
        first[...] = inverse_root(first, 2 * len(leaf), eps)
  return leaves
