"""Reads the JSON body of a request, and refuses what is not exact.

It converts nothing in silence: text is not a number, `true` is not 1, and a
list of another shape is not reshaped.
"""

from collections.abc import Callable, Iterable
import json
from typing import Any

import numpy as np

from slip_serve import vocabulary
from slip_serve.batching import Examples
from slip_serve.dense import inputs_of, may_be_missing
from slip_serve.errors import ServeError
from slip_serve.layout import Feature, Layout

MOST_EXAMPLES = 1 << 16
"""Examples that one request may have."""
_MOST_IDS = 1 << 20  # with padding, in one request by name
_KEYS = ('dense', 'ids', 'weights')
_LARGEST = 2**128 - 2**104  # of float32
_LEAST_ID, _MOST_ID = -(2**63), 2**63 - 1
# By the kind of a vocabulary, what an id must be.
_WANTED = {
  'none': 'a whole number in [0, {})',
  'bounded': 'a whole number of 64 bits',
  'text': 'a text or null',
  'hex': 'a text of up to 8 hex digits, its number, or null',
}
_ANY = 'a whole number of 64 bits, a text or null'
_NUMBERS = 'none', 'bounded'
_Where = Callable[[int, int], str]
"""Describes a place by example and column."""


def examples_of(layout: Layout, body: bytes | bytearray) -> Examples:
  """Reads the examples of a body.

  `ids`, `dense` and `weights` are objects with a list for each feature, or
  lists with a line for each example. By name an id is a value of the data: a
  whole number, a text, null where it is missing, or a list of these. In a line
  it is as the format of the data numbers ids, or a text or null. Where ids are
  rows of their table, only whole numbers are ids. Dense features by name are
  filled and transformed as in training.

  Raises:
    ServeError: the body is not JSON, or a value has another type, shape or
      range than the model takes. The sentence names the example, the feature
      and the value.
  """
  values = _parsed(layout, body)
  if type(values) is not dict or 'ids' not in values:
    raise _refused('a body must have the key ids', _shown(values), 'body')
  _check_keys(values, _KEYS, 'keys', 'body')
  if 'dense' not in values and layout.dense_features:
    raise _refused('a body must have the key dense', _shown(values), 'body')
  if 'weights' in values and not layout.weighted:
    raise _refused('this model takes no weights', 'the key weights', 'body')
  lines, lengths = values['ids'], None
  if type(lines) is dict:
    lines, lengths = _ids_by_name(layout, lines)
  else:
    _check_count(lines, MOST_EXAMPLES)
  weights = None
  if 'weights' in values:
    weights = _weights(layout, values['weights'], len(lines), lengths)
  dense = _dense(layout, values.get('dense', {}), len(lines))
  return Examples(dense, _ids(layout, lines), weights)


