"""The service as an ASGI application: examples as JSON in, probabilities out.

    POST /score   {"ids": {"user": [3], "item": ["item-7"]},
                   "dense": {"age": [31]}}
                  -> {"probabilities": [...]}
    GET  /        what the model takes
    GET  /stats   what was asked so far
    GET  /health  200 if it can score

Concurrent requests are scored together. Memory is bounded, whatever clients
send.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent import futures
import contextlib
import functools
import gc
import sys
import traceback
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from slip_serve.batching import Batcher, Examples
from slip_serve.bodies import examples_of
from slip_serve.errors import ServeError
from slip_serve.scorer import Scorer

MOST_BYTES = 1 << 21
"""Bytes that a body may have."""
MOST_REQUESTS = 512
"""Requests that are read or wait for their scores at a time."""
_SMALL = 1 << 14  # bytes of a body that is parsed without leaving the loop
_LARGE_AT_ONCE = 16  # larger ones that take memory at a time
_RETRY_S = '1'
_PATHS = '/, /stats, /health, /score'


def make_app(
  scorer: Scorer,
  together: int | None = None,
  on_ready: Callable[[], None] = lambda: None,
) -> Starlette:
  """Makes the application, to be run by any ASGI server.

  `app.state.draining = True` makes /health answer 503.

  Args:
    scorer: what scores. The application does not close it.
    together: examples of several requests that are scored at once. 0: each
      request is scored alone. None: the largest batch size of the export.
    on_ready: called once all programs are compiled, by another thread.
  """
  if together is None:
    together = max(one.examples for one in scorer.layout.programs)
  service = _Service(scorer, together, on_ready)
  app = Starlette(
    routes=[
      Route('/score', service.score, methods=['POST']),
      Route('/', service.facts),
      Route('/stats', service.stats),
      Route('/health', service.health),
    ],
    exception_handlers={HTTPException: _refusal},
    lifespan=service.lifespan,
  )
  app.state.draining = False
  return app


class _Service:
  """Answers requests while `lifespan` is entered."""

  def __init__(
    self, scorer: Scorer, together: int, on_ready: Callable[[], None]
  ) -> None:
    self._scorer = scorer
    self._make_batcher = functools.partial(Batcher, scorer, together, on_ready)
    self._batcher: Batcher
    self._parser: futures.Executor
    self._large: asyncio.Semaphore
    self._requests = 0

  @contextlib.asynccontextmanager
  async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
    """Runs the threads that parse and score."""
    self._large = asyncio.Semaphore(_LARGE_AT_ONCE)
    with (
      futures.ThreadPoolExecutor(1, 'slip-serve-parse') as self._parser,
      self._make_batcher() as self._batcher,
    ):
      app.state.batcher = self._batcher
      yield

  async def facts(self, _: Request) -> Response:
    return JSONResponse(facts_of(self._scorer))

  async def stats(self, _: Request) -> Response:
    batcher = self._batcher
    counts = {'requests': batcher.requests, 'batches': batcher.batches}
    return JSONResponse(self._scorer.stats._asdict() | counts)

  async def health(self, request: Request) -> Response:
    if request.app.state.draining:
      return JSONResponse({'status': 'draining'}, 503)
    if not self._batcher.ready:
      return JSONResponse({'status': 'starting'}, 503)
    return JSONResponse({'status': 'ok'})

  async def score(self, request: Request) -> Response:
    size = _size_of(request)
    if self._requests >= MOST_REQUESTS:
      raise HTTPException(
        503,
        f'the server answers {MOST_REQUESTS} requests at a time',
        {'Retry-After': _RETRY_S},
      )
    self._requests += 1
    try:
      if size <= _SMALL:
        return await self._answer(request, size)
      async with self._large:
        return await self._answer(request, size)
    except ClientDisconnect:
      return Response()  # to nobody
    finally:
      self._requests -= 1

  async def _answer(self, request: Request, size: int) -> Response:
    """Reads and scores a body of `size` bytes."""
    body = await request.body()
    if size <= _SMALL:
      examples = self._parse(body)
    else:
      loop = asyncio.get_running_loop()
      examples = await loop.run_in_executor(self._parser, self._parse, body)
    if isinstance(examples, str):
      return JSONResponse({'error': examples}, 400)
    del body
    try:
      scores = await self._scores(examples)
    except Exception as error:  # for example, the disk fails
      traceback.print_exc(file=sys.stderr)
      got = error if isinstance(error, ServeError) else 'an internal error'
      return JSONResponse({'error': str(got)}, 500)
    if not np.isfinite(scores).all():
      sentence = (
        'every score must be a finite number, got one that is not (POST'
        ' /score); look for features out of all proportion.'
      )
      return JSONResponse({'error': sentence}, 400)
    name = 'predictions' if self._scorer.layout.numbers else 'probabilities'
    return JSONResponse({name: scores.tolist()})

  async def _scores(self, examples: Examples) -> np.ndarray:
    """Scores the only request here, as two changes of threads take longer.

    Others are scored together. So are those whose rows are on a disk, as this
    thread must not wait for one.
    """
    await asyncio.sleep(0)  # until the other requests that came are counted
    may_score = self._scorer.memory == 'dram' and self._requests == 1
    if may_score and self._batcher.is_quick(len(examples.ids)):
      return self._batcher.scored(examples)
    return await asyncio.wrap_future(self._batcher.submit(examples))

  def _parse(self, body: bytes) -> Examples | str:
    """Returns the examples, or a sentence that says why there are none.

    An error would keep all that was parsed while the next body is.
    """
    collects = gc.isenabled()
    gc.disable()  # it would take most of the time to parse
    try:
      return examples_of(self._scorer.layout, body)
    except ServeError as error:
      return str(error)
    finally:
      if collects:
        gc.enable()


def facts_of(scorer: Scorer) -> dict[str, Any]:
  """Returns what the model takes, as JSON."""
  layout = scorer.layout
  words = [layout.vocabulary[one.table] for one in layout.features]
  return {
    'data': layout.name,
    'step': layout.step,
    'dense_features': layout.dense_features,
    'dense': [one._asdict() for one in layout.dense],
    'weighted': layout.weighted,
    'features': [
      {
        'name': feature.name,
        'table': layout.tables[feature.table].name,
        'ids': 'hex' if of.texts == 'hex' else of.kind,
        'first_column': feature.first,
        'columns': feature.length,
      }
      for feature, of in zip(layout.features, words, strict=True)
    ],
  }


def _size_of(request: Request) -> int:
  """Returns the bytes of a body, from its header. Refuses a wrong head."""
  headers = request.headers
  if request.scope['http_version'] not in ('1.0', '1.1'):
    raise HTTPException(400, 'the version must be HTTP/1.0 or HTTP/1.1')
  kind = headers.get('content-type', 'application/json').partition(';')[0]
  if kind.strip().lower() != 'application/json':
    raise HTTPException(415, 'the header Content-Type must be application/json')
  text = headers.get('content-length', '')
  if 'transfer-encoding' in headers or not text:
    raise HTTPException(411, 'a body must have a Content-Length and no chunks')
  if not (text.isascii() and text.isdigit()):
    raise HTTPException(400, 'a Content-Length must be a number of bytes')
  if len(text) > 18 or int(text) > MOST_BYTES:
    raise HTTPException(413, f'a body must have up to {MOST_BYTES} bytes')
  return int(text)


async def _refusal(_: Request, error: Exception) -> Response:
  """Answers with one sentence."""
  assert isinstance(error, HTTPException)
  sentence = error.detail
  if error.status_code == 404:
    sentence = f'a path must be one of {_PATHS}'
  elif error.status_code == 405:
    allowed = (error.headers or {}).get('Allow', '')
    sentence = f'the method of this path must be {allowed}'
  return JSONResponse({'error': sentence}, error.status_code, error.headers)
