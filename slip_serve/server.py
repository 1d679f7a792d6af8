"""Runs the service with uvicorn, within limits of time and memory.

uvicorn has no limit of time for the head of a request or for reading an answer,
closes connections that only stopped sending, and resets those that wait to be
accepted when it stops. Subclasses of its protocol and its server add this.
"""

import asyncio
from collections.abc import Callable, Generator
import contextlib
import ctypes
import json
import select
import signal
import socket
import struct
import sys
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from slip_serve.app import make_app
from slip_serve.scorer import Scorer

CONNECTIONS = 1024
"""Connections that may be open. Others are closed."""
PATIENCE_S = 10.0
"""Seconds for the head of a request, for its body, and to read its answer."""
_BACKLOG = 1024  # connections that may wait to be accepted
_MOST_HEAD = 1 << 14
_IDLE_S = 5  # for the next request on a connection
_LINGER_S = 2.0  # for a client to close its side
_MOST_DROPPED = 1 << 26  # bytes that it may send meanwhile
_DRAIN_S = 0.1  # for handshakes under way when the server stops
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux


class Server(uvicorn.Server):
  """Listens from the start. `run` answers, until a signal or `stop`.

  Attributes:
    address: host and port.
  """

  def __init__(
    self,
    scorer: Scorer,
    host: str = '127.0.0.1',
    port: int = 8080,
    together: int | None = None,
    on_ready: Callable[[], None] = lambda: None,
  ) -> None:
    """Listens.

    Args:
      scorer: what scores. The server does not close it.
      host: address to listen at.
      port: port to listen at. 0: any that is free.
      together: see `make_app`.
      on_ready: see `make_app`.

    Raises:
      OSError: it cannot listen there.
      UnicodeError: the host is not a name.
    """
    self._listener = socket.create_server((host, port), backlog=_BACKLOG)
    self.address: tuple[str, int] = self._listener.getsockname()
    self._app = make_app(scorer, together, on_ready)
    super().__init__(
      uvicorn.Config(
        self._app,
        http=_Protocol,
        loop='asyncio',
        ws='none',
        lifespan='on',
        log_config=None,
        log_level='critical',
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_IDLE_S,
        h11_max_incomplete_event_size=_MOST_HEAD,
      )
    )

  def run(self, sockets: list[socket.socket] | None = None) -> None:
    """Answers requests until it is stopped, then all that are connected."""
    with self._listener:
      super().run(sockets or [self._listener])

  def stop(self) -> None:
    """Makes `run` return. Any thread may call it."""
    self.should_exit = True

  @contextlib.contextmanager
  def capture_signals(self) -> Generator[None, None, None]:
    """Leaves signals to the program."""
    yield

  def handle_exit(self, sig: int, frame: object) -> None:
    """Stops at the first signal. A second one ends the process at once."""
    del sig, frame
    self.stop()
    for number in signal.SIGINT, signal.SIGTERM:
      signal.signal(number, signal.SIG_DFL)

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    """Accepts what is connected, and answers it."""
    self._app.state.draining = True
    _refuse_handshakes(self._listener)
    await asyncio.sleep(_DRAIN_S)
    for _ in range(_BACKLOG):
      if not select.select([self._listener], [], [], 0)[0]:
        break
      await asyncio.sleep(0.01)
    await asyncio.sleep(0)  # those that were accepted last have a protocol
    await super().shutdown(sockets)


class _Transport:
  """A transport that leaves three of its methods to the protocol."""

  def __init__(self, transport: asyncio.Transport, owner: '_Protocol') -> None:
    self._transport = transport
    self.close = owner.close
    self.pause_reading = owner.pause_reading
    self.resume_reading = owner.resume_reading

  def __getattr__(self, name: str) -> Any:
    return getattr(self._transport, name)


