"""Serves an export over HTTP: `python -m slip_serve FOLDER --memory=ssd`."""

import argparse
import gc
import signal
import sys
from typing import NoReturn

from slip_serve.errors import ServeError
from slip_serve.scorer import Scorer


class _Parser(argparse.ArgumentParser):
  """Ends with code 1 and one sentence if an argument is invalid."""

  def error(self, message: str) -> NoReturn:
    self.exit(1, f'error: {message}.\n')


def _port(text: str) -> int:
  digits = text.isascii() and text.isdigit() and len(text) < 6
  if not digits or int(text) >= 1 << 16:
    rule = 'a port must be a number from 0 to 65535'
    raise argparse.ArgumentTypeError(f'{rule}, got {text[:40]!r}')
  return int(text)


def _count(text: str) -> int:
  if not (text.isascii() and text.isdigit() and len(text) < 9):
    rule = 'a number of examples must be a whole number of up to 8 digits'
    raise argparse.ArgumentTypeError(f'{rule}, got {text[:40]!r}')
  return int(text)


def _keep_for_ever() -> None:
  """Has Python never again look for cycles in what there is now.

  JAX has so many objects that this would stop all requests for up to 0.3 s.
  """
  gc.collect()
  gc.freeze()


def _parser() -> _Parser:
  parser = _Parser(prog='python -m slip_serve', description=__doc__)
  parser.add_argument('folder', help='folder of an export')
  parser.add_argument(
    '--memory', default='dram', help='where rows are kept: dram, mmap or ssd'
  )
  parser.add_argument(
    '--cache',
    type=float,
    default=0.1,
    help='with ssd, rows in memory: a share up to 1, or a number',
  )
  parser.add_argument(
    '--pinned',
    type=lambda text: text.split(','),
    default=(),
    help='with ssd, tables whose rows all stay in memory, such as C1,C5',
  )
  parser.add_argument(
    '--bags',
    type=float,
    default=0.0,
    help="with ssd, share of the other rows' memory for sums of bags",
  )
  parser.add_argument('--host', default='127.0.0.1')
  parser.add_argument('--port', type=_port, default=8080)
  parser.add_argument(
    '--together',
    type=_count,
    default=None,
    help='examples of several requests that are scored at once; 0: each request'
    ' is scored alone; the largest batch size of the export if left out',
  )
  return parser


def main() -> int:
  """Serves until SIGINT or SIGTERM, and returns the exit code."""
  given = _parser().parse_args()
  try:
    from slip_serve.server import Server
  except ModuleNotFoundError as error:
    sys.stderr.write(
      f'error: the server must have uvicorn and starlette, got no {error.name};'
      " run pip install 'slipstream_jax[serve]'.\n"
    )
    return 1
  try:
    scorer = Scorer(
      given.folder,
      given.memory,
      given.cache,
      pinned=given.pinned,
      bags=given.bags,
    )
  except ServeError as error:
    sys.stderr.write(f'error: {error}\n')
    return 1
  with scorer:
    try:
      server = Server(
        scorer, given.host, given.port, given.together, _keep_for_ever
      )
    except (OSError, UnicodeError) as error:  # UnicodeError: a bad host name
      sys.stderr.write(
        f'error: the server must be able to listen, got {error}'
        f' ({given.host:.99}:{given.port}); give another --host or --port.\n'
      )
      return 1

    for number in signal.SIGINT, signal.SIGTERM:
      signal.signal(number, server.handle_exit)
    host, port = server.address
    sys.stdout.write(f'http://{host}:{port}\n')
    sys.stdout.flush()
    server.run()
  return 0


if __name__ == '__main__':
  sys.exit(main())
