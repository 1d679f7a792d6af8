"""Folders of a reproduction, drawn by a seeded generator."""

import numpy as np

from experiments.reproduce.results import (
  append,
  Cell,
  Modelled,
  Naive,
  Phase,
  PHASES,
  Point,
  RowChange,
  Skew,
  Threshold,
  write_setting,
)

MODELS = ('rm1', 'rm2', 'rm2_l20', 'rm3', 'rm4')
SYSTEMS = (
  *('xdl', 'dlrm_hybrid', 'fae', 'fae_pinned', 'hotline', 'hotline_micro'),
  *('cached', 'plain', 'pinned'),
)
KEYS = (
  *((system, 'off') for system in SYSTEMS),
  ('pinned', 'published'),
  ('pinned', 'ours'),
  *((system, 'ours') for system in ('fae', 'hotline', 'xdl')),
)
_SECONDS = {'xdl': 5.0, 'dlrm_hybrid': 6.0, 'fae': 2.0, 'hotline': 2.2}
_BYTES = {'xdl': 3000, 'dlrm_hybrid': 3300, 'fae': 900, 'hotline': 400}
SENTENCE = 'rows must fit the host\n(got <40 GB> & "more")'


def cell(rng, model, key, seed):
  """A run of made-up figures, those of a system much like one another."""
  system, skip = key
  seen = 2048 * 200
  share = 0 if skip == 'off' else rng.uniform(0.15, 0.25)
  noise = rng.normal(1, 0.03)
  seconds = _SECONDS.get(system, 2.5) * (1 - share) * noise
  many = _BYTES.get(system, 500) * (1 - share / 2)
  if model == 'rm2_l20' and system != 'dlrm_hybrid':
    many *= 12  # rows of long bags
  return Cell(
    model,
    system,
    skip,
    seed,
    steps=200,
    examples_seen=seen,
    examples_trained=seen - int(share * seen),
    examples_dropped=int(share * seen),
    seconds=seconds,
    bytes_loaded=int(many * seen / 2 * rng.normal(1, 0.001)),
    bytes_stored=int(many * seen / 2 * rng.normal(1, 0.001)),
    dense_bytes=190_000_000 if system == 'xdl' else 0,
    lookups_hot_share=0.93,
    examples_hot_share=0.76,
    auc=0.78 + rng.normal(0, 0.0004) - 0.004 * (skip == 'published'),
    log_loss=0.46 + rng.normal(0, 0.0004),
    accuracy=0.785 + rng.normal(0, 0.0004),
    test_examples=40_000,
    device_bytes=300_000_000,
    host_bytes=2_100_000_000,
    choose_seconds=0.04 if share else 0.0,
    window_seconds=0.01 if share else 0.0,
    matrix_share=0.7,
    test_positives=10_400,
  )


def cells(rng, models=MODELS, seeds=3, failed=()):
  """All runs of a grid, in alternation.

  Args:
    rng: draws them.
    models: which.
    seeds: how many.
    failed: (model, system, skip, seed) of runs that fail; of seed None all.
  """
  drawn = []
  for model in models:
    for seed in range(seeds):
      for key in KEYS:
        one = cell(rng, model, key, seed)
        names = {(model, *key, seed), (model, *key, None)}
        if names & set(failed):
          one = Cell(model, *key, seed, status=SENTENCE)
        drawn.append(one)
  return drawn


def others(rng, models=MODELS, seeds=3):
  """Lines of all kinds but cells."""
  for model in models:
    for key in KEYS:
      for n in range(1, 9):
        auc = 0.78 - 0.1 / n + rng.normal(0, 0.001)
        yield Point(
          model, *key, 0, 25 * n, 51200 * n, 51200 * n,
          _SECONDS.get(key[0], 2.5) * n / 8, auc, 0.46 + 0.1 / n,
        )  # fmt: skip
      for phase in PHASES:
        yield Phase(model, *key, 0, phase, float(rng.exponential(1)))
    ranks = np.unique(np.geomspace(1, 1e6, 200).astype(int))
    weights = 1 / np.arange(1, 10**6 + 1) ** 1.05
    shares = weights / weights.sum()
    whole = np.cumsum(shares)
    for rank in ranks:
      at = int(rank) - 1
      yield Skew(model, at + 1, float(shares[at]), float(whole[at]))
    for row in range(10):
      for batch in range(0, 201, 10):
        change = (1 - np.exp(-batch / 30)) * rng.uniform(0.08, 0.1)
        yield RowChange(model, 17 * row, batch, float(change))
    for seed in range(seeds):
      for variant, lost in (('none', 0.0), ('hot', 0.05), ('cold', 0.04)):
        noise = rng.normal(0, 0.001, 3)
        figures = 0.78 - lost, 0.46 + lost, 0.785 - lost
        yield Naive(model, variant, seed, *(figures + noise).tolist())
      for target in (0.1, 0.3, 0.5, 0.7):
        yield Threshold(
          model, seed, target, 1e-3 * 10**target * float(rng.normal(1, 0.1)),
          target + float(rng.normal(0, 0.02)),
          0.78 - 0.01 * target**2 + float(rng.normal(0, 3e-4)), 0.46,
        )  # fmt: skip
    for link in ('PCIe 3 x16', 'NVLink-C2C'):
      yield Modelled(model, 'xdl', 'off', link, 0.5, 2.25, 'link')


def setting(models=MODELS, seeds=3):
  """What the grid says of itself."""
  return {
    'command': 'python -m experiments.reproduce --scale=laptop',
    'scale': 'laptop',
    'date': '2026-11-22 09:00',
    'cpu': 'A Processor',
    'cores': 2,
    'device': 'cpu',
    'jax': '0.10.2',
    'python': '3.11.9',
    'seeds': seeds,
    'minutes': 9.75,
    'peak_memory_bytes': 5_400_000_000,
    'models': {
      model: {
        'title': model.upper().replace('_L20', ', bags of 20'),
        'data': f'synthetic proxy of {model} & <more>',
        'synthetic': True,
        'rows': 1_000_000,
        'dim': 16,
        'tables': 26,
        'features_per_example': 520 if model == 'rm2_l20' else 26,
        'batch_size': 2048,
        'steps': 200,
        'hot_rows': 68_000,
        'row_bytes': 64_000_000,
        'drop_target': 0.3,
        'dense_parameters': 480_000,
      }
      for model in models
    },
  }


def fill(folder, seed=0, models=MODELS, seeds=3, failed=()):
  """Writes all files; returns the cells."""
  rng = np.random.default_rng(seed)
  drawn = cells(rng, models, seeds, failed)
  write_setting(folder, setting(models, seeds))
  append(folder, [*drawn, *others(rng, models, seeds)])
  return drawn
