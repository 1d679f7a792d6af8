"""Raw data to packed data: every value, every interruption, every refusal."""

import collections
import errno
import json
import pathlib
import sys
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.data import vocabulary
from slipstream_jax.errors import UserError
from slipstream_jax.packed import columns as packed
from slipstream_jax.packed import journal, ranking, spill
from slipstream_jax.packed.prepare import prepare
from slipstream_jax.raw.base import Chunk, END, MISSING
from tests.support import programs
from tests.support.raw_example import CHUNK, Failure, fields, raw_of

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
  """So that small data has many pieces, and many places to stop at."""
  monkeypatch.setattr(ranking, 'PIECE', 64)
  monkeypatch.setattr(ranking, '_SMALLEST', 8)
  monkeypatch.setattr(spill, 'SAVED_INPUTS', 3 * CHUNK)


def run(raw, folder, **arguments):
  collections.deque(prepare(raw, folder, **arguments), maxlen=0)
  return packed.open_packed(folder)


def slow_rows(ids, train, min_count):
  """Ids of rows 1 and up by counting in a dict; the oracle of `ranking`."""
  counts = collections.Counter(ids[slice(*train)].ravel().tolist())
  counts.pop(END, None)
  counts.setdefault(MISSING, 0)
  kept = [i for i in counts if counts[i] >= min_count or i == MISSING]
  kept.sort(key=lambda i: (-counts[i], i))
  return kept, counts


@pytest.mark.parametrize('series', [None, 3])
@pytest.mark.parametrize('min_count', [1, 3])
def test_every_value_comes_back(tmp_path, series, min_count):
  whole = fields(series=series)
  data = run(raw_of(whole, (0.3, 0.7)), tmp_path / 'data', min_count=min_count)
  columns, manifest = data.columns, data.manifest
  assert columns['labels'].dtype == np.uint8
  np.testing.assert_array_equal(columns['labels'], whole.labels)
  np.testing.assert_array_equal(columns['dense'], whole.dense)
  for table, name in enumerate('abc'):
    ids = whole.ids[:, table]
    kept, counts = slow_rows(ids, (0, 700), min_count)
    row_of = {id_: row for row, id_ in enumerate(kept, start=1)}
    row_of[END] = rows = len(kept) + 1
    assert manifest['tables'][table]['name'] == name
    assert manifest['tables'][table]['rows'] == rows
    expected = np.vectorize(lambda i, of=row_of: of.get(i, 0))(ids)
    np.testing.assert_array_equal(columns[name], expected)
    assert columns[name].dtype == packed.smallest_uint(rows)
    assert manifest['tables'][table]['unknown'] == (expected == 0).sum()
    frequency = columns[f'frequency_{name}']
    assert frequency.dtype == np.uint32
    assert frequency[1:].tolist() == [counts[i] for i in kept]
    uses = sum(counts.values())
    assert frequency.sum() == uses == (ids[:700] != END).sum()
    assert columns[f'vocabulary_{name}'].tolist() == kept


def test_the_manifest_says_what_the_contract_asks_for(tmp_path):
  whole = fields()
  raw = raw_of(whole, (0.25, 0.75), settings={'x': 1})
  manifest = run(raw, tmp_path / 'data', min_count=2).manifest
  assert manifest['name'] == 'example'
  assert manifest['inputs'] == 1000
  assert manifest['dense_features'] == 2
  assert manifest['series'] is None
  assert manifest['parts'] == [
    {'name': 'part0', 'inputs': 250},
    {'name': 'part1', 'inputs': 750},
  ]
  assert manifest['splits'] == {
    'train': [0, 700],
    'validation': [700, 800],
    'test': [800, 1000],
  }
  assert manifest['base_rate'] == pytest.approx(whole.labels[:700].mean())
  assert manifest['vocabulary'] == {
    'kind': 'counted',
    'min_count': 2,
    'hash_rows': None,
  }
  assert manifest['bad_lines'] == 0
  assert manifest['sources'][1] == {'path': 'part1', 'bytes': 750}
  assert manifest['settings'] == {'x': 1}
  assert not (tmp_path / 'data' / journal.UNFINISHED).exists()


