"""Reads the JSON body of a request, and refuses what is not exact.

It converts nothing in silence: text is not a number, `true` is not 1, and a
list of another shape is not reshaped.
"""

from collections.abc import Callable, Sequence
import json
from typing import Any

import numpy as np

from slip_serve import vocabulary
from slip_serve.errors import ServeError
from slip_serve.layout import Layout

MOST_EXAMPLES = 1 << 16
"""Examples that one request may have."""
_KEYS = ('dense', 'ids', 'weights')
_LARGEST = 2**128 - 2**104  # of float32
_LEAST_ID, _MOST_ID = -(2**63), 2**63 - 1
# By the kind of a vocabulary, what an id must be.
_WANTED = {
  'none': 'a whole number in [0, {})',
  'bounded': 'a whole number of 64 bits',
  'text': 'a text or null',
}
_ANY = 'a whole number of 64 bits, a text or null'
_NUMBERS = 'none', 'bounded'


def examples_of(
  layout: Layout, body: bytes | bytearray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """Reads the examples of a body, the arguments of `Scorer.probabilities`.

  They are the dense features f32[n, I], raw ids i64[n, K], and the weights of
  the lookups f32[n, K], or None.

  An id is a whole number, a text that `vocabulary.raw_id` takes, or null where
  it is missing. Where ids are rows of their table, only whole numbers are ids.

  Raises:
    ServeError: the body is not JSON, or a value has another type, shape or
      range than the model takes. The sentence names the example and the
      feature.
  """
  values = _parsed(body)
  if type(values) is not dict or 'ids' not in values:
    raise _refused('a body must have the key ids', _shown(values), 'body')
  lines = values['ids']
  if type(lines) is not list or not 1 <= len(lines) <= MOST_EXAMPLES:
    raise _refused(
      f'ids must be a list of 1 to {MOST_EXAMPLES} examples',
      _shown(lines),
      'ids',
    )
  count = len(lines)
  if 'dense' not in values and layout.dense_features:
    raise _refused('a body must have the key dense', _shown(values), 'body')
  if 'weights' in values and not layout.weighted:
    raise _refused('this model takes no weights', 'the key weights', 'body')
  dense = values.get('dense', [[]] * count)
  weights = None
  if 'weights' in values:
    weights = _floats('weights', values['weights'], count, layout.columns)
  numbers = _floats('dense', dense, count, layout.dense_features)
  return numbers, _ids(layout, lines), weights


def _parsed(body: bytes | bytearray) -> Any:
  try:
    return json.loads(
      str(body, 'utf-8'), object_pairs_hook=_object, parse_constant=_constant
    )
  except ServeError:
    raise
  except (ValueError, RecursionError) as error:
    raise _refused(
      'a body must be JSON in UTF-8',
      f'{type(error).__name__}: {str(error)[:80]}',
      'body',
    ) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Checks the keys of an object as soon as it is parsed, to save memory."""
  values = dict(pairs)
  if len(values) < len(pairs) or not values.keys() <= {*_KEYS}:
    keys = [key for key, _ in pairs]
    raise _refused(
      f'keys must be some of {", ".join(_KEYS)}, each once',
      f'{json.dumps(keys[:9]):.80}',
      'body',
    )
  return values


def _constant(name: str) -> None:
  raise _refused('numbers must be finite', name, 'body')


def _floats(name: str, lines: Any, count: int, width: int) -> np.ndarray:
  """Converts lists of numbers to f32[count, width]."""
  if type(lines) is not list or len(lines) != count:
    raise _refused(
      f'{name} must be a list of {count} examples, as ids is',
      _shown(lines),
      name,
    )
  _check_widths(name, lines, width)
  if all({int, float}.issuperset(map(type, line)) for line in lines):
    try:
      wide = np.array(lines, np.float64)
      if (np.abs(wide) <= _LARGEST).all():
        return wide.astype(np.float32)
    except OverflowError:  # float64 does not hold it either
      pass
  example, place, value = _first(
    lines,
    lambda value: type(value) not in (int, float) or abs(value) > _LARGEST,
  )
  raise _refused(
    f'{name} must be finite numbers of 32 bits',
    _shown(value),
    f'{name} of example {example}, number {place}',
  )


def _ids(layout: Layout, lines: list[Any]) -> np.ndarray:
  """Converts lists of ids to i64[n, K]."""
  _check_widths('ids', lines, layout.columns)
  features = [one for one in layout.features for _ in range(one.length)]
  kinds = [layout.vocabulary[one.table].kind for one in features]
  rows = [layout.tables[one.table].rows for one in features]

  def refused(example: int, column: int, value: Any) -> ServeError:
    wanted = _WANTED.get(kinds[column], _ANY).format(rows[column])
    feature = features[column].name
    where = f'ids of example {example}, feature {feature!r}'
    return _refused(f'an id must be {wanted}', _shown(value), where)

  texts: list[tuple[int, int]] = []
  for example, line in enumerate(lines):
    for column, value in enumerate(line):
      kind, of = kinds[column], type(value)
      if of is int and (kind != 'text' or value == vocabulary.END):
        continue
      if kind in _NUMBERS or (of is not str and value is not None):
        raise refused(example, column, value)
      try:
        if kind == 'text' and of is str:
          value.encode()
          texts.append((example, column))
        else:
          line[column] = vocabulary.raw_id(value)
      except UnicodeEncodeError as error:  # half of a surrogate pair
        raise refused(example, column, value) from error
  hashes = vocabulary.text_ids([lines[i][k] for i, k in texts]).tolist()
  for (example, column), number in zip(texts, hashes, strict=True):
    lines[example][column] = number
  try:
    ids = np.array(lines, np.int64)
  except OverflowError as error:
    bad = _first(lines, lambda value: not _LEAST_ID <= value <= _MOST_ID)
    raise refused(*bad) from error
  are_rows = np.array([kind == 'none' for kind in kinds])
  outside = are_rows & ((ids < 0) | (ids >= rows))
  outside &= ids != vocabulary.END
  if outside.any():
    example, column = (int(one) for one in np.argwhere(outside)[0])
    raise refused(example, column, int(ids[example, column]))
  return ids


def _check_widths(name: str, lines: list[Any], width: int) -> None:
  for example, line in enumerate(lines):
    if type(line) is not list or len(line) != width:
      raise _refused(
        f'{name} of an example must be a list of {width}',
        _shown(line),
        f'{name} of example {example}',
      )


def _first(
  lines: Sequence[Sequence[Any]], is_bad: Callable[[Any], bool]
) -> tuple[int, int, Any]:
  """Returns example, place and value of the first bad value."""
  return next(
    (example, place, value)
    for example, line in enumerate(lines)
    for place, value in enumerate(line)
    if is_bad(value)
  )


def _shown(value: Any) -> str:
  """Describes a value of JSON in a few words."""
  if type(value) is list:
    return f'a list of {len(value)}'
  if type(value) is dict:
    return f'an object with the keys {json.dumps([*value])}'
  return f'{json.dumps(value):.40}'


def _refused(rule: str, got: str, where: str) -> ServeError:
  return ServeError(
    rule, got=got, where=where, hint='send what GET / says that the model takes'
  )
