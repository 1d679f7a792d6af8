"""The order of packed examples as plans, without any data."""

import itertools

import numpy as np

from slipstream_jax.packed import order


def test_a_group_mixes_whole_blocks():
  """What two epochs of a large data set read, without any data."""
  each = order.Order(50, 10_050, 8, True, 1, 1, 3, block=64, group=700)
  epochs = []
  for epoch in range(2):
    seen = []
    for group in range(each.groups):
      begin, end = each.bounds(group)
      runs = list(order.runs(each, epoch, group))
      examples = np.concatenate([np.arange(*run) for run in runs])
      assert len(examples) == end - begin <= 700
      assert max(last - first for first, last in runs) <= 64
      # Whole blocks but for the ends of a group: each costs a seek.
      assert len(runs) <= (end - begin) // 64 + 3
      where = order.places(each, epoch, group)
      assert np.sort(where).tolist() == list(range(len(examples)))
      # Neighbours are torn apart.
      assert (np.abs(np.diff(where)) == 1).mean() < 0.02
      seen.append(examples)
      for place in (begin, end - 1):
        assert each.group_of(place) == group
    read = np.concatenate(seen)
    assert len(np.unique(read)) == each.examples == 3333
    epochs.append(read)
  # Each epoch has an order of its blocks, and a choice for this shard.
  assert len(np.intersect1d(*epochs)) < 2000


def test_every_order_is_equally_likely():
  counts = dict.fromkeys(itertools.permutations(range(4)), 0)
  for key in range(12_000):
    values = np.arange(4)
    order.shuffle(np.uint64(order._key(key)), values)
    counts[tuple(values.tolist())] += 1
  # 500 each; five standard deviations are 110.
  assert min(counts.values()) > 390
  assert max(counts.values()) < 610
