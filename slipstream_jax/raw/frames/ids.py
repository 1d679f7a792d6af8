"""Ids of whole numbers and of texts, as i64, the same wherever they stand.

An id is what it is called: 7 in a column of numbers and '7' in one of text, or
in a CSV file, are one and the same.
"""

from collections.abc import Sequence
import hashlib

from jaxtyping import Int
import numpy as np
import polars as pl

from slipstream_jax.data.vocabulary import MISSING

# Below 0 two numbers are taken, by `MISSING` and `END`: v stands as v - 2.
_LEAST = np.iinfo(np.int64).min + 2


def text_ids(texts: Sequence[bytes]) -> Int[np.ndarray, ' n']:
  """Hashes of texts, i64, the same on every machine; `MISSING` for b''."""
  # Texts repeat: each is hashed once.
  ids = {text: _text_id(text) for text in set(texts)}
  return np.fromiter((ids[text] for text in texts), np.int64, len(texts))


def series_ids(series: pl.Series) -> Int[np.ndarray, ' n'] | None:
  """Ids of a column; None where its type is none of ids.

  A whole number is its own id, but a negative one v stands as v - 2. A text
  that is written as such a number is has the same id; any other one, and a
  number beyond i64, the hash of `text_ids`. Nulls and '' are `MISSING`.

  Args:
    series: whole numbers of any width, texts, categories or truth values.
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
    # As it would be written: '007' and '+7' are not 7.
    plain = (numbers.cast(pl.String) == texts) & (numbers >= _LEAST)
    return _ids(texts, numbers, plain)
  return None


def _text_id(text: bytes) -> int:
  if not text:
    return MISSING
  # Not Python's hash, which differs from process to process. 63 bits are never
  # below 0, where `MISSING` and `END` are.
  digest = hashlib.blake2b(text, digest_size=8).digest()
  return int.from_bytes(digest, 'little') >> 1


def _ids(
  series: pl.Series, numbers: pl.Series, are_ids: pl.Series
) -> Int[np.ndarray, ' n']:
  """The numbers that are ids as they are, and hashes of what else there is."""
  ids = numbers.fill_null(0).to_numpy()
  ids = np.where(ids < 0, ids - 2, ids)
  known = are_ids.fill_null(False).to_numpy()
  if not known.all():
    others = series.filter(pl.Series(~known)).cast(pl.String).fill_null('')
    ids[~known] = text_ids([text.encode() for text in others.to_list()])
  return ids
