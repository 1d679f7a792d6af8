"""Chains: read, merged, consolidated, kept and dropped, they are one table."""

import json
import zlib

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.checkpoint.chain import (
  check_exact,
  consolidate,
  copy_as_base,
  drop_later,
  find_chains,
  kept_steps,
  merged,
  merged_rows,
  next_on,
  prune,
  read_chain,
)
from slipstream_jax.checkpoint.manifest import (
  file_name,
  Manifest,
  name_of,
  new_id,
  publish,
  read_manifest,
  row_key,
  steps_in,
)
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.checkpoint.row_file import concatenate
from slipstream_jax.errors import UserError
from tests.checkpoint import small


@given(sources=st.lists(small.NEAR_ROWS.flatmap(small.cut), max_size=5))
def test_merging_is_a_dictionary_that_is_updated(sources):
  pieces = [
    [small.piece('rows', part, salt) for part in parts if part]
    for salt, parts in enumerate(sources)
  ]
  meant = {}
  for source in pieces:
    meant |= small.table_of(source)
  result = list(merged([iter(source) for source in pieces]))
  rows = [row for piece in result for row in piece.rows.tolist()]
  assert rows == sorted(meant)
  assert small.table_of(result) == meant
  assert all(len(piece.rows) for piece in result)


@given(
  saves=st.lists(small.NEAR_ROWS, min_size=1, max_size=5),
  size=st.sampled_from([60, 300, 1 << 20]),
)
def test_a_chain_is_a_dictionary_and_so_is_its_base(
  tmp_path_factory, saves, size
):
  place = open_place(tmp_path_factory.mktemp('place'))
  chain, meant = (), {}
  with small.pieces_of(size):
    for step, rows in enumerate(saves):
      parent = step - 1 if step else None
      chain = small.save(place, chain, parent, step, rows)
      meant |= small.expected('lazy_adam', rows, step)
    assert small.restored(place, chain) == meant
    assert small.table_of(merged_rows(place, chain, 'g')) == meant
    base = consolidate(place, chain)
    assert small.restored(place, (base,)) == meant
    assert base.parent is None
    assert (base.step, base.payload) == (chain[-1].step, chain[-1].payload)
    assert base.identity == chain[-1].identity
    prune(place, keep=1)
    names = place.names()
    assert consolidate(place, (base,)) == base
    assert place.names() == names
  assert find_chains(place).chains == [(base,)]
  assert small.restored(place, (base,)) == meant
  # The same file as one that a base of these rows would be.
  assert base.rows['g'].rows == len(meant)


def test_checkpoints_from_before_ids_are_read_and_built_on(tmp_path):
  place = open_place(tmp_path)
  small.save(place, (), None, 1, [1, 2])
  body = json.loads(place.read(name_of(1), 1 << 20))['body']
  assert body.pop('id') == ''
  text = json.dumps(body).encode()
  head = b'{"version":1,"crc32":%d,"body":' % zlib.crc32(text)
  place.write(name_of(1), [head, text, b'}\n'])
  chain = small.save(place, read_chain(place, 1), 1, 2, [2, 3])
  assert find_chains(place).chains == [chain]
  # Of another run's, which has an id, it is no child.
  publish(place, chain[0]._replace(id=new_id()))
  [skip] = find_chains(place, steps=[2]).skipped
  assert 'a step 1 of another history' in str(skip.why)


