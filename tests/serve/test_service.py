"""The service, as those who call it write it: raw ids by name, and JSON."""

import contextlib
import http.client
import io
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

from flax import linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from experiments.bench import clients
from experiments.common.progress import Bar
from slip_serve import __main__, app, batching, server
from slip_serve.scorer import Scorer
import slipstream_jax as slip
from slipstream_jax.errors import UserError
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.state import integers
from tests.serve import exported
from tests.serve.raw import answered, posted
from tests.serve.test_scores import uneven
from tests.support import small
from tests.support.programs import started
from tests.support.texts.mutations import check_sentence
from tests.support.watchdog import watchdog


class TwoTowers(nn.Module):
  @nn.compact
  def __call__(self, dense, embeddings):
    whole = jnp.concatenate([dense['age'][:, None], embeddings['user']], axis=1)
    return (nn.Dense(16)(whole) * embeddings['item']).sum(-1)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """An export of a model of users, items and ages."""
  folder = tmp_path_factory.mktemp('service') / 'export'
  data = {
    'user': [*range(50)] * 10,
    'item': [f'item-{n}' for n in range(100)] * 5,
    'age': [float(20 + n % 40) for n in range(500)],
    'label': [n % 2 for n in range(500)],
  }
  words = {'item': slip.GrowingVocabulary(101)}
  source = slip.batches(
    {'age': data['age']},
    {'user': data['user'], 'item': data['item']},
    data['label'],
    batch_size=50,
    vocabularies=words,
  )
  tables = {'user': slip.Table(50), 'item': slip.Table(101)}
  with slip.Trainer(TwoTowers(), tables) as trainer:
    trainer.train(source, steps=10)
    trainer.export(folder, batch_sizes=[1, 16])
  return folder


class Running:
  """A server in a thread of its own."""

  def __init__(self, scorer, **how):
    self.server = server.Server(scorer, port=0, **how)
    self.url = 'http://{}:{}'.format(*self.server.address)

  def __enter__(self):
    self.thread = threading.Thread(target=self.server.run)
    self.thread.start()
    return self

  def __exit__(self, *_):
    self.server.stop()
    self.thread.join()

  def wait(self):
    """Returns once it can score."""
    with watchdog():
      while ask(f'{self.url}/health')[0] == 503:
        time.sleep(0.01)


@pytest.fixture(scope='module')
def running(folder):
  with Scorer(folder) as scorer, Running(scorer) as one:
    one.scorer = scorer
    one.wait()
    yield one


def ask(url, values=None):
  """Code, values and headers of an answer."""
  data = None if values is None else json.dumps(values).encode()
  head = {'Content-Type': 'application/json'}
  request = urllib.request.Request(url, data, head)
  try:
    with urllib.request.urlopen(request, timeout=60) as answer:
      return answer.status, json.load(answer), answer.headers
  except urllib.error.HTTPError as error:
    with error:
      return error.code, json.load(error), error.headers


def test_raw_ids_by_name_are_scored(running):
  ids = {'user': [3, 49], 'item': ['item-7', 'never seen']}
  dense = {'age': [31, 25.5]}
  code, answer, _ = ask(f'{running.url}/score', {'ids': ids, 'dense': dense})
  assert code == 200, answer
  expected = running.scorer.probabilities(dense, ids)
  np.testing.assert_array_equal(
    np.array(answer['probabilities'], np.float32), expected
  )
  lines = {'ids': [[3, 'item-7'], [49, None]], 'dense': [[31], [25.5]]}
  code, answer, _ = ask(f'{running.url}/score', lines)
  assert code == 200, answer
  assert answer['probabilities'][0] == expected[0]


def test_the_service_says_what_it_takes(running):
  code, facts, _ = ask(running.url)
  assert code == 200
  names = [(one['name'], one['ids']) for one in facts['features']]
  assert names == [('user', 'none'), ('item', 'text')]
  assert [one['name'] for one in facts['dense']] == ['age']
  code, stats, _ = ask(f'{running.url}/stats')
  assert (code, {'requests', 'batches', 'examples'} <= {*stats}) == (200, True)


