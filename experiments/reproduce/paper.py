"""Figures of the papers. Nothing here was measured by us."""

from typing import Any

SOURCES = {
  'Slipstream': 'arXiv 2404.04270',
  'FAE': 'arXiv 2103.00686',
  'Hotline': 'arXiv 2204.05436',
}
EPOCHS_OF_BYTES = 10
"""Over which FAE's paper counts the bytes that it moves."""

MODELS: dict[str, dict[str, Any]] = {
  'rm1': {
    'data': 'Taobao user behaviour',
    'examples': 10_000_000,
    'tables': 3,
    'rows': 5_100_000,
    'dim': 16,
    'table_bytes': 0.3e9,
    'batch_size': 256,
    'hot_bytes_share': 0.76,
    'examples_hot_share': 0.924,
    'accuracy': 0.8921,
    'auc': None,
    'log_loss': 0.269,
    'gigabytes': {'dlrm_hybrid': 1.95, 'xdl': 0.51, 'fae': 0.61},
  },
  'rm2': {
    'data': 'Criteo Kaggle',
    'examples': 45_000_000,
    'tables': 26,
    'rows': 33_800_000,
    'dim': 16,
    'table_bytes': 2e9,
    'batch_size': 1024,
    'hot_bytes_share': 0.068,
    'examples_hot_share': 0.758,
    'accuracy': 0.7886,
    'auc': 0.802,
    'log_loss': 0.452,
    'gigabytes': {'dlrm_hybrid': 60.9, 'xdl': 23.2, 'fae': 15.0},
  },
  'rm3': {
    'data': 'Criteo Terabyte, sampled',
    'examples': 80_000_000,
    'tables': 26,
    'rows': 266_000_000,
    'dim': 64,
    'table_bytes': 63e9,
    'batch_size': 1024,
    'hot_bytes_share': 0.007,
    'examples_hot_share': 0.816,
    'accuracy': 0.8107,
    'auc': 0.802,
    'log_loss': 0.424,
    'gigabytes': {'dlrm_hybrid': 375.0, 'xdl': 95.6, 'fae': 69.6},
  },
  'rm4': {
    'data': 'Avazu',
    'examples': 32_300_000,
    'tables': 21,
    'rows': 9_300_000,
    'dim': 16,
    'table_bytes': 0.55e9,
    'batch_size': 1024,
    'hot_bytes_share': 0.17,
    'examples_hot_share': 0.746,
    'accuracy': 0.8361,
    'auc': 0.758,
    'log_loss': 0.390,
    'gigabytes': {'dlrm_hybrid': 40.5, 'xdl': 30.3, 'fae': 10.5},
  },
}
"""The models as the papers of FAE and Slipstream train them.

`batch_size` is per device, `hot_bytes_share` the share of hot rows in the bytes
of the tables. Quality is that of a full run on the full data. `gigabytes` are
moved in `EPOCHS_OF_BYTES` epochs, by system. FAE's paper has rows, sizes,
shares, quality and bytes."""

CLAIMS = {'xdl': 2.0, 'dlrm_hybrid': 2.4, 'fae': 1.2, 'hotline': 1.175}
"""Speed-up of Slipstream over each system: its abstract."""

DROP_TARGET, DROPPED = 0.3, 0.21
"""Share of hot examples to drop, and of all dropped on Criteo Kaggle."""

NAIVE_LOSS = 0.04, 0.06
"""Accuracy lost where all hot or all cold rows are frozen (Slipstream)."""

SATURATED = 0.25
"""Share of the batches before which hot rows stop moving (Slipstream)."""

BETWEEN = (
  ('fae', 'xdl', 2.3, 'FAE (4 GPUs)'),
  ('fae', 'dlrm_hybrid', 1.52, 'FAE (4 GPUs)'),
  ('hotline', 'xdl', 3.5, 'Hotline (1 GPU, modelled)'),
  ('hotline', 'dlrm_hybrid', 3.5, 'Hotline (1 GPU, modelled)'),
  ('hotline', 'fae', 2.3, 'Hotline (modelled)'),
)
"""Claims of papers: faster system, slower system, speed-up, source."""
