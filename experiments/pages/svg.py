"""Drawings whose colors are those of the page, light or dark.

A drawing is made in stand-in colors, which then become CSS variables. Text
stays text, in the page's type.
"""

from collections.abc import Callable
import pathlib
import re
import tempfile
from typing import Any

import matplotlib
from matplotlib import ticker
import numpy as np

from experiments.common.plots import picture

_THEMES: dict[str, tuple[str, str]] = {
  'ink': ('#1d2733', '#e4e8ee'),
  'muted': ('#5b6775', '#9fabb9'),
  'line': ('#e3e8ee', '#333c47'),
  'paper': ('#ffffff', '#14191f'),
  'loud': ('#a32a0c', '#ff9d80'),
  'tint': ('#eef4f8', '#1d2832'),
  'link': ('#14608a', '#7cc0ea'),
  # Lines and bars; neighbours differ in lightness, too.
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
_REM_PER_INCH = 7
SERIES = 12
"""Colors of lines and bars: `color('c0')` to `color('c11')`."""
_STAND_IN = {name: f'#0a0b{n:02x}' for n, name in enumerate(_THEMES)}


def color(name: str) -> str:
  """What to draw in for a color of the page: 'ink', 'muted', 'c0' to 'c11'."""
  return _STAND_IN[name]


def series(number: int) -> str:
  """What to draw the number-th line with."""
  return color(f'c{number % SERIES}')


def light(name: str) -> str:
  """The same color in a picture of its own, on white."""
  return _THEMES[name][0]


def variables() -> str:
  """CSS of drawings: what the colors are, light and dark, and how lines end."""
  light, dark = (
    ' '.join(f'--{name}: {both[n]};' for name, both in _THEMES.items())
    for n in (0, 1)
  )
  return (
    f':root {{ color-scheme: light dark; {light} }}\n'
    f'@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n'
    'svg * { stroke-linejoin: round; stroke-linecap: butt; }\n'
  )


_LOOK: Any = {
  **dict.fromkeys(
    ('text.color', 'axes.labelcolor', 'axes.titlecolor'), color('ink')
  ),
  **dict.fromkeys(('axes.edgecolor', 'grid.color'), color('muted')),
  **dict.fromkeys(('xtick.color', 'ytick.color'), color('muted')),
  **dict.fromkeys(('xtick.labelcolor', 'ytick.labelcolor'), color('ink')),
  **dict.fromkeys(('figure.facecolor', 'axes.facecolor'), 'none'),
  'savefig.facecolor': 'none',
  'axes.axisbelow': True,
  'font.size': 9.5,
  'axes.titlesize': 10.5,
  'legend.frameon': False,
  'legend.fontsize': 8.5,
  'svg.fonttype': 'none',
  'svg.hashsalt': 'the same ids each time',
}


def draw(
  name: str,
  paint: Callable[[np.ndarray], None],
  size: tuple[float, float],
  rows: int = 1,
  **options: Any,
) -> str:
  """A drawing as an SVG element, for a page that has `variables`.

  Args:
    name: of the drawing; no other of the page has it, so ids differ.
    paint: draws on axes, a flat array.
    size: width and height in inches. On a phone a drawing is as wide as the
      page, so that one of 5 inches keeps its type legible.
    rows: of axes, one below the other.
    options: of `plt.subplots`.
  """
  columns = options.pop('columns', 1)
  look = matplotlib.rc_context(_LOOK)
  with look, tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'drawing.svg'
    with picture(path, '', size, rows, columns, **options) as axes:
      paint(axes)
    text = path.read_text()
  return _of_page(name, text, size[0])


def plain_log(
  axis: Any, scale: Callable[[str], None], steps: tuple[float, ...] = (1,)
) -> None:
  """Makes a log axis with numbers as people write them.

  Args:
    axis: of matplotlib's axes, x or y.
    scale: sets its scale.
    steps: within a decade, where numbers stand.
  """
  scale('log')
  axis.set_major_locator(ticker.LogLocator(subs=steps, numticks=9))
  axis.set_major_formatter(ticker.FuncFormatter(plain))
  axis.set_minor_formatter(ticker.NullFormatter())


def plain(value: float, _: Any = None) -> str:
  """A number of an axis: 3 k rather than 3000."""
  for unit, letter in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if value >= unit:
      return f'{value / unit:g} {letter}'
  return f'{value:g}'.replace('e-0', 'e-')


def _of_page(name: str, text: str, width: float) -> str:
  text = text[text.index('<svg') :]  # less what makes it a file of its own
  for part in ('metadata', 'style'):
    text = re.sub(f'<{part}.*?</{part}>', '', text, flags=re.DOTALL)
  text = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', '', text)
  text = text.replace('xlink:href', 'href')
  text = re.sub(r'\bid="', f'id="{name}-', text)
  text = re.sub(r'(url\(|href=")#', rf'\1#{name}-', text)
  text = re.sub(r"'DejaVu Sans'[^;\"]*", 'system-ui, sans-serif', text)
  for key, stand_in in _STAND_IN.items():
    text = text.replace(stand_in, f'var(--{key})')
  # Type as large as the page's, where the page is wide enough.
  look = f'<svg style="max-width: {_REM_PER_INCH * width:g}rem" '
  return text.replace('<svg ', look, 1).strip()


def as_file(svg: str) -> str:
  """A drawing as a file of its own, light and dark."""
  head, end, body = svg.partition('>')
  space = ' xmlns="http://www.w3.org/2000/svg"'
  return f'{head}{space}{end}\n<style>{variables()}</style>{body}\n'
