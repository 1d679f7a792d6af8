"""Writes one HTML page with its tables and pictures inside, light and dark.

    figure, (axis,) = page.figure(height=3.2)
    axis.plot(steps, losses, color=page.color(0), label='streamed')
    page.legend(figure)
    page.write(
      folder / 'report.html',
      'Two runs',
      [
        page.Section('Runs', ['A paragraph.', page.Table('', rows)]),
        page.Section('Curves', [page.Picture('Loss', figure, 'In log loss.')]),
      ],
    )

Pictures are drawn in the light colors. In the page these become CSS variables,
so that a dark page has pictures in the dark colors.
"""

from collections.abc import Mapping, Sequence
import io
import pathlib
import re
from typing import Any, NamedTuple

import jinja2
import markupsafe

from experiments.common import report
from slipstream_jax.files import replace

COLORS: dict[str, tuple[str, str]] = {
  'ink': ('#1d2733', '#e4e8ee'),
  'muted': ('#5b6775', '#9fabb9'),
  'line': ('#e3e8ee', '#333c47'),
  'paper': ('#ffffff', '#14191f'),
  'loud': ('#a32a0c', '#ff9d80'),
  'tint': ('#eef4f8', '#1d2832'),
  'link': ('#14608a', '#7cc0ea'),
  # Lines and bars. Neighbours differ in lightness, too.
  'c0': ('#1b6ca8', '#5fb0e8'),
  'c1': ('#d9541e', '#ff8f5c'),
  'c2': ('#2b8a3e', '#63c978'),
  'c3': ('#8a4fbf', '#c49af0'),
  'c4': ('#b8860b', '#e6b93c'),
  'c5': ('#0b8a8f', '#45c9cd'),
  'c6': ('#c2255c', '#ff7aa8'),
  'c7': ('#6b7785', '#a9b4c0'),
  'c8': ('#7a4b20', '#c99361'),
  'c9': ('#5c7a00', '#b2d24a'),
  'c10': ('#8fc4e8', '#2f6a94'),
  'c11': ('#f2b59a', '#8f4a2c'),
}
"""Light and dark value of each color of a page."""
_SERIES = 12
_REM_PER_INCH = 7


class Table(NamedTuple):
  """A table: one mapping of column to cell per row, all with the same keys."""

  title: str
  rows: Sequence[Mapping[str, Any]]
  """Text is shown as it is, numbers as `report.text` shows them."""
  about: str = ''
  notes: Sequence[str] = ()
  """Footnotes."""
  strong: Sequence[int] = ()
  """Numbers of the rows that are highlighted."""


class Picture(NamedTuple):
  """A matplotlib figure with a title and a caption."""

  title: str
  figure: Any
  """A figure from `figure`."""
  about: str = ''


class Section(NamedTuple):
  """A heading and what follows it: paragraphs, lists, tables, pictures."""

  title: str
  blocks: Sequence[str | list[str] | Table | Picture]


def write(
  path: pathlib.Path,
  title: str,
  sections: Sequence[Section],
  warning: str = '',
  about: str = '',
) -> None:
  """Writes a page; see `html`."""
  replace(path, html(title, sections, warning, about))