def test_a_group_may_have_a_row_file_per_owner(tmp_path):
  place = open_place(tmp_path)
  first = small.save(place, (), None, 1, [1, 2, 3])
  rows = {}
  for owner, numbers in ((0, [2, 4]), (3, [1, 5])):
    name = file_name('increment', 2, f'{row_key("g", owner)}.rows')
    facts = small.write(place, name, 'lazy_adam', numbers, salt=2)
    rows[row_key('g', owner)] = facts._replace(owner=owner)
  chain = next_on(first, 1, step=2, rows=rows, files={}, payload={})
  publish(place, chain[-1])
  # Libraries that do not know of owners refuse this version.
  assert place.read(name_of(2), 99).startswith(b'{"version":3,')
  assert place.read(name_of(1), 99).startswith(b'{"version":2,')
  assert find_chains(place).chains == [chain]
  assert chain[-1].groups == {'g'}
  meant = small.expected('lazy_adam', [1, 2, 3], 1)
  meant |= small.expected('lazy_adam', [1, 2, 4, 5], 2)
  assert small.restored(place, chain) == meant
  base = consolidate(place, chain)
  assert small.table_of(merged_rows(place, (base,), 'g')) == meant
  assert base.rows['g'].owner == 0


def test_a_newer_manifest_is_refused(tmp_path):
  place = open_place(tmp_path)
  small.save(place, (), None, 1, [1])
  data = place.read(name_of(1), 1 << 20)
  place.write(name_of(1), [data.replace(b'"version":2', b'"version":4')])
  with pytest.raises(UserError, match=r'version 4, where .* reads up to 3'):
    read_manifest(place, 1)


def test_links_must_be_of_the_same_arrays(tmp_path):
  place = open_place(tmp_path)
  chain = small.save(place, (), None, 1, [1], kind='rows')
  chain = small.save(place, chain, 1, 2, [1], kind='lazy_adam')
  with pytest.raises(UserError, match='all links of a chain must have'):
    consolidate(place, chain)
  assert find_chains(place).chains == [chain]


def test_a_parent_of_another_history_is_none(tmp_path):
  place = open_place(tmp_path)
  chain = small.save(place, (), None, 1, [1])
  chain = small.save(place, chain, 1, 2, [1])
  chain = small.save(place, chain, 2, 3, [1])
  other = Manifest(2, None, chain[1].rows, {}, {'step': 'anew'})
  publish(place, other)
  with pytest.raises(UserError, match='step 3 must be on the step 2'):
    read_chain(place, 3)
  chains, [skip] = find_chains(place)
  assert chains == [(other,)]
  assert skip.step == 3


def test_later_checkpoints_are_dropped_when_a_run_goes_back(tmp_path):
  place = open_place(tmp_path)
  chain = small.save(place, (), None, 1, [1])
  small.save(place, chain, 1, 2, [1])
  drop_later(place, 1)
  assert find_chains(place).chains == [chain]
  assert steps_in(place) == [1]


def test_the_newest_are_kept_with_what_they_are_on(tmp_path):
  place = open_place(tmp_path)
  chain, chains = (), []
  for step in range(6):
    parent = None if step in (0, 3) else step - 1
    chain = small.save(place, chain, parent, step, [step, 9])
    chains.append(chain)
  tables = [small.restored(place, chain) for chain in chains]
  for keep, first in ((5, 0), (3, 3), (2, 3), (1, 3)):
    prune(place, keep=keep)
    newest = find_chains(place, most=keep).chains
    assert newest == chains[::-1][:keep]
    for step in range(6 - keep, 6):
      assert small.restored(place, chains[step]) == tables[step]
    manifests = place.names('manifest-')
    assert manifests == [name_of(step) for step in range(first, 6)]
  # Of a link that is no checkpoint of its own any more only rows are kept.
  assert place.names('file-') == [file_name('file', 5, 'dense')]


def test_what_was_saved_to_stay_is_never_dropped(tmp_path):
  place = open_place(tmp_path)
  chain, tables = (), []
  for step in range(9):
    before, parent = chain, None if step in (0, 6) else step - 1
    chain = small.save(place, chain, parent, step, [step, 9])
    if step in (2, 5):
      kept = chain[-1]._replace(payload={'kept': True})
      chain = (*before, kept) if parent is not None else (kept,)
      publish(place, kept)
    tables.append(small.restored(place, chain))
    prune(place, keep=1)
  assert kept_steps(place) == [2, 5]
  for step in (2, 5, 8):
    (found,) = find_chains(place, steps=[step]).chains
    assert small.restored(place, found) == tables[step]
  assert not find_chains(place, steps=[4]).chains  # a link alone


