"""Host loops that turn ids into rows, and lists of them into columns.

They stay out of jaxtyping's import hook, which numba cannot compile through.
"""

import numba
import numpy as np

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)


@_kernel
def place_ids(
  ids: np.ndarray,
  size: int,
  first: int,
  unknown: int,
  padded: bool,
  rows: np.ndarray,
) -> int:
  """Global rows of local ids.

  Args:
    ids: i64[n].
    size: ids that the table has rows for.
    first: the table's first global row.
    unknown: global row of all other ids, or -1 if they are errors.
    padded: whether the id -1 is no lookup, and stays.
    rows: out, integer[n].

  Returns:
    -1, or the index of the first id that is an error.
  """
  for i in range(len(ids)):
    wanted = ids[i]
    if (wanted >= 0) & (wanted < size):
      rows[i] = first + wanted
    elif padded and wanted == -1:
      rows[i] = -1
    elif unknown >= 0:
      rows[i] = unknown
    else:
      return i
  return -1


@_kernel
def pad_lists(
  values: np.ndarray,
  splits: np.ndarray,
  index: np.ndarray,
  column: int,
  length: int,
  last: bool,
  out: np.ndarray,
) -> None:
  """Writes lists into columns; what is behind their ends is left as it is.

  Args:
    values: [m], of all lists, one list after the other.
    splits: i64[n + 1], where each begins and ends.
    index: i64[B], which lists.
    column: of `out`, where they begin.
    length: columns for each; of longer lists that many values are written.
    last: their last ones, rather than their first.
    out: [B, K].
  """
  for i in range(len(index)):
    begin, end = splits[index[i]], splits[index[i] + 1]
    if end - begin > length:
      if last:
        begin = end - length
      else:
        end = begin + length
    for k in range(end - begin):
      out[i, column + k] = values[begin + k]


@_kernel
def spread(
  values: np.ndarray, index: np.ndarray, columns: np.ndarray, out: np.ndarray
) -> None:
  """Writes lines of a matrix into some columns of another.

  Args:
    values: [n, k].
    index: i64[B], which lines.
    columns: i64[k], of `out`, where each column goes.
    out: [B, K].
  """
  for i in range(len(index)):
    for k in range(len(columns)):
      out[i, columns[k]] = values[index[i], k]
