"""Results of a reproduction, drawn by a seeded generator."""

import numpy as np

from experiments.reproduce.results import Job, PHASES, Results

MODELS = ('rm1', 'rm2', 'rm2_l20', 'rm3', 'rm4')
KEYS = (
  *((system, 'off') for system in ('xdl', 'dlrm_hybrid', 'fae', 'fae_pinned')),
  *((system, 'off') for system in ('hotline', 'hotline_micro', 'cached')),
  *(('plain', 'off'), ('pinned', 'off')),
  *(('pinned', 'published'), ('pinned', 'ours')),
  *((system, 'ours') for system in ('fae', 'hotline', 'xdl')),
)
_SECONDS = {'xdl': 5.0, 'dlrm_hybrid': 6.0, 'fae': 2.0, 'hotline': 2.2}
_BYTES = {'xdl': 3000, 'dlrm_hybrid': 3300, 'fae': 900, 'hotline': 400}
SENTENCE = 'rows must fit the host (got <40 GB> & "more")'


def key_of(kind, model, seed=0, system='pinned', skip='off', **others):
  return Job(kind, model, seed, system, skip, **others)._asdict()


def run(rng, model, key, seed):
  """A run with made-up figures, similar for all runs of a system."""
  system, skip = key
  seen = 2048 * 200
  share = 0 if skip == 'off' else rng.uniform(0.15, 0.25)
  many = _BYTES.get(system, 500) * (1 - share / 2)
  if model == 'rm2_l20' and system != 'dlrm_hybrid':
    many *= 12  # rows of long bags
  return key_of('run', model, seed, *key) | {
    'status': 'ok',
    'step': 200,
    'examples_seen': seen,
    'examples_trained': seen - int(share * seen),
    'examples_dropped': int(share * seen),
    'seconds': _SECONDS.get(system, 2.5) * (1 - share) * rng.normal(1, 0.03),
    'bytes_loaded': int(many * seen / 2 * rng.normal(1, 0.001)),
    'bytes_stored': int(many * seen / 2 * rng.normal(1, 0.001)),
    'dense_bytes': 190_000_000 if system == 'xdl' else 0,
    'lookups_hot_share': 0.93,
    'examples_hot_share': 0.76,
    'auc': 0.78 + rng.normal(0, 0.0004) - 0.004 * (skip == 'published'),
    'log_loss': 0.46 + rng.normal(0, 0.0004),
    'accuracy': 0.785 + rng.normal(0, 0.0004),
    'test_examples': 40_000,
    'test_positives': 10_400,
    'device_bytes': 300_000_000,
    'host_bytes': 2_100_000_000,
    'choose_seconds': 0.04 if share else 0.0,
    'window_seconds': 0.01 if share else 0.0,
    'matrix_share': 0.7,
  }


def runs(rng, models=MODELS, seeds=3, failed=()):
  """All runs of a grid.

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
        row = run(rng, model, key, seed)
        if {(model, *key, seed), (model, *key, None)} & set(failed):
          row = key_of('run', model, seed, *key) | {'status': SENTENCE}
        drawn.append(row)
  return drawn


def others(rng, models=MODELS, seeds=3):
  """Rows of all kinds but runs."""
  weights = 1 / np.arange(1, 10**6 + 1) ** 1.05
  shares = weights / weights.sum()
  whole = np.cumsum(shares)
  ranks = np.unique(np.geomspace(1, 1e6, 200).astype(int))
  for model in models:
    for key in KEYS:
      for n in range(1, 9):
        yield key_of('curve', model, 0, *key) | {
          'step': 25 * n,
          'seconds': _SECONDS.get(key[0], 2.5) * n / 8,
          'auc': 0.78 - 0.1 / n + rng.normal(0, 0.001),
          'log_loss': 0.46 + 0.1 / n,
        }
      for phase in PHASES:
        ms = float(rng.exponential(1))
        row = {'phase': phase, 'ms_per_batch': ms}
        yield key_of('phase', model, 0, *key) | row
    for rank in map(int, ranks):
      yield key_of('skew', model) | {
        'rank': rank,
        'share': float(shares[rank - 1]),
        'cumulative_share': float(whole[rank - 1]),
      }
    for row in range(10):
      for batch in range(0, 201, 10):
        change = (1 - np.exp(-batch / 30)) * rng.uniform(0.08, 0.1)
        values = {'row': 17 * row, 'batch': batch, 'change': float(change)}
        yield key_of('row', model) | values
    for seed in range(seeds):
      for variant, lost in (('none', 0.0), ('hot', 0.05), ('cold', 0.04)):
        noise = rng.normal(0, 0.001, 3)
        figures = np.array([0.78 - lost, 0.46 + lost, 0.785 - lost]) + noise
        names = ('auc', 'log_loss', 'accuracy')
        values = dict(zip(names, figures.tolist(), strict=True))
        yield key_of('naive', model, seed, variant=variant) | values
      for target in (0.1, 0.3, 0.5, 0.7):
        key = key_of('threshold', model, seed, 'pinned', 'published')
        yield key | {
          'drop_target': target,
          'threshold': 1e-3 * 10**target * float(rng.normal(1, 0.1)),
          'drop_rate': target + float(rng.normal(0, 0.02)),
          'auc': 0.78 - 0.01 * target**2 + float(rng.normal(0, 3e-4)),
          'log_loss': 0.46,
        }


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
  """Writes a folder, and returns its results."""
  rng = np.random.default_rng(seed)
  results = Results(folder)
  results.setting = setting(models, seeds)
  results.add([*runs(rng, models, seeds, failed), *others(rng, models, seeds)])
  return results