def _parsed(layout: Layout, body: bytes | bytearray) -> Any:
  own = [one.name for one in layout.features]
  own += [one.name for one in layout.dense]
  allowed = {*_KEYS, *own}

  def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Checks the keys of an object as soon as it is parsed, to save memory."""
    values = dict(pairs)
    if len(values) < len(pairs) or not values.keys() <= allowed:
      raise _refused(
        f'keys must be some of {", ".join(_KEYS)} and inside of them names of'
        f' features ({", ".join(dict.fromkeys(own)):.150}), each once',
        f'{json.dumps([key for key, _ in pairs[:9]]):.80}',
        'body',
      )
    return values

  try:
    return json.loads(
      str(body, 'utf-8'), object_pairs_hook=checked, parse_constant=_constant
    )
  except ServeError:
    raise
  except (ValueError, RecursionError) as error:
    raise _refused(
      'a body must be JSON in UTF-8',
      f'{type(error).__name__}: {str(error)[:80]}',
      'body',
    ) from error


def _constant(name: str) -> None:
  raise _refused('numbers must be finite', name, 'body')


def _check_keys(
  values: dict[str, Any], names: Iterable[str], what: str, where: str
) -> None:
  if not values.keys() <= {*names}:
    raise _refused(
      f'{what} must be some of {", ".join(names) or "no feature":.200}',
      f'{json.dumps([*values]):.80}',
      where,
    )


def _check_count(lines: Any, most: int) -> None:
  if type(lines) is not list or not 1 <= len(lines) <= most:
    rule = f'ids must be a list of 1 to {most} examples'
    raise _refused(rule, _shown(lines), 'ids')


def _check_features(
  values: dict[str, Any], names: list[str], what: str
) -> None:
  """Checks that there is a value for each name, and for no other."""
  _check_keys(values, names, f'{what} by name', what)
  missing = [name for name in names if name not in values]
  if missing:
    rule = f'{what} by name must have the feature {missing[0]!r}'
    raise _refused(rule, f'{json.dumps([*values]):.80}', what)


def _check_list(value: Any, count: int, what: str, name: str) -> None:
  if type(value) is not list or len(value) != count:
    raise _refused(
      f'{what} of a feature must be a list of {count} examples, as ids of the'
      ' first',
      _shown(value),
      f'{what}, feature {name!r}',
    )


def _ids_by_name(
  layout: Layout, values: dict[str, Any]
) -> tuple[list[list[Any]], dict[str, list[int]]]:
  """Returns the ids in lines, and how many of a feature each example has."""
  names = [one.name for one in layout.features]
  _check_features(values, names, 'ids')
  first = values[names[0]]
  _check_count(first, min(MOST_EXAMPLES, max(_MOST_IDS // layout.columns, 1)))
  lines: list[list[Any]] = [[] for _ in first]
  lengths: dict[str, list[int]] = {}
  for feature in layout.features:
    kind, own = layout.vocabulary[feature.table].kind, []
    _check_list(values[feature.name], len(first), 'ids', feature.name)
    for example, cell in enumerate(values[feature.name]):
      several = cell if type(cell) is list else [cell]
      if len(several) > feature.length:
        raise _refused(
          f'an example must have up to {feature.length} ids of this feature',
          f'{len(several)}',
          f'ids of example {example}, feature {feature.name!r}',
        )
      own.append(len(several))
      for value in several:
        if type(value) is int and value < 0:
          if kind in ('none', 'text'):
            raise _bad_id(layout, feature, example, value)
          value = _negative(kind, value)
        lines[example].append(value)
      lines[example] += [vocabulary.END] * (feature.length - len(several))
    lengths[feature.name] = own
  return lines, lengths


def _negative(kind: str, value: int) -> int:
  """Returns the id in a line of a negative value of the data."""
  if kind == 'bounded':  # unknown, as all beyond the table
    return vocabulary.MISSING if value >= _LEAST_ID else value
  return vocabulary.raw_id(value) if value >= _LEAST_ID else value


def _dense(layout: Layout, values: Any, count: int) -> np.ndarray:
  """Returns dense features f32[count, I], as the model gets them."""
  if type(values) is not dict:
    where = _numbered('dense')
    lines = _checked_lines('dense', values, count, layout.dense_features)
    return _floats('dense', lines, where).astype(np.float32)
  widths = {one.name: one.columns for one in layout.dense}
  if layout.dense_features and not widths:
    raise _refused(
      f'dense must be a list of {count} examples, as the export has no names'
      ' of dense features',
      _shown(values),
      'dense',
    )
  _check_features(values, [*widths], 'dense')
  blocks = {}
  for name, width in widths.items():
    _check_list(values[name], count, 'dense', name)
    lines = [one if type(one) is list else [one] for one in values[name]]
    _check_widths('dense', lines, width, name)
    missing = np.zeros((count, width), bool)
    if may_be_missing(layout.dense, name):
      missing = np.array([[one is None for one in line] for line in lines])
      if missing.any():
        lines = [[0 if one is None else one for one in line] for line in lines]
    numbers = _floats('dense', lines, _named('dense', name))
    blocks[name] = np.where(missing, np.nan, numbers)
  return inputs_of(layout.dense, blocks, count)


def _weights(
  layout: Layout,
  values: Any,
  count: int,
  lengths: dict[str, list[int]] | None,
) -> np.ndarray:
  """Returns the weights of the lookups f32[count, K]."""
  if type(values) is not dict:
    lines = _checked_lines('weights', values, count, layout.columns)
    return _floats('weights', lines, _numbered('weights')).astype(np.float32)
  _check_keys(
    values, [one.name for one in layout.features], 'weights by name', 'weights'
  )
  if lengths is None:
    raise _refused('weights by name need ids by name', 'a list', 'ids')
  weights = np.ones((count, layout.columns), np.float32)
  for feature in layout.features:
    if feature.name not in values:
      continue
    own = values[feature.name]
    _check_list(own, count, 'weights', feature.name)
    lines = [one if type(one) is list else [one] for one in own]
    for example, line in enumerate(lines):
      length = lengths[feature.name][example]
      if len(line) != length:
        raise _refused(
          f'weights of an example must be as many as its ids, {length}',
          f'{len(line)}',
          f'weights of example {example}, feature {feature.name!r}',
        )
    full = [line + [1] * (feature.length - len(line)) for line in lines]
    span = slice(feature.first, feature.first + feature.length)
    weights[:, span] = _floats('weights', full, _named('weights', feature.name))
  return weights


def _numbered(name: str) -> _Where:
  return lambda example, place: f'{name} of example {example}, number {place}'


def _named(name: str, feature: str) -> _Where:
  return lambda example, _: f'{name} of example {example}, feature {feature!r}'


def _checked_lines(name: str, lines: Any, count: int, width: int) -> list[Any]:
  if type(lines) is not list or len(lines) != count:
    raise _refused(
      f'{name} must be a list of {count} examples, as ids is',
      _shown(lines),
      name,
    )
  _check_widths(name, lines, width)
  return lines


def _floats(name: str, lines: list[list[Any]], where: _Where) -> np.ndarray:
  """Converts lines of numbers of one length to f64[n, width]."""
  if all({int, float}.issuperset(map(type, line)) for line in lines):
    try:
      wide = np.array(lines, np.float64)
      if (np.abs(wide) <= _LARGEST).all():
        return wide
    except OverflowError:  # float64 does not hold it either
      pass
  example, place, value = _first(
    lines,
    lambda value: type(value) not in (int, float) or abs(value) > _LARGEST,
  )
  raise _refused(
    f'{name} must be finite numbers of 32 bits',
    _shown(value),
    where(example, place),
  )


def _bad_id(
  layout: Layout, feature: Feature, example: int, value: Any
) -> ServeError:
  kind = layout.vocabulary[feature.table].kind
  if layout.vocabulary[feature.table].texts == 'hex':
    kind = 'hex'
  wanted = _WANTED.get(kind, _ANY).format(layout.tables[feature.table].rows)
  where = f'ids of example {example}, feature {feature.name!r}'
  return _refused(f'an id must be {wanted}', _shown(value), where)


def _ids(layout: Layout, lines: list[Any]) -> np.ndarray:
  """Converts lines of ids to i64[n, K]."""
  _check_widths('ids', lines, layout.columns)
  features = [one for one in layout.features for _ in range(one.length)]
  kinds = [layout.vocabulary[one.table].kind for one in features]
  forms = [layout.vocabulary[one.table].texts for one in features]

  def refused(example: int, column: int, value: Any) -> ServeError:
    return _bad_id(layout, features[column], example, value)

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
          line[column] = vocabulary.raw_id(value, forms[column])
      except ValueError as error:  # half of a surrogate pair, or no hex digit
        raise refused(example, column, value) from error
  hashes = vocabulary.text_ids([lines[i][k] for i, k in texts]).tolist()
  for (example, column), number in zip(texts, hashes, strict=True):
    lines[example][column] = number
  try:
    ids = np.array(lines, np.int64)
  except OverflowError as error:
    bad = _first(lines, lambda value: not _LEAST_ID <= value <= _MOST_ID)
    raise refused(*bad) from error
  rows = np.array([layout.tables[one.table].rows for one in features])
  are_rows = np.array([kind == 'none' for kind in kinds])
  outside = are_rows & ((ids < 0) | (ids >= rows))
  outside &= ids != vocabulary.END
  if outside.any():
    example, column = (int(one) for one in np.argwhere(outside)[0])
    raise refused(example, column, int(ids[example, column]))
  return ids


def _check_widths(
  name: str, lines: list[Any], width: int, feature: str = ''
) -> None:
  for example, line in enumerate(lines):
    if type(line) is not list or len(line) != width:
      raise _refused(
        f'{name} of an example must be a list of {width}',
        _shown(line),
        f'{name} of example {example}'
        + (f', feature {feature!r}' if feature else ''),
      )


def _first(
  lines: list[list[Any]], is_bad: Callable[[Any], bool]
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
