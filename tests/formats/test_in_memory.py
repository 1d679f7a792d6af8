"""Any raw data, held in memory: parts, splits, lists of ids, vocabularies."""

import collections
import itertools

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import (
  BadLines,
  Chunk,
  END,
  MISSING,
  Part,
  RawData,
)
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.tables import features_of

TABLES = ('a', 'b')


def raw_of(
  ids: np.ndarray, chunks: list[int], held_out: int, skipped: int = 0
) -> RawData:
  """Examples in two parts, numbered by their dense feature."""
  examples = len(ids)
  dense = np.arange(examples, dtype=np.float32)[:, None]
  labels = (dense[:, 0] % 3 == 0).astype(np.float32)
  flat = ids.reshape(examples, -1)
  cuts = sorted({0, examples, *(c % (examples + 1) for c in chunks)})
  made = [
    (Chunk(labels[i:j], dense[i:j], flat[i:j]), j)
    for i, j in itertools.pairwise(cuts)
  ]
  half = len(made) // 2
  budget = BadLines(skipped)
  budget.restore(skipped)
  first = made[half][1] if made and half else 0

  def split(n: int, parts: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    assert (n, sum(parts)) == (examples, examples)
    assert len(parts) == 2
    assert first == 0 or parts[0] == made[half - 1][1]
    return {'train': (0, n - held_out), 'test': (n - held_out, n)}

  return RawData(
    name='some',
    features=features_of(TABLES, ids.shape[2] if ids.ndim == 3 else None),
    dense_features=1,
    parts=(
      Part('one', 0, lambda: iter(made[:half])),
      Part('two', 0, lambda: iter(made[half:])),
    ),
    split=split,
    bad=budget,
  )


lists = st.lists(st.integers(MISSING, 6), max_size=3)
examples_of_lists = st.lists(st.tuples(lists, lists), min_size=2, max_size=20)


@given(examples_of_lists, st.lists(st.integers(0, 30), max_size=4), st.data())
def test_lists_of_ids_against_a_counter(examples, chunks, data):
  held_out = data.draw(st.integers(1, len(examples) - 1))
  min_count = data.draw(st.integers(1, 3))
  padded = [[(ids + [END] * 3)[:3] for ids in pair] for pair in examples]
  raw = raw_of(np.array(padded, np.int64), chunks, held_out)
  made = in_memory(raw, min_count=min_count)
  split = len(examples) - held_out
  batches = next(made.train(split)), *made.test(held_out)
  assert batches[0].dense[:, 0].tolist() == list(range(split))
  assert batches[1].dense[:, 0].tolist() == list(range(split, len(examples)))
  lookups = np.concatenate([batch.lookups for batch in batches])
  first = 0
  for feature, (name, size) in enumerate(made.sizes.items()):
    assert name == TABLES[feature]
    counts = collections.Counter({MISSING: 0})
    for pair in examples[:split]:
      counts.update(pair[feature])
    kept = [i for i in counts if counts[i] >= min_count or i == MISSING]
    kept.sort(key=lambda i: (-counts[i], i))
    row_of = {id_: row for row, id_ in enumerate(kept, start=1)}
    assert size == 1 + len(kept)
    expected = [
      [first + row_of.get(i, 0) for i in pair[feature]]
      + [-1] * (3 - len(pair[feature]))
      for pair in examples
    ]
    assert lookups[:, feature].tolist() == expected
    first += size


def test_one_id_each_hashed_and_shuffled():
  ids = np.arange(60).reshape(30, 2) % 7
  made = in_memory(raw_of(ids, [4, 19], 10), hash_rows=5, shuffle_seed=1)
  assert [*made.sizes.values()] == [5, 5]
  assert made.base_rate == pytest.approx(7 / 20)
  assert made.train_examples == 20
  train = next(made.train(20))
  assert train.lookups.shape == (20, 2)
  order = train.dense[:, 0].astype(int)
  assert sorted(order) == list(range(20))
  assert order.tolist() != list(range(20))
  in_order = next(in_memory(raw_of(ids, [], 10), hash_rows=5).train(20))
  assert (train.lookups == in_order.lookups[order]).all()
  assert (train.labels == in_order.labels[order]).all()


def test_the_name_tells_ranges_and_skipped_lines():
  ids = np.zeros((1200, 2), np.int64)
  made = in_memory(raw_of(ids, [], 100, skipped=1234))
  assert made.name == (
    'some, examples 1-1,100 to train, examples 1,101-1,200 to test,'
    ' 1,234 bad lines skipped'
  )


@pytest.mark.parametrize(
  ('held_out', 'named'),
  [(0, 'got 5 to train, 0 to test'), (5, 'got 0 to train, 5 to test')],
)
def test_both_parts_must_have_examples(held_out, named):
  with pytest.raises(UserError, match=named):
    in_memory(raw_of(np.zeros((5, 2), np.int64), [], held_out))