@pytest.mark.parametrize('codec', ['int8', 'int2'])
def test_quantized_copies_are_refused_by_who_goes_on(tmp_path, codec):
  place = open_place(tmp_path / 'run')
  chain = small.save(place, (), None, 1, range(50))
  chain = small.save(place, chain, 1, 2, range(7))
  check_exact(chain, place.url)
  into = open_place(tmp_path / 'archive')
  copy = copy_as_base(place, chain, into, codec)
  assert find_chains(into).chains == [(copy,)]
  # The state is what it was, to the bit; rows are near.
  own = concatenate([*merged_rows(place, chain, 'g')])
  lossy = concatenate([*merged_rows(into, (copy,), 'g')])
  np.testing.assert_array_equal(lossy.rows, own.rows)
  np.testing.assert_allclose(
    lossy.values['rows'],
    own.values['rows'],
    atol=0.2 if codec == 'int8' else 17,
  )
  for name in ('state_0', 'state_1'):
    np.testing.assert_array_equal(lossy.values[name], own.values[name])
  with pytest.raises(UserError, match=f'got codec {codec} at step 2'):
    check_exact((copy,), into.url)
  with pytest.raises(UserError, match='full precision'):
    copy_as_base(into, (copy,), open_place(tmp_path / 'again'))
  with pytest.raises(UserError, match='a copy needs a place of its own'):
    copy_as_base(place, chain, open_place(tmp_path / 'run'), codec)


def test_groups_are_apart_and_may_be_without_rows(tmp_path):
  place, chain = open_place(tmp_path), ()
  for step, groups in (1, {'a': [1, 2], 'b': []}), (2, {'c': [7]}):
    rows = {
      group: small.write(place, file_name('base', step, group), 'rows', ids)
      for group, ids in groups.items()
    }
    parent = step - 1 or None
    values = {'rows': rows, 'files': {}, 'payload': {}}
    chain = next_on(chain, parent, step=step, **values)
    publish(place, chain[-1])
  base = consolidate(place, chain)
  assert {g: f.rows for g, f in base.rows.items()} == {'a': 2, 'b': 0, 'c': 1}
  tables = small.table_of(merged_rows(place, (base,), 'a'))
  assert tables == small.expected('rows', [1, 2], 0)


@pytest.mark.parametrize(
  'wrong',
  [
    {'step': -1},
    {'rows': {'g': ('../a', 1, 2, 3)}},
    {'payload': {'array': np.ones(3)}},
    {'codec': 'zip'},
  ],
  ids=lambda wrong: next(iter(wrong)),
)
def test_only_good_manifests_are_published(tmp_path, wrong):
  place = open_place(tmp_path)
  chain = small.save(place, (), None, 1, [1])
  names = place.names()
  if 'rows' in wrong:
    wrong = {'rows': {'g': type(chain[0].rows['g'])(*wrong['rows']['g'])}}
  with pytest.raises(UserError, match='manifest must be'):
    publish(place, chain[0]._replace(**{'step': 2} | wrong))
  assert place.names() == names


def test_a_manifest_is_read_as_it_was_published(tmp_path):
  place = open_place(tmp_path)
  payload = {7: [1.5, None, float('inf')], 'ü': {'10': 1, '9': (1, 2)}}
  meant = Manifest(3, None, {}, {}, payload, 'int8', (4, 5))
  publish(place, meant)
  read = read_manifest(place, 3)
  assert read.identity == meant.identity
  read_payload = {'7': [1.5, None, float('inf')], 'ü': {'10': 1, '9': [1, 2]}}
  assert read == meant._replace(payload=read_payload)
