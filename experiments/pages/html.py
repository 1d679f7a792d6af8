"""A page as one HTML file: light and dark, wide and narrow, without scripts."""

from collections.abc import Sequence
import html

from experiments.pages.blocks import (
  Block,
  filled,
  Frame,
  Items,
  Picture,
  Section,
  Table,
  Words,
)
from experiments.pages.svg import variables

_STYLE = """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); max-width: 1180px; margin: 2rem auto;
  padding: 0 1.2rem; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; margin-bottom: 0.4rem; }
h2 { font-size: 1.2rem; margin-top: 2.6rem; padding-top: 0.6rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 0.2rem; }
p, figcaption, li { max-width: 46rem; }
.about, figcaption, .note { color: var(--muted); font-size: 0.87rem;
  margin: 0 0 0.5rem; }
.loud { color: var(--loud); border: 2px solid var(--loud); font-weight: 600;
  border-radius: 6px; padding: 0.6rem 0.9rem; max-width: none; }
a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums;
  font-size: 0.9rem; }
th, td { padding: 0.22rem 0.6rem; border-bottom: 1px solid var(--line);
  text-align: right; white-space: nowrap; }
th { color: var(--muted); font-weight: 600; vertical-align: bottom;
  line-height: 1.25; white-space: normal; min-width: 4rem; }
.words { text-align: left; }
th:first-child, td:first-child { position: sticky; left: 0;
  background: var(--paper); }
tr.strong td { background: var(--tint); font-weight: 600; }
ul { padding-left: 1.3rem; }
@media (max-width: 40rem) { td:first-child { white-space: normal; } }
.pictures { display: grid; gap: 1.2rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0.6rem 0; min-width: 0; }
figure h3 { margin-top: 0.6rem; }
svg { display: block; width: 100%; height: auto; }
"""

_WORDS = ' class="words"'


def document(
  title: str, sections: Sequence[Section], head: Sequence[Block] = ()
) -> str:
  """A whole page.

  Args:
    title: of the page, and its first heading.
    sections: what is on it; empty ones are left out, and those with an anchor
      are listed at the top.
    head: what stands before all sections.
  """
  full = [section for section in sections if filled(section.blocks)]
  parts = [
    f'<h1>{escaped(title)}</h1>\n',
    _blocks(filled(head)),
    _links(full),
    *(_section(section) for section in full),
  ]
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f'<title>{escaped(title)}</title>\n'
    f'<style>\n{variables()}{_STYLE}</style></head>\n'
    f'<body>\n{"".join(parts)}</body></html>\n'
  )


def escaped(value: object) -> str:
  """Text, and nothing that a browser could take for more."""
  return html.escape(str(value))


def _links(sections: Sequence[Section]) -> str:
  links = [
    f'<a href="#{escaped(section.anchor)}">{escaped(section.title)}</a>'
    for section in sections
    if section.anchor
  ]
  return f'<nav>{" ".join(links)}</nav>\n' if links else ''


def _section(section: Section) -> str:
  anchor = f' id="{escaped(section.anchor)}"' if section.anchor else ''
  title = f'<h2{anchor}>{escaped(section.title)}</h2>\n'
  return title + _blocks(filled(section.blocks))


def _blocks(blocks: Sequence[Block]) -> str:
  """Pictures that follow one another stand side by side where there is room."""
  parts = []
  for number, block in enumerate(blocks):
    beside = [
      0 <= n < len(blocks) and isinstance(blocks[n], Picture)
      for n in (number - 1, number + 1)
    ]
    if isinstance(block, Picture):
      before, after = beside
      start = '' if before else '<div class="pictures">\n'
      parts.append(start + _picture(block) + ('' if after else '</div>\n'))
    else:
      parts.append(_block(block))
  return ''.join(parts)


def _block(block: Words | Items | Table) -> str:
  if isinstance(block, Words):
    kind = ' class="loud"' if block.loud else ''
    return f'<p{kind}>{escaped(block.text)}</p>\n'
  if isinstance(block, Items):
    items = ''.join(f'<li>{escaped(text)}</li>\n' for text in block.texts)
    return f'{_heading(block.title)}<ul>\n{items}</ul>\n'
  notes = ''.join(f'<p class="note">{escaped(x)}</p>\n' for x in block.notes)
  return (
    _heading(block.title)
    + (f'<p class="about">{escaped(block.about)}</p>\n' if block.about else '')
    + f'<div class="wide" tabindex="0">{_table(block)}</div>\n{notes}'
  )


def _heading(title: str) -> str:
  return f'<h3>{escaped(title)}</h3>\n' if title else ''


def _picture(block: Picture) -> str:
  label = f'<svg role="img" aria-label="{escaped(block.title)}" '
  drawing = block.svg.replace('<svg ', label, 1)
  caption = escaped(block.about)
  return (
    f'<figure>{_heading(block.title)}{drawing}\n'
    f'<figcaption>{caption}</figcaption></figure>\n'
  )


def _table(block: Table) -> str:
  frame: Frame = block.frame
  names = list(frame[0])
  left = {n for n, name in enumerate(names) if n == 0 or _worded(frame, name)}

  def row(cells: Sequence[str], tag: str, kind: str = '') -> str:
    inner = ''.join(
      f'<{tag}{_WORDS * (n in left)}>{escaped(cell)}</{tag}>'
      for n, cell in enumerate(cells)
    )
    return f'<tr{kind}>{inner}</tr>\n'

  head = row([name.replace('_', ' ') for name in names], 'th')
  body = ''.join(
    row(list(line.values()), 'td', ' class="strong"' * (number in block.strong))
    for number, line in enumerate(frame)
  )
  return f'<table>\n{head}{body}</table>'


def _worded(frame: Frame, name: str) -> bool:
  """Whether most cells of a column begin with a letter."""
  return 2 * sum(line[name][:1].isalpha() for line in frame) > len(frame)
