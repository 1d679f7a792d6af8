"""A small HTTP server: examples as JSON in, probabilities out.

    POST /score  {"dense": [[...], ...], "ids": [[...], ...]}
                 -> {"probabilities": [...]}
    GET  /       what the model takes
    GET  /stats  what was asked so far

It is an example. It has no users and no encryption, and answers one request per
connection. Its memory is bounded, whatever clients send.
"""

from concurrent import futures
import contextlib
import ctypes
from email.utils import formatdate
import gc
from http import HTTPStatus
import json
import re
import socket
import struct
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np

from slip_serve.bodies import examples_of
from slip_serve.errors import ServeError
from slip_serve.scorer import Scorer

MOST_BYTES = 1 << 21
"""Bytes that a body may have."""
CONNECTIONS = 128
"""Connections that are read or answered at a time. Others wait."""
_AT_WORK = 4  # requests that are parsed or scored at a time
_BACKLOG = 1024  # connections that may wait
_MOST_HEAD = 1 << 14
_PATIENCE_S = 10.0  # for a whole request, and again for its answer
_LINGER_S = 2.0  # for a client to close its side
_DRAIN_S = 0.1  # without a new connection, before the server stops listening
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_METHODS = {
  '/': ('GET', 'HEAD'),
  '/stats': ('GET', 'HEAD'),
  '/score': ('POST',),
}
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux


class Server:
  """Listens from the start. `serve_forever` answers, and `with` closes it.

  Attributes:
    server_address: host and port.
  """

  def __init__(
    self, scorer: Scorer, host: str = '127.0.0.1', port: int = 8080
  ) -> None:
    """Listens.

    Args:
      scorer: shared by all threads. The server does not close it.
      host: address to listen at.
      port: port to listen at. 0: any that is free.
    """
    self._scorer = scorer
    self._listener = socket.create_server((host, port), backlog=_BACKLOG)
    self._listener.settimeout(0.2)
    self.server_address: tuple[str, int] = self._listener.getsockname()
    self._room = threading.Semaphore(CONNECTIONS)
    self._workers = futures.ThreadPoolExecutor(_AT_WORK, 'slip-serve-score')
    self._parsing, self._serving = threading.Lock(), threading.Lock()
    self._stopping = False

  def __enter__(self) -> 'Server':
    return self

  def __exit__(self, *_: object) -> None:
    self.shutdown()
    with self._serving:
      self._listener.close()
      self._workers.shutdown()

  def serve_forever(self) -> None:
    """Answers requests until `shutdown`, then all that are connected."""
    threads = futures.ThreadPoolExecutor(CONNECTIONS, 'slip-serve-http')
    with self._serving, threads as pool:
      while not self._stopping:
        self._accept(pool)
      _refuse_handshakes(self._listener)
      self._listener.settimeout(_DRAIN_S)
      for _ in range(_BACKLOG + 1):
        if not self._accept(pool):
          break
      self._listener.close()

  def shutdown(self) -> None:
    """Makes `serve_forever` return. A signal handler may call it."""
    self._stopping = True

  def _accept(self, pool: futures.Executor) -> bool:
    """Passes one connection to the pool. Returns False if none came."""
    self._room.acquire()
    try:
      connection = self._listener.accept()[0]
    except OSError as error:
      self._room.release()
      if isinstance(error, TimeoutError):
        return False
      time.sleep(0.05)  # for example, no file descriptor is left
      return True
    pool.submit(self._serve, connection)
    return True

  def _serve(self, connection: socket.socket) -> None:
    try:
      with contextlib.suppress(OSError), connection:  # the client may be gone
        answer = self._answer(_Request(connection))
        connection.settimeout(_PATIENCE_S)
        connection.sendall(answer)
        _linger(connection)
    finally:
      self._room.release()

  def _answer(self, request: '_Request') -> bytes:
    """Returns the bytes of the answer to a request."""
    allowed: tuple[str, ...] = ()
    try:
      method, path = request.read_head()
      if path not in _METHODS:
        raise _RequestError(404, f'there are {", ".join(_METHODS)}')
      allowed = _METHODS[path]
      if method not in allowed:
        raise _RequestError(405, f'{path} takes {" and ".join(allowed)}')
      if path == '/score':
        return self._workers.submit(self._score, request.read_body()).result()
      facts = facts_of(self._scorer)
      if path == '/stats':
        facts = self._scorer.stats._asdict()
      return _response(200, facts, method)
    except _RequestError as error:
      allow = allowed if error.code == 405 else ()
      return _response(error.code, {'error': str(error)}, allow=allow)

  def _score(self, body: bytearray) -> bytes:
    """Returns the answer to a body. Raises nothing.

    An exception would hold the parsed lists until Python collects cycles.
    """
    with self._parsing:  # one at a time: lists are large
      collects = gc.isenabled()
      gc.disable()  # it would take most of the time to parse
      try:
        examples = examples_of(self._scorer.layout, body)
      except ServeError as error:
        return _response(400, {'error': str(error)})
      finally:
        if collects:
          gc.enable()
    try:
      probabilities = self._scorer.probabilities(*examples)
    except Exception as error:  # for example, the disk fails
      traceback.print_exc(file=sys.stderr)
      got = error if isinstance(error, ServeError) else 'an internal error'
      return _response(500, {'error': str(got)})
    if not np.isfinite(probabilities).all():
      sentence = (
        'every score must be a finite number, got one that is not (POST'
        ' /score); look for features out of all proportion.'
      )
      return _response(400, {'error': sentence})
    return _response(200, {'probabilities': probabilities.tolist()})


make_server = Server
"""Makes a server that scores: see `Server`."""


