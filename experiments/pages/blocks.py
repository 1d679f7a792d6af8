"""What a page holds, before it is HTML or markdown."""

from collections.abc import Sequence
from typing import NamedTuple

Frame = Sequence[dict[str, str]]
"""A tidy frame of text: for each row a mapping of column to cell."""


class Words(NamedTuple):
  """A paragraph."""

  text: str
  loud: bool = False
  """Whether nobody may miss it."""


class Items(NamedTuple):
  """Short paragraphs, one below the other."""

  title: str
  texts: Sequence[str]


class Table(NamedTuple):
  """A frame, and what must be known to read it."""

  title: str
  frame: Frame
  about: str = ''
  notes: Sequence[str] = ()
  """Footnotes: cells refer to them as [1], [2]."""
  strong: Sequence[int] = ()
  """Rows to be seen first."""


class Picture(NamedTuple):
  """A drawing."""

  name: str
  """Of its file, without a suffix; no other picture of a page has it."""
  title: str
  svg: str
  """As `svg.draw` makes it."""
  about: str = ''


Block = Words | Items | Table | Picture


class Section(NamedTuple):
  """A heading, and what stands below it."""

  title: str
  blocks: Sequence[Block]
  anchor: str = ''
  """What links lead to; a section with one is listed at the top."""


def filled(blocks: Sequence[Block]) -> list[Block]:
  """The blocks less tables and lists that hold nothing."""
  return [
    block
    for block in blocks
    if not (isinstance(block, Table) and not block.frame)
    and not (isinstance(block, Items) and not block.texts)
  ]
