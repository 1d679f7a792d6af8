"""Ids of integers and of texts, as i64.

The same id may come as a number or as text: 7 in a column of numbers equals '7'
in a text column or a CSV file.
"""

from collections.abc import Sequence

from jaxtyping import Int
import numpy as np
import polars as pl

from slipstream_jax.data.vocabulary import MISSING
from slipstream_jax.hashing import text_id

# `MISSING` and `END` are -1 and -2, so a negative v becomes v - 2.
_LEAST = np.iinfo(np.int64).min + 2


def text_ids(texts: Sequence[bytes]) -> Int[np.ndarray, ' n']:
  """Hashes texts to i64, the same on every machine; `MISSING` for b''."""
  # Texts repeat, so each is hashed once.
  ids = {text: text_id(text) if text else MISSING for text in set(texts)}
  return np.fromiter((ids[text] for text in texts), np.int64, len(texts))


def series_ids(series: pl.Series) -> Int[np.ndarray, ' n'] | None:
  """Returns the ids of a column, or None if its type cannot hold ids.

  An integer is its own id, but a negative v becomes v - 2. A text that spells
  such an integer in canonical form has the same id. Other texts, and integers
  beyond i64, are hashed by `text_ids`. Nulls and '' are `MISSING`.

  Args:
    series: integers of any width, texts, categories or booleans.
  """
  dtype = series.dtype
  if dtype == pl.Null:
    return np.full(len(series), MISSING, np.int64)
  if dtype.is_integer():
    numbers = series.cast(pl.Int64, strict=False)  # null beyond i64
    return _ids(series, numbers, numbers >= _LEAST)
  if dtype in (pl.String, pl.Categorical, pl.Enum, pl.Boolean):
    texts = series.cast(pl.String)
    numbers = texts.cast(pl.Int64, strict=False)
    # Only the canonical form: '007' and '+7' are not 7.
    plain = (numbers.cast(pl.String) == texts) & (numbers >= _LEAST)
    return _ids(texts, numbers, plain)
  return None


def _ids(
  series: pl.Series, numbers: pl.Series, are_ids: pl.Series
) -> Int[np.ndarray, ' n']:
  """Returns the numbers that are ids, and hashes of all other values."""
  ids = numbers.fill_null(0).to_numpy()
  ids = np.where(ids < 0, ids - 2, ids)
  known = are_ids.fill_null(False).to_numpy()
  if not known.all():
    others = series.filter(pl.Series(~known)).cast(pl.String).fill_null('')
    ids[~known] = text_ids([text.encode() for text in others.to_list()])
  return ids
