"""Stopped by the user, by a signal or by a full disk: continued to the bit."""

import pathlib
import sys

import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import BadLines
from slipstream_jax.packed import columns as packed
from slipstream_jax.packed.prepare import prepare
from tests.support import programs
from tests.support.packed_folders import checksums, prepared
from tests.support.raw_example import CHUNK, Failure, fields, raw_of

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize('hash_rows', [None, 97])
def test_stopped_anywhere_and_continued_gives_the_same_bits(
  tmp_path, hash_rows
):
  whole = fields()
  arguments = {'hash_rows': hash_rows, 'threads': 1}
  expected = prepared(
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
    prepared(raw_of(whole, (0.5, 0.5), fail_at=26), folder)
  # 14 chunks make the first part; of the second, 9 in threes are saved.
  work = prepare(raw_of(whole, (0.5, 0.5)), folder)
  assert next(work).examples == 500 + 9 * CHUNK
  work.close()


KILLED = """
import os, resource, signal, sys
sys.path.insert(0, {root!r})
from slipstream_jax.packed import prepare, ranking
from slipstream_jax.errors import UserError
from tests.support.raw_example import CHUNK, fields, raw_of

prepare.SAVED_EXAMPLES, ranking.PIECE = 3 * CHUNK, 64
prepare._PAUSE_S = 0.0
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
    assert 'make room and prepare it again' in line
  prepared(raw_of(fields(), (0.4, 0.6)), tmp_path / 'whole')
  expected = checksums(tmp_path / 'whole')
  assert checksums(tmp_path / 'killed') == expected
  assert checksums(tmp_path / 'killed-full') == expected


def test_bad_lines_are_counted_once_over_restarts(tmp_path):
  """Each chunk has a bad line; those of parts read before are not lost."""
  whole, total = fields(), -(-500 // CHUNK) * 2

  def counting(fail_at=None):
    bad, error = BadLines(total), UserError('a', got=1, where='b', hint='c')
    raw = raw_of(whole, (0.5, 0.5), fail_at)

    def counted(part):
      bad.start(part.name)
      for chunk in part.chunks():
        bad.add(part.name, error)
        yield chunk

    return raw._replace(
      parts=tuple(p._replace(chunks=lambda p=p: counted(p)) for p in raw.parts),
      bad=bad,
    )

  for fail_at in 4, 20, 12:
    with pytest.raises(Failure):
      prepared(counting(fail_at), tmp_path)
  assert prepared(counting(), tmp_path).manifest['bad_lines'] == total
