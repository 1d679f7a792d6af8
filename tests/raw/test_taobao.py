"""Taobao's log: lines, series of events, data sets, and the real sample."""

import collections
import gzip
import itertools
import json
import pathlib
import random

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from configs import taobao as config_file
from experiments.common import record
from slipstream_jax.data.base import BatchSource
from slipstream_jax.errors import UserError
from slipstream_jax.raw import taobao_log, text
from slipstream_jax.raw.sequences import (
  by_user,
  choose_points,
  draw_negatives,
  Events,
  user_starts,
)
from slipstream_jax.raw.taobao import taobao_text
from tests.support.runs import run_job, SHARED, summary_of

SAMPLE = SHARED / 'taobao' / 'UserBehavior.csv.gz'
needs_sample = pytest.mark.skipif(
  not SAMPLE.exists(), reason=f'shared samples absent: {SAMPLE}'
)
WORDS = ('pv', 'cart', 'fav', 'buy')


def slow_parse(data: bytes) -> list[tuple | None]:
  """Fields of every line, None for a bad one; the fast parser's oracle."""

  def line_fields(line: str) -> tuple | None:
    fields = line.split(',')
    if len(fields) != 5 or fields[3] not in WORDS:
      return None
    numbers = fields[:3] + fields[4:]
    if not all(n.isascii() and n.isdigit() and len(n) <= 10 for n in numbers):
      return None
    user, item, category, time = map(int, numbers)
    if max(user, item, category) >= 2**32 or not 10**9 <= time < 2**31:
      return None
    return user, item, category, fields[3], time

  lines = data.decode('latin-1').replace('\r\n', '\n').split('\n')
  return [line_fields(x) for x in (lines[:-1] if lines[-1] == '' else lines)]


def fast_parse(path: pathlib.Path, block_bytes: int) -> list[tuple | None]:
  found: list[tuple | None] = []
  for block in text.read_blocks(path, block_bytes):
    *ids, words, times, good = taobao_log.parse(block)
    columns = (*(c.tolist() for c in ids), [WORDS[w] for w in words])
    rows = zip(*columns, times.tolist(), strict=True)
    found += [row if g else None for row, g in zip(rows, good, strict=True)]
  return found


numbers = st.integers(0, 2**32 + 3).map(str)
times = st.integers(10**9 - 2, 2**31 + 1).map(str)
junk = st.text('0123456789,pv-\t x', max_size=14)
good_lines = st.tuples(
  numbers, numbers, numbers, st.sampled_from([*WORDS, 'pvv', 'PV', '']), times
).map(','.join)
any_lines = good_lines | st.tuples(good_lines, junk).map(''.join) | junk


@settings(max_examples=150, deadline=None)
@given(
  st.lists(any_lines, min_size=1, max_size=6),
  st.sampled_from(['\n', '\r\n']),
  st.sampled_from(['', '\n']),
  st.integers(1, 200),
)
def test_every_field_of_any_lines_in_blocks_of_any_size(
  tmp_path_factory, lines, end, last, block_bytes
):
  data = (end.join(lines) + last).encode()
  path = tmp_path_factory.getbasetemp() / 'any.csv'
  path.write_bytes(data)
  if data:
    assert fast_parse(path, block_bytes) == slow_parse(data)


def log(count: int, users: int = 30, items: int = 60, seed: int = 0) -> str:
  """Lines in the order of time, some of one second; skewed users and items."""
  rng = random.Random(seed)
  lines, time = [], 1_511_658_000
  for _ in range(count):
    time += rng.randrange(3)
    user = int(rng.paretovariate(0.8)) % users + 4_000_000_000
    item = int(rng.paretovariate(0.5)) % items
    word = rng.choice(WORDS)
    lines.append(f'{user},{item},{item % 7 + 2_000_000},{word},{time}')
  return '\n'.join(lines) + '\n'


