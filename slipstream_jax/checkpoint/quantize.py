"""Quantizes rows to 8, 4, 3 or 2 bits, to archive or serve them.

Each row has its own range, a float32 low end and scale. Its values are rounded
to the nearest of 2**bits levels (Eisenman et al., Check-N-Run, NSDI 2022). With
few bits, a greedy search narrows the range where clipping costs less than
coarse levels. With 8 bits that gains nothing and takes 60 times as long.

Row state beside such rows has 16 bits. Optimizers divide by it, so each element
needs a bound relative to its own size. A range per row has none: a second
moment much smaller than its row's largest would become 0.
"""

from typing import Any, NamedTuple, no_type_check

from jaxtyping import Float, Float32, UInt8
import ml_dtypes
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel


class Bits(NamedTuple):
  """Settings of a codec."""

  bits: int
  """Bits of a value."""
  bins: int = 0
  """Parts of a row's range, which is narrowed by one at a time. 0: it is not
  narrowed."""
  least: int = 1
  """Parts that a narrowed range keeps, at least."""


PAPER = 25, 1
"""`bins` and `least` of Check-N-Run: a search over the whole range."""
TORCH = 200, 168
"""Those of torch's `choose_qparams_optimized`, a finer search over 0.16 of it.
Its errors are 6 % smaller with 4 bits, 1 % with 3, and 2 to 13 % larger with 2.
"""
RAW = 'raw'
"""The codec that stores values unchanged."""
CODECS = {
  RAW: None,
  'int8': Bits(8),
  'int4': Bits(4, *TORCH),
  'int3': Bits(3, *TORCH),
  'int2': Bits(2, *PAPER),
}
HALF = 'bfloat16'
"""The codec of row state beside rows in few bits. The error of an element is at
most 2**-8 of it."""


class Codes(NamedTuple):
  """Quantized rows: value = low + code * scale.

  The error is at most scale / 2, except for values outside a narrowed range.
  """

  codes: UInt8[np.ndarray, 'n bytes']
  """The codes of each row as one stream of bits, lowest first."""
  scales: Float32[np.ndarray, ' n']
  """Distance of two levels. 0 if all values of the row are equal."""
  lows: Float32[np.ndarray, ' n']
  """Value of code 0."""


def code_bytes(dim: int, bits: int) -> int:
  """Returns the bytes of a row's codes, without its range."""
  return -(-dim * bits // 8)


def quantize(rows: Float[np.ndarray, 'n D'], how: Bits) -> Codes:
  """Quantizes rows of any float dtype.

  Raises:
    UserError: a value is not finite.
  """
  values = np.ascontiguousarray(rows, np.float32)
  if not np.isfinite(values).all():
    row = int(np.flatnonzero(~np.isfinite(values).all(1))[0])
    raise UserError(
      'rows must be finite in float32 to be quantized',
      got=f'{values[row]}',
      where=f'quantize, row {row}',
      hint='save them raw, or lower the learning rates',
    )
  n, dim = values.shape
  codes = np.zeros((n, code_bytes(dim, how.bits)), np.uint8)
  scales, lows = np.zeros(n, np.float32), np.zeros(n, np.float32)
  if dim:
    _encode(values, how.bits, how.bins, how.least, codes, scales, lows)
  return Codes(codes, scales, lows)


def to_half(values: Float32[np.ndarray, '...']) -> Any:
  """Rounds values to bfloat16. Finite ones stay finite."""
  half = values.astype(ml_dtypes.bfloat16)
  largest = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
  over = np.isinf(half) & np.isfinite(values)
  half[over] = np.copysign(largest, values[over])
  return half


def dequantize(
  quantized: Codes, dim: int, how: Bits
) -> Float32[np.ndarray, 'n D']:
  """Returns the rows, f32[n, dim]."""
  rows = np.empty((len(quantized.scales), dim), np.float32)
  _decode(quantized.codes, how.bits, quantized.scales, quantized.lows, rows)
  return rows


@kernel
@no_type_check
def _encode(
  rows: np.ndarray,
  bits: int,
  bins: int,
  least: int,
  codes: np.ndarray,
  scales: np.ndarray,
  lows: np.ndarray,
) -> None:
  """Writes the codes, u8 and zeros before, and ranges of rows, f32[n, D]."""
  top = (1 << bits) - 1
  for i in range(len(rows)):
    row = rows[i]
    low, high = np.float64(row.min()), np.float64(row.max())
    if bins:
      low, high = _narrowed(row, low, high, top, bins, least)
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
def _decode(
  codes: np.ndarray,
  bits: int,
  scales: np.ndarray,
  lows: np.ndarray,
  rows: np.ndarray,
) -> None:
  """Writes low + code * scale to `rows`, f32[n, D]. Inverse of `_encode`."""
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
  """Returns the code nearest to a value. 0 if the scale is 0."""
  if scale == 0:
    return 0
  return np.int64(min(max(np.rint((value - low) / scale), 0), top))


@kernel
@no_type_check
def _loss(row: np.ndarray, low: float, high: float, top: int) -> float:
  """Returns the squared error of a row that is stored with a range.

  It is computed from the scale and low end as they are stored.
  """
  scale = np.float64(np.float32((high - low) / top))
  low = np.float64(np.float32(low))
  total = 0.0
  for d in range(len(row)):
    error = low + _code(row[d], low, scale, top) * scale - row[d]
    total += error * error
  return total


@kernel
@no_type_check
def _narrowed(
  row: np.ndarray, low: float, high: float, top: int, bins: int, least: int
) -> tuple:
  """Returns the best range (low, high) that a greedy search meets.

  Each move takes one bin off the end that costs less. torch's
  `choose_qparams_optimized` takes the same path in float16, but only keeps
  local optima.
  """
  step = (high - low) / bins
  best, best_low, best_high = _loss(row, low, high, top), low, high
  for _ in range(bins - least):
    left = _loss(row, low + step, high, top)
    right = _loss(row, low, high - step, top)
    if left < right:
      low += step
    else:
      high -= step
    if min(left, right) < best:
      best, best_low, best_high = min(left, right), low, high
  return best_low, best_high