GOOD = {'ids': {'user': [3, 4], 'item': ['a', 'b']}, 'dense': {'age': [1, 2]}}


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'ids': {'user': [3], 'itm': ['a']}}, ('itm', 'user, item, age')),
    ({'ids': {'user': [3]}}, ("'item'", 'ids')),
    ({'ids': {}}, ("'user'",)),
    ({'ids': {'user': [], 'item': []}}, ('1 to 65536',)),
    ({'ids': {'user': 3, 'item': ['a']}}, ('list of 1 to', 'got 3')),
    ({'ids': {'user': [3, 4], 'item': ['a']}}, ("'item'", '2 examples')),
    ({'ids': {'user': [3, 4], 'item': ['a', 7]}}, ('1', "'item'", 'got 7')),
    ({'ids': {'user': [3, 4], 'item': ['a', -2]}}, ('1', "'item'", '-2')),
    ({'ids': {'user': [3, 50], 'item': ['a', 'b']}}, ('1', "'user'", '50')),
    ({'ids': {'user': [-2, 4], 'item': ['a', 'b']}}, ('0', "'user'", '-2')),
    ({'ids': {'user': [3, '4'], 'item': ['a', 'b']}}, ('1', "'user'", '"4"')),
    ({'ids': {'user': [3, True], 'item': ['a', 'b']}}, ("'user'", 'true')),
    ({'ids': {'user': [3, [4, 5]], 'item': ['a', 'b']}}, ('1', 'up to 1')),
    ({'dense': {}}, ("'age'",)),
    ({'dense': {'age': [1]}}, ("'age'", 'list of 2', 'list of 1')),
    ({'dense': {'age': [1, None]}}, ('example 1', "'age'", 'null')),
    ({'dense': {'age': [1, '2']}}, ('example 1', "'age'", '"2"')),
    ({'dense': {'age': [1, [2, 3]]}}, ('example 1', "'age'", 'list of 2')),
    ({'dense': {'age': [1, 10**400]}}, ('example 1', "'age'")),
    ({'dense': {'user': [1, 2]}}, ('dense by name', 'age', 'user')),
    ({'weights': {'user': [1, 2]}}, ('no weights',)),
  ],
)
def test_errors_name_feature_example_and_value(running, change, words):
  code, answer, _ = ask(f'{running.url}/score', GOOD | change)
  assert code == 400, answer
  check_sentence(answer['error'], *words)


@pytest.fixture(scope='module')
def bags(tmp_path_factory):
  """Weighted bags, a vocabulary, and dense features without names."""
  run = exported.trained(uneven(), steps=0)
  known = tuple(
    Vocabulary(integers(np.arange(-40, 40, 10 + i))) for i in range(3)
  )
  run = run._replace(data=run.data._replace(vocabulary=lambda: known))
  with exported.served(run, tmp_path_factory.mktemp('bags') / 'x') as one:
    yield one


def test_bags_and_weights_by_name_are_scored_as_in_process(bags):
  scorer, address = bags
  rng = random.Random(0)
  with watchdog():
    for _ in range(40):
      count, ids, weights = rng.randrange(1, 6), {}, {}
      for one in scorer.layout.features:
        lengths = [rng.randrange(one.length + 1) for _ in range(count)]
        values = (rng.randrange(-60, 60), None, '7', '-7', 'é', '007')
        cells = [[rng.choice(values) for _ in range(n)] for n in lengths]
        flat = one.length == 1 and all(lengths) and rng.random() < 0.5
        ids[one.name] = [cell[0] for cell in cells] if flat else cells
        weights[one.name] = [[rng.gauss(0, 1) for _ in cell] for cell in cells]
      if rng.random() < 0.5:
        weights.popitem()
      dense = [[rng.gauss(0, 1) for _ in range(small.DENSE)]] * count
      body = {'dense': dense, 'ids': ids, 'weights': weights}
      code, answer = answered(address, posted(json.dumps(body).encode()))
      assert code == 200, (answer, body)
      expected = scorer.probabilities(np.array(dense), ids, weights)
      np.testing.assert_array_equal(
        np.array(answer['probabilities'], np.float32), expected
      )


def test_wrong_weights_and_dense_by_name_are_refused(bags):
  _, address = bags
  good = {'x': [[1, 2]], 'y': [[]], 'z': [1], 'w': [[1, 2]]}
  dense = [[0] * small.DENSE]
  for change, words in (
    ({'weights': {'x': [[1]]}}, ('as many as its ids', "'x'")),
    ({'weights': {'q': [[1]]}}, ('q',)),
    ({'weights': {'x': [[1, True]]}}, ('example 0', "'x'", 'true')),
    ({'dense': {'x': [1]}}, ('no names',)),
    ({'ids': good | {'x': [[1, 2, 3, 4]]}}, ('up to 3', "'x'")),
    ({'ids': [[1] * 8], 'weights': {'x': [[1]]}}, ('need ids by name',)),
  ):
    body = {'ids': good, 'dense': dense} | change
    code, answer = answered(address, posted(json.dumps(body).encode()))
    assert code == 400, answer
    check_sentence(answer['error'], *words)