def write(path: pathlib.Path, data: str) -> pathlib.Path:
  path.write_bytes(gzip.compress(data.encode(), 1))
  return path


MASK = 2**64 - 1


def hashed(key: int, number: int) -> int:
  """splitmix64 in Python's integers."""
  x = (key + (number + 1) * 0x9E3779B97F4A7C15) & MASK
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
  return x ^ (x >> 31)


def brute_force(
  data, *, steps, per_user, min_history, test_share, min_count, seed
):
  """Lookups (local rows) and labels of both parts, one event at a time."""
  events = [fields for fields in slow_parse(data) if fields]
  by = collections.defaultdict(list)
  for user, item, category, _, time in events:
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

  category_of, known = {}, []
  for user in sorted(by):
    for time, item, category in by[user]:
      if time < start:
        known.append((user, item, category))
      category_of.setdefault(item, category)
  first_known: dict[int, int] = {}
  for _, item, category in known:
    first_known.setdefault(item, category)
  rows = []
  for ids in zip(*known, strict=True):
    seen = collections.Counter(ids)
    kept = [i for i in seen if seen[i] >= min_count]
    kept.sort(key=lambda i: (-seen[i], i))
    rows.append({id_: row for row, id_ in enumerate(kept, start=1)})

  def drawn(user, number, categories, items):
    mine = {e[1] for e in by[user]}
    for attempt in range(64):
      at = hashed(hashed(seed, 1), number * 64 + attempt) % len(items)
      if items[at] not in mine:
        return items[at], categories[items[at]]
    raise AssertionError('give a test log with more items')

  pools = [(found, sorted(found)) for found in (first_known, category_of)]
  parts = ([], [])
  for time, user, at, number in points:
    test = time >= start
    history = by[user][max(0, at - steps) : at]
    pad = [None] * (steps - len(history))
    negative = drawn(user, number, *pools[test])
    for candidate, label in ((by[user][at][1:], 1.0), (negative, 0.0)):
      pairs = [*(e[1:] for e in history), candidate]
      columns = ([user] * len(pairs), *zip(*pairs, strict=True))
      lookups = [
        [-1] * len(pad) + [known_rows.get(i, 0) for i in ids]
        for ids, known_rows in zip(columns, rows, strict=True)
      ]
      parts[test].append((lookups, label))
  sizes = [len(known_rows) + 1 for known_rows in rows]
  return parts, sizes, start


def drain(source: BatchSource, sizes, limit=None):
  """Local lookups, labels and dense features of inputs; no padding."""
  batches = list(itertools.islice(source, limit))
  found = [np.concatenate(a) for a in zip(*batches, strict=True)]
  dense, lookups, labels = (a[found[3] > 0] for a in found[:3])
  offsets = np.cumsum([0, *sizes[:-1]])[None, :, None]
  return np.where(lookups < 0, -1, lookups - offsets), labels, dense


def assert_as_by_brute_force(path, data, **arguments):
  dataset = taobao_text(path, **arguments)
  arguments.pop('bad_lines', None)
  expected, sizes, start = brute_force(data, **arguments)
  length = arguments['steps'] + 1
  assert f'before time {start} to train' in dataset.name
  assert [t.name for t in dataset.tables] == ['user', 'item', 'category']
  assert [t.rows for t in dataset.tables] == sizes
  assert {t.length for t in dataset.tables} == {length}
  assert dataset.train_inputs == len(expected[0])
  size = 50
  whole = len(expected[0]) // size
  sources = (dataset.train(size), whole), (dataset.test(size), None)
  for part, (source, limit) in zip(expected, sources, strict=True):
    lookups, labels, dense = drain(source, sizes, limit)
    count = len(part) if limit is None else limit * size
    assert len(labels) == count > 0
    assert labels.tolist() == [label for _, label in part[:count]]
    wanted = np.array([ids for ids, _ in part[:count]])
    np.testing.assert_array_equal(lookups, wanted)
    places = np.arange(length) / length
    np.testing.assert_allclose(dense, np.tile(places, (count, 1)), rtol=1e-6)