def html(
  title: str, sections: Sequence[Section], warning: str = '', about: str = ''
) -> str:
  """Returns a page without tables that lack rows and sections that lack blocks.

  Args:
    title: title of the page.
    sections: its content, in order.
    warning: a sentence in a red box.
    about: what was run, where and when.
  """
  full = [Section(title, _filled(blocks)) for title, blocks in sections]
  drawings = 0

  def svg(picture: Picture) -> markupsafe.Markup:
    nonlocal drawings
    drawings += 1
    return _svg(picture, f'p{drawings}-')

  environment = jinja2.Environment(
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  source = pathlib.Path(__file__).with_name('page.html').read_text()
  text: str = environment.from_string(source).render(
    title=title,
    sections=[section for section in full if section.blocks],
    warning=warning,
    about=about,
    colors=COLORS,
    svg=svg,
    align=_align,
    cell=report.text,
  )
  return text + '\n'


def figure(
  height: float, rows: int = 1, width: float = 4.5, **options: Any
) -> tuple[Any, Any]:
  """Makes a figure in the look of pages.

  Args:
    height: in inches.
    rows: of axes, one below the other.
    width: in inches; a phone shows 4.5 with legible text.
    options: of `Figure.subplots`.

  Returns:
    The figure and its axes, a flat array.
  """
  import matplotlib
  from matplotlib.figure import Figure

  with matplotlib.rc_context({'font.size': 9.5, 'axes.titlesize': 10.5}):
    drawing = Figure(figsize=(width, height), layout='constrained')
    axes = drawing.subplots(rows, squeeze=False, **options).flatten()
  ink, muted = color('ink'), color('muted')
  for axis in axes:
    axis.grid(alpha=0.25, color=muted)
    axis.set_axisbelow(True)
    axis.spines[['top', 'right']].set_visible(False)
    axis.spines[['left', 'bottom']].set_color(muted)
    axis.tick_params(which='both', color=muted, labelcolor=ink, labelsize=8.5)
  return drawing, axes


def color(name: str | int) -> str:
  """Returns a color of the page by name, or that of the n-th line or bar."""
  if isinstance(name, int):
    name = f'c{name % _SERIES}'
  return COLORS[name][0]


def legend(drawing: Any, columns: int = 3) -> None:
  """Puts the legend of a figure above its axes, where it hides nothing."""
  drawing.legend(
    loc='outside upper left', ncols=columns, frameon=False, fontsize=8.5
  )


def log_axis(axis: Any, steps: tuple[float, ...] = (1,)) -> None:
  """Makes an axis logarithmic, with labels such as 3 k.

  Args:
    axis: `axes.xaxis` or `axes.yaxis`.
    steps: the labelled values within a decade.
  """
  from matplotlib import ticker

  getattr(axis.axes, f'set_{axis.axis_name}scale')('log')
  axis.set_major_locator(ticker.LogLocator(subs=steps, numticks=9))
  axis.set_major_formatter(ticker.FuncFormatter(_short))
  axis.set_minor_formatter(ticker.NullFormatter())


def _short(value: float, _: Any = None) -> str:
  for unit, letter in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if value >= unit:
      return f'{value / unit:g} {letter}'
  return f'{value:g}'.replace('e-0', 'e-')


def _filled(blocks: Sequence[Any]) -> list[Any]:
  return [
    block
    for block in blocks
    if (block.rows if isinstance(block, Table) else block)
  ]


def _align(table: Table, name: str) -> markupsafe.Markup:
  """Returns the class of a column: text is left, numbers are right."""
  cells = [str(row[name])[:1].isalpha() for row in table.rows]
  words = name == next(iter(table.rows[0])) or 2 * sum(cells) > len(cells)
  return markupsafe.Markup(' class="words"' if words else '')


def _svg(picture: Picture, prefix: str) -> markupsafe.Markup:
  """Returns a figure as an SVG element whose ids begin with the prefix."""
  import matplotlib

  file = io.StringIO()
  # Text stays text, in the page's type. Ids are the same each time.
  look: Any = {'svg.fonttype': 'none', 'svg.hashsalt': 'page'}
  with matplotlib.rc_context(look):
    picture.figure.savefig(file, format='svg', transparent=True)
  text = file.getvalue()
  text = text[text.index('<svg') :]
  for part in ('metadata', 'style'):
    text = re.sub(f'<{part}.*?</{part}>', '', text, flags=re.DOTALL)
  text = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', '', text)
  text = text.replace('xlink:href', 'href')
  text = re.sub(r'\bid="', f'id="{prefix}', text)
  text = re.sub(r'(url\(|href=")#', rf'\1#{prefix}', text)
  text = re.sub(r"'DejaVu Sans'[^;\"]*", 'system-ui, sans-serif', text)
  for name, (light, _) in COLORS.items():
    text = text.replace(light, f'var(--{name})')
  width = _REM_PER_INCH * picture.figure.get_figwidth()
  label = markupsafe.escape(picture.title)
  head = f'<svg role="img" aria-label="{label}" style="max-width: {width:g}rem"'
  return markupsafe.Markup(text.replace('<svg', head, 1).strip())
