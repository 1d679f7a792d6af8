"""Adds to the site what docs/ does not contain.

- The API reference: a page of all public names, grouped by use as in the
  docstring of the package, and a page for each room.
- Pages outside docs/, listed in `OUTSIDE`.
- Links out of docs/ are relative, so that they work on a git host. Here they
  lead to the site's copy of a page, or to `repo_url`. Without a `repo_url` they
  become plain paths.

A page that would fetch anything from another host is an error.
"""

import ast
import pathlib
import posixpath
import re
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / 'slipstream_jax'
OUTSIDE = ('CHANGELOG.md', 'CONTRIBUTING.md')
LINK = re.compile(r'(?<!!)\[([^\]]+)\]\(([^)\s]+)\)')
REFERENCE = 'API reference'
# What a browser fetches by itself; links are only followed.
FETCHED = re.compile(
  r'<(?:script|img|iframe|source)[^>]*\ssrc="?((?:https?:)?//[^\s">]+)'
  r'|<link[^>]*\srel="?(?:stylesheet|preconnect|icon)[^>]*'
  r'\shref="?((?:https?:)?//[^\s">]+)'
)
# The page of the modules that belong to no room.
WORDS = 'words'
# The public names that a reader needs first.
FIRST = 'Trainer', 'batches', 'Table'
# A heading of the package's docstring, and the names below it.
GROUP = re.compile(r'^(\w[\w ]*)\n((?:  .+\n?)+)', re.MULTILINE)


def on_config(config: Any) -> Any:
  """Adds the pages of the rooms to the navigation."""
  (section,) = (entry for entry in config.nav if REFERENCE in entry)
  section[REFERENCE] += [f'api/{room}.md' for room in room_pages()]
  return config


def on_files(files: Any, config: Any) -> Any:
  """Adds the generated pages, and those from outside docs/."""
  pages = {f'api/{room}.md': page for room, page in room_pages().items()}
  pages['api/index.md'] = names_page()
  pages |= {name: (ROOT / name).read_text() for name in OUTSIDE}
  for path, content in pages.items():
    files.append(File.generated(config, path, content=content))
  return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
  """Rewrites links that leave docs/, and hides the sidebar of a lone page."""
  if page.parent is None:  # the sidebar would only repeat its title
    page.meta.setdefault('hide', ['navigation'])
  if page.file.src_uri in OUTSIDE:
    docs = pathlib.PurePosixPath('docs')
    return LINK.sub(lambda link: _into_docs(link, docs), markdown)
  folder = posixpath.dirname(page.file.src_uri)
  return LINK.sub(lambda link: _out_of_docs(link, folder, config), markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
  """Checks that a browser fetches nothing from another host for the page.

  Raises:
    PluginError: it would.
  """
  fetched = FETCHED.search(output)
  if fetched:
    address = fetched[1] or fetched[2]
    raise PluginError(f'{page.file.src_uri} would fetch {address}')
  return output


def _into_docs(link: re.Match[str], docs: pathlib.PurePosixPath) -> str:
  target = link[2].removeprefix(f'{docs}/')
  return f'[{link[1]}]({target})'


def _out_of_docs(link: re.Match[str], folder: str, config: Any) -> str:
  text, target = link[1], link[2]
  path = posixpath.normpath(posixpath.join('docs', folder, target))
  if ':' in target or target.startswith('#') or path.startswith('docs/'):
    return link[0]
  if not (ROOT / path.partition('#')[0]).exists():
    return link[0]  # mkdocs warns of it
  if path.partition('#')[0] in OUTSIDE:
    return f'[{text}]({posixpath.relpath(path, folder or ".")})'
  if config.repo_url:
    return f'[{text}]({config.repo_url.rstrip("/")}/blob/HEAD/{path})'
  return f'{text} (`{path}`)' if text.strip('`') != path else f'`{path}`'


def public_names() -> dict[str, list[str]]:
  """Returns the public names by the heading of their group, in reading order.

  The docstring of the package has the groups. It is read without an import.

  Raises:
    PluginError: the docstring and `_HOMES` have other names.
  """
  path = PACKAGE / '__init__.py'
  groups = {
    title: [
      name
      for line in re.findall('^  ([A-Za-z][^:]*):', lines, re.MULTILINE)
      for name in line.split(', ')
    ]
    for title, lines in GROUP.findall(_summary(path))
  }
  unlike = {name for names in groups.values() for name in names} ^ _homes(path)
  if unlike:
    raise PluginError(f'docstring and _HOMES of {path} differ: {unlike}')
  rest = {
    title: [name for name in names if name not in FIRST]
    for title, names in groups.items()
  }
  return {'Start here': [*FIRST], **rest}


def _homes(path: pathlib.Path) -> set[str]:
  for node in ast.parse(path.read_text()).body:
    if isinstance(node, ast.Assign) and ast.unparse(node).startswith('_HOMES'):
      return set(ast.literal_eval(node.value))
  raise PluginError(f'{path} has no _HOMES')


def names_page() -> str:
  """Returns the page of the names in `slipstream_jax`."""
  parts = [
    '# Public names\n',
    'These are the names in `slip` after `import slipstream_jax as slip`. The'
    ' first three are enough to train. The pages that follow describe the'
    ' modules of each room.\n',
    'Shapes in brackets use the letters of the '
    '[concepts](../architecture.md#words): `f32[B, D]` is a float32 array of B '
    'examples by D.\n',
  ]
  for title, names in public_names().items():
    parts.append(f'## {title}\n')
    parts += [_entry(f'slipstream_jax.{name}', 3) for name in names]
  return '\n'.join(parts)


def room_pages() -> dict[str, str]:
  """Returns a page for each room, and one for the other modules."""
  pages = {}
  for room in sorted(PACKAGE.iterdir()):
    if room.is_dir() and (room / '__init__.py').exists():
      modules = sorted(room.glob('[!_]*.py'), key=_rank)
      # Only the module beside a kernel calls it.
      modules = [m for m in modules if not m.stem.endswith('kernels')]
      names = [f'slipstream_jax.{room.name}.{m.stem}' for m in modules]
      pages[room.name] = _page(room.name, _summary(room / '__init__.py'), names)
  words = sorted(PACKAGE.glob('[!_]*.py'))
  names = [f'slipstream_jax.{module.stem}' for module in words]
  pages[WORDS] = _page(WORDS, 'Modules that every room may import.', names)
  return pages


def _rank(module: pathlib.Path) -> tuple[bool, bool, str]:
  """Returns a sort key: modules of public names, then the base, then others."""
  source = (PACKAGE / '__init__.py').read_text()
  public = f"'{module.parent.name}.{module.stem}'" in source
  return not public, module.stem != 'base', module.stem


def _page(title: str, summary: str, modules: list[str]) -> str:
  entries = [_entry(module, 2) for module in modules]
  return '\n'.join([f'# {title}\n', f'{summary}\n', *entries])


def _entry(name: str, level: int) -> str:
  return f'::: {name}\n    options:\n      heading_level: {level}\n'


def _summary(path: pathlib.Path) -> str:
  return ast.get_docstring(ast.parse(path.read_text())) or ''
