"""Synthetic twins of the data sets that the papers train on; NOT real data.

A twin has a data set's tables, its share of clicks, and the skew that the
papers print of it: so many of the bytes are hot, so many of the inputs look up
hot rows only (arXiv 2103.00686). `python -m experiments.skew` measures both.
Nothing else is claimed to be alike.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from slipstream_jax.data.base import Dataset
from slipstream_jax.errors import choose, UserError
from slipstream_jax.synthetic.clicks import inputs_at
from slipstream_jax.synthetic.shop import series_at
from slipstream_jax.synthetic.spec import (
  AVAZU_ROWS,
  KAGGLE_ROWS,
  SeriesSpec,
  Spec,
  SyntheticSpec,
  TAOBAO_ROWS,
  TERABYTE_ROWS,
)
from slipstream_jax.synthetic.stream import InputsAt, stream_dataset


class Twin(NamedTuple):
  """A stream, and what is published of the data set that it is a twin of."""

  title: str
  """The data set's name."""
  spec: Spec
  """The stream."""
  dim: int
  """D, as published."""
  epoch_inputs: int
  """Inputs of the data set, as published."""
  profile_inputs: int
  """Inputs whose lookups rank the rows. The papers sample 5 %; but no stream
  in which rows differ in popularity alone can fill a budget of 17 % or 76 % of
  all rows from so few, so Avazu's twin takes 20 % and Taobao's an epoch."""
  hot_bytes: float
  """Published share of the tables' bytes that is hot."""
  hot_inputs: float
  """Published share of the inputs that look up hot rows only."""

  @property
  def law(self) -> InputsAt:
    """What the stream's inputs at some positions are."""
    return series_at if isinstance(self.spec, SeriesSpec) else inputs_at

  @property
  def hot_rows(self) -> int:
    """Rows that fit the published budget."""
    return round(self.hot_bytes * sum(self.spec.rows))


TWINS = {
  # The spec's defaults, so 25 % of clicks and not the real 25.6 %: what is
  # recorded of this stream stays comparable.
  'kaggle': Twin(
    title='Criteo Kaggle',
    spec=SyntheticSpec(rows=KAGGLE_ROWS),
    dim=16,
    epoch_inputs=45_000_000,
    profile_inputs=2_250_000,
    hot_bytes=0.068,
    hot_inputs=0.758,
  ),
  'terabyte': Twin(
    title='Criteo Terabyte',
    spec=SyntheticSpec(
      rows=TERABYTE_ROWS,
      skews=(1.2, 1.25, 1.2),
      logit_std=1.3,
      base_rate=0.034,
    ),
    dim=64,
    epoch_inputs=80_000_000,
    profile_inputs=4_000_000,
    hot_bytes=0.007,
    hot_inputs=0.816,
  ),
  # Devices' addresses are nearly flat, their ids and most other fields steep,
  # as in the log.
  'avazu': Twin(
    title='Avazu',
    spec=SyntheticSpec(
      rows=AVAZU_ROWS,
      dense_features=1,
      skews=(0.9, 1.05, 1.3),
      field_skew=1.8,
      logit_std=1.2,
      base_rate=0.17,
    ),
    dim=16,
    epoch_inputs=32_300_000,
    profile_inputs=6_460_000,
    hot_bytes=0.17,
    hot_inputs=0.746,
  ),
  'taobao': Twin(
    title='Taobao',
    spec=SeriesSpec(rows=TAOBAO_ROWS),
    dim=16,
    epoch_inputs=10_000_000,
    profile_inputs=10_000_000,
    hot_bytes=0.76,
    hot_inputs=0.924,
  ),
}
"""By the names that `twin_dataset` takes."""


def twin_dataset(
  name: str,
  *,
  seed: int = 0,
  test_inputs: int = 1 << 18,
  rows: Sequence[int] | None = None,
  drift_inputs: int = 0,
  saturation: float = 0.0,
  test_at: int = 0,
) -> Dataset:
  """A twin as a data set; endless to train on, its Bayes AUC known.

  Args:
    name: of `TWINS`.
    seed: seed of everything; another one gives another population.
    test_inputs: inputs of one pass over the test part.
    rows: R of each table, in place of the data set's; for runs of seconds.
    drift_inputs: see `SyntheticSpec`.
    saturation: see `SyntheticSpec`; not of Taobao's twin.
    test_at: time of the first input to test on, so the inputs trained before
      it. Without drift all times are alike.

  Raises:
    UserError: there is no such twin, or a value is out of range.
  """
  twin = choose(TWINS, name, 'twin_dataset, name')
  changes: dict[str, Any] = {'seed': seed, 'drift_inputs': drift_inputs}
  if rows is not None:
    changes['rows'] = tuple(rows)
  if isinstance(twin.spec, SyntheticSpec):
    changes['saturation'] = saturation
  elif saturation:
    raise UserError(
      f'the {name} twin has no saturation: its rows have no planted effects',
      got=saturation,
      where='twin_dataset, saturation',
      mend='set it to 0, or take another twin',
    )
  spec = twin.spec._replace(**changes)
  data = stream_dataset(twin.law, spec, test_inputs, test_at)
  plain = not (drift_inputs or saturation)
  if twin is TWINS['kaggle'] and plain:
    return data
  parts = [
    f'synthetic twin of {twin.title} (NOT real data)',
    f'{len(spec.rows)} tables of {sum(spec.rows):,} rows together',
    *([f'ranks held for {drift_inputs:,} inputs'] if drift_inputs else []),
    *([f'saturation {saturation:g}'] if saturation else []),
    f'seed {seed}',
  ]
  return data._replace(name=', '.join(parts))
