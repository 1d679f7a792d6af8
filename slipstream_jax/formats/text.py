"""Raw text files, plain or gzip, in bounded blocks of whole lines.

The first bytes tell the type of a file; its name does not matter. Lines are
counted from 1, as in editors, so that every error can name its line.
"""

from collections.abc import Iterator
import contextlib
import gzip
import io
import os
import pathlib
from typing import NamedTuple
import zlib

import numpy as np

from slipstream_jax.errors import UserError

BLOCK_BYTES = 1 << 24
"""Bytes of text read at a time, which makes the work per block negligible."""

MAX_LINE_BYTES = 1 << 20
"""Longest line allowed. It bounds the memory for files that are not text."""

_GZIP_MAGIC = b'\x1f\x8b'  # RFC 1952
_BINARY = bytes({*range(32)} - set(b'\t\n\f\r'))  # never in text
(_NEWLINE,) = b'\n'
_HEAD_BYTES = 512  # enough to tell text from binary data
_SHOWN = 40  # bytes of an offending value that a message shows


class Block(NamedTuple):
  """Whole lines of a file."""

  path: pathlib.Path
  first_line: int
  """Number of the block's first line in its file, from 1."""
  text: bytes
  r"""The lines, each ended by one '\n', never by '\r\n'."""
  ended: bool = True
  """False for a file's last line without a line end, a block of its own. It may
  have been cut off."""
  read: int = 0
  """Bytes of the file, compressed as it is, read so far."""

  @property
  def num_lines(self) -> int:
    """Lines in the block, at least 1."""
    # Twice as fast as `text.count`.
    return int(np.count_nonzero(np.frombuffer(self.text, 'u1') == _NEWLINE))

  def where(self, line: int) -> str:
    """Returns the place of the block's line `line`, from 0, for errors."""
    return f'{self.path}, line {self.first_line + line}'


def read_blocks(
  path: str | os.PathLike[str], block_bytes: int = BLOCK_BYTES
) -> Iterator[Block]:
  """Yields the lines of a plain or gzip file in blocks of about `block_bytes`.

  Lines end with LF or CRLF, or with the file. A block has at least one line.

  Raises:
    UserError: the file cannot be opened or read, is empty, is not text, or is a
      gzip file that is cut off or corrupt.
  """
  path = pathlib.Path(path)
  line, rest = 1, b''
  with _open(path) as (file, packed):
    while chunk := _read(file, block_bytes, path, line):
      head = chunk[:_HEAD_BYTES]
      # Only the first chunk is checked: later, `line` or `rest` is set.
      if line == 1 and not rest and head.translate(None, _BINARY) != head:
        raise UserError(
          'a file must be plain or gzip text',
          got=f'a start of {quoted(head[:8])}',
          where=str(path),
          hint='unpack or convert it first',
        )
      # Splits at LF, because a CR may be the last byte read so far.
      whole, end, rest = (rest + chunk).rpartition(b'\n')
      if end:
        # Finding one byte is 20 times as fast as two, and few files have a CR.
        lines = whole + end
        if b'\r' in lines:
          lines = lines.replace(b'\r\n', b'\n')
        block = Block(path, line, lines, read=packed.tell())
        yield block
        line += block.num_lines
      if len(rest) > MAX_LINE_BYTES:
        raise UserError(
          f'a line must have at most {MAX_LINE_BYTES:,} bytes',
          got=f'more, from {quoted(rest)} on',
          where=f'{path}, line {line}',
          hint='give a text file with one example per line',
        )
  if rest:
    yield Block(path, line, rest + b'\n', False, path.stat().st_size)
  elif line == 1:
    raise UserError(
      'a text file must have at least one line',
      got='an empty file',
      where=str(path),
      hint='fetch or write the file again',
    )


def first_line(path: str | os.PathLike[str]) -> bytes:
  """Reads the first line of a file, without its line end; see `read_blocks`."""
  blocks = read_blocks(path, 1 << 12)
  line = next(blocks).text.partition(b'\n')[0]
  blocks.close()  # type: ignore[attr-defined]
  return line


def size(path: str | os.PathLike[str]) -> int:
  """Returns the bytes of a file, or raises a `UserError` if there is none."""
  path = pathlib.Path(path)
  try:
    with path.open('rb'):  # fails for folders and unreadable files
      return path.stat().st_size
  except OSError as error:
    raise _unreadable(path, error) from error


def changed(path: str | os.PathLike[str]) -> int | None:
  """Returns when the file was last written, in ns since 1970, or None."""
  try:
    return os.stat(path).st_mtime_ns
  except OSError:
    return None


def quoted(value: bytes) -> str:
  """Returns an offending value for errors: quoted, escaped and shortened."""
  text = repr(value[:_SHOWN].decode('utf-8', 'backslashreplace'))
  return text if len(value) <= _SHOWN else f'{text} and more'


@contextlib.contextmanager
def _open(
  path: pathlib.Path,
) -> Iterator[tuple[io.BufferedIOBase, io.BufferedIOBase]]:
  """Opens the text and the raw file, whose position shows the progress."""
  try:
    file = path.open('rb')
    packed = file.peek(2)[:2] == _GZIP_MAGIC
  except OSError as error:
    raise _unreadable(path, error) from error
  with file:
    if not packed:
      yield file, file
      return
    with gzip.GzipFile(fileobj=file) as unpacked:
      yield unpacked, file


def _unreadable(path: pathlib.Path, error: OSError) -> UserError:
  return UserError(
    'a text file must exist and be readable',
    got=error.strerror,
    where=str(path),
    hint='give the path of a plain or gzip file',
  )


def _read(
  file: io.BufferedIOBase, size: int, path: pathlib.Path, line: int
) -> bytes:
  try:
    return file.read(size)
  except (EOFError, OSError, zlib.error) as error:
    # gzip raises EOFError if its end marker is missing.
    cut_off = isinstance(error, EOFError)
    raise UserError(
      'a file must be readable to its end',
      got='a file that is cut off' if cut_off else f'"{error}"',
      where=f'{path}, at or after line {line}',
      hint='fetch the file again',
    ) from error
