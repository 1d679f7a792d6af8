"""Rows as records: float32, float16, or int8 with a scale for each."""

from jaxtyping import Float, UInt8
import numpy as np

from slip_serve.layout import record_bytes
from slipstream_jax.errors import UserError


def encoded(
  codec: str, rows: Float[np.ndarray, 'n D'], table: str
) -> UInt8[np.ndarray, 'n record']:
  """Records of rows.

  In float32 they are the rows' own bits. In int8 every element of a row of
  range r is at most r / 510 from its own, and a little for rounding: the scale
  is asymmetric, from the row's least element to its largest.

  Args:
    codec: of `slip_serve.layout.CODECS`.
    rows: of any floating type.
    table: whose they are, for errors.

  Raises:
    UserError: a row is beyond float16.
  """
  records = np.empty((len(rows), record_bytes(codec, rows.shape[1])), np.uint8)
  exact = np.asarray(rows, np.float32)
  if codec == 'float32':
    records.view('<f4')[:] = exact
  elif codec == 'float16':
    with np.errstate(over='ignore'):
      half = exact.astype('<f2')
    if not np.isfinite(half).all():
      raise UserError(
        'rows in float16 must be below 65520',
        got=exact[~np.isfinite(half)][0],
        where=f'table {table}',
        hint='export them with --dtype=float32 or int8',
      )
    records.view('<f2')[:] = half
  else:
    _quantize(exact, records)
  return records


def _quantize(rows: np.ndarray, records: np.ndarray) -> None:
  least = rows.min(axis=1).astype(np.float64)
  # In double: of two finite numbers of f32 the difference may be none.
  scale = ((rows.max(axis=1) - least) / 255).astype(np.float32)
  divisor = np.where(scale > 0, scale, 1).astype(np.float64)[:, None]
  codes = np.rint((rows - least[:, None]) / divisor)
  records[:, :4] = scale.astype('<f4')[:, None].view(np.uint8)
  records[:, 4:8] = least.astype('<f4')[:, None].view(np.uint8)
  records[:, 8:] = np.clip(codes, 0, 255).astype(np.uint8)
