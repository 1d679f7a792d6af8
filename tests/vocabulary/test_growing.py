"""The growing vocabulary: the rule, its resuming, what it lists as fresh."""

from typing import Any, NamedTuple
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import polars as pl

from slipstream_jax.columns.ids import raw_ids
from slipstream_jax.vocabulary import growth
from slipstream_jax.vocabulary.growing import GrowingVocabulary
from tests.vocabulary.dictionary import Dictionary

# Numbers whose bits or signs could be mistaken; 0 marks free slots elsewhere.
SIGNED = [0, -1, 1, -(2**63), 2**63 - 1, *range(2, 10)]
UNSIGNED = [0, 2**64 - 1, 2**63, 1, 2**63 - 1, *range(2, 10)]
WORDS = ['', None, 'a', 'ä', '日本', 'b', 'b\0', 'a long name', *'cdefg']
# Of words that wait, the one of the lowest hash is forgotten.
KEYS = {None: None} | {
  word: int(raw_ids([word], '').bits.view(np.uint64)[0])
  for word in WORDS
  if word is not None
}


class Case(NamedTuple):
  """Settings and batches, small enough to be adversarial."""

  settings: dict[str, int]
  batches: list[Any]
  keys: list[list[int | None]]
  """The same ids as the dictionary knows them."""
  values: Any
  """All ids that there may be."""


@st.composite
def cases(draw):
  settings = {
    'size': draw(st.integers(2, 6)),
    'admit_after': draw(st.integers(1, 3)),
    'candidates': draw(st.integers(1, 5)),
  }
  values, dtype = draw(
    st.sampled_from(
      [(SIGNED, pl.Int64), (UNSIGNED, pl.UInt64), (WORDS, pl.String)]
    )
  )
  values = values[: draw(st.integers(2, len(values)))]
  batches = draw(
    st.lists(st.lists(st.sampled_from(values), max_size=12), max_size=14)
  )
  return Case(
    settings,
    [pl.Series(ids, dtype=dtype) for ids in batches],
    [[KEYS[i] if dtype is pl.String else i for i in ids] for ids in batches],
    pl.Series(values, dtype=dtype),
  )


def queued(places):
  """Lets queues hold so few places that they are made anew all the time."""
  return mock.patch.multiple(growth, _LEAST=places, _SHARE=10**9)


@given(cases(), st.integers(1, 4))
def test_it_is_a_dictionary_with_the_same_rule(case, places):
  words = GrowingVocabulary(**case.settings)
  expected = Dictionary(**case.settings)
  everything = np.arange(words.size)
  with queued(places):
    for ids, keys in zip(case.batches, case.keys, strict=True):
      before = words.ids(everything).tolist()
      rows, fresh = words.assign(ids)
      wanted, wanted_fresh = expected.take(keys)
      assert rows.tolist() == wanted
      assert fresh.tolist() == wanted_fresh
      after = words.ids(everything).tolist()
      changed = [r for r in everything.tolist() if before[r] != after[r]]
      assert sorted(wanted_fresh) == changed
      assert words.ids(rows).tolist() == [
        i if row else None for i, row in zip(ids, wanted, strict=True)
      ]
      assert words.rows(ids).tolist() == [
        expected.row_of.get(key, 0) for key in keys
      ]


@given(cases(), st.integers(1, 3))
def test_it_goes_on_from_any_batch(case, places):
  words, then = GrowingVocabulary(**case.settings), []
  with queued(places):
    for ids in case.batches:
      state, rows = words.get_state(), words.rows(case.values)
      then.append((state, rows, words.assign(ids)))
    # Read to its end: what it was before comes from what it noted.
    for at, (state, rows, _) in enumerate(then):
      found = words.get_state(at)
      # Of no type before the first id, though later that is known.
      known = {n: found[n] for n in state if n != 'kind'}
      np.testing.assert_equal(known, {n: state[n] for n in known})
      frozen = words.frozen(at)
      assert frozen.size == words.size
      np.testing.assert_array_equal(frozen.rows(case.values), rows)
      resumed = GrowingVocabulary(**case.settings)
      resumed.set_state(found)
      rest = zip(case.batches[at:], then[at:], strict=True)
      for ids, (_, _, expected) in rest:
        np.testing.assert_equal(tuple(resumed.assign(ids)), tuple(expected))
      np.testing.assert_equal(resumed.get_state(), words.get_state())


@given(cases(), st.randoms(use_true_random=False))
def test_it_may_be_set_back_again_and_again(case, random):
  words, rows, first = GrowingVocabulary(**case.settings), {}, 0
  for _ in range(3 * len(case.batches)):
    if words.batches == len(case.batches) or random.random() < 0.3:
      first = random.randint(first, words.batches)  # none before is kept
      words.set_state(words.get_state(first))
    else:
      at = words.batches
      taken = [array.tolist() for array in words.assign(case.batches[at])]
      assert rows.setdefault(at, taken) == taken
