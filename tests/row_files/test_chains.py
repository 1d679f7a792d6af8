"""Chains of row files: what was saved comes back, whichever way it is kept."""

import numpy as np

from slipstream_jax.row_files.chain import find_chains, next_on, read_rows
from slipstream_jax.row_files.consolidate import consolidate
from slipstream_jax.row_files.layout import leaves_of
from slipstream_jax.row_files.manifest import file_name, publish
from slipstream_jax.row_files.pieces import Piece
from slipstream_jax.row_files.places import open_place
from slipstream_jax.row_files.retention import prune
from slipstream_jax.row_files.writer import write_row_file


def save(place, chain, parent, step, rows):
  values = {
    'rows': np.float32(rows)[:, None] + step * np.ones(3, np.float32)[None],
    'state_0': np.int32(rows),
  }
  kind = 'base' if parent is None else 'increment'
  facts = write_row_file(
    place,
    file_name(kind, step, 'g'),
    leaves_of(values),
    [Piece(np.int64(rows), values)],
  )
  chain = next_on(
    chain,
    parent,
    step=step,
    rows={'g': facts},
    files={},
    payload={'at': step},
  )
  publish(place, chain[-1])
  return chain


def test_a_chain_comes_back(tmp_path):
  place = open_place(tmp_path)
  chain = save(place, (), None, 10, [1, 5, 700])
  chain = save(place, chain, 10, 20, [5, 6])
  search = find_chains(place)
  assert search.chains == [chain]
  table = {}
  for rows, values in read_rows(place, chain, 'g'):
    table |= dict(zip(rows.tolist(), values['rows'][:, 0], strict=True))
  assert table == {1: 11, 5: 25, 6: 26, 700: 710}
  base = consolidate(place, chain)
  assert find_chains(place).chains == [(base,)]
  assert len(prune(place, keep=1)) == 3
  [(rows, values)] = read_rows(place, (base,), 'g')
  np.testing.assert_array_equal(rows, [1, 5, 6, 700])
  np.testing.assert_array_equal(values['rows'][:, 2], [11, 25, 26, 710])
