"""What the papers say, as far as it stands beside our figures.

Nothing here was measured by us.
"""

from typing import NamedTuple

SOURCES = {
  'Slipstream': 'arXiv 2404.04270',
  'FAE': 'arXiv 2103.00686',
  'Hotline': 'arXiv 2204.05436',
}
EPOCHS_OF_BYTES = 10
"""Over which FAE's paper counts the bytes that it moves."""


class Model(NamedTuple):
  """A model as FAE's paper and Slipstream's train it."""

  data: str
  examples: int
  dense: int
  tables: int
  rows: int
  dim: int
  table_bytes: float
  batch_size: int
  """Per device."""
  hot_bytes_share: float
  """Of the tables' bytes, those of hot rows (FAE's paper)."""
  examples_hot_share: float
  accuracy: float
  """Of a full run on the full data, as the two below."""
  auc: float | None
  log_loss: float
  gigabytes: dict[str, float]
  """By system, moved in `EPOCHS_OF_BYTES` epochs (FAE's paper)."""


MODELS = {
  'rm1': Model(
    data='Taobao user behaviour',
    examples=10_000_000,
    dense=1,
    tables=3,
    rows=5_100_000,
    dim=16,
    table_bytes=0.3e9,
    batch_size=256,
    hot_bytes_share=0.76,
    examples_hot_share=0.924,
    accuracy=0.8921,
    auc=None,
    log_loss=0.269,
    gigabytes={'dlrm_hybrid': 1.95, 'xdl': 0.51, 'fae': 0.61},
  ),
  'rm2': Model(
    data='Criteo Kaggle',
    examples=45_000_000,
    dense=13,
    tables=26,
    rows=33_800_000,
    dim=16,
    table_bytes=2e9,
    batch_size=1024,
    hot_bytes_share=0.068,
    examples_hot_share=0.758,
    accuracy=0.7886,
    auc=0.802,
    log_loss=0.452,
    gigabytes={'dlrm_hybrid': 60.9, 'xdl': 23.2, 'fae': 15.0},
  ),
  'rm3': Model(
    data='Criteo Terabyte, sampled',
    examples=80_000_000,
    dense=13,
    tables=26,
    rows=266_000_000,
    dim=64,
    table_bytes=63e9,
    batch_size=1024,
    hot_bytes_share=0.007,
    examples_hot_share=0.816,
    accuracy=0.8107,
    auc=0.802,
    log_loss=0.424,
    gigabytes={'dlrm_hybrid': 375.0, 'xdl': 95.6, 'fae': 69.6},
  ),
  'rm4': Model(
    data='Avazu',
    examples=32_300_000,
    dense=1,
    tables=21,
    rows=9_300_000,
    dim=16,
    table_bytes=0.55e9,
    batch_size=1024,
    hot_bytes_share=0.17,
    examples_hot_share=0.746,
    accuracy=0.8361,
    auc=0.758,
    log_loss=0.390,
    gigabytes={'dlrm_hybrid': 40.5, 'xdl': 30.3, 'fae': 10.5},
  ),
}
"""By our key. FAE's paper has rows, sizes, shapes, quality and bytes."""

CLAIMS = {'xdl': 2.0, 'dlrm_hybrid': 2.4, 'fae': 1.2, 'hotline': 1.175}
"""How many times as long as Slipstream each system trains: its abstract."""

DROP_TARGET, DROPPED = 0.3, 0.21
"""Of hot examples, those to drop; of all on Criteo Kaggle, those dropped."""

NAIVE_LOSS = 0.04, 0.06
"""Accuracy lost where all hot or all cold rows stand still (Slipstream)."""

SATURATED = 0.25
"""Share of the batches before which hot rows stop moving (Slipstream)."""


class Claim(NamedTuple):
  """What a paper says of two baselines."""

  slower: str
  faster: str
  times: float
  paper: str
  setting: str


BETWEEN = (
  Claim('xdl', 'fae', 2.3, 'FAE', '4 GPUs'),
  Claim('dlrm_hybrid', 'fae', 1.52, 'FAE', '4 GPUs'),
  Claim('xdl', 'hotline', 3.5, 'Hotline', '1 GPU, modelled'),
  Claim('dlrm_hybrid', 'hotline', 3.5, 'Hotline', '1 GPU, modelled'),
  Claim('fae', 'hotline', 2.3, 'Hotline', 'modelled'),
)
"""What the papers of baselines claim over other baselines."""
