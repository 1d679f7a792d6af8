"""The example server: what it answers, and what it refuses."""

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from slip_serve import __main__, app, server
from tests.serve import exported
from tests.serve.raw import answered, exchanged, parsed, posted
from tests.support import small
from tests.support.programs import finished, started
from tests.support.watchdog import watchdog

GOOD = {'dense': [[0.0] * small.DENSE], 'ids': [[0, 0, 0, 0]]}
BODY = json.dumps(GOOD).encode()


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('h') / 'x'


@pytest.fixture(scope='module')
def serving(folder):
  with exported.served(
    exported.trained(small.recipe(), steps=2), folder
  ) as server:
    yield server


def looked(path, method='GET'):
  head = f'{method} {path} HTTP/1.1', 'Host: x', 'Connection: close', '', ''
  return '\r\n'.join(head).encode()


def test_scores_are_those_of_the_scorer(serving):
  scorer, address = serving
  dense = np.linspace(-1, 1, 6 * small.DENSE).reshape(6, -1)
  ids = np.array([[n, n % 7, 9 * n, 0] for n in range(6)])
  body = json.dumps({'dense': dense.tolist(), 'ids': ids.tolist()})
  code, answer = answered(address, posted(body.encode()), ends=False)
  assert code == 200
  expected = scorer.probabilities(dense, ids)
  np.testing.assert_array_equal(
    np.array(answer['probabilities'], np.float32), expected
  )
  code, facts = answered(address, looked('/'))
  assert code == 200
  assert facts['dense_features'] == small.DENSE
  assert [one['name'] for one in facts['features']] == [*small.SIZES]
  code, stats = answered(address, looked('/stats'))
  assert (code, stats['examples'] >= 6) == (200, True)


@pytest.mark.parametrize(
  ('code', 'request_'),
  [
    (404, looked('/none')),
    (405, looked('/score')),
    (405, looked('/score', 'PUT')),
    (405, posted(BODY).replace(b'POST', b'post')),
    (400, posted(BODY).replace(b'HTTP/1.1', b'HTTP/2.0')),
    (400, b'GET /\r\n\r\n'),
    (400, b'\r\n\r\n'),
    (400, b'GET / HTTP/1.1\r\nHost: x\r\n'),
    (400, looked('/').replace(b'Host: x', b'Host x')),
    (400, looked('/').replace(b'Host: x', b'Host: \x00')),
    (431, b'GET / HTTP/1.1\r\nHost: ' + b'x' * 20_000),
    (411, posted(BODY, **{'Content-Length': None})),
    (411, posted(BODY, **{'Transfer-Encoding': 'chunked'})),
    (400, posted(BODY, **{'Content-Length': '-1'})),
    (400, posted(BODY, **{'Content-Length': 'x'})),
    (400, posted(BODY, **{'content-length': str(len(BODY) + 1)})),
    (200, posted(BODY, **{'content-length': str(len(BODY))})),
    (400, posted(BODY, **{'Content-Length': str(len(BODY) + 1)})),
    (413, posted(BODY, **{'Content-Length': str(app.MOST_BYTES + 1)})),
    (413, posted(BODY, **{'Content-Length': '9' * 20})),
    (400, posted(BODY, **{'Content-Length': '9' * 5000})),
    (415, posted(BODY, **{'Content-Type': 'text/plain'})),
    (200, posted(BODY, **{'Content-Type': 'application/json; charset=utf-8'})),
    (200, posted(BODY).replace(b'\r\n', b'\n')),
  ],
  ids=range(24),
)
def test_requests_have_the_right_codes(serving, code, request_):
  got, values = answered(serving[1], request_)
  assert got == code, values
  assert ('error' in values) == (code != 200)


def test_who_sends_more_than_it_may_still_gets_the_answer(serving):
  """A connection closed with bytes unread would be reset."""
  for body in bytes(15_000_000), BODY:
    # The second is two requests at once: the first is answered.
    request = posted(body) if body != BODY else posted(BODY) * 2
    assert answered(serving[1], request)[0] == (200 if body == BODY else 413)


@pytest.mark.parametrize(
  'request_',
  [
    looked('/'),
    looked('/', 'HEAD'),
    looked('/none'),
    posted(BODY),
    posted(b'{}'),
    posted(BODY, **{'Content-Type': 'text/plain'}),
    posted(BODY, **{'Content-Length': None}),
    posted(BODY, **{'Content-Length': str(app.MOST_BYTES + 1)}),
    posted(BODY, **{'Content-Length': 'x'}),
    b'GET / HTTP/1.0\r\n\r\n',
    b'A' * 20_000,
  ],
  ids=range(11),
)
def test_bytes_after_the_answer_do_not_reset_the_connection(serving, request_):
  with socket.create_connection(serving[1], timeout=60) as connection:
    connection.sendall(request_)
    assert b''.join(iter(lambda: connection.recv(1 << 16), b''))
    for _ in range(3):  # the second one fails if the first was answered so
      connection.sendall(BODY)
      time.sleep(0.01)


