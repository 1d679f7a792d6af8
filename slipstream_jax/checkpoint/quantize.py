"""Rows in 8, 4, 3 or 2 bits: for archives and serving, not for going on.

Each row has a range of its own, float32 low end and scale, in which its values
are rounded to the nearest of 2**bits (Eisenman et al., Check-N-Run, NSDI 2022).
With few bits the range is narrowed greedily where clipping costs less than
coarse steps; with 8 that gains nothing, and takes 60 times as long.
"""

from typing import NamedTuple

from jaxtyping import Float, Float32, UInt8
import numpy as np

from slipstream_jax.checkpoint.quantize_kernels import decode, encode
from slipstream_jax.errors import UserError


class Bits(NamedTuple):
  """How rows are quantized."""

  bits: int
  """Of a value."""
  adaptive: bool
  """Whether ranges are narrowed."""


RAW = 'raw'
"""The codec that changes nothing: values as they are."""
CODECS = {
  RAW: None,
  'int8': Bits(8, adaptive=False),
  'int4': Bits(4, adaptive=True),
  'int3': Bits(3, adaptive=True),
  'int2': Bits(2, adaptive=True),
}


class Codes(NamedTuple):
  """Quantized rows: value = low + code * scale, at most scale / 2 off.

  Further off, where a range was narrowed, are only the values beyond it.
  """

  codes: UInt8[np.ndarray, 'n bytes']
  """A row's codes as one stream of bits, the lowest first."""
  scales: Float32[np.ndarray, ' n']
  """Between two codes; 0 of a row of one value."""
  lows: Float32[np.ndarray, ' n']
  """The value of code 0."""


def code_bytes(dim: int, bits: int) -> int:
  """Bytes of a row's codes, without its range."""
  return -(-dim * bits // 8)


def quantize(rows: Float[np.ndarray, 'n D'], how: Bits) -> Codes:
  """Quantizes rows of any float dtype.

  Raises:
    UserError: a value is not finite, so that its row has no range.
  """
  values = np.ascontiguousarray(rows, np.float32)
  if not np.isfinite(values).all():
    row = int(np.flatnonzero(~np.isfinite(values).all(1))[0])
    raise UserError(
      'rows must be finite in float32 to be quantized',
      got=f'{values[row]}',
      where=f'quantize, row {row}',
      hint='save them raw, or look for what made them so',
    )
  n, dim = values.shape
  codes = np.zeros((n, code_bytes(dim, how.bits)), np.uint8)
  scales, lows = np.zeros(n, np.float32), np.zeros(n, np.float32)
  if dim:
    encode(values, how.bits, how.adaptive, codes, scales, lows)
  return Codes(codes, scales, lows)


def dequantize(
  quantized: Codes, dim: int, how: Bits
) -> Float32[np.ndarray, 'n D']:
  """The rows, f32[n, dim]."""
  rows = np.empty((len(quantized.scales), dim), np.float32)
  decode(quantized.codes, how.bits, quantized.scales, quantized.lows, rows)
  return rows