@settings(max_examples=25)
@given(st.data())
def test_rows_are_those_of_the_counted_vocabulary(tmp_path_factory, data):
  """For any ids, of any i64 value: the same as `vocabulary.count` finds."""
  number = st.sampled_from([MISSING, 0, 1, -3, 1 << 40]) | st.integers(
    -(2**63), 2**63 - 1
  ).filter(lambda i: i != END)
  ids = data.draw(st.lists(number, min_size=20, max_size=90))
  ids = np.array(ids[: len(ids) // 2 * 2], np.int64).reshape(-1, 2)
  inputs = len(ids)
  whole = Chunk(
    np.zeros(inputs, np.float32), np.zeros((inputs, 2), np.float32), ids
  )
  min_count = data.draw(st.integers(1, 3))
  folder = tmp_path_factory.mktemp('any') / 'data'
  found = run(raw_of(whole), folder, min_count=min_count)
  first, end = found.manifest['splits']['train']
  words = vocabulary.count(ids[first:end].T, min_count)
  expected = words.map(ids.T)
  for table, name in enumerate('ab'):
    np.testing.assert_array_equal(found.columns[name], expected[:, table])


@pytest.mark.parametrize('series', [None, 2])
def test_hashed_rows_are_the_buckets_by_frequency(tmp_path, series):
  whole, hash_rows = fields(series=series), 211
  data = run(raw_of(whole), tmp_path / 'data', hash_rows=hash_rows)
  flat = whole.ids.transpose(1, 0, 2).reshape(3, -1) if series else whole.ids.T
  buckets = vocabulary.Hashed(3, hash_rows).map(flat)
  for table, name in enumerate('abc'):
    ids = whole.ids[:, table]
    rank, column = data.columns[f'rank_{name}'], data.columns[name]
    rows = data.manifest['tables'][table]['rows']
    assert rank.shape == (hash_rows,)
    expected = np.where(
      ids == END, rows, rank[buckets[:, table].reshape(ids.shape)]
    )
    np.testing.assert_array_equal(column, expected)
    here = buckets[:, table].reshape(ids.shape)[:700][ids[:700] != END]
    counts = np.bincount(here, minlength=hash_rows)
    order = sorted(np.flatnonzero(counts), key=lambda b: (-counts[b], b))
    assert [rank[b] for b in order] == list(range(1, rows))
    assert (rank > 0).sum() == rows - 1, 'unused buckets are unknown'
    frequency = data.columns[f'frequency_{name}']
    assert frequency.tolist() == [0, *counts[order]]


def checksums(folder):
  return {
    entry['name']: entry['crc32']
    for entry in packed.open_packed(folder).manifest['columns']
  }


@pytest.mark.parametrize('hash_rows', [None, 97])
def test_stopped_anywhere_and_continued_gives_the_same_bits(
  tmp_path, hash_rows
):
  whole = fields()
  arguments = {'hash_rows': hash_rows, 'threads': 1}
  expected = run(
    raw_of(whole, (0.2, 0.5, 0.3)), tmp_path / 'whole', **arguments
  )
  rng = np.random.default_rng(1)
  for trial in range(6):
    folder, stops = tmp_path / f'{trial}', 0
    while not packed.is_finished(folder):
      stops += 1
      # Half of the times the reader fails, else the user stops the work.
      at = int(rng.integers(1, 40))
      fail_at = at if trial % 2 else None
      work = prepare(
        raw_of(whole, (0.2, 0.5, 0.3), fail_at), folder, **arguments
      )
      try:
        for number, _ in enumerate(work):
          if not trial % 2 and number == at:
            work.close()
      except Failure:
        pass
    assert stops < 20
    found = packed.open_packed(folder)
    assert found.manifest == expected.manifest
    assert list(packed.verify(folder))


def test_what_is_saved_is_not_spilled_again(tmp_path):
  whole, folder = fields(), tmp_path / 'data'
  with pytest.raises(Failure):
    run(raw_of(whole, (0.5, 0.5), fail_at=26), folder)
  state = json.loads((folder / journal.UNFINISHED / 'journal.json').read_text())
  # 14 chunks make the first part; of the second, 9 in threes are saved.
  assert [part[:2] for part in state['parts']] == [['part0', 500]]
  assert state['chunks'] == 9
  assert state['inputs'] == 500 + 9 * CHUNK
  work = prepare(raw_of(whole, (0.5, 0.5)), folder)
  assert next(work).inputs == 500 + 9 * CHUNK
  collections.deque(work, maxlen=0)
  assert checksums(folder) == checksums_of(tmp_path / 'other', whole)


def checksums_of(folder, whole, **arguments):
  run(raw_of(whole, (0.5, 0.5)), folder, **arguments)
  return checksums(folder)


def test_threads_change_nothing(tmp_path):
  whole = fields(tables=4)
  one = checksums_of(tmp_path / 'one', whole, threads=1)
  assert one == checksums_of(tmp_path / 'four', whole, threads=4)


KILLED = """
import os, resource, signal, sys
sys.path.insert(0, {root!r})
from slipstream_jax.packed import prepare, ranking, spill
from slipstream_jax.errors import UserError
from tests.support.raw_example import CHUNK, fields, raw_of

spill.SAVED_INPUTS, ranking.PIECE = 3 * CHUNK, 64
prepare._TELL_S = 0.0
whole = fields()

def run(folder, stop=None, room=None):
  if room:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
  work = prepare.prepare(raw_of(whole, (0.4, 0.6)), folder)
  for number, at in enumerate(work):
    if stop is not None and (number == stop or at.phase == stop):
      os.kill(os.getpid(), signal.SIGKILL)

def forked(*arguments):
  child = os.fork()
  if not child:
    try:
      run(*arguments)
    except UserError as error:
      sys.stdout.write(f'{{error}}\\n')
      sys.stdout.flush()
      os._exit(1)
    os._exit(0)
  return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

folder = sys.argv[1]
codes = [forked(folder, stop) for stop in (2, 5, 11, 13, 'ranking', 'sealing')]
codes.append(forked(folder, None, 500))
codes.append(forked(folder))
assert codes == [-9] * 6 + [1, 0], codes
assert [forked(folder + '-full', None, size) for size in (600, 5000)] == [1, 1]
assert forked(folder + '-full') == 0
"""


def test_killed_or_out_of_room_then_continued(tmp_path):
  """SIGKILL at six places, a file system that refuses: the same bits."""
  result = programs.finished(
    [sys.executable, '-c', KILLED.format(root=str(ROOT)), tmp_path / 'killed']
  )
  assert result.returncode == 0, result.stderr
  said = result.stdout.splitlines()
  assert len(said) == 3
  for line in said:
    assert 'File too large' in line
    assert 'make room and run the same command again' in line
  run(raw_of(fields(), (0.4, 0.6)), tmp_path / 'whole')
  expected = checksums(tmp_path / 'whole')
  assert checksums(tmp_path / 'killed') == expected
  assert checksums(tmp_path / 'killed-full') == expected


def test_a_full_disk_is_one_sentence_and_no_loss(tmp_path, monkeypatch):
  whole, folder, calls = fields(), tmp_path / 'data', []
  append = spill._Files.append

  def full(files, chunk):
    calls.append(1)
    if len(calls) == 8:
      raise OSError(errno.ENOSPC, 'No space left on device')
    append(files, chunk)

  monkeypatch.setattr(spill._Files, 'append', full)
  with pytest.raises(UserError, match='No space left on device') as caught:
    run(raw_of(whole, (0.5, 0.5)), folder)
  assert 'it continues' in str(caught.value)
  assert not packed.is_finished(folder)
  run(raw_of(whole, (0.5, 0.5)), folder)
  assert checksums(folder) == checksums_of(tmp_path / 'other', whole)


def stopped(raw, folder, **arguments):
  """Stops a preparation after two saves."""
  work = prepare(raw, folder, **arguments)
  for _ in range(8):
    next(work)
  work.close()


@pytest.mark.parametrize(
  ('change', 'arguments', 'named'),
  [
    ({'parts': (0.5, 0.5)}, {}, 'sources'),
    ({'settings': {'sample': 0.5}}, {}, 'settings'),
    ({}, {'min_count': 2}, 'min_count 2 after 1'),
    ({}, {'hash_rows': 64}, 'hash_rows 64 after None'),
  ],
)
def test_other_sources_or_settings_do_not_continue(
  tmp_path, change, arguments, named
):
  whole = fields()
  stopped(raw_of(whole), tmp_path)
  with pytest.raises(UserError, match=named):
    run(raw_of(whole, **change), tmp_path, **arguments)
  run(raw_of(whole), tmp_path)


def test_a_finished_folder_is_not_written_over(tmp_path):
  before = run(raw_of(fields()), tmp_path).manifest
  with pytest.raises(UserError, match='not written over'):
    run(raw_of(fields(seed=1)), tmp_path)
  assert packed.open_packed(tmp_path).manifest == before


def test_a_folder_of_other_things_is_refused(tmp_path):
  (tmp_path / 'thesis.txt').write_text('years of work')
  with pytest.raises(UserError, match=r'must be empty, got thesis\.txt'):
    run(raw_of(fields()), tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ['thesis.txt']


def test_a_path_that_is_a_file_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='folder that can be written'):
    run(raw_of(fields()), tmp_path / 'file' / 'data')


def test_two_at_a_time_are_refused(tmp_path):
  work = prepare(raw_of(fields()), tmp_path)
  next(work)
  with pytest.raises(UserError, match='another one at work'):
    run(raw_of(fields()), tmp_path)
  work.close()
  run(raw_of(fields()), tmp_path)


def test_a_spilled_file_cut_by_others_is_noticed(tmp_path):
  stopped(raw_of(fields()), tmp_path)
  path = tmp_path / journal.UNFINISHED / 'b.int64'
  path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(UserError, match='something changed the file'):
    run(raw_of(fields()), tmp_path)


def test_splits_are_those_that_the_reader_knew(tmp_path):
  """As of a format whose days are only known once they are read."""
  raw, known = raw_of(fields(), (0.5, 0.5)), []
  last = raw.parts[-1]

  def chunks():
    yield from last.chunks()
    known.append({'train': (0, 900), 'test': (900, 1000)})

  learning = raw._replace(
    parts=(raw.parts[0], last._replace(chunks=chunks)),
    split=lambda inputs, parts: known[0],
  )
  work = prepare(learning, tmp_path)
  while next(work).phase == 'reading':
    pass
  work.close()
  known.clear()
  data = run(learning, tmp_path)
  assert data.manifest['splits'] == {'train': [0, 900], 'test': [900, 1000]}


def test_too_few_inputs(tmp_path):
  with pytest.raises(UserError, match='got 0 to train, 0 to validation, 1 to'):
    run(raw_of(fields(1)), tmp_path)
  assert not packed.is_finished(tmp_path)


@pytest.mark.parametrize(
  'arguments',
  [{'min_count': 0}, {'hash_rows': 0}, {'hash_rows': 9, 'min_count': 2}],
)
def test_bad_arguments_leave_no_folder(tmp_path, arguments):
  with pytest.raises(UserError, match=r'\(vocabulary, '):
    run(raw_of(fields()), tmp_path / 'data', **arguments)
  assert not (tmp_path / 'data').exists()


def test_bad_lines_are_counted_once_over_restarts(tmp_path):
  """Each chunk has a bad line; those of parts read before are not lost."""
  whole, total = fields(), -(-500 // CHUNK) * 2

  def counting(restores, fail_at=None):
    count = [0]
    raw = raw_of(whole, (0.5, 0.5), fail_at)

    def counted(chunks):
      for chunk in chunks():
        count[0] += 1
        yield chunk

    return raw._replace(
      parts=tuple(
        p._replace(chunks=lambda c=p.chunks: counted(c)) for p in raw.parts
      ),
      skipped=lambda: count[0],
      restore=lambda n: count.__setitem__(0, n) if restores else None,
    )

  for restores in True, False:
    folder = tmp_path / f'{restores}'
    for fail_at in 4, 20, 12:
      with pytest.raises(Failure):
        run(counting(restores, fail_at), folder)
    assert run(counting(restores), folder).manifest['bad_lines'] == total


def test_memory_does_not_grow_with_the_inputs(tmp_path, monkeypatch):
  monkeypatch.setattr(ranking, 'PIECE', 1 << 12)
  monkeypatch.setattr(packed, '_CHECKED_BYTES', 1 << 12)
  whole = fields(1 << 12)

  def peak(times):
    raw = raw_of(whole, (1.0,))
    (part,) = raw.parts

    def chunks():
      for _ in range(times):
        yield whole, 0

    raw = raw._replace(parts=(part._replace(chunks=chunks),))
    tracemalloc.start()
    try:
      data = run(raw, tmp_path / f'{times}', threads=1)
      assert data.manifest['inputs'] == times << 12
      return tracemalloc.get_traced_memory()[1]
    finally:
      tracemalloc.stop()

  peak(4)  # compiles what is needed
  assert peak(80) < 1.2 * peak(8)


def test_pieces_are_bounded_and_whole(tmp_path):
  ids = np.arange(600).reshape(200, 3)
  (tmp_path / 'ids').write_bytes(ids.astype('<i8').tobytes())
  column = ranking.RawColumn(tmp_path / 'ids', 200, 3)
  pieces = list(column.pieces(10, 150))
  assert max(map(len, pieces)) <= ranking.PIECE
  np.testing.assert_array_equal(np.concatenate(pieces), ids[10:150].ravel())


def test_frequencies_too_large_for_their_type_stay_at_its_end():
  counts = np.array([5, 2**40, 2**32 - 1, 2**16, 7, 2**16, 0])
  assert ranking._by_count(counts).tolist() == [1, 2, 3, 5, 4, 0, 6]
  assert ranking._saturated(counts)[1] == 2**32 - 1


@pytest.mark.parametrize('column', ['labels', 'dense', 'c', 'frequency_a'])
def test_verify_finds_a_flipped_byte(tmp_path, column):
  data = run(raw_of(fields()), tmp_path)
  assert {name for name, _ in packed.verify(tmp_path)} == {
    f'{entry["name"]}.{entry["dtype"]}' for entry in data.manifest['columns']
  }
  path = next(tmp_path.glob(f'{column}.*'))
  contents = bytearray(path.read_bytes())
  contents[len(contents) // 2] ^= 1
  path.write_bytes(contents)
  with pytest.raises(UserError, match=path.name):
    collections.deque(packed.verify(tmp_path))
