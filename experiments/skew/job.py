"""Measures and draws how skewed the lookups of proxies and real samples are."""

from collections.abc import Callable, Iterator
import pathlib
import textwrap
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from experiments.common import page, record, report
from experiments.common.progress import Bar
from experiments.common.workdir import writable
from slipstream_jax.errors import choose, UserError
from slipstream_jax.selection.hot import access_counts, hot_rows
from slipstream_jax.synthetic.proxies import PROXIES, Proxy
from slipstream_jax.synthetic.stream import PROFILE_START, TEST_START
from slipstream_jax.types import Lookups

PUBLISHED = {n: p for n, p in PROXIES.items() if p.hot_bytes is not None}
"""Proxies of data sets whose skew a paper prints."""
JUDGED = 1 << 18
"""Examples judged. Their hot share has a standard error of 0.1 %."""
_PART = 1 << 17  # examples drawn at once


class Skew(NamedTuple):
  """The skew of a proxy as measured."""

  proxy: Proxy
  hot_bytes: float
  """Share of all rows that is hot; at most the budget."""
  hot_examples: float
  """Share of other examples that look up hot rows only."""
  curve: np.ndarray
  """Lookups of each row seen, most first: i64."""


def compare(
  proxy: list[str],
  seed: int,
  workdir: str | None = None,
  samples: str | None = None,
) -> None:
  """Measures proxies, prints their skew, and writes it to a folder, if any.

  The arguments are those of the program.

  Raises:
    UserError: there is no such proxy, or a sample is missing.
  """
  proxies = {
    name: choose(PUBLISHED, name, '--proxy') for name in proxy or PUBLISHED
  }
  real = samples_in(samples, list(proxies))
  screen = report.console()
  skews: dict[str, Skew] = {}
  with Bar(screen, None, 'example') as bar:
    for name, one in proxies.items():
      examples = one.profile_examples + JUDGED
      bar.begin(f'{len(skews) + 1}/{len(proxies)} {name}', examples)
      own = one._replace(spec=one.spec._replace(seed=seed))
      skews[name] = measured(own, tell=bar.show)
  frame = frame_of(skews)
  screen.print(report.table('shares of rows and examples that are hot', frame))
  if workdir:
    folder = writable(workdir, '--workdir')
    record.write_json(folder / 'skew.json', frame)
    plot(folder / 'access_curves.png', skews, real)
    report.teller(screen)(f'written to {folder}')


def measured(
  proxy: Proxy,
  judged: int = JUDGED,
  part: int = _PART,
  tell: Callable[[int], object] = lambda examples: None,
) -> Skew:
  """Ranks rows by one part of the proxy's stream and judges another.

  Args:
    proxy: what to measure.
    judged: examples to judge.
    part: examples drawn at once.
    tell: called with the number of examples drawn so far.
  """
  num_rows = sum(proxy.spec.rows)
  drawn = 0

  def parts(first: int, examples: int) -> Iterator[Lookups]:
    nonlocal drawn
    for lookups in lookups_of(proxy, first, examples, part):
      yield lookups
      drawn += len(lookups)
      tell(drawn)

  profile = parts(PROFILE_START, proxy.profile_examples)
  counts = access_counts(profile, num_rows)
  rows = np.flatnonzero(counts)
  # A proxy's row numbers are ranks, so ties must not be broken by them.
  rows = rows[np.random.default_rng(proxy.spec.seed).permutation(len(rows))]
  rows = rows[np.argsort(-counts[rows], kind='stable')]
  hot = hot_rows(rows[: proxy.hot_rows], num_rows)
  shares = []
  for lookups in parts(TEST_START, judged):
    places = hot.places(lookups).reshape(len(lookups), -1)
    shares.append((places.max(axis=1) < len(hot.rows)).mean())
  return Skew(
    proxy=proxy,
    hot_bytes=len(hot.rows) / num_rows,
    hot_examples=float(np.mean(shares)),
    curve=counts[rows].astype(np.int64),
  )


def lookups_of(
  proxy: Proxy, first: int, examples: int, part: int = _PART
) -> Iterator[Lookups]:
  """Yields the lookups of consecutive examples: [n, F] or [n, F, L]."""
  for start in range(0, examples, part):
    positions = first + np.arange(start, min(start + part, examples))
    yield proxy.law(proxy.spec, positions).columns.lookups


def frame_of(skews: dict[str, Skew]) -> list[dict[str, Any]]:
  """Lists measured and published shares, and differences in points."""
  frame = []
  for name, skew in skews.items():
    for of in ('bytes', 'examples'):
      ours, paper = (getattr(x, f'hot_{of}') for x in (skew, skew.proxy))
      row = {'proxy': name, 'ranked on': skew.proxy.profile_examples}
      row |= {'hot': of, 'share': ours, 'paper share': paper}
      frame.append({**row, 'points': f'{100 * (ours - paper):+.1f}'})
  return frame


