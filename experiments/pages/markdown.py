"""The same page as markdown, with its pictures as files beside it."""

from collections.abc import Sequence
import re

from experiments.common.report import markdown as table
from experiments.pages.blocks import (
  Block,
  filled,
  Items,
  Picture,
  Section,
  Words,
)

PICTURES = 'pictures'
"""The folder of pictures, beside the page."""


def document(
  title: str, sections: Sequence[Section], head: Sequence[Block] = ()
) -> str:
  """A whole page; its pictures are looked for in `PICTURES`.

  Args:
    title: its first heading.
    sections: what is on it; empty ones are left out.
    head: what stands before all sections.
  """
  parts = [f'# {_escaped(title)}\n', *map(_block, filled(head))]
  for section in sections:
    blocks = filled(section.blocks)
    if blocks:
      parts += [f'## {_escaped(section.title)}\n', *map(_block, blocks)]
  return '\n'.join(parts)


def pictures(sections: Sequence[Section]) -> list[Picture]:
  """All that a page shows."""
  return [
    block
    for section in sections
    for block in section.blocks
    if isinstance(block, Picture)
  ]


def _block(block: Block) -> str:
  if isinstance(block, Words):
    text = _escaped(block.text)
    return f'> **{text}**\n' if block.loud else f'{text}\n'
  heading = f'### {_escaped(block.title)}\n\n' if block.title else ''
  if isinstance(block, Items):
    return heading + ''.join(f'- {_escaped(x)}\n' for x in block.texts)
  about = f'{_escaped(block.about)}\n' if block.about else ''
  if isinstance(block, Picture):
    link = f'![{_escaped(block.title)}]({PICTURES}/{block.name}.svg)\n'
    return f'{heading}{link}\n{about}'
  frame = [
    {
      _escaped(name): f'**{_escaped(cell)}**' if strong else _escaped(cell)
      for name, cell in row.items()
    }
    for strong, row in (
      (number in block.strong, row) for number, row in enumerate(block.frame)
    )
  ]
  notes = ''.join(f'\n{_escaped(note)}\n' for note in block.notes)
  return f'{heading}{about}\n{table(frame)}{notes}'


def _escaped(text: str) -> str:
  """Text in which nothing is a mark of markdown's, or a column's end."""
  return re.sub(r'([\\|*_`<>\[\]#])', r'\\\1', text)