def test_a_client_that_never_stops_is_given_up(serving, monkeypatch):
  monkeypatch.setattr(server, '_MOST_DROPPED', 1 << 20)
  monkeypatch.setattr(server, '_LINGER_S', 60)
  with watchdog(), socket.create_connection(serving[1]) as connection:
    connection.sendall(looked('/'))
    with contextlib.suppress(ConnectionError):
      while True:
        connection.sendall(bytes(1 << 16))


def test_a_head_is_that_of_the_whole_answer(serving):
  whole, head = (
    exchanged(serving[1], looked('/', method)) for method in ('GET', 'HEAD')
  )
  assert head.endswith(b'\r\n\r\n')
  assert whole.split(b'\r\n')[2:5] == head.split(b'\r\n')[2:5]


def test_a_client_that_waits_is_told_to_continue(serving):
  address, long = serving[1], str(app.MOST_BYTES + 1)
  request = posted(BODY, Expect='100-continue')
  with socket.create_connection(address, timeout=60) as connection:
    connection.sendall(request[: -len(BODY)])
    assert connection.recv(99) == b'HTTP/1.1 100 Continue\r\n\r\n'
    connection.sendall(BODY)
    assert b'200 OK' in connection.recv(99)
  head = posted(b'', Expect='100-continue', **{'Content-Length': long})
  assert answered(address, head, ends=False)[0] == 413


def test_a_slow_client_is_given_up_in_bounded_time(serving, monkeypatch):
  monkeypatch.setattr(server, 'PATIENCE_S', 0.5)
  head, body = posted(BODY)[:-9], posted(BODY)[-9:]
  for start, rest in ((b'', head), (head, body), (head, b'')):
    with socket.create_connection(serving[1], timeout=60) as connection:
      connection.sendall(start)
      for byte in rest[:4]:
        time.sleep(0.2)  # each byte comes in time, but not all of them
        connection.sendall(bytes([byte]))
      answer = b''.join(iter(lambda c=connection: c.recv(4096), b''))
    assert parsed(answer)[0] == 408


HEADS = (b':', b' ', b'\x00', b'\xff', b'HTTP/1.1', b'POST', b'')


def malformed(rng):
  """A request that no server should take."""
  body = BODY[: rng.randrange(len(BODY))]
  lie = rng.choice(('-1', '+5', '1 2', '0x10', '1e3', ' ', '\xb2', '9' * 30))
  return rng.choice(
    (
      lambda: posted(body),
      lambda: posted(rng.randbytes(rng.randrange(99))),
      lambda: posted(BODY, **{'content-length': lie}),
      lambda: posted(BODY, **{'Content-Length': None}),
      lambda: posted(BODY, **{'Transfer-Encoding': rng.choice(('x', 'gzip'))}),
      lambda: posted(BODY, **{'Content-Type': rng.choice(('x', 'a/b', ';'))}),
      lambda: posted(BODY)[: rng.randrange(1, len(posted(BODY)))],
      lambda: posted(BODY).replace(b'\r\nHost', rng.choice(HEADS) + b'Host', 1),
      lambda: posted(BODY).replace(b'/score', rng.randbytes(3).hex().encode()),
      lambda: posted(BODY).replace(b'POST', rng.randbytes(3), 1),
      lambda: rng.randbytes(rng.randrange(1, 200)),
      lambda: looked('/score', rng.choice(('GET', 'HEAD', 'PUT', 'X', ''))),
      lambda: b'A' * rng.randrange(1, 40_000),
    )
  )()


