"""Measures how skewed the lookups of proxies are."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from experiments.bench.runner import Item
from experiments.common.progress import Bar
from slipstream_jax.errors import choose
from slipstream_jax.selection.hot import access_counts, hot_rows, rows_by_share
from slipstream_jax.synthetic.proxies import PROXIES, Proxy
from slipstream_jax.synthetic.stream import PROFILE_START, TEST_START
from slipstream_jax.tables import offsets
from slipstream_jax.types import Lookups

PUBLISHED = {n: p for n, p in PROXIES.items() if p.hot_bytes is not None}
"""Proxies of data sets whose skew a paper prints."""
JUDGED = 1 << 18
"""Examples judged. Their hot share has a standard error of 0.1 %."""
_PART = 1 << 17  # examples drawn at once


class Skew(NamedTuple):
  """The skew of a proxy as measured."""

  hot_bytes: float
  """Share of all rows that is hot; at most the budget."""
  hot_examples: float
  """Share of other examples that look up hot rows only."""
  by_share: float
  """The same, where rows are cut by their share of a table's lookups."""


def compare(bar: Bar, proxy: list[str], seed: int) -> Iterator[Item]:
  """Yields measured and published skew. The arguments are the program's.

  Raises:
    UserError: there is no such proxy.
  """
  proxies = {
    name: choose(PUBLISHED, name, '--proxy') for name in proxy or PUBLISHED
  }
  frame: list[dict[str, Any]] = []
  for number, (name, one) in enumerate(proxies.items(), 1):
    examples = one.profile_examples + JUDGED
    bar.begin(f'{number}/{len(proxies)} {name}', examples, 'example')
    own = one._replace(spec=one.spec._replace(seed=seed))
    frame += lines_of(name, own, measured(own, tell=bar.show))
  yield 'shares of rows and examples that are hot', frame


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
  by_share = rows_by_share(counts, proxy.hot_rows, 1, offsets(proxy.spec.rows))
  hots = [hot_rows(r, num_rows) for r in (rows[: proxy.hot_rows], by_share)]
  shares = []
  for lookups in parts(TEST_START, judged):
    most = [
      hot.places(lookups).reshape(len(lookups), -1).max(1) for hot in hots
    ]
    shares.append(
      [(m < len(hot.rows)).mean() for m, hot in zip(most, hots, strict=True)]
    )
  return Skew(len(hots[0].rows) / num_rows, *np.mean(shares, 0).tolist())


def lookups_of(
  proxy: Proxy, first: int, examples: int, part: int = _PART
) -> Iterator[Lookups]:
  """Yields the lookups of consecutive examples: [n, F] or [n, F, L]."""
  for start in range(0, examples, part):
    positions = first + np.arange(start, min(start + part, examples))
    yield proxy.law(proxy.spec, positions).columns.lookups


def lines_of(name: str, proxy: Proxy, skew: Skew) -> Iterator[dict[str, Any]]:
  """Yields measured and published shares, and differences in points."""
  examples: Any = proxy.hot_examples
  shares: list[tuple[str, float, Any]] = [
    ('bytes', skew.hot_bytes, proxy.hot_bytes),
    ('examples', skew.hot_examples, examples),
    ('examples, cut by share', skew.by_share, examples),
  ]
  for of, ours, paper in shares:
    row = {'proxy': name, 'ranked on': proxy.profile_examples}
    row |= {'hot': of, 'share': ours, 'paper share': paper}
    yield {**row, 'points': f'{100 * (ours - paper):+.1f}'}
