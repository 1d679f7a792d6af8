"""Draws docs/images/overview.png, the picture of the home page.

python docs/_site/overview.py
"""

import pathlib

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

PICTURE = pathlib.Path(__file__).parents[1] / 'images' / 'overview.png'
INK, ACCENT, MUTED, GREY = '#1b4965', '#c8553d', '#c5ced8', '#6b7785'
SKIPPED = 2, 5, 6, 9
LOADED = 1, 4, 5, 9, 13


def box(axis: Axes, x: float, width: float, title: str, text: str) -> None:
  """Draws a rounded box with a title and a line of text above it."""
  shape = FancyBboxPatch(
    (x, 0.6), width, 3.0, boxstyle='round,pad=0.1', fill=False, edgecolor=INK
  )
  axis.add_patch(shape)
  axis.text(x, 4.15, title, color=INK, size=13, weight='bold')
  axis.text(x, 3.83, text, color=INK, size=10)


def cell(axis: Axes, x: float, y: float, width: float, color: str) -> None:
  """Draws one filled cell, 0.15 high."""
  axis.add_patch(Rectangle((x, y), width, 0.15, color=color, linewidth=0))


def arrow(axis: Axes, x: float, y: float, to: float, text: str) -> None:
  """Draws a horizontal arrow with a text above it."""
  style = {'arrowstyle': '-|>', 'color': INK, 'linewidth': 1.6}
  axis.annotate('', (to, y), (x, y), arrowprops=style)
  middle = (x + to) / 2
  axis.text(middle, y + 0.12, text, color=INK, size=10, ha='center')


def draw() -> None:
  """Draws examples, tables and device from left to right, and saves them."""
  figure, axis = plt.subplots(figsize=(11, 3.9))
  box(axis, 0.0, 2.2, 'Examples', 'from your data')
  for i in range(12):
    color = MUTED if i in SKIPPED else INK
    cell(axis, 0.1, 3.3 - 0.22 * i, 1.0, color)
    if i in SKIPPED:
      y = 3.3 - 0.22 * i + 0.075
      axis.text(1.2, y, 'skipped', color=GREY, size=9, va='center')
  box(axis, 4.2, 2.2, 'Host memory', 'all rows of all tables')
  for i in range(14):
    y = 3.35 - 0.2 * i
    cell(axis, 4.4, y, 1.8, ACCENT if i in LOADED else MUTED)
  box(axis, 8.6, 2.6, 'Accelerator', 'the rows of one batch')
  for i in range(len(LOADED)):
    cell(axis, 8.8, 3.3 - 0.2 * i, 2.2, ACCENT)
  text = 'one jitted step:\nmodel, loss, gradients,\nupdates'
  axis.text(9.9, 1.3, text, color=INK, size=11, ha='center', va='center')
  arrow(axis, 2.45, 2.1, 4.0, 'ids of a batch')
  arrow(axis, 6.65, 2.6, 8.4, 'its rows')
  arrow(axis, 8.4, 1.6, 6.65, 'updated rows')
  axis.set(xlim=(-0.3, 11.5), ylim=(0.3, 4.5), aspect='equal')
  axis.axis('off')
  figure.savefig(PICTURE, dpi=160, bbox_inches='tight', facecolor='white')


if __name__ == '__main__':
  draw()
