"""Raw text files, plain or gzip, in bounded blocks of whole lines.

What a file is, its first bytes say; its name does not matter. Lines are
counted from 1, as editors do, so that every error can name its line.
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
"""Text read at a time; large enough that the work per block is no cost."""

MAX_LINE_BYTES = 1 << 20
"""Longest line; a file that is not text has no line ends to stop at."""

_GZIP_MAGIC = b'\x1f\x8b'  # RFC 1952
_BINARY = bytes({*range(32)} - set(b'\t\n\f\r'))  # in no text
(_NEWLINE,) = b'\n'
_HEAD_BYTES = 512  # enough to tell text from anything packed
_SHOWN = 40  # bytes of an offending value that a message shows


class Block(NamedTuple):
  """Some whole lines of a file."""

  path: pathlib.Path
  """The file."""
  first_line: int
  """Number of the block's first line in its file, from 1."""
  text: bytes
  r"""The lines, each ended by one '\n': no '\r\n', none unfinished."""

  ended: bool = True
  """False for a file's last line where no line end follows it: it may have
  been cut off. It is a block of its own."""
  read: int = 0
  """Bytes of the file, packed as it is, read up to here and a little beyond."""

  @property
  def num_lines(self) -> int:
    """Lines in the block, at least 1."""
    # Twice as fast as `text.count`, which stops at each of them.
    return int(np.count_nonzero(np.frombuffer(self.text, 'u1') == _NEWLINE))

  def where(self, line: int) -> str:
    """The place of the block's line `line`, from 0, as errors name it."""
    return f'{self.path}, line {self.first_line + line}'


def read_blocks(
  path: str | os.PathLike[str], block_bytes: int = BLOCK_BYTES
) -> Iterator[Block]:
  """Reads a text file block by block.

  Args:
    path: a plain or gzip file; its lines end with LF or CRLF, the last one
      also with the file.
    block_bytes: bytes to read at a time; a block holds about as many, or one
      line where that is longer.

  Yields:
    The blocks in file order; together, all lines of the file.

  Raises:
    UserError: the file cannot be opened or read, is empty, is no text, or is
      a gzip file that is cut off or corrupt.
  """
  path = pathlib.Path(path)
  line, rest = 1, b''
  with _open(path) as (file, packed):
    while chunk := _read(file, block_bytes, path, line):
      # Of the first chunk only: behind it there are lines, or a rest of one.
      if line == 1 and not rest:
        _check_text(chunk[:_HEAD_BYTES], path)
      # A CR may be the last byte read so far; LF marks the whole lines.
      whole, end, rest = (rest + chunk).rpartition(b'\n')
      if end:
        block = Block(path, line, _unix(whole + end), read=packed.tell())
        yield block
        line += block.num_lines
      _check_length(rest, path, line)
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
  """The first line of a file, without its end.

  Raises:
    UserError: as `read_blocks`.
  """
  blocks = read_blocks(path, 1 << 12)
  line = next(blocks).text.partition(b'\n')[0]
  blocks.close()  # type: ignore[attr-defined]
  return line


def size(path: str | os.PathLike[str]) -> int:
  """Bytes of a file, packed as it is.

  Raises:
    UserError: there is no such file.
  """
  path = pathlib.Path(path)
  try:
    with path.open('rb'):  # which a folder refuses, and a file not ours
      return path.stat().st_size
  except OSError as error:
    raise _unreadable(path, error) from error


def changed(path: str | os.PathLike[str]) -> int | None:
  """When the file was last written, in ns since 1970; None if there is none."""
  try:
    return os.stat(path).st_mtime_ns
  except OSError:
    return None


def quoted(value: bytes) -> str:
  """An offending value as errors show it: quoted, escaped and cut short."""
  text = repr(value[:_SHOWN].decode('utf-8', 'backslashreplace'))
  return text if len(value) <= _SHOWN else f'{text} and more'


def _unix(text: bytes) -> bytes:
  # One byte is found 20 times as fast as two, and few files have it.
  return text.replace(b'\r\n', b'\n') if b'\r' in text else text


@contextlib.contextmanager
def _open(
  path: pathlib.Path,
) -> Iterator[tuple[io.BufferedIOBase, io.BufferedIOBase]]:
  """The text, and the file as it is, whose position tells the progress."""
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
  except EOFError as error:  # of gzip: its end marker is not there
    cause: Exception = error
    got = 'a file that is cut off'
  except (OSError, zlib.error) as error:
    cause, got = error, f'"{error}"'
  raise UserError(
    'a file must be readable to its end',
    got=got,
    where=f'{path}, at or after line {line}',
    hint='fetch the file again',
  ) from cause


def _check_text(head: bytes, path: pathlib.Path) -> None:
  if head.translate(None, _BINARY) != head:
    raise UserError(
      'a file must be plain or gzip text',
      got=f'a start of {quoted(head[:8])}',
      where=str(path),
      hint='unpack or convert it first',
    )


def _check_length(line_so_far: bytes, path: pathlib.Path, line: int) -> None:
  if len(line_so_far) > MAX_LINE_BYTES:
    raise UserError(
      f'a line must have at most {MAX_LINE_BYTES:,} bytes',
      got=f'more, from {quoted(line_so_far)} on',
      where=f'{path}, line {line}',
      hint='give a text file with one example per line',
    )
