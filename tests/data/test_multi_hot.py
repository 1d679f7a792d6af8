"""Bags of several lookups in place of one, as MLPerf's DLRM-DCNv2 has them."""

import numpy as np
import pytest

from slipstream_jax.data.multi_hot import multi_hot
from slipstream_jax.errors import UserError
from slipstream_jax.synthetic.proxies import proxy_dataset
from slipstream_jax.tables import tables_of

ROWS, LENGTHS = (9, 500, 30), (3, 1, 40)


def test_a_row_has_one_bag_of_its_table_everywhere():
  plain = proxy_dataset('kaggle', rows=ROWS, test_examples=50)
  data = multi_hot(plain, LENGTHS)
  tables = tables_of(data.sizes, data.features)
  assert tables.num_columns == sum(LENGTHS)
  bags = {}
  for make in ('train', 'test', 'profile'):
    source, before = getattr(data, make)(64), getattr(plain, make)(64)
    state = source.get_state()
    batch, one = next(source), next(before)
    np.testing.assert_array_equal(batch.labels, one.labels)
    for column, (name, first) in enumerate(tables.first_rows.items()):
      bag = batch.lookups[:, tables.columns[name]]
      rows = one.lookups[:, column]
      np.testing.assert_array_equal(bag[:, 0], rows)
      there = bag[rows >= 0]
      assert ((there >= first) & (there < first + ROWS[column])).all()
      assert (bag[rows < 0] == -1).all()
      for row, own in zip(
        rows[rows >= 0].tolist(), there.tolist(), strict=True
      ):
        assert bags.setdefault(row, own) == own
    source.set_state(state)
    np.testing.assert_array_equal(next(source).lookups, batch.lookups)
  drawn = np.concatenate([bag[1:] for bag in bags.values() if len(bag) == 40])
  share = np.bincount(drawn - sum(ROWS[:2]), minlength=30) / len(drawn)
  assert share.max() < 3 / 30  # about uniform


def test_lengths_that_do_not_fit():
  plain = proxy_dataset('kaggle', rows=ROWS)
  for lengths in ((1, 2), (1, 0, 1)):
    with pytest.raises(UserError, match='a length of at least 1 for each'):
      multi_hot(plain, lengths)
  with pytest.raises(UserError, match='a length of at least 1 for each'):
    multi_hot(multi_hot(plain, LENGTHS), LENGTHS)
