"""What the site has beside the pages of docs/, made when it is built.

- Pages of the reference: one with the public names, in the order of
  `slipstream_jax.__all__`, and one for each room. So no list of names has to
  be kept in step with the package.
- Pages that lie outside docs/: those of `OUTSIDE`.
- Links out of docs/ are relative, as a git host shows them. Here they lead to
  the site's copy, or to `repo_url`, or are mere paths if there is neither.

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
# Modules that come one by one, not as a room of their own.
WORDS = 'words'


def on_config(config: Any) -> Any:
  """Puts the rooms' pages behind the one of public names."""
  (section,) = (entry for entry in config.nav if REFERENCE in entry)
  section[REFERENCE] += [f'api/{room}.md' for room in room_pages()]
  return config


def on_files(files: Any, config: Any) -> Any:
  """Adds the pages that are made, and those from outside docs/."""
  pages = {f'api/{room}.md': page for room, page in room_pages().items()}
  pages['api/index.md'] = names_page()
  pages |= {name: (ROOT / name).read_text() for name in OUTSIDE}
  for path, content in pages.items():
    files.append(File.generated(config, path, content=content))
  return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
  """Turns links that leave docs/; gives a lone page the sidebar's room."""
  if page.parent is None:  # the sidebar would only repeat its title
    page.meta.setdefault('hide', ['navigation'])
  if page.file.src_uri in OUTSIDE:
    docs = pathlib.PurePosixPath('docs')
    return LINK.sub(lambda link: _into_docs(link, docs), markdown)
  folder = posixpath.dirname(page.file.src_uri)
  return LINK.sub(lambda link: _out_of_docs(link, folder, config), markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
  """Looks whether the page needs no other host.

  Raises:
    PluginError: it does.
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


def public_names() -> list[str]:
  """The package's public names, read without importing it."""
  tree = ast.parse((PACKAGE / '__init__.py').read_text())
  for node in tree.body:
    if isinstance(node, ast.Assign) and ast.unparse(node).startswith('_HOMES'):
      return list(ast.literal_eval(node.value))
  raise ValueError('slipstream_jax has no _HOMES')


def names_page() -> str:
  """The page of the names that `import slipstream_jax as slip` gives."""
  parts = [
    '# Public names\n',
    'What `import slipstream_jax as slip` gives: `slip.NAME`. The parts of it '
    'are one import deeper, room by room, on the pages that follow.\n',
    'Shapes in brackets use the letters of the '
    '[concepts](../architecture.md#words): `f32[B, D]` is a float32 array of B '
    'examples by D.\n',
  ]
  parts += [_entry(f'slipstream_jax.{name}', 2) for name in public_names()]
  return '\n'.join(parts)


def room_pages() -> dict[str, str]:
  """A page for each room, and one for the modules that are no room's."""
  pages = {}
  for room in sorted(PACKAGE.iterdir()):
    if room.is_dir() and (room / '__init__.py').exists():
      modules = sorted(room.glob('[!_]*.py'), key=_rank)
      # Kernels are called by what they stand beside, and by nobody else.
      modules = [m for m in modules if not m.stem.endswith('kernels')]
      names = [f'slipstream_jax.{room.name}.{m.stem}' for m in modules]
      pages[room.name] = _page(room.name, _summary(room / '__init__.py'), names)
  words = sorted(PACKAGE.glob('[!_]*.py'))
  names = [f'slipstream_jax.{module.stem}' for module in words]
  pages[WORDS] = _page(WORDS, 'What every room may import.', names)
  return pages


def _rank(module: pathlib.Path) -> tuple[bool, bool, str]:
  """What a reader looks for first comes first: public names, then the base."""
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