@pytest.mark.parametrize(
  'tries', [300, pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_malformed_requests_are_refused(serving, tries, capfd):
  rng = random.Random(0)
  with watchdog(busy_s=600):
    for _ in range(tries):
      request = malformed(rng)
      answer = exchanged(serving[1], request)
      assert answer[:10] == b'HTTP/1.1 4', (request, answer)
      if not request.startswith(b'HEAD'):
        values = parsed(answer)[1]
        assert [*values] == ['error']
        assert len(values['error'].splitlines()) == 1
        assert len(values['error']) < 500
  assert capfd.readouterr().err == ''


def test_a_failure_of_its_own_is_no_fault_of_the_client(
  serving, monkeypatch, capfd
):
  scorer, address = serving
  monkeypatch.setattr(scorer, 'predictions', lambda *_: 1 / 0)
  code, answer = answered(address, posted(BODY))
  assert (code, answer) == (500, {'error': 'an internal error'})
  assert 'ZeroDivisionError' in capfd.readouterr().err


def test_a_score_that_is_no_number_is_refused(serving, monkeypatch):
  scorer, address = serving
  monkeypatch.setattr(scorer, 'predictions', lambda *_: np.array([np.nan]))
  code, answer = answered(address, posted(BODY))
  assert code == 400
  assert 'finite number' in answer['error']


def flood(address, clients, each, body, most=None, stop=lambda: None):
  """Counts what became of requests; calls stop() once `most` were answered.

  A request counts once its connection is established. A client ends where its
  connection is refused.
  """
  counts = {'answered': 0, 'lost': 0, 'refused': 0}
  lock, barrier = threading.Lock(), threading.Barrier(clients)

  def outcome():
    try:
      with socket.create_connection(address, timeout=300) as connection:
        connection.sendall(posted(body))
        answer = b''.join(iter(lambda: connection.recv(1 << 16), b''))
      return 'answered' if parsed(answer)[0] in (200, 400) else 'lost'
    except ConnectionRefusedError:
      return 'refused'
    except (OSError, ValueError):
      return 'lost'

  def client():
    barrier.wait()
    for _ in range(each):
      became = outcome()
      with lock:
        counts[became] += 1
        if most is not None and counts['answered'] == most:
          stop()
      if became == 'refused':
        return

  threads = [threading.Thread(target=client) for _ in range(clients)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return counts


def program(folder):
  command = [sys.executable, '-m', 'slip_serve', str(folder), '--port=0']
  return started(
    [*command, '--memory=ssd'], stdout=subprocess.PIPE, stderr=subprocess.PIPE
  )


def address_of(process):
  host, port = process.stdout.readline().strip()[len('http://') :].split(':')
  return host, int(port)


def memory_of(process, key):
  """Bytes, of /proc."""
  with open(f'/proc/{process.pid}/status') as file:
    line = next(line for line in file if line.startswith(key))
  return int(line.split()[1]) << 10


def largest(piece, count=app.MOST_BYTES):
  start, end = b'{"ids": [', b'0]}'
  return start + piece * ((count - len(start + end)) // len(piece)) + end


@pytest.mark.parametrize(
  ('each', 'senders'), [(2, 6), pytest.param(20, 200, marks=pytest.mark.slow)]
)
def test_the_program_under_load_loses_nothing(serving, folder, each, senders):
  """As many requests of 200 clients, large bodies, and SIGTERM under load."""
  deep = b'[' * 900 + b']' * 900 + b','
  with program(folder) as process:
    address = address_of(process)
    counts = flood(address, 200, each, BODY)
    assert counts == {'answered': 200 * each, 'lost': 0, 'refused': 0}
    before = memory_of(process, 'VmRSS')
    for piece in deep, b'1e1,':
      counts = flood(address, senders, 1, largest(piece))
      assert counts['answered'] == senders
    assert memory_of(process, 'VmHWM') - before < 512 << 20
    counts = flood(address, 200, each, BODY, 50, process.terminate)
    assert counts['lost'] == 0
    assert counts['answered'] >= 50
    assert process.wait(60) == 0
    assert process.stderr.read() == ''


def test_a_second_signal_ends_the_program_at_once(serving, folder):
  with (
    program(folder) as process,
    socket.create_connection(address_of(process)) as connection,
  ):
    connection.sendall(b'POST')  # keeps the program waiting for the rest
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
      process.wait(1)
    process.terminate()
    assert process.wait(5) == -signal.SIGTERM


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['none', '--port=65536'], "from 0 to 65535, got '65536'"),
    (['none', '--port=x'], "a port must be a number from 0 to 65535, got 'x'"),
    (['none', '--cache=x'], '--cache'),
    ([], 'folder'),
    (['none', '--more'], '--more'),
  ],
)
def test_a_wrong_call_ends_in_one_sentence(
  arguments, words, monkeypatch, capsys
):
  monkeypatch.setattr(sys, 'argv', ['slip_serve', *arguments])
  with pytest.raises(SystemExit) as ended:
    __main__.main()
  errors = capsys.readouterr().err
  assert (ended.value.code, len(errors.splitlines())) == (1, 1)
  assert errors.startswith('error: ')
  assert words in errors


def test_the_program_ends_with_code_1_and_one_sentence():
  done = finished([sys.executable, '-m', 'slip_serve', 'none'])
  assert done.returncode == 1
  assert done.stderr.startswith('error: ')
  assert len(done.stderr.splitlines()) == 1
  assert 'an export is a folder' in done.stderr


def test_an_address_that_is_taken_is_told(folder, serving, monkeypatch, capsys):
  port = f'--port={serving[1][1]}'
  monkeypatch.setattr(sys, 'argv', ['slip_serve', str(folder), port])
  assert __main__.main() == 1
  monkeypatch.setattr(sys, 'argv', ['x', str(folder), '--host=' + 'a' * 99])
  assert __main__.main() == 1
  errors = capsys.readouterr().err.splitlines()
  assert len(errors) == 2
  for line in errors:
    assert line.startswith('error: the server must be able to listen')
