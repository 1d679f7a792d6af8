"""HTML pages, read back: their tables, and whether they need other files."""

import html.parser
import re

_VOID = ('meta', 'br')


class Page(html.parser.HTMLParser):
  """A page with balanced tags.

  Attributes:
    tables: rows of cells, by section and heading.
    words: every text, without the space around it.
  """

  def __init__(self, text):
    super().__init__()
    self.open, self.tags, self.ids, self.references = [], set(), [], []
    self.section, self.heading, self.tables, self.words = '', '', {}, ['']
    self.feed(text)
    self.close()
    assert self.open == []
    self.words = [words.strip() for words in self.words]

  def handle_starttag(self, tag, attributes):
    self.tags.add(tag)
    if tag not in _VOID:
      self.open.append(tag)
    for name, value in attributes:
      if name == 'id':
        self.ids.append(value)
      if name in ('src', 'href', 'xlink:href', 'data', 'action', 'srcset'):
        self.references.append(value)
    self.words.append('')
    if tag == 'table':
      self.rows = self.tables[self.section, self.heading] = []
    if tag == 'tr':
      self.rows.append([])

  def handle_startendtag(self, tag, attributes):
    self.handle_starttag(tag, attributes)
    if tag not in _VOID:
      self.open.pop()

  def handle_endtag(self, tag):
    assert self.open.pop() == tag
    if tag in ('td', 'th'):
      self.rows[-1].append(self.words[-1])
    if tag == 'h2':
      self.section, self.heading = self.words[-1], ''
    if tag == 'h3':
      self.heading = self.words[-1]
    self.words.append('')

  def handle_data(self, data):
    self.words[-1] += data

  def frame(self, section, heading):
    """A table's rows by their first cell, each a dict of its columns."""
    head, *rows = self.tables[section, heading]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def assert_complete(text):
  """Checks that a page refers to nothing outside itself; returns it parsed."""
  page = Page(text)
  assert not {'script', 'link', 'img', 'iframe'} & page.tags
  assert not re.search(r'url\((?!#)|@import|http', text)
  assert all(reference.startswith('#') for reference in page.references)
  assert {x[1:] for x in page.references} <= set(page.ids)
  assert len(page.ids) == len(set(page.ids))
  return page
