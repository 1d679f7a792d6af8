"""Quantized rows: bounds of the error, and oracles of what is stored."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import ml_dtypes
import numpy as np
import pytest

from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.checkpoint.quantize import (
  Bits,
  CODECS,
  dequantize,
  PAPER,
  quantize,
  to_half,
  TORCH,
)
from slipstream_jax.checkpoint.row_file import (
  leaves_of,
  Piece,
  read_row_file,
  write_row_file,
)
from slipstream_jax.errors import UserError

LOSSY = {name: how for name, how in CODECS.items() if how is not None}
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)
MATRICES = hnp.arrays(
  np.float32,
  hnp.array_shapes(min_dims=2, max_dims=2, max_side=9),
  elements=FLOATS,
)
lossy = pytest.mark.parametrize('how', LOSSY.values(), ids=[*LOSSY])


def there_and_back(rows, how):
  return dequantize(quantize(rows, how), rows.shape[1], how)


def error(rows, how):
  """Squared, of each row."""
  wrong = np.float64(there_and_back(rows, how)) - np.float64(rows)
  return (wrong**2).sum(1)


def oracle_code(rows, bits, low, scale):
  """Codes, as the definition has them."""
  scale = np.where(scale == 0, 1, np.float64(scale))
  codes = np.rint(
    (np.float64(rows) - np.float64(low)[:, None]) / scale[:, None]
  )
  return np.clip(codes, 0, 2**bits - 1)


@lossy
@given(rows=MATRICES)
def test_codes_are_the_nearest(how, rows):
  quantized = quantize(rows, how)
  codes = oracle_code(rows, how.bits, quantized.lows, quantized.scales)
  low, scale = np.float64(quantized.lows), np.float64(quantized.scales)
  meant = np.float32(low[:, None] + codes * scale[:, None])
  np.testing.assert_array_equal(
    dequantize(quantized, rows.shape[1], how), meant
  )


@pytest.mark.parametrize('bits', [8, 4, 3, 2])
@given(rows=MATRICES)
def test_values_within_the_range_are_half_a_step_off(bits, rows):
  quantized = quantize(rows, Bits(bits))
  back = dequantize(quantized, rows.shape[1], Bits(bits))
  off = np.abs(np.float64(back) - np.float64(rows))
  largest = np.abs(rows).max(1, keepdims=True) * 2.0**-22
  bound = np.float64(quantized.scales)[:, None] * 0.5 + largest + 1e-42
  assert (off <= bound).all()


searched = pytest.mark.parametrize('search', [PAPER, TORCH])


@searched
@pytest.mark.parametrize('bits', [8, 4, 3, 2])
@given(rows=MATRICES)
def test_a_narrowed_range_is_never_worse(bits, search, rows):
  plain, narrowed = Bits(bits), Bits(bits, *search)
  assert (error(rows, narrowed) <= error(rows, plain) * (1 + 1e-6)).all()


@pytest.mark.parametrize('bits', [4, 3, 2])
def test_the_search_of_the_paper_is_brute_force_over_its_path(bits):
  rng, top = np.random.default_rng(2), 2**bits - 1
  bins, least = PAPER
  for row in rng.standard_t(2, (20, 9)).astype(np.float32):

    def loss(low, high, row=row):
      scale, low = np.float64(np.float32((high - low) / top)), np.float32(low)
      low = np.float64(low)
      codes = np.clip(np.rint((row - low) / scale), 0, top)
      return ((low + codes * scale - row) ** 2).sum()

    low, high = np.float64(row.min()), np.float64(row.max())
    step, tried = (high - low) / bins, [(loss(low, high), low, high)]
    for _ in range(bins - least):
      ends = (low + step, high), (low, high - step)
      low, high = min(reversed(ends), key=lambda end: loss(*end))
      tried.append((loss(low, high), low, high))
    best = min(tried, key=lambda one: one[0])
    quantized = quantize(row[None], Bits(bits, *PAPER))
    assert quantized.lows[0] == np.float32(best[1])
    assert quantized.scales[0] == np.float32((best[2] - best[1]) / top)


@given(rows=hnp.arrays(np.float32, 30, elements=st.floats(width=32)))
def test_state_in_half_the_bits_is_near_relative_to_itself(rows):
  back = to_half(rows).astype(np.float32)
  finite = np.isfinite(rows)
  np.testing.assert_array_equal(np.isfinite(back), finite)
  np.testing.assert_array_equal(back[~finite], rows[~finite])
  off = np.abs(np.float64(back[finite]) - rows[finite])
  # Below the least normal number, half a step of bfloat16 is 2**-134.
  assert (off <= np.abs(np.float64(rows[finite])) * 2**-8 + 2.0**-134).all()


@lossy
@given(value=FLOATS, dim=st.integers(0, 20))
def test_rows_of_one_value_are_exact(how, value, dim):
  rows = np.full((2, dim), value, np.float32)
  np.testing.assert_array_equal(there_and_back(rows, how), rows)


@searched
def test_a_narrowed_range_gains_where_one_value_is_far_away(search):
  rows = np.random.default_rng(0).normal(size=(500, 16)).astype(np.float32)
  for bits, gain in ((2, 0.75), (3, 0.9)):
    plain, narrowed = Bits(bits), Bits(bits, *search)
    assert error(rows, narrowed).sum() < gain * error(rows, plain).sum()


def test_sizes_are_what_the_names_say():
  rows = np.zeros((3, 16), np.float32)
  widths = {k: quantize(rows, how).codes.shape[1] for k, how in LOSSY.items()}
  assert widths == {'int8': 16, 'int4': 8, 'int3': 6, 'int2': 4}


@pytest.mark.parametrize('bad', [np.nan, np.inf, 1e300])
def test_rows_must_be_finite(bad):
  rows = np.zeros((3, 4))
  rows[1, 2] = bad
  with pytest.raises(UserError, match='row 1'), np.errstate(over='ignore'):
    quantize(rows, LOSSY['int8'])


@pytest.mark.parametrize('codec', LOSSY)
@pytest.mark.parametrize('dtype', [np.float32, np.float16, ml_dtypes.bfloat16])
def test_files_hold_rows_quantized_and_their_state_in_half_the_bits(
  tmp_path, codec, dtype
):
  rng = np.random.default_rng(1)
  values = {
    'rows': rng.normal(size=(50, 7)).astype(dtype),
    'state_0': rng.normal(size=(50, 7)).astype(np.float32),
    'state_1': rng.integers(0, 1 << 20, 50).astype(np.int32),
  }
  place = open_place(tmp_path)
  pieces = [Piece(np.arange(50), values)]
  facts = write_row_file(place, 'a', leaves_of(values, codec), pieces)
  [(_, read)] = read_row_file(place, facts)
  np.testing.assert_array_equal(
    read['state_0'], to_half(values['state_0']).astype(np.float32)
  )
  np.testing.assert_array_equal(read['state_1'], values['state_1'])
  meant = there_and_back(values['rows'], LOSSY[codec]).astype(dtype)
  assert read['rows'].dtype == dtype
  np.testing.assert_array_equal(read['rows'], meant)
