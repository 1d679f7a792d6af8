"""Taobao's log in memory against brute force, and a run on it."""

import collections
import gzip
import itertools
import json

import numpy as np
import pytest

from configs import taobao as config_file
from experiments.common import record
from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import UserError
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.formats.taobao import taobao_raw
from tests.support.runs import run_job, SHARED, summary_of
from tests.support.texts.taobao import log, slow_parse, write

SAMPLE = SHARED / 'taobao' / 'UserBehavior.csv.gz'
needs_sample = pytest.mark.skipif(
  not SAMPLE.exists(), reason=f'shared samples absent: {SAMPLE}'
)
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
  return parts, sizes


def drain(source: BatchSource, sizes, limit=None):
  """Local lookups, labels and dense features of examples; no padding."""
  batches = list(itertools.islice(source, limit))
  columns = zip(*(batch[:4] for batch in batches), strict=True)
  found = [np.concatenate(a) for a in columns]
  dense, lookups, labels = (a[found[3] > 0] for a in found[:3])
  offsets = np.cumsum([0, *sizes[:-1]])[None, :, None]
  return np.where(lookups < 0, -1, lookups - offsets), labels, dense


def data_of(path, *, min_count=1, hash_rows=None, shuffle_seed=None, **others):
  """A log in memory."""
  return in_memory(
    taobao_raw(path, **others),
    min_count=min_count,
    hash_rows=hash_rows,
    shuffle_seed=shuffle_seed,
  )


def assert_as_by_brute_force(path, data, **arguments):
  dataset = data_of(path, **arguments)
  arguments.pop('bad_lines', None)
  expected, sizes = brute_force(data, **arguments)
  length = arguments['steps'] + 1
  assert list(dataset.sizes) == ['user', 'item', 'category']
  assert [*dataset.sizes.values()] == sizes
  assert {f.max_length for f in dataset.features.values()} == {length}
  assert dataset.train_examples == len(expected[0])
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
def test_sequence_equal_those_of_brute_force(tmp_path, seed, min_count):
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


def test_no_sequence_looks_ahead_and_halves_differ_in_the_candidate_only(
  tmp_path,
):
  data = log(800, items=300)
  path = write(tmp_path / 'log.csv', data)
  dataset = data_of(path, steps=5, per_user=3, min_history=3)
  sizes = [*dataset.sizes.values()]
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


def test_epochs_are_shuffled_by_seed_and_continue_where_they_were(tmp_path):
  path = write(tmp_path / 'log.csv', log(800, items=300))
  dataset = data_of(path, min_history=2, shuffle_seed=3)
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
  hashed_set = data_of(path, min_history=2, hash_rows=11)
  assert {*hashed_set.sizes.values()} == {11}
  assert next(hashed_set.train(8)).lookups.max() < 33


@pytest.mark.parametrize(
  ('arguments', 'named'),
  [
    ({'test_share': 0.0}, 'test_share must be between 0 and 1'),
    ({'test_share': float('nan')}, 'got nan'),
    ({'test_share': 0.999}, 'points to train on .* got 0 and'),
    ({'min_history': 500}, 'got 0 and 0'),
    (
      {'min_history': 0},
      'min_history must be .*, at least 1, got 0',
    ),
    ({'steps': 0}, 'steps must be'),
    ({'per_user': -1}, 'per_user .* got -1'),
    ({'bad_lines': -1}, 'bad_lines must be .* at least 0, got -1'),
    ({'min_count': 0}, 'min_count must be a whole number, at least 1'),
    ({'seed': -1}, r'seed must be .* in \[0, 2\*\*63\), got -1'),
  ],
)
def test_bad_arguments_are_named(tmp_path, arguments, named):
  path = write(tmp_path / 'log.csv', log(200))
  with pytest.raises(UserError, match=named):
    data_of(path, **({'min_history': 2} | arguments))


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
  assert summary['data'].startswith('Taobao user behaviour, log.csv, examples')
  assert '1 bad lines skipped' in summary['data']
  assert summary['examples_seen'] == 60 * config.data.batch_size
  assert summary['examples_dropped'] > 0
  assert summary['lookups'] > 3 * 2 * summary['examples_trained']
  assert 0 < summary['auc'] < 1
  saved = json.loads((workdir / 'config.json').read_text())
  assert saved['skip']['alpha'] == [4, 4, 4]
  lines = (workdir / record.METRICS).read_text().splitlines()
  assert any(json.loads(line)['kind'] == 'decision' for line in lines)


@pytest.mark.parametrize(
  ('changes', 'says'),
  [
    ({'data.format': 'tabao'}, "movielens, tfds, got 'tabao'"),
    ({'model.name': 'tsbm'}, "dlrm, tbsm, or my_module:function, got 'tsbm'"),
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
def test_the_torn_line_is_reported_and_skipped_only_when_told():
  with pytest.raises(UserError, match=r"got '15' .*line 96169, column time"):
    data_of(SAMPLE, min_history=1)
  raw = taobao_raw(SAMPLE, min_history=1, bad_lines=1)
  users, *_ = raw.counted()
  assert len(users) < 96_168
  assert '1 bad lines skipped' in in_memory(raw).name


@needs_sample
def test_sequence_of_the_real_log_equal_those_of_brute_force():
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
