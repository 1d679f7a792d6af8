"""Raw values of each format become what training got, to the bit."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slip_serve import vocabulary
from slip_serve.dense import FUNCTIONS, inputs_of, may_be_missing
from slip_serve.layout import Dense, TRANSFORMS
from slipstream_jax.export.source import DENSE_OF_FORMATS, facts_of_dataset
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.formats.tfds import TRANSFORMS as TRAINED
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.packed.prepare import prepare
from tests.formats.text_formats import FORMATS

CASES = [
  ('criteo', {'test_share': 0.2}),
  ('criteo', {'test_share': 0.2, 'missing_flags': True}),
  ('avazu', {'test_share': 0.2}),
  ('ml csv', {'history': 3}),
]


def numbers(texts):
  """Raw values by name, as a caller converts them."""
  return np.array([[float(one) if one else np.nan] for one in texts])


@pytest.mark.parametrize(('name', 'how'), CASES)
def test_raw_values_are_filled_and_transformed_as_in_training(
  name, how, tmp_path
):
  form = FORMATS[name]
  lines = form.lines(300, seed=7)
  raw = form.raw(form.write(tmp_path / 'x', lines), **how)
  ((chunk, _),) = raw.parts[0].chunks()
  for _ in prepare(raw, tmp_path / 'packed'):
    pass
  for data in in_memory(raw), packed_dataset(tmp_path / 'packed'):
    facts = facts_of_dataset(data)
    assert sum(one.columns for one in facts.dense) == data.dense_features
    texts = [line.split(form.schema.delimiter.decode()) for line in lines]
    fields = dict(zip(form.columns, zip(*texts, strict=True), strict=True))
    if name == 'ml csv':  # the counts that a caller keeps are not in the file
      earlier = np.expm1(chunk.dense.astype(np.float64)).round()
      values = {
        one.name: earlier[:, [number]] for number, one in enumerate(facts.dense)
      }
    else:
      values = {one.name: numbers(fields[one.name]) for one in facts.dense}
    dense = inputs_of(facts.dense, values, len(lines))
    np.testing.assert_array_equal(
      dense.view(np.uint32), chunk.dense.view(np.uint32)
    )
    if name == 'ml csv':
      continue
    for number, (table, of) in enumerate(
      zip(raw.tables, facts.ids, strict=True)
    ):
      ids = [vocabulary.raw_id(t, of.vocabulary.texts) for t in fields[table]]
      assert ids == chunk.ids[:, number].tolist()


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=9))
def test_tfds_is_transformed_as_in_training(values):
  column = np.array(values)[:, None]
  for name, trained in TRAINED.items():
    settings = {'dense': ['age'], 'transform': name}
    (age,) = DENSE_OF_FORMATS['tfds'](settings)
    one = inputs_of((age,), {'age': column}, len(values))
    np.testing.assert_array_equal(one, trained(column).astype(np.float32))


def test_every_transform_has_a_function():
  assert {*FUNCTIONS} == {*TRANSFORMS}


def test_a_value_may_be_missing_only_where_the_export_says_so():
  features = (
    Dense('a', 1, 0.0, 'log1p'),
    Dense('a', 1, None, 'missing'),
    Dense('b'),
    Dense('c', 1, None, 'missing'),
    Dense('c'),
  )
  may = [may_be_missing(features, name) for name in 'abc']
  assert may == [True, False, False]
  values = {
    'a': np.array([[np.nan], [np.e - 1]]),
    'b': np.array([[1.0], [2.0]]),
    'c': np.array([[0.0], [4.0]]),
  }
  dense = inputs_of(features, values, 2)
  expected = [[0, 1, 1, 0, 0], [1, 0, 2, 0, 4]]
  np.testing.assert_array_equal(dense, np.array(expected, np.float32))


def test_hex_digits_are_numbers():
  for text, expected in (('68fd1e64', 0x68FD1E64), ('F', 15), ('', -1)):
    assert vocabulary.raw_id(text, 'hex') == expected
  assert vocabulary.raw_id(15, 'hex') == 15
  for text in 'x', '0x1', '123456789', '-1', ' 1':
    with pytest.raises(ValueError, match=text):
      vocabulary.raw_id(text, 'hex')
  words = vocabulary.TableVocabulary(0, 9, 'counted', 0, texts='hex')
  with pytest.raises(ValueError, match='8 hex digits'):
    vocabulary.ids_of(words, ['1', 'x'])
  assert vocabulary.ids_of(words, ['1F', None]).tolist() == [31, -1]
