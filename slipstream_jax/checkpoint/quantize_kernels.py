"""Host loops of quantization: ranges, codes, and bits packed into bytes.

A row's codes are one stream of bits, the lowest first, that begins at a byte.
All is computed in float64 from the scale and the low end as they are stored, so
that what is compared here is what will be read.
"""

from typing import no_type_check

import numpy as np

from slipstream_jax.hashing import kernel

_BINS = 200
_LEAST = 168
"""Bins that the range keeps: 1 - 0.16 of them, as in torch."""


@kernel
@no_type_check
def encode(
  rows: np.ndarray,
  bits: int,
  adaptive: bool,
  codes: np.ndarray,
  scales: np.ndarray,
  lows: np.ndarray,
) -> None:
  """Quantizes rows, each by a range of its own.

  Args:
    rows: f32[n, D], finite; D at least 1.
    bits: of a code, 1 to 8.
    adaptive: whether the range is narrowed where that makes the error smaller.
    codes: out, u8[n, ceil(D * bits / 8)], zeros.
    scales: out, f32[n].
    lows: out, f32[n].
  """
  top = (1 << bits) - 1
  for i in range(len(rows)):
    row = rows[i]
    low, high = np.float64(row.min()), np.float64(row.max())
    if adaptive:
      low, high = _narrowed(row, low, high, top)
    lows[i] = low
    scales[i] = (high - low) / top
    for d in range(len(row)):
      code = _code(row[d], np.float64(lows[i]), np.float64(scales[i]), top)
      at = d * bits
      word = code << (at & 7)
      codes[i, at >> 3] |= np.uint8(word & 255)
      if word > 255:
        codes[i, (at >> 3) + 1] |= np.uint8(word >> 8)


@kernel
@no_type_check
def decode(
  codes: np.ndarray,
  bits: int,
  scales: np.ndarray,
  lows: np.ndarray,
  rows: np.ndarray,
) -> None:
  """Writes low + code * scale to `rows`, f32[n, D]; the others as `encode`."""
  top = (1 << bits) - 1
  for i in range(len(rows)):
    low, scale = np.float64(lows[i]), np.float64(scales[i])
    for d in range(rows.shape[1]):
      at = d * bits
      word = np.int64(codes[i, at >> 3])
      if (at & 7) + bits > 8:
        word |= np.int64(codes[i, (at >> 3) + 1]) << 8
      rows[i, d] = low + ((word >> (at & 7)) & top) * scale


@kernel
@no_type_check
def _code(value: float, low: float, scale: float, top: int) -> int:
  """The code nearest to a value; 0 of a row of one value."""
  if scale == 0:
    return 0
  return np.int64(min(max(np.rint((value - low) / scale), 0), top))


@kernel
@no_type_check
def _loss(row: np.ndarray, low: float, high: float, top: int) -> float:
  """The squared error of a row by a range, as it would be stored."""
  scale = np.float64(np.float32((high - low) / top))
  low = np.float64(np.float32(low))
  total = 0.0
  for d in range(len(row)):
    error = low + _code(row[d], low, scale, top) * scale - row[d]
    total += error * error
  return total


@kernel
@no_type_check
def _narrowed(row: np.ndarray, low: float, high: float, top: int) -> tuple:
  """The best range on the way of a greedy search: (low, high).

  The end that costs less moves by a bin; torch's `choose_qparams_optimized`
  goes the same way, in float16, and takes local optima alone.
  """
  step = (high - low) / _BINS
  best, best_low, best_high = _loss(row, low, high, top), low, high
  for _ in range(_BINS - _LEAST):
    left = _loss(row, low + step, high, top)
    right = _loss(row, low, high - step, top)
    if left < right:
      low += step
    else:
      high -= step
    if min(left, right) < best:
      best, best_low, best_high = min(left, right), low, high
  return best_low, best_high
