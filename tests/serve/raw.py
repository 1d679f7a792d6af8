"""Bytes to a server of HTTP, and its answer, without a client's own rules."""

import json
import socket


def posted(body, **headers):
  """A request to score; the headers are added or, with None, left out."""
  fields = {'Host': 'x', 'Content-Length': str(len(body))}
  fields |= {'Connection': 'close'} | headers
  lines = [f'{name}: {value}' for name, value in fields.items() if value]
  head = '\r\n'.join(('POST /score HTTP/1.1', *lines, '', ''))
  return head.encode('latin-1') + body


def exchanged(address, request, ends=True):
  """All that the server sends; it closes first unless the client ends."""
  with socket.create_connection(address, timeout=60) as connection:
    connection.sendall(request)
    if ends:
      connection.shutdown(socket.SHUT_WR)
    return b''.join(iter(lambda: connection.recv(1 << 16), b''))


def parsed(answer):
  """Code and values of an answer that is whole."""
  head, _, body = answer.partition(b'\r\n\r\n')
  first, *lines = head.decode().split('\r\n')
  fields = dict(line.lower().split(': ', 1) for line in lines)
  assert int(fields['content-length']) == len(body)
  assert fields['connection'] == 'close'
  version, code, _ = first.split(' ', 2)
  assert version == 'HTTP/1.1'
  return int(code), json.loads(body)


def answered(address, request, ends=True):
  """Code and values of the answer to a request."""
  return parsed(exchanged(address, request, ends))
