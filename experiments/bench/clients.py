"""Clients of a server of an export, and what they measure."""

import asyncio
from collections.abc import Iterator
import json
import time
from typing import Any
import urllib.request

import numpy as np

from experiments.bench.runner import Item
from experiments.common.progress import Bar
from slipstream_jax.errors import UserError

_WARM_S = 1.0  # before any request is timed


def measure(*words: Any, **how: Any) -> Iterator[Item]:
  """Yields a table of requests/s and latencies.

  Args:
    words: one or two servers as 'host:port', and the progress bar.
    how: the flags of the program `experiments.bench.service`.

  Raises:
    UserError: a server does not answer, or refuses the requests.
  """
  *servers, bar = words
  yield 'requests', _rows(servers, bar, **how)


def _rows(
  servers: list[str],
  bar: Bar,
  clients: list[str],
  examples: int,
  by_name: bool,
  seconds: float,
  turns: int,
) -> list[dict[str, Any]]:
  requests = {one: _request(one, examples, by_name) for one in servers}
  bar.begin('turns')
  taken: dict[tuple[str, int], list[list[float]]] = {}
  for server in servers:
    asyncio.run(_turn(server, requests[server], 1, _WARM_S))
  for turn in range(turns):
    for count in map(int, clients):
      for server in servers[:: 1 if turn % 2 else -1]:
        times = asyncio.run(_turn(server, requests[server], count, seconds))
        taken.setdefault((server, count), []).append(times)
  return [
    {
      'clients': count,
      'server': server,
      'requests/s': round(_median(len(one) / seconds for one in own)),
      **{
        f'ms, p{p}': round(
          1e3 * _median(float(np.percentile(one, p)) for one in own), 2
        )
        for p in (50, 99)
      },
    }
    for (server, count), own in sorted(
      taken.items(), key=lambda item: (item[0][1], servers.index(item[0][0]))
    )
  ]


def _median(values: Iterator[float]) -> float:
  return float(np.median([*values]))


def _request(server: str, examples: int, by_name: bool) -> bytes:
  """Returns a request that the server's model takes, as bytes."""
  try:
    with urllib.request.urlopen(f'http://{server}/', timeout=30) as answer:
      facts = json.load(answer)
  except (OSError, ValueError) as error:
    raise UserError(
      'a server must answer',
      got=str(error),
      where=server,
      hint='start it with `python -m slip_serve EXPORT`',
    ) from error
  features = facts['features']
  body: dict[str, Any] = {}
  if by_name:
    texts = {one['name'] for one in features if one.get('ids') == 'text'}
    body['ids'] = {
      one['name']: ['a' if one['name'] in texts else 1] * examples
      for one in features
    }
    if facts.get('dense'):
      body['dense'] = {one['name']: [1.0] * examples for one in facts['dense']}
  else:
    width = sum(one['columns'] for one in features)
    body['ids'] = [[1] * width] * examples
  if 'dense' not in body:
    body['dense'] = [[1.0] * facts['dense_features']] * examples
  text = json.dumps(body).encode()
  head = (
    f'POST /score HTTP/1.1\r\nHost: {server}\r\n'
    f'Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n'
  )
  return head.encode() + text


async def _turn(
  server: str, request: bytes, clients: int, seconds: float
) -> list[float]:
  """Returns the seconds of each request that all clients sent meanwhile."""
  until = time.perf_counter() + seconds
  some = [_client(server, request, until) for _ in range(clients)]
  return [one for own in await asyncio.gather(*some) for one in own]


async def _client(server: str, request: bytes, until: float) -> list[float]:
  host, _, port = server.rpartition(':')
  times, writer = [], None
  while (start := time.perf_counter()) < until:
    if writer is None:
      reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    head = (await reader.readuntil(b'\r\n\r\n')).lower()
    size = head.partition(b'content-length: ')[2].partition(b'\r')[0]
    body = await reader.readexactly(int(size))
    times.append(time.perf_counter() - start)
    if b' 200 ' not in head[:16]:
      raise UserError(
        'a server must score the requests',
        got=body[:200].decode(),
        where=server,
        hint='give an export with tables of at least 2 rows',
      )
    if b'connection: close' in head:
      writer.close()
      writer = None
  if writer is not None:
    writer.close()
  return times
