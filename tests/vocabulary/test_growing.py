"""The growing vocabulary: the rule, its resuming, what it lists as fresh."""

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
import numpy as np

from slipstream_jax.vocabulary import growth
from slipstream_jax.vocabulary.growing import GrowingVocabulary
from tests.vocabulary.dictionary import Dictionary

# Numbers whose bits or signs could be mistaken; 0 marks free slots elsewhere.
SIGNED = [0, -1, 1, -(2**63), 2**63 - 1, *range(2, 10)]
UNSIGNED = [0, 2**64 - 1, 2**63, 1, 2**63 - 1, *range(2, 10)]


@st.composite
def cases(draw):
  """Skip, batches of ids and a dtype, small enough to be adversarial."""
  settings = {
    'size': draw(st.integers(2, 6)),
    'admit_after': draw(st.integers(1, 3)),
    'candidates': draw(st.integers(1, 5)),
  }
  values, dtype = draw(
    st.sampled_from([(SIGNED, np.int64), (UNSIGNED, np.uint64)])
  )
  of = st.sampled_from(values[: draw(st.integers(2, len(values)))])
  batches = draw(st.lists(st.lists(of, max_size=12), max_size=14))
  return settings, [np.array(batch, dtype) for batch in batches]


def arrays_equal(one, other):
  assert one.keys() == other.keys()
  for name, value in one.items():
    np.testing.assert_array_equal(value, other[name], err_msg=name)


def queued(places):
  """Lets queues hold so few places that they are made anew all the time."""
  return mock.patch.multiple(growth, _LEAST=places, _SHARE=10**9)


@given(cases(), st.integers(1, 4))
def test_it_is_a_dictionary_with_the_same_rule(case, places):
  settings, batches = case
  words, expected = GrowingVocabulary(**settings), Dictionary(**settings)
  with queued(places):
    for ids in batches:
      before = words.ids(np.arange(words.size))
      rows, fresh = words.assign(ids)
      wanted, wanted_fresh = expected.take(ids.tolist())
      assert rows.tolist() == wanted
      assert fresh.tolist() == wanted_fresh
      after = words.ids(np.arange(words.size))
      changed = [r for r in range(words.size) if before[r] != after[r]]
      assert sorted(fresh.tolist()) == changed
      assert (words.ids(rows)[rows > 0] == ids[rows > 0]).all()
      assert words.rows(ids).tolist() == [
        expected.row_of.get(i, 0) for i in ids.tolist()
      ]


@given(cases(), st.integers(1, 3))
def test_it_goes_on_from_any_batch(case, places):
  settings, batches = case
  words, then = GrowingVocabulary(**settings), []
  with queued(places):
    for ids in batches:
      then.append((words.get_state(), words.assign(ids)))
    # Read to its end: what it was before comes from what it noted.
    for at, (state, _) in enumerate(then):
      kind = {'kind': words.get_state()['kind']}  # at 0 there was none
      arrays_equal(words.get_state(at), state | kind)
      resumed = GrowingVocabulary(**settings)
      resumed.set_state(words.get_state(at))
      for ids, (_, expected) in zip(batches[at:], then[at:], strict=True):
        rows, fresh = resumed.assign(ids)
        np.testing.assert_array_equal(rows, expected.rows)
        np.testing.assert_array_equal(fresh, expected.fresh)
      arrays_equal(resumed.get_state(), words.get_state())


@given(cases(), st.randoms(use_true_random=False))
def test_it_may_be_set_back_again_and_again(case, random):
  settings, batches = case
  words, rows = GrowingVocabulary(**settings), {}
  for _ in range(3 * len(batches)):
    if words.batches == len(batches) or random.random() < 0.3:
      first = words.batches - len(words._history._changes)
      words.set_state(words.get_state(random.randint(first, words.batches)))
    else:
      at = words.batches
      taken = [array.tolist() for array in words.assign(batches[at])]
      assert rows.setdefault(at, taken) == taken