@pytest.mark.parametrize('seed', [0, 1, 7])
@pytest.mark.parametrize('min_count', [1, 3])
def test_series_equal_those_of_brute_force(tmp_path, seed, min_count):
  data = log(600, items=400, seed=seed)
  assert_as_by_brute_force(
    write(tmp_path / 'log.csv', data),
    data.encode(),
    steps=6,
    per_user=5,
    min_history=2,
    test_share=0.3,
    min_count=min_count,
    seed=seed,
  )


def test_no_series_looks_ahead_and_halves_differ_in_the_candidate_only(
  tmp_path,
):
  data = log(800, items=300)
  path = write(tmp_path / 'log.csv', data)
  dataset = taobao_text(path, steps=5, per_user=3, min_history=3)
  sizes = [table.rows for table in dataset.tables]
  for source, limit in ((dataset.train(20), 5), (dataset.test(20), None)):
    lookups, labels, _ = drain(source, sizes, limit)
    assert labels.tolist() == [1.0, 0.0] * (len(labels) // 2)
    own, other = lookups[::2], lookups[1::2]
    np.testing.assert_array_equal(own[..., :-1], other[..., :-1])
    np.testing.assert_array_equal(own[:, 0], other[:, 0])
    assert (own[:, 1, -1] != other[:, 1, -1]).all()
    # Histories have at least 3 events, and padding stands before them.
    there = lookups[:, 1] >= 0
    assert there[:, -4:].all()
    assert (np.diff(there.astype(int), axis=1) >= 0).all()
    np.testing.assert_array_equal(there, lookups[:, 0] >= 0)
    np.testing.assert_array_equal(there, lookups[:, 2] >= 0)


@settings(max_examples=60, deadline=None)
@given(
  st.lists(st.integers(1, 30), min_size=1, max_size=8),
  st.integers(1, 8),
  st.integers(1, 12),
  st.integers(1, 5),
  st.integers(0, 2**40),
)
def test_points_are_as_many_as_wanted(counts, per_user, least, steps, seed):
  starts = np.concatenate([[0], np.cumsum(counts)])
  points = choose_points(
    starts, steps=steps, per_user=per_user, min_history=least, seed=seed
  )
  users = np.searchsorted(starts, points.candidates, 'right') - 1
  before = points.candidates - starts[users]
  assert (np.diff(points.candidates) > 0).all()
  assert (before >= least).all()
  np.testing.assert_array_equal(points.history, np.minimum(before, steps))
  wanted = [min(per_user, max(0, count - least)) for count in counts]
  assert np.bincount(users, minlength=len(counts)).tolist() == wanted


def test_choices_and_draws_are_even():
  """Every able event, and every item never touched, is as likely."""
  starts = np.arange(0, 20_001, 20)
  points = choose_points(starts, per_user=3, min_history=4)
  chosen = np.bincount(points.candidates % 20, minlength=20)
  assert not chosen[:4].any()
  # 3000 over 16 places are 187 each; five standard deviations are 62.
  assert np.ptp(chosen[4:]) < 124
  zeros = np.zeros(20_000, np.uint32)
  # Users touch items 0 to 19 of 25; 3000 draws of 5 are 600 each.
  events = Events(
    zeros, np.tile(np.arange(20, dtype=np.uint32), 1000), *[zeros] * 2
  )
  items = np.arange(25, dtype=np.uint32)
  drawn = draw_negatives(events, starts, points.candidates, items)
  counts = np.bincount(drawn, minlength=25)
  assert not counts[:20].any()
  assert np.ptp(counts[20:]) < 220
  other = draw_negatives(events, starts, points.candidates, items, seed=1)
  assert (drawn != other).mean() > 0.5


def test_a_rare_item_is_found_in_turn():
  zeros = np.zeros(300, np.uint32)
  touched = np.delete(np.arange(301, dtype=np.uint32), 123)
  events, starts = Events(zeros, touched, zeros, zeros), np.array([0, 300])
  items = np.arange(301, dtype=np.uint32)
  candidates = np.arange(10, 300)
  assert (draw_negatives(events, starts, candidates, items) == 123).all()
  with pytest.raises(UserError, match=r'never touched.* got 300 items.*user 0'):
    draw_negatives(events, starts, candidates, touched)


def test_events_of_one_second_keep_their_order():
  users = np.array([2, 1, 2, 1, 2], np.uint32)
  times_ = np.array([5, 9, 5, 3, 2], np.int32) + 10**9
  items = np.arange(5, dtype=np.uint32)
  found = by_user([users, items, items + 7, times_])
  assert found.items.tolist() == [3, 1, 4, 0, 2]
  assert found.users.tolist() == [1, 1, 2, 2, 2]
  assert (found.times - 10**9).tolist() == [3, 9, 2, 5, 5]
  assert found.categories.tolist() == [10, 8, 11, 7, 9]
  assert user_starts(found).tolist() == [0, 2, 5]


def test_epochs_are_shuffled_by_seed_and_continue_where_they_were(tmp_path):
  path = write(tmp_path / 'log.csv', log(800, items=300))
  dataset = taobao_text(path, min_history=2, shuffle_seed=3)
  source = dataset.train(32)
  batches = [next(source) for _ in range(12)]
  assert not np.array_equal(batches[0].labels, [1.0, 0.0] * 16)
  again = dataset.train(32)
  again.set_state(again.get_state() | {'delivered': 7})
  for one, other in zip(batches[7:], again, strict=False):
    np.testing.assert_array_equal(one.lookups, other.lookups)
    np.testing.assert_array_equal(one.labels, other.labels)
  assert again.get_state() == source.get_state()
  last = list(dataset.test(59))[-1]
  padding = last.weights == 0
  assert padding.any()
  assert (last.lookups[padding] == -1).all()
  hashed_set = taobao_text(path, min_history=2, hash_rows=11)
  assert {t.rows for t in hashed_set.tables} == {11}
  assert next(hashed_set.train(8)).lookups.max() < 33


@pytest.mark.parametrize(
  ('line', 'says'),
  [
    ('1,2,3,pv', "5 fields .* got 4, the last being 'pv' .*line 3"),
    ('1,2,3,pv,1511658000,', 'got 6'),
    ('1,2,3,look,1511658000', "one of pv, cart, fav, buy, got 'look'"),
    ('1,,3,pv,1511658000', "below 2.*, got '' .*line 3, column item"),
    ('-1,2,3,pv,1511658000', "got '-1' .*column user"),
    ('1,2,4294967296,pv,1511658000', "got '4294967296' .*column category"),
    ('1,2,3,pv,151165', "10 digits .* got '151165' .*column time"),
    ('1,2,3,pv,2147483648', "got '2147483648'"),
    ('', "got 1, the last being ''"),
  ],
)
def test_bad_lines_are_named_and_counted(tmp_path, line, says):
  good = log(40).splitlines()
  path = tmp_path / 'log.csv'
  path.write_text('\n'.join([*good[:2], line, *good[2:], line]))
  for budget, number in ((0, 3), (1, 42)):
    named = says.replace('line 3', f'line {number}')
    if line or budget == 0:
      with pytest.raises(UserError, match=named) as error:
        taobao_log.read_events(path, budget)
      assert f'{path}, line {number}' in str(error.value)
      assert 'config.data.bad_lines' in str(error.value)
  columns, skipped = taobao_log.read_events(path, 2)
  assert skipped == (2 if line else 1)  # an empty last line is none
  assert columns[1].tolist() == [int(x.split(',')[1]) for x in good]


@pytest.mark.parametrize(
  ('arguments', 'named'),
  [
    ({'test_share': 0.0}, 'test_share must be between 0 and 1'),
    ({'test_share': float('nan')}, 'got nan'),
    ({'test_share': 0.999}, 'points to train on .* got 0 and'),
    ({'min_history': 500}, 'got 0 and 0'),
    ({'min_history': 0}, 'min_history of a series must be at least 1, got 0'),
    ({'steps': 0}, 'steps of a series'),
    ({'per_user': -1}, 'per_user .* got -1'),
    ({'min_count': 0}, 'min_count must be at least 1'),
    ({'bad_lines': -1}, 'bad_lines must be at least 0, got -1'),
    ({'seed': -1}, r'seed must be .* in \[0, 2\*\*63\), got -1'),
  ],
)
def test_bad_arguments_are_named(tmp_path, arguments, named):
  path = write(tmp_path / 'log.csv', log(200))
  with pytest.raises(UserError, match=named):
    taobao_text(path, **({'min_history': 2} | arguments))


def small(path, **changes):
  config = config_file.get_config('smoke')
  with config.unlocked():
    config.update_from_flattened_dict({'data.path': str(path), **changes})
  return config


def test_the_job_trains_skips_and_reports(tmp_path):
  data = log(4000, users=80, items=500) + '9,9,9,pv,15'
  path = write(tmp_path / 'log.csv', data)
  workdir = tmp_path / 'run'
  config = small(path, **{'data.per_user': 50, 'train.steps': 60})
  assert run_job(workdir, config) == 0
  summary = summary_of(workdir)
  assert summary['data'].startswith('log.csv, 4,000 events of ')
  assert '(bad lines skipped: 1)' in summary['data']
  assert summary['inputs_seen'] == 60 * config.data.batch_size
  assert summary['inputs_dropped'] > 0
  assert summary['lookups'] > 3 * 2 * summary['inputs_trained']
  assert 0 < summary['auc'] < 1
  saved = json.loads((workdir / 'config.json').read_text())
  assert saved['skip']['alpha'] == [4, 4, 4]
  lines = (workdir / record.METRICS).read_text().splitlines()
  assert any(json.loads(line)['kind'] == 'decision' for line in lines)


@pytest.mark.parametrize(
  ('changes', 'says'),
  [
    ({'data.format': 'tabao'}, "taobao, tfds, got 'tabao'"),
    ({'model.name': 'tsbm'}, "dlrm, tbsm, got 'tsbm'"),
    ({'data.bad_lines': 0}, 'line 401, column time'),
  ],
)
def test_mistakes_in_the_config_are_told(tmp_path, capsys, changes, says):
  path = write(tmp_path / 'log.csv', log(400) + '9,9,9,pv,15')
  config = small(path)
  with config.unlocked():
    config.update_from_flattened_dict(changes)
  assert run_job(tmp_path / 'run', config) == 1
  assert says in capsys.readouterr().err


@needs_sample
def test_every_field_of_the_real_lines():
  expected = slow_parse(gzip.decompress(SAMPLE.read_bytes()))
  assert len(expected) == 96_169
  assert [i for i, x in enumerate(expected) if x is None] == [96_168]
  assert fast_parse(SAMPLE, 100_000) == expected
  assert fast_parse(SAMPLE, text.BLOCK_BYTES) == expected


@needs_sample
def test_the_torn_line_is_reported_and_skipped_only_when_told():
  with pytest.raises(UserError, match=r"got '15' .*line 96169, column time"):
    taobao_text(SAMPLE, min_history=1)
  dataset = taobao_text(SAMPLE, min_history=1, bad_lines=1)
  assert '96,168 events of 58,732 users (bad lines skipped: 1)' in dataset.name


@needs_sample
def test_series_of_the_real_log_equal_those_of_brute_force():
  assert_as_by_brute_force(
    SAMPLE,
    gzip.decompress(SAMPLE.read_bytes()),
    steps=5,
    per_user=2,
    min_history=2,
    test_share=0.2,
    min_count=2,
    seed=3,
    bad_lines=1,
  )