SAMPLES = {
  'kaggle': ('criteo/dac_80k.tsv.gz', '\t', False, slice(14, 40)),
  'avazu': ('avazu/train.csv', ',', True, slice(3, 24)),
  'taobao': ('taobao/UserBehavior.csv.gz', ',', False, slice(0, 3)),
}
"""Text files of real examples by proxy: path in the folder of samples,
separator, whether there is a header, and the columns that hold ids."""


class Real(NamedTuple):
  """The lookups of a real sample."""

  lines: int
  curve: np.ndarray
  """Lookups of each id of all columns, most first: i64."""


def samples_in(folder: str | None, names: list[str]) -> dict[str, Real]:
  """Reads the samples of those proxies that have one; none without a folder.

  Raises:
    UserError: a file is missing or cannot be read.
  """
  if not folder:
    return {}
  return {n: _read(pathlib.Path(folder), n) for n in names if n in SAMPLES}


def _read(folder: pathlib.Path, name: str) -> Real:
  path, separator, header, columns = SAMPLES[name]
  try:
    frame = pl.read_csv(
      folder / path,
      separator=separator,
      has_header=header,
      quote_char=None,
      infer_schema=False,  # some ids exceed 64 bits
      truncate_ragged_lines=True,
    )
  except (OSError, pl.exceptions.PolarsError) as error:
    raise UserError(
      f'the sample of {name} must be a text file that can be read',
      got=error,
      where=f'--samples, {path}',
      hint='fetch it again, or leave --samples out',
    ) from error
  if name == 'taobao':  # a line without a whole time in seconds was cut off
    frame = frame.filter(frame[frame.columns[-1]].str.len_chars() == 10)
  counts = [
    frame[column].value_counts()['count'].to_numpy()
    for column in frame.columns[columns]
  ]
  return Real(len(frame), _falling(np.concatenate(counts)))


def _falling(counts: np.ndarray) -> np.ndarray:
  return np.sort(counts.astype(np.int64))[::-1]


def proxy_curve(proxy: Proxy, lines: int) -> np.ndarray:
  """Returns the lookups of each row in a number of examples, most first.

  A line of a log of sequences is one item that a user looked at, so the first
  step represents an example there.
  """
  (lookups,) = lookups_of(proxy, PROFILE_START, lines, lines)
  first = lookups.reshape(*lookups.shape[:2], -1)[:, :, 0]
  return _falling(np.unique(first, return_counts=True)[1])


# Counts would lie as far apart as the sizes of the samples.
_CAPTION = (
  'Shares of all lookups, so that large and small samples lie on one curve. '
  'The last step of each curve is of rows looked up once. Dashed: as many '
  'examples of the proxy as the real sample has lines (one step of each for '
  'Taobao). Dotted: the budget for hot rows.'
)


def plot(
  path: pathlib.Path, skews: dict[str, Skew], samples: dict[str, Real]
) -> None:
  """Draws the access curves of proxies, and of those samples that there are."""
  columns = min(2, len(skews))
  lines = -(-len(skews) // columns)
  figure, axes = page.figure(
    3.7 * lines + 0.7, lines, 5.4 * columns, ncols=columns
  )
  for axis, (name, skew) in zip(axes, skews.items(), strict=False):
    proxy, real = skew.proxy, samples.get(name)
    many = _many(proxy.profile_examples)
    _line(axis, skew.curve, f'proxy, {many} examples')
    if real is not None:
      many = _many(real.lines)
      _line(axis, real.curve, f'real sample, {many} lines', page.color(1))
      curve = proxy_curve(proxy, real.lines)
      _line(axis, curve, f'proxy, {many} examples', style='--')
    axis.axvline(proxy.hot_rows, color=page.color('muted'), linestyle=':')
    axis.set(
      xscale='log',
      yscale='log',
      title=f'{proxy.title}; budget {proxy.hot_bytes:.1%} of the rows',
      xlabel='rank of the row, of all tables',
      ylabel='share of all lookups',
    )
    axis.legend(frameon=False, fontsize=8, loc='lower left')
  for axis in axes[len(skews) :]:
    axis.remove()
  figure.suptitle('Synthetic proxies (NOT real data): lookups of each row')
  figure.supxlabel(textwrap.fill(_CAPTION, 85 * columns), fontsize=8)
  figure.savefig(path, dpi=130)


def _line(
  axis: Any,
  curve: np.ndarray,
  label: str,
  color: str = page.color('ink'),
  style: str = '-',
) -> None:
  """Draws a curve at ranks that are evenly spread on a log axis."""
  ranks = np.unique(np.geomspace(1, len(curve), 400).astype(np.int64))
  shares = curve[ranks - 1] / curve.sum()
  axis.plot(ranks, shares, style, color=color, linewidth=1.4, label=label)


def _many(examples: int) -> str:
  if examples >= 1_000_000:
    return f'{examples / 1e6:.3g} M'
  return f'{examples / 1e3:.0f} k'
