"""The growing vocabulary around its rule: files, threads, refusals."""

import numpy as np
import pytest

from slipstream_jax.data.prefetch import ahead
from slipstream_jax.errors import UserError
from slipstream_jax.vocabulary.growing import GrowingVocabulary


def batches_of(seed, batches=40, ids=30, size=17):
  """Batches of ids by popularity, which drifts."""
  rng = np.random.default_rng(seed)
  return [rng.zipf(1.5, size) % ids + number for number in range(batches)]


@pytest.mark.parametrize('batches', [batches_of(1), [['b', 'a', None]] * 3, []])
def test_files_hold_all_of_it(tmp_path, batches):
  words = GrowingVocabulary(9, admit_after=2, candidates=4)
  for ids in batches[: len(batches) // 2]:
    words.assign(ids)
  words.save(tmp_path / 'words')
  loaded = GrowingVocabulary.load(tmp_path / 'words')
  assert loaded.batches == words.batches
  for ids in batches[len(batches) // 2 :]:
    for one, other in zip(words.assign(ids), loaded.assign(ids), strict=True):
      np.testing.assert_array_equal(one, other)
  np.testing.assert_equal(loaded.get_state(), words.get_state())
  np.testing.assert_equal(
    loaded.ids(np.arange(9)).tolist(), words.ids(np.arange(9)).tolist()
  )


def test_it_is_saved_while_it_is_read_ahead():
  """As a trainer does: a thread takes batches, another saves what was used."""
  batches = [ids.astype(np.uint64) for ids in batches_of(3, batches=60)]
  alone = GrowingVocabulary(9, admit_after=2, candidates=5)
  expected = [alone.assign(ids) for ids in batches]
  words = GrowingVocabulary(9, admit_after=2, candidates=5, history=20)
  states = []
  mapped = ahead((words.assign(ids) for ids in batches), 8)
  for at, assigned in enumerate(mapped):
    np.testing.assert_array_equal(assigned.rows, expected[at].rows)
    np.testing.assert_array_equal(assigned.fresh, expected[at].fresh)
    states.append(words.get_state(at + 1))
  for at, state in enumerate(states, start=1):
    resumed = GrowingVocabulary(9, admit_after=2, candidates=5)
    resumed.set_state(state)
    for ids, (rows, fresh) in zip(batches[at:], expected[at:], strict=True):
      again = resumed.assign(ids)
      np.testing.assert_array_equal(again.rows, rows)
      np.testing.assert_array_equal(again.fresh, fresh)


def test_features_that_share_a_table_are_one_batch():
  items, histories = batches_of(4), [b.reshape(-1, 1) for b in batches_of(5)]
  one, two = GrowingVocabulary(20), GrowingVocabulary(20)
  for item, history in zip(items, histories, strict=True):
    rows, fresh = one.assign_features({'item': item, 'history': history})
    assert rows['history'].shape == history.shape
    whole = two.assign(np.concatenate([item, history.ravel()]))
    joined = np.concatenate([rows['item'], rows['history'].ravel()])
    np.testing.assert_array_equal(joined, whole.rows)
    np.testing.assert_array_equal(fresh, whole.fresh)


def test_a_refused_batch_changes_nothing():
  words = GrowingVocabulary(4, admit_after=2)
  words.assign([3, 5, 3])
  before = words.get_state()
  for ids, sentence in (
    (['a'], r'ids must be int64, as the first were, got text \(Growing'),
    ([0.5], 'ids must be integers or text, got float'),
    (np.array([1.0]), 'ids must be integers or text, got 1.0, of type float64'),
    ([2**63], 'ids must be int64, as the first were, got 9223372036854775808'),
  ):
    with pytest.raises(UserError, match=sentence):
      words.assign(ids)
    with pytest.raises(UserError, match=sentence):
      words.rows(ids)
    with pytest.raises(UserError, match='assign, history'):
      words.assign_features({'item': [7, 7], 'history': ids})
  np.testing.assert_equal(words.get_state(), before)


@pytest.mark.parametrize(
  ('arguments', 'sentence'),
  [
    ({'size': 1}, 'size must be a whole number, at least 2, got 1'),
    ({'size': 2**31}, r'size and candidates must be below 2\*\*31'),
    ({'size': 5, 'admit_after': 0}, 'admit_after must be .* at least 1'),
    ({'size': 5, 'candidates': 0}, 'candidates must be .* at least 1'),
    ({'size': 5, 'history': 0}, 'history must be .* at least 1'),
  ],
)
def test_bad_arguments_are_named(arguments, sentence):
  with pytest.raises(UserError, match=sentence):
    GrowingVocabulary(**arguments)


def test_states_out_of_reach_are_refused():
  words = GrowingVocabulary(4, history=3)
  for ids in batches_of(6, batches=8):
    words.assign(ids)
  assert words.get_state(5)['batches'] == 5
  for batches in 4, 9, -1:
    with pytest.raises(UserError, match=r'batches must be in \[5, 8\]'):
      words.get_state(batches)
  words.set_state(words.get_state(6))
  with pytest.raises(UserError, match=r'batches must be in \[6, 6\]'):
    words.frozen(5)


def test_other_and_damaged_states_are_refused():
  words = GrowingVocabulary(4, admit_after=2)
  for ids in batches_of(7):
    words.assign(ids)
  state = words.get_state()
  for other in (
    GrowingVocabulary(5, admit_after=2),
    GrowingVocabulary(4, admit_after=3),
    GrowingVocabulary(4, admit_after=2, candidates=9),
  ):
    with pytest.raises(UserError, match='a state must be of what Growing'):
      other.set_state(state)
  for name, value in state.items():
    bad = [None]
    if isinstance(value, np.ndarray):
      bad += [np.zeros((2, 2)), np.append(value, value[:1])]
      bad += [value[:-1], value + 0.5]
    if name == 'ids':  # one of them twice
      bad.append(np.repeat(value[:1], len(value)))
    elif name.endswith('last'):
      bad += [0 * value, value + 1000]
    for damaged in bad:
      with pytest.raises(UserError, match='a state must be'):
        words.set_state(state | {name: damaged})
    with pytest.raises(UserError, match='a state must be'):
      words.set_state({k: v for k, v in state.items() if k != name})
  np.testing.assert_equal(words.get_state(), state)


def test_many_rows_leave_in_order():
  """At a size where queues are parts, against the rule in arrays."""
  size, rng = 5001, np.random.default_rng(8)
  words = GrowingVocabulary(size)
  last, owner, row_of = np.zeros(size, int), np.zeros(size, int), {}
  last[0] = 1 << 60
  for now in range(1, 61):
    ids = np.unique(rng.zipf(1.2, 900) % 40_000)
    rows, fresh = words.assign(ids)
    known = [row_of[i] for i in ids.tolist() if i in row_of]
    last[known] = now
    new = [i for i in ids.tolist() if i not in row_of]
    expected = np.lexsort((np.arange(size), last))[: len(new)]
    np.testing.assert_array_equal(fresh, expected)
    for row, wanted in zip(expected.tolist(), new, strict=True):
      row_of.pop(owner[row], None)
      row_of[wanted], owner[row], last[row] = row, wanted, now
    np.testing.assert_array_equal(rows, [row_of[i] for i in ids.tolist()])
