"""Code blocks of Markdown pages, to be run as they stand."""

import re

import jax

_BLOCK = re.compile(r'^```(\w+)\n(.*?)^```$', flags=re.DOTALL | re.MULTILINE)


def blocks(page, language):
  """The page's code blocks of a language, each with its first line's number."""
  text = page.read_text()
  return [
    (text.count('\n', 0, block.start(2)) + 1, block[2])
    for block in _BLOCK.finditer(text)
    if block[1] == language
  ]


def commands(page):
  """Commands of a page: in shell blocks, in indented ones and in backticks."""
  text = re.sub(r'\\\n\s*', ' ', page.read_text())
  for _, block in blocks(page, 'sh'):
    yield from block.splitlines()
  starts = r'(?:python3?|pip|curl|mkdocs|pytest|tensorboard) '
  yield from re.findall(rf'^ {{4}}({starts}.*)$', text, flags=re.MULTILINE)
  yield from re.findall(rf'`({starts}[^`\n]*)`', text)


def run(page):
  """Runs the page's Python from top to bottom, in one namespace."""
  names = {'__name__': page.stem}
  try:
    for line, source in blocks(page, 'python'):
      # Blank lines before it, so that a traceback names the page's own line.
      code = compile('\n' * (line - 1) + source, str(page), 'exec')
      with jax.transfer_guard('allow'):  # as outside of these tests
        exec(code, names)
  finally:
    names.clear()  # a class of the page may live on, and all names with it