class _Protocol(H11Protocol):
  """uvicorn's HTTP/1.1 with limits of time, and with errors in JSON."""

  transport: Any
  _own: asyncio.Transport
  _reading: asyncio.TimerHandle | None = None
  """Ends a head that does not come, or a connection that lingers."""
  _writing: asyncio.TimerHandle | None = None
  """Ends a connection whose client does not read its answer."""
  _left: float | None = None
  """Seconds left for a request that is not read for a while."""
  _dropped = 0
  _ended = False
  """Whether the last answer is sent, and the connection lingers."""

  def connection_made(self, transport: Any) -> None:
    # asyncio does so only for sockets that it made itself.
    transport.get_extra_info('socket').setsockopt(
      socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    )
    self._own = transport
    wrapped: Any = _Transport(transport, self)
    super().connection_made(wrapped)
    if len(self.connections) > CONNECTIONS:
      transport.abort()
    else:
      self._set_reading(PATIENCE_S, self._request_is_late)

  def connection_lost(self, exc: Exception | None) -> None:
    for timer in self._reading, self._writing:
      if timer is not None:
        timer.cancel()
    super().connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    if self._ended:  # it is read only so that the connection is not reset
      self._dropped += len(data)
      if self._dropped > _MOST_DROPPED:
        self._own.abort()
      return
    super().data_received(data)
    self._watch()

  def eof_received(self) -> Any:
    """Answers what was sent. uvicorn would close the connection.

    Returns:
      Whether the connection stays open for the answer.
    """
    if self._ended or (self._idle and not self.conn.trailing_data[0]):
      return False
    self.conn.receive_data(b'')
    if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
      self.handle_events()  # refuses a request that is not complete
    else:
      self._close_after_this()
    return True

  def on_response_complete(self) -> None:
    super().on_response_complete()
    if self._writing is not None:
      self._writing.cancel()
    if self.transport.get_write_buffer_size():
      late = self._answer_is_not_read
      self._writing = self.loop.call_later(PATIENCE_S, late)
    self._watch()

  def pause_reading(self) -> None:
    """Stops reading, and the clock of the request."""
    if self._reading is not None:
      left = self._reading.when() - self.loop.time()
      self._set_reading(None)
      self._left = left
    self._own.pause_reading()

  def resume_reading(self) -> None:
    """Undoes `pause_reading`."""
    self._own.resume_reading()
    if self._left is not None:
      self._set_reading(self._left, self._request_is_late)

  def close(self) -> None:
    """Sends nothing more, and closes the connection once the client has.

    The system resets a connection if bytes come after it was closed, or if it
    is closed with bytes unread. Then the client might lose the answer.
    """
    if self._ended or self._own.is_closing():
      return
    if self.conn.trailing_data[1]:  # the client has closed its side
      self._own.close()
      return
    self._ended = True
    self.flow.resume_reading()
    self._set_reading(_LINGER_S, self._own.abort)
    self._own.write_eof()

  def send_400_response(self, msg: str) -> None:
    """Refuses what is not HTTP. uvicorn calls it where h11 has raised."""
    error = sys.exc_info()[1]
    if getattr(error, 'error_status_hint', 400) == 431:
      self._refuse(431, f'a head must have up to {_MOST_HEAD} bytes')
    else:
      self._refuse(400, f'a request must be HTTP/1.1, {str(error or msg)[:80]}')

  def shutdown(self) -> None:
    """Answers requests that are under way, and at most one more."""
    if self._idle and self.cycle is not None:
      # One may be on its way, so the connection is not closed at once.
      self._set_reading(_LINGER_S, self.transport.close)
    else:
      self._close_after_this()

  @property
  def _idle(self) -> bool:
    """Whether no request waits for its answer."""
    return self.cycle is None or self.cycle.response_complete

  def _close_after_this(self) -> None:
    """Closes the connection once the present request is answered."""
    if not self._idle:
      # So that the answer says so, too. Not in `self.headers`: Starlette has
      # replaced the scope's list by a copy.
      headers = [*self.cycle.scope['headers'], CLOSE_HEADER]
      self.cycle.scope['headers'] = headers
      self.cycle.keep_alive = False

  def _watch(self) -> None:
    """Limits the time of a request once it has begun to come."""
    if self._ended:
      return
    app: Any = self.config.app
    if app.state.draining:
      self._close_after_this()
    their, more = self.conn.their_state, self.conn.trailing_data[0]
    if their is not h11.SEND_BODY and (their is not h11.IDLE or not more):
      self._set_reading(None)
    elif self._reading is None and not self.flow.read_paused:
      self._set_reading(PATIENCE_S, self._request_is_late)

  def _request_is_late(self) -> None:
    self._refuse(408, f'a request must come within {PATIENCE_S:.0f} seconds')

  def _answer_is_not_read(self) -> None:
    if self.transport.get_write_buffer_size():
      self.transport.abort()

  def _refuse(self, code: int, sentence: str) -> None:
    """Answers with an error, if none was begun, and ends the connection."""
    if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
      self.transport.close()
      return
    if self.cycle is not None:
      self.cycle.disconnected = True  # its answer would be a second one
      self.cycle.message_event.set()
    body = json.dumps({'error': sentence}).encode()
    headers = [
      *self.server_state.default_headers,
      (b'content-type', b'application/json'),
      (b'content-length', str(len(body)).encode()),
      (b'connection', b'close'),
    ]
    for event in (
      h11.Response(status_code=code, headers=headers),
      h11.Data(data=body),
      h11.EndOfMessage(),
    ):
      self.transport.write(self.conn.send(event) or b'')
    self.close()

  def _set_reading(
    self, seconds: float | None, late: Callable[[], None] = lambda: None
  ) -> None:
    if self._reading is not None:
      self._reading.cancel()
    self._reading = self._left = None
    if seconds is not None:
      self._reading = self.loop.call_later(seconds, late)


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
