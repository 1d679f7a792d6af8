"""A small HTTP server: examples as JSON in, probabilities out.

    POST /score  {"dense": [[...], ...], "ids": [[...], ...]}
                 -> {"probabilities": [...]}
    GET  /       what the model takes
    GET  /stats  what was asked so far

An example of how to serve, and no more: it knows no users and no encryption.
"""

from http import server
import json
from typing import Any

import numpy as np

from slip_serve import vocabulary
from slip_serve.errors import ServeError
from slip_serve.scorer import Scorer

_MOST_BYTES = 1 << 24
_MOST_EXAMPLES = 1 << 16


def make_server(
  scorer: Scorer, host: str = '127.0.0.1', port: int = 8080
) -> server.ThreadingHTTPServer:
  """A server that scores; `serve_forever` runs it.

  Args:
    scorer: shared by all threads; whoever made it closes it.
    host: address to listen at.
    port: 0: any that is free.
  """

  class Handler(server.BaseHTTPRequestHandler):
    """One request."""

    timeout = 30  # who sends nothing does not keep a thread

    def do_GET(self) -> None:
      """What there is."""
      if self.path == '/stats':
        self._answer(200, scorer.stats._asdict())
      elif self.path == '/':
        self._answer(200, facts_of(scorer))
      else:
        self._answer(404, {'error': 'there are /, /stats and /score'})

    def do_POST(self) -> None:
      """Scores."""
      if self.path != '/score':
        self._answer(404, {'error': 'there are /, /stats and /score'})
        return
      try:
        length = int(self.headers.get('Content-Length', ''))
      except ValueError:
        length = -1
      if not 0 <= length <= _MOST_BYTES:
        self.close_connection = True
        self._answer(413, {'error': f'a body has up to {_MOST_BYTES} bytes'})
        return
      try:
        self._answer(200, scored(scorer, self.rfile.read(length)))
      except ServeError as error:
        self._answer(400, {'error': str(error)})

    def _answer(self, code: int, values: dict[str, Any]) -> None:
      body = json.dumps(values, allow_nan=False).encode()
      self.send_response(code)
      self.send_header('Content-Type', 'application/json')
      self.send_header('Content-Length', str(len(body)))
      self.end_headers()
      self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
      """Nothing is said of requests."""

  httpd = server.ThreadingHTTPServer((host, port), Handler)
  httpd.daemon_threads = True
  return httpd


def facts_of(scorer: Scorer) -> dict[str, Any]:
  """What the model takes, as JSON."""
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


def scored(scorer: Scorer, body: bytes) -> dict[str, Any]:
  """The answer to a body.

  Ids are whole numbers as the format of the data gives them, null where one is
  missing; text is an id of a table of one's own.

  Raises:
    ServeError: the body is none, or its examples cannot be scored.
  """
  try:
    values = json.loads(body)
    ids = _ids(values['ids'])
    dense = values.get('dense') or [[] for _ in ids]
    weights = values.get('weights')
    if len(ids) > _MOST_EXAMPLES:
      raise ValueError(f'{len(ids)} examples, more than {_MOST_EXAMPLES}')
    arrays = (
      np.asarray(dense, np.float32).reshape(len(ids), -1),
      np.asarray(ids, np.int64).reshape(len(ids), -1),
      None if weights is None else np.asarray(weights, np.float32),
    )
  except (
    *(ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError),
  ) as error:
    raise ServeError(
      'a body must be {"dense": [[...]], "ids": [[...]]}',
      got=f'{type(error).__name__}: {str(error)[:200]}',
      where='POST /score',
      hint='give one line of each for every example',
    ) from error
  probabilities = scorer.probabilities(*arrays)
  if not np.isfinite(probabilities).all():
    raise ServeError(
      'examples must be of sizes that the model can score',
      got='a score that is no number',
      where='POST /score',
      hint='look for features out of all proportion',
    )
  return {'probabilities': probabilities.tolist()}


def _ids(lines: Any) -> list[list[int]]:
  return [
    [
      one if type(one) is int else _raw_id(one)  # True is no id
      for one in line
    ]
    for line in lines
  ]


def _raw_id(value: Any) -> int:
  if value is not None and not isinstance(value, str):
    raise TypeError(f'{value!r:.40} as an id')
  return vocabulary.raw_id(value)
