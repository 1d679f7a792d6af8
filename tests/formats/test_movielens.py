"""MovieLens' ratings: examples in the order of time, histories, and rows."""

import collections
import gzip

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import END
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.formats.movielens import movielens_raw
from slipstream_jax.tables import Feature
from tests.formats.text_formats import FORMATS

NAMES = [name for name in FORMATS if name.startswith('ml')]


def slow_examples(path, name, history, threshold=4.0):
  """Examples in the order of time, by a dictionary of what each user did."""
  rows = [*FORMATS[name].slow_rows(path.read_bytes()).values()]
  seen, of_item, examples = {}, {}, []
  for user, item, word, _ in sorted(rows, key=lambda row: row[3]):  # stable
    past = seen.setdefault(user, [])
    stars = float(word.to_bytes(3).lstrip(b'\0'))
    label = stars >= threshold if threshold else stars / 5
    dense = np.log1p(np.float32([len(past), of_item.get(item, 0)]))
    latest = past[-history:] if history else []
    examples.append((np.float32(label), dense, user, item, latest))
    past.append(item)
    of_item[item] = of_item.get(item, 0) + 1
  return examples


def write(path, name, count=400, seed=0):
  return FORMATS[name].write(path, FORMATS[name].lines(count, seed))


@pytest.mark.parametrize('name', NAMES)
@settings(max_examples=25)
@given(
  st.integers(1, 60),
  st.integers(0, 99),
  st.integers(0, 9),
  st.sampled_from([0.5, 3.5, 4.0, 5.0, None]),
)
def test_any_log_has_the_histories_of_a_slow_reader(
  name, tmp_path_factory, count, seed, history, threshold
):
  path = write(tmp_path_factory.getbasetemp() / 'log', name, count, seed)
  if seed % 2:
    path.write_bytes(gzip.compress(path.read_bytes(), 1))
  raw = movielens_raw(path, history=history, threshold=threshold)
  expected = slow_examples(path, name, history, threshold)
  (chunk,) = (chunk for chunk, _ in raw.parts[0].chunks())
  assert chunk.labels.tolist() == [example[0] for example in expected]
  np.testing.assert_array_equal(chunk.dense, [e[1] for e in expected])
  assert chunk.ids.tolist() == [
    [user, item, *past, *[END] * (history - len(past))]
    for _, _, user, item, past in expected
  ]


@pytest.mark.parametrize('name', NAMES)
def test_sequences_have_the_histories_and_then_the_item(name, tmp_path):
  path = write(tmp_path / 'log', name)
  raw = movielens_raw(path, steps=5)
  (chunk,) = (chunk for chunk, _ in raw.parts[0].chunks())
  expected = slow_examples(path, name, 5)
  assert chunk.ids.tolist() == [
    [*[END] * (5 - len(past)), *past, item] for _, _, _, item, past in expected
  ]
  np.testing.assert_array_equal(chunk.dense[:, :2], [e[1] for e in expected])
  when, ages = {}, []
  rows = [*FORMATS[name].slow_rows(path.read_bytes()).values()]
  for user, _, _, time in sorted(rows, key=lambda row: row[3]):
    past = when.setdefault(user, [])
    past.append(time)
    latest = [np.float32(time - x) for x in past[-6:]]
    ages.append([*[0] * (6 - len(latest)), *latest])
  np.testing.assert_array_equal(chunk.dense[:, 2:], ages)
  with pytest.raises(UserError, match='sequences have the history in them'):
    movielens_raw(path, steps=5, history=2)


@pytest.mark.parametrize('split', ['last', 'random'])
def test_some_ratings_of_each_user_are_held_out(split, tmp_path):
  """In the order of time within each part. Counts are of the first part."""
  path = write(tmp_path / 'log', 'ml csv')
  raw = movielens_raw(path, split=split, test_share=0.2)
  (chunk,) = (chunk for chunk, _ in raw.parts[0].chunks())
  parts = raw.split(len(chunk.labels), (len(chunk.labels),))
  assert [*parts] == ['train', 'validation', 'test']
  assert [*parts.values()][-1][1] == len(chunk.labels)
  expected = slow_examples(path, 'ml csv', 0)
  everything = [example[2:4] for example in expected]
  of_user = collections.Counter(user for user, _ in everything)
  found = {
    name: [*map(tuple, chunk.ids[slice(*span)].tolist())]
    for name, span in parts.items()
  }
  assert sorted(pair for pairs in found.values() for pair in pairs) == sorted(
    everything
  )
  for name, pairs in found.items():
    held = collections.Counter(user for user, _ in pairs)
    if name != 'train':
      share = {u: int(0.2 * count) for u, count in of_user.items()}
      one = {u: int(count > (name != 'test')) for u, count in of_user.items()}
      assert held == collections.Counter(one if split == 'last' else share)
  if split == 'last':
    last = dict(everything)
    assert found['test'] == [(u, last[u]) for u, _ in found['test']]
  users, items = (
    collections.Counter(of) for of in zip(*found['train'], strict=True)
  )
  counts = [(users[u], items[i]) for u, i in chunk.ids.tolist()]
  np.testing.assert_array_equal(chunk.dense, np.log1p(np.float32(counts)))
  for test_split, others in ('test', 'validation'), ('validation', None):
    known = in_memory(raw, test_split=test_split, shuffle_seed=0).known
    held = sum(batch.weights.sum() for part in known for batch in part(64))
    assert held == sum(len(found[name]) for name in ('train', others) if name)


def test_the_latest_are_held_out_and_rows_ranked_by_all_features(tmp_path):
  path = write(tmp_path / 'ratings.csv', 'ml csv')
  raw = movielens_raw(path, history=4, test_share=0.25)
  data = in_memory(raw, min_count=2)
  assert list(data.sizes) == ['user', 'item']
  assert data.features['history'] == Feature('item', 'mean', 4)
  assert (data.train_examples, data.dense_features) == (300, 2)
  expected = slow_examples(path, 'ml csv', 4)
  seen = collections.Counter()
  for _, _, _, item, past in expected[:300]:
    seen.update([item, *past])
  assert data.sizes['item'] == 2 + sum(count >= 2 for count in seen.values())
  batch = next(data.train(300))
  assert batch.lookups.shape == (300, 6)
  popular, _ = max(seen.items(), key=lambda pair: (pair[1], -pair[0]))
  row = data.sizes['user'] + 1  # after that of unknown ids
  is_popular = [example[3] == popular for example in expected[:300]]
  assert (batch.lookups[:, 1] == row).tolist() == is_popular
  (test,) = data.test(100)
  assert test.labels.tolist() == [example[0] for example in expected[300:]]