def facts_of(scorer: Scorer) -> dict[str, Any]:
  """Returns what the model takes, as JSON."""
  layout = scorer.layout
  return {
    'data': layout.name,
    'step': layout.step,
    'dense_features': layout.dense_features,
    'weighted': layout.weighted,
    'features': [
      {
        'name': feature.name,
        'table': layout.tables[feature.table].name,
        'first_column': feature.first,
        'columns': feature.length,
      }
      for feature in layout.features
    ],
  }


class _RequestError(Exception):
  """A request that is answered with this code and sentence."""

  def __init__(self, code: int, sentence: str) -> None:
    self.code = code
    super().__init__(sentence)


class _Request:
  """Reads one request, within a limit of time for all its bytes."""

  def __init__(self, connection: socket.socket) -> None:
    self._connection = connection
    self._until = time.monotonic() + _PATIENCE_S
    self._fields: dict[str, str] = {}
    self._early = b''  # bytes of the body that came with the head

  def read_head(self) -> tuple[str, str]:
    """Returns method and path. Refuses what is not HTTP."""
    received = bytearray()
    while not (end := re.search(rb'\r?\n\r?\n', received)):
      if len(received) > _MOST_HEAD:
        raise _RequestError(431, f'a head must have up to {_MOST_HEAD} bytes')
      piece = self._receive(4096)
      if not piece and not received:
        raise ConnectionError
      _check(piece, 'the head must end with an empty line')
      received += piece
    self._early = bytes(received[end.end() :])
    first, *lines = re.split('\r?\n', received[: end.start()].decode('latin-1'))
    words = first.split(' ')
    _check(
      len(words) == 3
      and _TOKEN.fullmatch(words[0])
      and words[1].isprintable()
      and words[2] in ('HTTP/1.0', 'HTTP/1.1'),
      'the first line must be as in "POST /score HTTP/1.1"',
    )
    for line in lines:
      name, colon, value = line.partition(':')
      name, value = name.lower(), value.strip(' \t')
      good = _TOKEN.fullmatch(name) and value.replace('\t', '').isprintable()
      _check(colon and good, 'a header must be a name, a colon and a value')
      if name in self._fields:
        value = f'{self._fields[name]}, {value}'
      self._fields[name] = value
    return words[0], words[1]

  def read_body(self) -> bytearray:
    """Returns the body. Refuses one that is too long, or no JSON."""
    fields = self._fields
    kind = fields.get('content-type', 'application/json').partition(';')[0]
    if kind.strip().lower() != 'application/json':
      raise _RequestError(
        415, 'the header Content-Type must be application/json'
      )
    text = fields.get('content-length')
    if text is None or 'transfer-encoding' in fields:
      raise _RequestError(
        411, 'a body must have a Content-Length and no chunks'
      )
    digits = text.isascii() and text.isdigit()
    _check(digits, 'the header Content-Length must be a number of bytes')
    if len(text) > 18 or int(text) > MOST_BYTES:
      raise _RequestError(413, f'a body must have up to {MOST_BYTES} bytes')
    if fields.get('expect', '').lower() == '100-continue' and not self._early:
      self._connection.sendall(b'HTTP/1.1 100 Continue\r\n\r\n')
    body = bytearray(self._early[: int(text)])
    while left := int(text) - len(body):
      piece = self._receive(min(left, 1 << 16))
      _check(piece, f'the body must have the {text} bytes of its header')
      body += piece
    return body

  def _receive(self, most: int) -> bytes:
    left = self._until - time.monotonic()
    try:
      self._connection.settimeout(max(left, 1e-3))
      return self._connection.recv(most)
    except TimeoutError as error:
      sentence = f'a request must come within {_PATIENCE_S:.0f} seconds'
      raise _RequestError(408, sentence) from error


def _check(good: object, sentence: str) -> None:
  if not good:
    raise _RequestError(400, sentence)


def _response(
  code: int,
  values: dict[str, Any],
  method: str = '',
  allow: tuple[str, ...] = (),
) -> bytes:
  body = json.dumps(values, allow_nan=False).encode()
  head = [
    f'HTTP/1.1 {code} {HTTPStatus(code).phrase}',
    f'Date: {formatdate(usegmt=True)}',
    'Content-Type: application/json',
    f'Content-Length: {len(body)}',
    'Connection: close',
    *([f'Allow: {", ".join(allow)}'] if allow else []),
  ]
  whole = '\r\n'.join((*head, '', '')).encode()
  return whole if method == 'HEAD' else whole + body


def _linger(connection: socket.socket) -> None:
  """Waits until the client closes, and reads what it still sends.

  The system would reset a connection that is closed with bytes unread, and the
  client might lose the answer.
  """
  connection.shutdown(socket.SHUT_WR)
  until = time.monotonic() + _LINGER_S
  while (left := until - time.monotonic()) > 0:
    connection.settimeout(left)
    if not connection.recv(1 << 16):
      break


def _refuse_handshakes(listener: socket.socket) -> None:
  """Refuses new connections, if the system is Linux.

  A filter drops the first packet of every handshake. So all connections that
  exist can be accepted before the socket closes, which would reset the others.
  """
  if sys.platform != 'linux':
    return
  code = (
    (0x30, 0, 0, 13),  # load the flags of the TCP header
    (0x45, 0, 1, 2),  # is it a SYN?
    (0x06, 0, 0, 0),  # yes: drop it
    (0x06, 0, 0, 0xFFFFFFFF),  # no: keep it
  )
  packed = b''.join(struct.pack('HBBI', *one) for one in code)
  program = ctypes.create_string_buffer(packed)
  where = struct.pack('HP', len(code), ctypes.addressof(program))
  with contextlib.suppress(OSError):
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, where)
