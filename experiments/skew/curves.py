"""Access curves: how often each row is looked up, against its rank."""

import pathlib
import textwrap
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from experiments.common.plots import ACCENT, INK, MUTED, note, picture
from slipstream_jax.errors import UserError
from slipstream_jax.synthetic.proxies import Proxy
from slipstream_jax.synthetic.stream import PROFILE_START


class Sample(NamedTuple):
  """A text file of real examples."""

  path: str
  """Under the folder of samples."""
  separator: str
  header: bool
  columns: slice
  """Those that hold ids."""


SAMPLES = {
  'kaggle': Sample('criteo/dac_80k.tsv.gz', '\t', False, slice(14, 40)),
  'avazu': Sample('avazu/train.csv', ',', True, slice(3, 24)),
  'taobao': Sample('taobao/UserBehavior.csv.gz', ',', False, slice(0, 3)),
}


class Real(NamedTuple):
  """What is plotted of a sample."""

  lines: int
  curve: np.ndarray
  """Lookups of each id of all columns, most first: i64."""


def samples_in(folder: str | None, names: list[str]) -> dict[str, Real]:
  """The samples of those of the proxies that have one; none without a folder.

  Raises:
    UserError: a file is not there, or cannot be read.
  """
  wanted = [name for name in names if name in SAMPLES] if folder else []
  return {name: _read(pathlib.Path(folder or ''), name) for name in wanted}


def _read(folder: pathlib.Path, name: str) -> Real:
  sample = SAMPLES[name]
  try:
    frame = pl.read_csv(
      folder / sample.path,
      separator=sample.separator,
      has_header=sample.header,
      quote_char=None,
      infer_schema=False,  # some ids exceed 64 bits
      truncate_ragged_lines=True,
    )
  except (OSError, pl.exceptions.PolarsError) as error:
    raise UserError(
      f'the sample of {name} must be a text file that can be read',
      got=error,
      where=f'--samples, {sample.path}',
      hint='fetch it again, or leave --samples out',
    ) from error
  if name == 'taobao':  # a line without a whole time in seconds was cut off
    frame = frame.filter(frame[frame.columns[-1]].str.len_chars() == 10)
  counts = [
    frame[column].value_counts()['count'].to_numpy()
    for column in frame.columns[sample.columns]
  ]
  return Real(len(frame), _falling(np.concatenate(counts)))


def _falling(counts: np.ndarray) -> np.ndarray:
  return np.sort(counts.astype(np.int64))[::-1]


def proxy_curve(proxy: Proxy, lines: int) -> np.ndarray:
  """Lookups of each row in as many examples as a sample has lines, most first.

  A line of a log of sequence is one item that a user looked at, so the first
  step stands for an example there.
  """
  positions = PROFILE_START + np.arange(lines)
  lookups = proxy.law(proxy.spec, positions).columns.lookups
  first = lookups.reshape(*lookups.shape[:2], -1)[:, :, 0]
  return _falling(np.unique(first, return_counts=True)[1])


# Counts would lie as far apart as the sizes of the samples.
_CAPTION = (
  'Shares, not counts, so that large and small samples lie on one curve until '
  'a row is met once only: the last step of each. Dashed: as many examples of '
  "the proxy as the real sample has lines; of Taobao's, one step of each."
)


def plot(
  path: pathlib.Path,
  proxies: dict[str, Proxy],
  seen: dict[str, np.ndarray],
  samples: dict[str, Real],
) -> None:
  """One picture of all proxies.

  Args:
    path: of the PNG.
    proxies: by name.
    seen: lookups of each row in the proxy's profile, most first.
    samples: of those that have one.
  """
  columns = min(2, len(proxies))
  lines = -(-len(proxies) // columns)
  size = 5.4 * columns, 3.7 * lines + 0.7
  title = 'Synthetic proxies (NOT real data): lookups of each row, by rank'
  with picture(path, title, size, lines, columns) as axes:
    for axis, (name, proxy) in zip(axes, proxies.items(), strict=False):
      _one(axis, proxy, seen[name], samples.get(name))
    for axis in axes[len(proxies) :]:
      axis.remove()
    for axis in axes[::columns]:
      axis.set_ylabel('share of all lookups')
    for axis in axes[-columns:]:
      axis.set_xlabel('rank of the row, of all tables')
    caption = textwrap.fill(_CAPTION, 85 * columns)
    axes[0].figure.supxlabel(caption, fontsize=8, color=MUTED)


def _one(axis: Any, proxy: Proxy, seen: np.ndarray, real: Real | None) -> None:
  _line(axis, seen, 'proxy', f'{_many(proxy.profile_examples)} examples')
  if real is not None:
    many = _many(real.lines)
    _line(axis, real.curve, 'real sample', f'{many} lines', ACCENT)
    curve = proxy_curve(proxy, real.lines)
    _line(axis, curve, 'proxy', f'{many} examples', style='--')
  axis.axvline(proxy.hot_rows, color=MUTED, linewidth=1, linestyle=':')
  words = f'budget: {proxy.hot_bytes:.1%}\nof the rows'
  at, coords = (proxy.hot_rows, 0.97), ('data', 'axes fraction')
  note(axis, words, at, xycoords=coords)
  axis.set(xscale='log', yscale='log', title=proxy.title)
  axis.legend(frameon=False, fontsize=8, loc='lower left')


def _line(
  axis: Any,
  curve: np.ndarray,
  what: str,
  size: str,
  color: str = INK,
  style: str = '-',
) -> None:
  """A curve at ranks evenly spread on a log axis."""
  ranks = np.unique(np.geomspace(1, len(curve), 400).astype(np.int64))
  shares = curve[ranks - 1] / curve.sum()
  label = f'{what}, {size}'
  axis.plot(ranks, shares, style, color=color, linewidth=1.4, label=label)


def _many(examples: int) -> str:
  if examples >= 1_000_000:
    return f'{examples / 1e6:.3g} M'
  return f'{examples / 1e3:.0f} k'
