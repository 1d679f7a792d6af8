"""Taobao's log: points, drawn items and sequences, against brute force."""

import collections
import gzip
import random

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import END
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.formats.taobao import (
  Catalogue,
  choose_points,
  draw_negatives,
  Events,
  TABLES,
  taobao_raw,
)
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.tables import Feature, offsets
from tests.formats.text_formats import Bad, FORMATS, SHARED
from tests.support.packed_folders import prepared

SAMPLE = SHARED / 'taobao' / 'UserBehavior.csv.gz'
needs_sample = pytest.mark.skipif(not SAMPLE.exists(), reason='no sample')
MASK = 2**64 - 1


def log(count, users=30, items=60, seed=0):
  """Lines in the order of time, some of one second; skewed users and items."""
  rng = random.Random(seed)
  lines, time = [], 1_511_658_000
  for _ in range(count):
    time += rng.randrange(3)
    user = int(rng.paretovariate(0.8)) % users + 4_000_000_000
    item = int(rng.paretovariate(0.5)) % items + 2**32 - items
    word = rng.choice(('pv', 'cart', 'fav', 'buy'))
    lines.append(f'{user},{item},{item % 7 + 2_000_000},{word},{time}')
  return lines


def write(path, lines):
  path.write_bytes(gzip.compress(FORMATS['taobao'].text(lines), 1))
  return path


def hashed(key: int, number: int) -> int:
  """splitmix64 in Python's integers."""
  x = (key + (number + 1) * 0x9E3779B97F4A7C15) & MASK
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
  return x ^ (x >> 31)


def brute_force(path, *, steps, per_user, min_history, test_share, seed=0, **_):
  """Ids [n, 3, L] and labels of both parts, event by event; ids to count."""
  rows = FORMATS['taobao'].slow_rows(path.read_bytes()).values()
  by = collections.defaultdict(list)
  for user, item, category, _, time in (r for r in rows if type(r) is not Bad):
    by[user].append((time, item, category))
  place, points = 0, []
  for user in sorted(by):
    history = by[user] = sorted(by[user], key=lambda e: e[0])
    able = range(min_history, len(history))
    wanted, left = min(per_user, len(able)), len(able)
    for at in able:
      number = place + at
      if (hashed(hashed(seed, 0), number) >> 11) / 2**53 * left < wanted:
        points.append((history[at][0], user, at, number))
        wanted -= 1
      left -= 1
    place += len(history)
  points.sort(key=lambda p: p[0])
  start = points[len(points) - max(1, round(len(points) * test_share))][0]

  category_of, early, known = {}, {}, []
  for user in sorted(by):
    for time, item, category in by[user]:
      if time < start:
        known.append((user, item, category))
        early.setdefault(item, category)
      category_of.setdefault(item, category)

  pools = [(found, sorted(found)) for found in (early, category_of)]

  def drawn(user, number, pool, items):
    mine = {e[1] for e in by[user]}
    for attempt in range(64):
      at = hashed(hashed(seed, 1), number * 64 + attempt) % len(items)
      if items[at] not in mine:
        return items[at], pool[items[at]]
    raise AssertionError('give a test log with more items')

  parts = ([], []), ([], [])
  for time, user, at, number in points:
    history = by[user][max(0, at - steps) : at]
    negative = drawn(user, number, *pools[time >= start])
    ids, labels = parts[time >= start]
    for candidate, label in ((by[user][at][1:], 1.0), (negative, 0.0)):
      pairs = [*(e[1:] for e in history), candidate]
      columns = ([user] * len(pairs), *zip(*pairs, strict=True))
      ids.append([[END] * (steps + 1 - len(c)) + [*c] for c in columns])
      labels.append(label)
  return parts, known


def check_log(path, *, min_count, **how):
  """Chunks, and rows in memory, as by brute force."""
  parts, known = brute_force(path, **how)
  raw = taobao_raw(path, **how)
  for part, (ids, labels) in zip(raw.parts, parts, strict=True):
    chunks = zip(*(chunk[:3] for chunk, _ in part.chunks()), strict=True)
    told, dense, found = map(np.concatenate, chunks)
    np.testing.assert_array_equal(told, labels)
    np.testing.assert_array_equal(found, np.reshape(ids, found.shape))
    places = np.arange(how['steps'] + 1, dtype=np.float32) / (how['steps'] + 1)
    np.testing.assert_allclose(dense, np.tile(places, (len(ids), 1)), 1e-6)
  data = in_memory(raw, min_count=min_count)
  rows = []
  for ids in zip(*known, strict=True):
    seen = collections.Counter(ids)
    kept = sorted(i for i in seen if seen[i] >= min_count)
    kept.sort(key=lambda i: -seen[i])
    rows.append({END: -1} | {id_: row for row, id_ in enumerate(kept, start=1)})
  assert list(data.sizes) == list(TABLES)
  assert [*data.sizes.values()] == [len(of) for of in rows]
  feature = {'combiner': 'none', 'max_length': how['steps'] + 1}
  assert data.features == {name: Feature(name, **feature) for name in TABLES}
  first = offsets([*data.sizes.values()])[:-1, None]
  sizes = [len(labels) for _, labels in parts]
  for source, (ids, _) in zip(
    (data.train(sizes[0]), data.test(sizes[1])), parts, strict=True
  ):
    lookups = next(source).lookups
    local = np.where(lookups < 0, -1, lookups - first)
    expected = [
      [[rows[f].get(i, 0) for i in ids] for f, ids in enumerate(example)]
      for example in ids
    ]
    np.testing.assert_array_equal(local, expected)


