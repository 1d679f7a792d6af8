"""Synthetic proxies of the data sets that the papers train on. NOT real data.

A proxy has a data set's tables, its share of clicks, and its published skew:
the share of the bytes that is hot, and the share of the examples that look up
hot rows only (arXiv 2103.00686). Both are measured in docs/datasets.md. In all
else a proxy may differ from its data set.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import choose, UserError
from slipstream_jax.synthetic.clicks import examples_at
from slipstream_jax.synthetic.sequence_log import sequence_at
from slipstream_jax.synthetic.spec import (
  AVAZU_ROWS,
  KAGGLE_ROWS,
  MOVIELENS_ROWS,
  SequenceSpec,
  Spec,
  SyntheticSpec,
  TAOBAO_ROWS,
  TERABYTE_ROWS,
)
from slipstream_jax.synthetic.stream import ExamplesAt, stream_dataset


class Proxy(NamedTuple):
  """A stream, and the published figures of the data set that it imitates."""

  title: str
  """The data set's name."""
  spec: Spec
  """Settings of the stream."""
  epoch_examples: int
  """Examples of the data set, as published."""
  profile_examples: int
  """Examples whose lookups rank the rows. The papers sample 5 %. If rows differ
  in popularity only, so few examples cannot fill a budget of 17 % or 76 % of
  all rows, so Avazu's proxy takes 20 % and Taobao's a whole epoch."""
  hot_bytes: float | None
  """Published share of the tables' bytes that is hot, or None."""
  hot_examples: float | None
  """Published share of the examples that look up hot rows only, or None."""

  @property
  def law(self) -> ExamplesAt:
    """The function that computes the stream's examples."""
    return sequence_at if isinstance(self.spec, SequenceSpec) else examples_at

  @property
  def hot_rows(self) -> int:
    """Rows that fit the published budget; 0 if none is published."""
    return round((self.hot_bytes or 0) * sum(self.spec.rows))


PROXIES = {
  # The spec's defaults, so 25 % of clicks instead of the real 25.6 %. Earlier
  # results on this stream stay comparable.
  'kaggle': Proxy(
    title='Criteo Kaggle',
    spec=SyntheticSpec(rows=KAGGLE_ROWS),
    epoch_examples=45_000_000,
    profile_examples=2_250_000,
    hot_bytes=0.068,
    hot_examples=0.758,
  ),
  'terabyte': Proxy(
    title='Criteo Terabyte',
    spec=SyntheticSpec(
      rows=TERABYTE_ROWS,
      skews=(1.2, 1.25, 1.2),
      logit_std=1.3,
      base_rate=0.034,
    ),
    epoch_examples=80_000_000,
    profile_examples=4_000_000,
    hot_bytes=0.007,
    hot_examples=0.816,
  ),
  # As in the log, device addresses have little skew, and device ids and most
  # other fields have much.
  'avazu': Proxy(
    title='Avazu',
    spec=SyntheticSpec(
      rows=AVAZU_ROWS,
      dense_features=1,
      skews=(0.9, 1.05, 1.3),
      field_skew=1.8,
      logit_std=1.2,
      base_rate=0.17,
    ),
    epoch_examples=32_300_000,
    profile_examples=6_460_000,
    hot_bytes=0.17,
    hot_examples=0.746,
  ),
  'taobao': Proxy(
    title='Taobao',
    spec=SequenceSpec(rows=TAOBAO_ROWS),
    epoch_examples=10_000_000,
    profile_examples=10_000_000,
    hot_bytes=0.76,
    hot_examples=0.924,
  ),
  # No paper prints its skew, so only the sizes match. About half of the ratings
  # are clicks.
  'movielens': Proxy(
    title='MovieLens 25M',
    spec=SyntheticSpec(
      rows=MOVIELENS_ROWS,
      dense_features=2,
      skews=(0.6, 0.85, 1.0),
      logit_std=1.2,
      base_rate=0.5,
    ),
    epoch_examples=25_000_095,
    profile_examples=1_250_000,
    hot_bytes=None,
    hot_examples=None,
  ),
  # No data set's. Its rows are few enough to be learned from a million
  # examples, and most of the signal is in products of two and three fields.
  'planted': Proxy(
    title='a log with planted interactions',
    spec=SyntheticSpec(
      rows=(100, 80, 60) * 4,
      dense_features=4,
      skews=(1.0, 1.0, 1.0),
      own_share=1.0,  # else one field would tell what three multiply to
      signal=(0.05, 0.15, 0.4, 0.4),
    ),
    epoch_examples=1_000_000,
    profile_examples=100_000,
    hot_bytes=None,
    hot_examples=None,
  ),
}
"""Proxies by name."""


def proxy_dataset(
  name: str,
  *,
  seed: int = 0,
  test_examples: int = 1 << 18,
  rows: Sequence[int] | None = None,
  drift_examples: int = 0,
  saturation: float = 0.0,
  test_at: int = 0,
) -> Dataset:
  """Returns a proxy as an endless data set with known Bayes AUC.

  Args:
    name: a key of `PROXIES`.
    seed: seed of everything. Another seed gives another population.
    test_examples: examples of one pass over the test part.
    rows: R of each table, in place of the data set's, for short runs.
    drift_examples: see `SyntheticSpec`.
    saturation: see `SyntheticSpec`. Not available for Taobao's proxy.
    test_at: time of the first test example, that is, the number of examples
      trained before it. It matters only with drift.

  Raises:
    UserError: there is no such proxy, or a value is out of range.
  """
  proxy = choose(PROXIES, name, 'proxy_dataset, name')
  changes: dict[str, Any] = {'seed': seed, 'drift_examples': drift_examples}
  if rows is not None:
    changes['rows'] = tuple(rows)
  if isinstance(proxy.spec, SyntheticSpec):
    changes['saturation'] = saturation
  elif saturation:
    raise UserError(
      f'the {name} proxy has no saturation: its rows have no planted effects',
      got=saturation,
      where='proxy_dataset, saturation',
      hint='set it to 0, or take another proxy',
    )
  spec = proxy.spec._replace(**changes)
  data = stream_dataset(proxy.law, spec, test_examples, test_at)
  if proxy is PROXIES['kaggle'] and not (drift_examples or saturation):
    return data
  parts = [
    f'synthetic proxy of {proxy.title} (NOT real data)',
    f'{len(spec.rows)} tables of {sum(spec.rows):,} rows together',
  ]
  if drift_examples:
    parts.append(f'ranks held for {drift_examples:,} examples')
  if saturation:
    parts.append(f'saturation {saturation:g}')
  return data._replace(name=', '.join([*parts, f'seed {seed}']))