def test_a_connection_answers_several_requests(running):
  address = running.server.address
  with contextlib.closing(
    http.client.HTTPConnection(*address, timeout=60)
  ) as connection:
    for body, code in ((json.dumps(GOOD), 200), ('{', 400)) * 2:
      connection.request('POST', '/score', body)
      with connection.getresponse() as answer:
        assert (answer.status, answer.will_close) == (code, False)
        answer.read()
    for one in [*running.server.server_state.connections]:
      own = one.transport.get_extra_info('socket')
      # Else the body of an answer waits 40 ms for that of its head.
      assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize('memory', ['dram', 'mmap', 'ssd'])
def test_a_quick_request_alone_is_scored_without_another_thread(
  folder, monkeypatch, memory
):
  threads = []
  with Scorer(folder, memory) as scorer, Running(scorer) as one:
    one.wait()
    alone = scorer.predictions

    def seen(*given):
      threads.append(threading.current_thread())
      return alone(*given)

    monkeypatch.setattr(scorer, 'predictions', seen)
    batcher = one.server._app.state.batcher
    many = {name: values * 8 for name, values in GOOD['ids'].items()}
    dense = {'age': GOOD['dense']['age'] * 8}
    for seconds in 1e-9, 1.0:
      monkeypatch.setattr(batcher, '_seconds', {1: 1e-9, 16: seconds})
      code, answer, _ = ask(f'{one.url}/score', GOOD)
      assert code == 200
      expected = alone(GOOD['dense'], GOOD['ids']).tolist()
      assert answer['probabilities'] == expected
      assert ask(f'{one.url}/score', {'ids': many, 'dense': dense})[0] == 200
    assert batcher.requests == batcher.batches == 4
    own = one.thread if memory == 'dram' else batcher._thread
    assert threads == [own, own, batcher._thread, batcher._thread]


def test_requests_that_wait_are_scored_together(running, monkeypatch):
  scorer, go, at_work = running.scorer, threading.Event(), threading.Event()
  alone = scorer.predictions

  def waiting(*given):
    at_work.set()
    assert go.wait(60)
    return alone(*given)

  monkeypatch.setattr(scorer, 'predictions', waiting)
  batcher = running.server._app.state.batcher
  # Measured on a busy machine, 16 at once may seem slower than 16 alone.
  monkeypatch.setattr(batcher, '_seconds', {1: 1.0, 16: 2.0})
  before = ask(f'{running.url}/stats')[1]
  answers = [None] * 16

  def client(number):
    ids = {'user': [number], 'item': [f'item-{number}']}
    body = {'ids': ids, 'dense': {'age': [20 + number]}}
    answers[number] = (body, ask(f'{running.url}/score', body))

  threads = [threading.Thread(target=client, args=(n,)) for n in range(16)]
  threads[0].start()
  assert at_work.wait(60)
  for thread in threads[1:]:
    thread.start()
  jobs = batcher._jobs
  with watchdog():
    while len(jobs) < 15:  # all others wait
      time.sleep(0.01)
  go.set()
  for thread in threads:
    thread.join()
  after = ask(f'{running.url}/stats')[1]
  assert after['requests'] - before['requests'] == 16
  assert after['batches'] - before['batches'] == 2
  for body, (code, answer, _) in answers:
    assert code == 200
    expected = alone(body['dense'], body['ids'])
    np.testing.assert_allclose(answer['probabilities'], expected, rtol=1e-6)


def test_more_requests_than_may_wait_are_told_to_come_again(
  running, monkeypatch
):
  go, full = threading.Event(), threading.Semaphore(0)
  monkeypatch.setattr(app, 'MOST_REQUESTS', 2)
  monkeypatch.setattr(batching, 'QUICK_S', -1)  # so that no request is alone
  alone = running.scorer.predictions
  monkeypatch.setattr(
    running.scorer,
    'predictions',
    lambda *given: go.wait(60) and alone(*given),
  )
  answers = []

  def client():
    answers.append(ask(f'{running.url}/score', GOOD))
    full.release()

  threads = [threading.Thread(target=client) for _ in range(6)]
  for thread in threads:
    thread.start()
  for _ in range(4):
    assert full.acquire(timeout=60)
  assert ask(f'{running.url}/health')[0] == 200
  go.set()
  for thread in threads:
    thread.join()
  assert sorted(code for code, _, _ in answers) == [200] * 2 + [503] * 4
  for code, answer, headers in answers:
    if code == 503:
      assert headers['Retry-After'] == '1'
      assert '2 requests' in answer['error']


