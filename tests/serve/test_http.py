"""The example server: what it answers, and what it refuses."""

import contextlib
from http.client import HTTPConnection
import json
import sys
import threading

import numpy as np
import pytest

from slip_serve import Scorer
from slip_serve.http import make_server
from tests.serve import exported
from tests.support import small
from tests.support.programs import finished, started


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  run = exported.trained(small.recipe(), steps=2)
  return exported.export(run, tmp_path_factory.mktemp('h') / 'x', sizes=(4,))


@pytest.fixture(scope='module')
def serving(folder):
  with Scorer(folder) as scorer, make_server(scorer, port=0) as httpd:
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield scorer, httpd.server_address
    httpd.shutdown()
    thread.join()


def asked(address, method, path, body=None, headers=()):
  with contextlib.closing(HTTPConnection(*address[:2], timeout=60)) as one:
    one.request(method, path, body, dict(headers))
    answer = one.getresponse()
    return answer.status, json.loads(answer.read())


def test_scores_are_those_of_the_scorer(serving):
  scorer, address = serving
  dense = np.linspace(-1, 1, 6 * small.DENSE).reshape(6, -1)
  ids = np.array([[n, n % 7, 9 * n, 0] for n in range(6)])
  body = json.dumps({'dense': dense.tolist(), 'ids': ids.tolist()})
  code, answer = asked(address, 'POST', '/score', body)
  assert code == 200
  expected = scorer.probabilities(dense, ids)
  np.testing.assert_array_equal(
    np.array(answer['probabilities'], np.float32), expected
  )
  code, facts = asked(address, 'GET', '/')
  assert code == 200
  assert facts['dense_features'] == small.DENSE
  assert [one['name'] for one in facts['features']] == [*small.SIZES]
  code, stats = asked(address, 'GET', '/stats')
  assert (code, stats['examples'] >= 6) == (200, True)


GOOD = {'dense': [[0.0] * small.DENSE], 'ids': [[0, 0, 0, 0]]}


@pytest.mark.parametrize(
  'body',
  [
    '',
    '[]',
    'null',
    '{"ids": 5}',
    '[' * 100_000,
    json.dumps(GOOD | {'ids': [[0, 0, 0]]}),
    json.dumps(GOOD | {'ids': [[0, 0, 0, 1]]}),
    json.dumps(GOOD | {'ids': [[0, 0, 0, 0.5]]}),
    json.dumps(GOOD | {'ids': [[0, 0, 0, 2**80]]}),
    json.dumps(GOOD | {'ids': [[0, 0, True, 0]]}),
    json.dumps(GOOD | {'dense': [['a'] * small.DENSE]}),
    json.dumps(GOOD | {'dense': [[1e999] * small.DENSE]}),
    json.dumps(GOOD | {'dense': []}),
    json.dumps(GOOD | {'ids': [[0] * 4] * 70_000}),
  ],
  ids=range(14),
)
def test_what_is_no_query_is_told(serving, body):
  code, answer = asked(serving[1], 'POST', '/score', body)
  assert (code, [*answer]) == (400, ['error'])
  assert len(answer['error']) < 500


def test_other_requests(serving):
  address = serving[1]
  assert asked(address, 'GET', '/none')[0] == 404
  assert asked(address, 'POST', '/none', '{}')[0] == 404
  for length in '-1', str(1 << 40), 'x':
    headers = {'Content-Length': length}
    assert asked(address, 'POST', '/score', None, headers)[0] == 413


def test_the_program_serves_until_it_is_told_to_end(folder):
  command = [sys.executable, '-m', 'slip_serve', str(folder), '--port=0']
  with started([*command, '--memory=ssd'], stdout=-1, stderr=-1) as process:
    line = process.stdout.readline().strip()
    host, port = line.removeprefix('http://').split(':')
    code, answer = asked((host, int(port)), 'POST', '/score', json.dumps(GOOD))
    assert (code, len(answer['probabilities'])) == (200, 1)
    process.terminate()
    assert process.wait(60) == 0
  done = finished([*command[:3], str(folder / 'none')])
  assert done.returncode == 1
  assert done.stderr.startswith('error: an export is a folder')


def test_a_score_that_is_no_number_is_refused(serving, monkeypatch):
  scorer, address = serving
  monkeypatch.setattr(scorer, 'probabilities', lambda *_: np.array([np.nan]))
  body = json.dumps({'dense': [[3e38] * small.DENSE], 'ids': [[1, 1, 1, 0]]})
  code, answer = asked(address, 'POST', '/score', body)
  assert code == 400
  assert 'a score that is no number' in answer['error']
