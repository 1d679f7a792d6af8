"""Raw ids: the same ones whatever they come in, and one sentence else."""

import importlib

import numpy as np
import polars as pl
import pytest

from slipstream_jax.columns.ids import raw_ids
from slipstream_jax.errors import UserError
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.growing import GrowingVocabulary

NAN = float('nan')
TEXT = ['ä', 'b', 'ä', 'zz top']
NUMBERS = [7, 0, 7, 120]
UNSIGNED = [2**64 - 1, 0, 5, 2**64 - 1]


def text_forms(words):
  yield words
  yield tuple(words)
  yield np.array(words)
  yield np.array(words, object)
  yield np.array(words, np.dtypes.StringDType())
  yield np.array([word.encode() for word in words])
  yield [word.encode() for word in words]
  yield pl.Series(words)
  yield pl.Series(words, dtype=pl.Categorical)
  yield pl.Series([word.encode() for word in words])


def number_forms(values, dtypes):
  yield values
  yield np.array(values, object)
  for dtype in dtypes:
    yield np.array(values, dtype)
    yield np.array(values, dtype).astype(np.dtype(dtype).newbyteorder())
    yield np.repeat(np.array(values, dtype), 3)[::3]
    yield pl.Series(np.array(values, dtype))


def foreign_forms(values):
  """Of libraries that may not be there."""
  for name in 'pyarrow', 'pandas':
    try:
      library = importlib.import_module(name)
    except ImportError:
      continue
    if name == 'pandas':
      yield library.Series(values)
    else:
      yield library.array(values)
      yield library.chunked_array([values[:1], values[1:]])


@pytest.mark.parametrize(
  'forms',
  [
    [*text_forms(TEXT), *foreign_forms(TEXT)],
    [
      *number_forms(NUMBERS, ['i1', 'i4', 'i8', 'u1', 'u2', 'u4', 'u8']),
      *foreign_forms(NUMBERS),
    ],
    [*number_forms(UNSIGNED, ['u8']), *foreign_forms(np.array(UNSIGNED, 'u8'))],
  ],
  ids=['text', 'numbers', 'unsigned'],
)
def test_an_id_is_the_same_in_any_form(forms):
  expected = raw_ids(forms[0], '').bits.tolist()
  growing = GrowingVocabulary(9)
  for form in forms:
    assert raw_ids(form, '').bits.tolist() == expected
    assert Vocabulary.fit(form).known.tolist() == (
      Vocabulary.fit(forms[0]).known.tolist()
    )
    assert Vocabulary.fit(forms[0]).rows(form).min() > 0
    growing.assign(form)
  assert growing.ids([1, 2]).tolist() == [*dict.fromkeys(forms[0])][:2]
  shaped = np.array(forms[0], object).reshape(2, 1, 2)
  assert growing.rows(shaped).shape == (2, 1, 2)
  assert Vocabulary.fit(shaped).rows(shaped).shape == (2, 1, 2)


@pytest.mark.parametrize(
  'ids',
  [
    ['a', None, 'b'],
    np.array(['a', NAN, 'b'], object),
    pl.Series(['a', None, 'b']),
    [4, None, 7],
    np.array([4, NAN, 7], object),
    pl.Series([4, None, 7]),
    *foreign_forms(['a', None, 'b']),
  ],
)
def test_missing_ids_have_row_0_and_count_for_nothing(ids):
  for missing in (None, NAN):
    assert Vocabulary.fit([missing, missing, 'a', 'b', 'b']).size == 3
  vocabulary = Vocabulary.fit(ids, hash_rows=2)
  assert vocabulary.rows(ids).tolist() == [3, 0, 4]
  growing = GrowingVocabulary(3)
  assert growing.assign(ids).rows.tolist() == [1, 0, 2]
  assert growing.assign([None, None]).rows.tolist() == [0, 0]


@pytest.mark.parametrize(
  ('ids', 'sentence'),
  [
    (np.array([1.0]), 'integers or text, got 1.0, of type float64'),
    (np.array([True]), 'integers or text, got True, of type bool'),
    (np.array(['2020-01-01'], 'M8[D]'), 'or text, got .*, of type datetime64'),
    ([1, 'a'], 'integers or text, got int and str'),
    ([1, 2.5], 'integers or text, got float and int'),
    ([True, 1], 'integers or text, got bool and int'),
    ([b'a', 'a'], 'integers or text, got bytes and str'),
    ([[1, 2], [3]], 'got list .* give the values of ragged lists'),
    ([2**64], r'in \[-2\*\*63, 2\*\*63\), or all in \[0, 2\*\*64\)'),
    ([2**63, -1], r'got -1 to 9223372036854775808'),
    ([b'\xff'], 'or bytes must be valid UTF-8, got'),
    (['\ud800'], 'must be valid UTF-8, got'),
    (pl.Series([1.5]), 'integers or text, got 1.5, of type Float64'),
    (pl.Series([[1], [2, 3]]), r'type List\(Int64\) .* values of ragged lists'),
    (pl.Series([2**65], dtype=pl.Int128), 'or text, got .*, of type Int128'),
    (
      pl.DataFrame({'a': [1]}),
      r"of one table, got DataFrame .*frame\['item'\]",
    ),
    ({'a': [1]}, 'of one table, got dict'),
    (object(), 'integers or text, got object'),
    (np.ma.array([1], mask=[True]), 'values must not be masked'),
  ],
)
def test_what_is_no_id_is_said_in_a_sentence(ids, sentence):
  with pytest.raises(UserError, match=sentence) as error:
    raw_ids(ids, 'Vocabulary.rows, ids')
  assert '(Vocabulary.rows, ids)' in str(error.value)
  assert '\n' not in str(error.value)