def test_health_says_when_it_can_score(folder, monkeypatch):
  monkeypatch.setattr(server, '_LINGER_S', 60)
  go = threading.Event()
  with Scorer(folder) as scorer:
    compiles = scorer.compile
    monkeypatch.setattr(scorer, 'compile', lambda: go.wait(60) and compiles())
    with Running(scorer) as one:
      url = f'{one.url}/health'
      assert ask(url)[:2] == (503, {'status': 'starting'})
      go.set()
      while ask(url)[0] == 503:
        time.sleep(0.01)
      assert ask(url)[:2] == (200, {'status': 'ok'})
      connection = http.client.HTTPConnection(*one.server.address, timeout=60)
      code, stopped = 200, False
      while code == 200:
        connection.request('GET', '/health')
        answer = connection.getresponse()
        code, values = answer.status, json.load(answer)
        if not stopped:
          one.server.stop()
          stopped = True
        time.sleep(0.01)
      assert (code, values) == (503, {'status': 'draining'})
      assert answer.will_close
      connection.close()


def test_a_client_that_reads_no_answer_is_given_up(running, monkeypatch):
  monkeypatch.setattr(server, 'PATIENCE_S', 0.5)
  request = b'GET / HTTP/1.1\r\nHost: x\r\n\r\n' * 100
  with watchdog(), socket.socket() as connection:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(running.server.address)
    with contextlib.suppress(ConnectionError):
      while True:
        connection.sendall(request)


def test_a_stopped_program_answers_on_connections_that_are_open(folder):
  """No request of a client that keeps its connection is lost."""
  command = [sys.executable, '-m', 'slip_serve', str(folder), '--port=0']
  counts = {'answered': 0, 'lost': 0}
  with started(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
  ) as process:
    host, port = process.stdout.readline().strip()[7:].split(':')

    def client():
      while True:
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        try:
          connection.connect()
        except OSError:
          connection.close()
          return
        try:
          closes = False
          while not closes:
            connection.request('POST', '/score', json.dumps(GOOD))
            answer = connection.getresponse()
            answer.read()
            closes = answer.will_close
            counts['answered'] += answer.status == 200
        except (OSError, http.client.HTTPException):
          counts['lost'] += 1
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
      thread.start()
    while counts['answered'] < 100:
      assert process.poll() is None
      time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    for thread in threads:
      thread.join()
    assert process.stderr.read() == ''
  assert counts['lost'] == 0


def is_listening(address):
  try:
    socket.create_connection(address, 0.1).close()
  except ConnectionRefusedError:
    return False
  except TimeoutError:  # a server that stops does not shake hands any more
    pass
  return True


def test_the_last_answer_on_a_connection_says_that_it_closes(
  folder, monkeypatch
):
  go, at_work = threading.Event(), threading.Event()
  monkeypatch.setattr(batching, 'QUICK_S', -1)
  with Scorer(folder) as scorer, Running(scorer) as one:
    alone = scorer.predictions

    def waiting(*given):
      at_work.set()
      assert go.wait(60)
      return alone(*given)

    monkeypatch.setattr(scorer, 'predictions', waiting)
    connection = http.client.HTTPConnection(*one.server.address, timeout=60)
    connection.request('POST', '/score', json.dumps(GOOD))
    assert at_work.wait(60)
    one.server.stop()
    while is_listening(one.server.address):
      pass
    go.set()
    answer = connection.getresponse()
    assert (answer.status, answer.will_close) == (200, True)
    connection.close()


def test_without_the_extra_one_sentence_says_what_to_install(
  folder, monkeypatch, capsys
):
  monkeypatch.setitem(sys.modules, 'uvicorn', None)
  monkeypatch.delitem(sys.modules, 'slip_serve.server')
  monkeypatch.setattr(sys, 'argv', ['slip_serve', str(folder)])
  assert __main__.main() == 1
  errors = capsys.readouterr().err
  assert errors.startswith('error: the server must have uvicorn and starlette')
  assert "pip install 'slipstream_jax[serve]'" in errors


def test_the_bench_of_servers_counts_requests(running):
  server = '{}:{}'.format(*running.server.address)
  bar = Bar(Console(file=io.StringIO()), None, '')
  before = ask(f'{running.url}/stats')[1]
  how = {'clients': ['1', '3'], 'examples': 2, 'seconds': 0.3, 'turns': 1}
  with bar:
    ((_, rows),) = clients.measure(server, bar, by_name=True, **how)
  after = ask(f'{running.url}/stats')[1]
  assert [row['clients'] for row in rows] == [1, 3]
  counted = sum(row['requests/s'] * 0.3 for row in rows)
  assert 0 < counted <= after['requests'] - before['requests'] + 1
  for row in rows:
    assert 0 < row['ms, p50'] <= row['ms, p99']
  with pytest.raises(UserError, match='a server must answer'):
    list(clients.measure('127.0.0.1:1', bar, by_name=True, **how))
