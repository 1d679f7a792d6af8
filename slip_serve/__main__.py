"""Serves an export over HTTP: `python -m slip_serve FOLDER --memory=ssd`."""

import argparse
import signal
import sys
import threading

from slip_serve.errors import ServeError
from slip_serve.http import make_server
from slip_serve.scorer import Scorer


def main() -> int:
  """Serves until SIGINT or SIGTERM; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog='python -m slip_serve', description=__doc__
  )
  parser.add_argument('folder', help='that experiments.export wrote')
  parser.add_argument(
    '--memory', default='dram', help='where rows are: dram, mmap or ssd'
  )
  parser.add_argument(
    '--cache',
    type=float,
    default=0.1,
    help='of ssd, rows in memory: a share up to 1, or a number',
  )
  parser.add_argument('--host', default='127.0.0.1')
  parser.add_argument('--port', type=int, default=8080)
  given = parser.parse_args()
  try:
    scorer = Scorer(given.folder, given.memory, given.cache)
  except ServeError as error:
    sys.stderr.write(f'error: {error}\n')
    return 1
  with scorer:
    try:
      httpd = make_server(scorer, given.host, given.port)
    except OSError as error:
      sys.stderr.write(f'error: a port must be free, got {error}.\n')
      return 1
    for number in signal.SIGINT, signal.SIGTERM:
      # `shutdown` waits for the loop, which this very thread is in.
      signal.signal(
        number, lambda *_: threading.Thread(target=httpd.shutdown).start()
      )
    host, port = httpd.server_address[:2]
    sys.stdout.write(f'http://{host!s}:{port}\n')
    sys.stdout.flush()
    with httpd:
      httpd.serve_forever()
  return 0


if __name__ == '__main__':
  sys.exit(main())