@pytest.mark.parametrize('seed', [0, 1, 7])
@pytest.mark.parametrize('min_count', [1, 3])
def test_sequences_are_those_of_brute_force(tmp_path, seed, min_count):
  path = write(tmp_path / 'log', [*log(600, items=400, seed=seed), 'bad'])
  how = {'steps': 6, 'per_user': 5, 'min_history': 2, 'test_share': 0.3}
  check_log(path, **how, min_count=min_count, seed=seed, bad_lines=1)


@needs_sample
def test_sequences_of_the_real_log_are_those_of_brute_force():
  how = {'steps': 5, 'per_user': 2, 'min_history': 2, 'test_share': 0.2}
  check_log(SAMPLE, **how, min_count=2, seed=3, bad_lines=1)
  with pytest.raises(UserError, match=r"got '15' .*line 96169, column time"):
    in_memory(taobao_raw(SAMPLE, min_history=1))


def test_packed_sequences_are_those_in_memory(tmp_path):
  """Row by row, though rows are numbered in another order."""
  path = write(tmp_path / 'log', [*log(1500, items=400), 'bad'])
  raw = taobao_raw(path, steps=5, min_history=2, bad_lines=1)
  # Of ids that training has not, the rows would be those of unknown ids.
  again = raw.parts[0]._replace(name='again')
  both = raw._replace(parts=(raw.parts[0], again))
  # Bad lines count with the first part, as the second reads no other ones.
  assert prepared(both, tmp_path / 'data').manifest['bad_lines'] == 1
  packed, held = packed_dataset(tmp_path / 'data'), in_memory(raw)
  assert (packed.features, packed.train_examples) == (
    *(held.features, held.train_examples),
  )
  sources = (packed.train(held.train_examples), held.train(held.train_examples))
  ours, theirs = map(next, sources)
  sources[0].close()
  np.testing.assert_array_equal(ours.labels, theirs.labels)
  np.testing.assert_array_equal(ours.lookups < 0, theirs.lookups < 0)
  unknown = {*offsets([*held.sizes.values()])[:-1].tolist()}  # drawn items
  pairs = {*zip(ours.lookups.flat, theirs.lookups.flat, strict=True)}
  assert len(pairs) == len({a for a, _ in pairs})
  assert len(pairs) - sum(b in unknown for _, b in pairs) == len(
    {b for _, b in pairs} - unknown
  )


@settings(max_examples=60)
@given(
  st.lists(st.integers(1, 30), min_size=1, max_size=8),
  st.integers(1, 8),
  st.integers(1, 12),
  st.integers(0, 2**40),
)
def test_points_are_as_many_as_wanted(counts, per_user, least, seed):
  starts = np.concatenate([[0], np.cumsum(counts)])
  how = {'per_user': per_user, 'min_history': least}
  points = choose_points(starts, **how, seed=seed)
  users = np.searchsorted(starts, points, 'right') - 1
  assert (np.diff(points) > 0).all()
  assert (points - starts[users] >= least).all()
  wanted = [min(per_user, max(0, count - least)) for count in counts]
  assert np.bincount(users, minlength=len(counts)).tolist() == wanted


def test_choices_and_draws_are_even():
  """Every able event, and every item never touched, is as likely."""
  starts = np.arange(0, 20_001, 20)
  points = choose_points(starts, per_user=3, min_history=4)
  chosen = np.bincount(points % 20, minlength=20)
  assert not chosen[:4].any()
  # 3000 over 16 places are 187 each; five standard deviations are 62.
  assert np.ptp(chosen[4:]) < 124
  zeros = np.zeros(20_000, np.uint32)
  # Users touch items 0 to 19 of 25; 3000 draws of 5 are 600 each.
  touched = np.tile(np.arange(20, dtype=np.uint32), 1000)
  events = Events(zeros, touched, zeros, zeros)
  items = np.arange(25, dtype=np.uint32)
  known = Catalogue(items, items + 7)
  drawn, categories = draw_negatives(events, starts, points, known)
  np.testing.assert_array_equal(categories, drawn + 7)
  counts = np.bincount(drawn, minlength=25)
  assert not counts[:20].any()
  assert np.ptp(counts[20:]) < 220
  other = draw_negatives(events, starts, points, known, seed=1).items
  assert (drawn != other).mean() > 0.5


def test_a_rare_item_is_found_in_turn():
  zeros = np.zeros(300, np.uint32)
  touched = np.delete(np.arange(301, dtype=np.uint32), 123)
  events, starts = Events(zeros, touched, zeros, zeros), np.array([0, 300])
  items = np.arange(301, dtype=np.uint32)
  points = np.arange(10, 300)
  known = Catalogue(items, items)
  assert (draw_negatives(events, starts, points, known).items == 123).all()
  with pytest.raises(UserError, match=r'never touched.* got 300 items.*user 0'):
    draw_negatives(events, starts, points, Catalogue(touched, touched))
