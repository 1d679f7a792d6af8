"""Measures the skew of the synthetic proxies against what the papers print.

    python -m experiments.skew [--proxy=NAME] [--seed=0] [--out=DIR]
        [--samples=DIR]

Hot rows are those of all tables together that a sample of a proxy's stream
looks up most, up to the published share of the tables' bytes; rows of equal
counts come in random order. Judged is another part of the stream: an example is
hot iff all its lookups are. --out adds skew.md, and access_curves.png: lookups
of each row against its rank, with those of real samples under --samples beside
them (laid out as criteo/dac_80k.tsv.gz, avazu/train.csv and
taobao/UserBehavior.csv.gz).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from absl import flags
import numpy as np
from rich.table import Table

from experiments.common import cli, report
from experiments.common.progress import Bar
from experiments.common.workdir import writable
from experiments.skew import curves
from slipstream_jax.errors import choose
from slipstream_jax.selection.hot import access_counts, hot_rows
from slipstream_jax.synthetic.proxies import PROXIES, Proxy
from slipstream_jax.synthetic.stream import PROFILE_START, TEST_START
from slipstream_jax.types import HotRows, Lookups

PUBLISHED = {n: p for n, p in PROXIES.items() if p.hot_bytes is not None}
"""Proxies of data sets whose skew a paper prints."""
_PROXIES = flags.DEFINE_multi_string(
  'proxy', list(PUBLISHED), 'Proxy to measure; may be given again.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of the streams.')
_OUT = flags.DEFINE_string('out', None, 'Folder for skew.md and the picture.')
_SAMPLES = flags.DEFINE_string('samples', None, 'Folder with real samples.')

_JUDGED = 1 << 18  # examples; their hot share has a standard error of 0.1 %
_PART = 1 << 17  # examples drawn at once


class Skew(NamedTuple):
  """What was measured of a proxy."""

  proxy: Proxy
  profile_examples: int
  """Examples whose lookups ranked the rows."""
  seen: float
  """Share of all rows that they look up."""
  hot_bytes: float
  """Share of all rows that is hot; at most the budget."""
  hot_examples: float
  """Share of other examples that look up hot rows only."""
  curve: np.ndarray
  """Lookups of each row seen, most first: i64."""


def main() -> None:
  """Measures, prints, and writes what --out asks for.

  Raises:
    UserError: a flag that cannot be, or a sample that is not there.
  """
  names = list(dict.fromkeys(_PROXIES.value))
  for name in names:
    choose(PUBLISHED, name, '--proxy')
  samples = curves.samples_in(_SAMPLES.value, names)  # before any work
  screen = report.console()
  skews = {}
  with Bar(screen, None, 'example') as bar:
    for number, name in enumerate(names):
      examples = PROXIES[name].profile_examples + _JUDGED
      bar.begin(f'{number + 1}/{len(names)} {name}', examples)
      skews[name] = measured(PROXIES[name], _SEED.value, tell=bar.show)
      screen.print(_said(skews[name]), highlight=False)
  frame = frame_of(skews)
  screen.print(table_of(frame))
  if _OUT.value:
    out = writable(_OUT.value, '--out')
    (out / 'skew.md').write_text(report.markdown(frame))
    specs = {name: seeded(PROXIES[name], _SEED.value) for name in names}
    seen = {name: skew.curve for name, skew in skews.items()}
    curves.plot(out / 'access_curves.png', specs, seen, samples)
    screen.print(f'written to {out}', highlight=False)


def seeded(proxy: Proxy, seed: int) -> Proxy:
  """The proxy with its streams of that seed."""
  return proxy._replace(spec=proxy.spec._replace(seed=seed))


def measured(
  proxy: Proxy,
  seed: int = 0,
  profile_examples: int | None = None,
  tell: Callable[[int], object] = bool,
) -> Skew:
  """Ranks rows on one part of the proxy's stream and judges another.

  Args:
    proxy: what to measure.
    seed: of its stream.
    profile_examples: examples to rank on; None takes the proxy's.
    tell: called with the examples drawn so far.
  """
  proxy = seeded(proxy, seed)
  examples = profile_examples or proxy.profile_examples
  all_rows = sum(proxy.spec.rows)
  profile = _telling(lookups_of(proxy, PROFILE_START, examples), 0, tell)
  counts = access_counts(profile, all_rows)
  rows = np.flatnonzero(counts)
  # Ranks are row numbers in a proxy: ties by row would tell the truth.
  rows = rows[np.random.default_rng(seed).permutation(len(rows))]
  rows = rows[np.argsort(-counts[rows], kind='stable')]
  hot = hot_rows(rows[: proxy.hot_rows], all_rows)
  judged = _telling(lookups_of(proxy, TEST_START, _JUDGED), examples, tell)
  return Skew(
    proxy=proxy,
    profile_examples=examples,
    seen=len(rows) / all_rows,
    hot_bytes=len(hot.rows) / all_rows,
    hot_examples=float(
      np.mean([_are_hot(part, hot).mean() for part in judged])
    ),
    curve=counts[rows].astype(np.int64),
  )


def lookups_of(proxy: Proxy, first: int, examples: int) -> Iterator[Lookups]:
  """Lookups of consecutive examples, in parts: [n, F] or [n, F, L]."""
  for start in range(0, examples, _PART):
    stop = min(start + _PART, examples)
    positions = first + np.arange(start, stop)
    yield proxy.law(proxy.spec, positions).columns.lookups


def _telling(
  parts: Iterator[Lookups], before: int, tell: Callable[[int], object]
) -> Iterator[Lookups]:
  """The parts, telling of the examples in them and before them."""
  for part in parts:
    yield part
    before += len(part)
    tell(before)


def _are_hot(lookups: Lookups, hot: HotRows) -> np.ndarray:
  """Which examples look up hot rows only: bool[n]."""
  places = hot.places(lookups).reshape(len(lookups), -1)
  is_hot: np.ndarray = places.max(axis=1) < len(hot.rows)
  return is_hot


def _said(skew: Skew) -> str:
  proxy = skew.proxy
  return (
    f'{proxy.title}: ranked on {skew.profile_examples:,} examples '
    f'({skew.profile_examples / proxy.epoch_examples:.0%} of an epoch), which'
    f' see '
    f'{skew.seen:.1%} of the rows'
  )


def frame_of(skews: dict[str, Skew]) -> list[dict[str, Any]]:
  """A row for each proxy: what was measured, and what was published."""
  frame = []
  for name, skew in skews.items():
    row = {'proxy': name, 'ranked on': skew.profile_examples}
    for of in ('bytes', 'examples'):
      measured, published = (
        getattr(x, f'hot_{of}') for x in (skew, skew.proxy)
      )
      row |= {f'hot_{of}_share': measured, f'published_{of}_share': published}
      row[f'{of} less published'] = f'{100 * (measured - published):+.1f}'
    frame.append(row)
  return frame


def table_of(frame: report.Frame) -> Table:
  """The same for the screen."""
  title = (
    'shares that are hot, of bytes and of examples: measured, those in the '
    'paper, and differences in points'
  )
  headings: dict[str, str] = {}
  for of in ('bytes', 'examples'):
    headings |= {f'hot_{of}_share': of, f'published_{of}_share': 'paper'}
    headings[f'{of} less published'] = 'points'
  return report.table(title, frame, headings=headings)


if __name__ == '__main__':
  cli.run(main, config='none')
