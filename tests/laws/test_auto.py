"""What drop='auto' loses is at most about what it promised.

Streams are planted: clicks follow ids alone and in pairs. Models learn them at
rates from too low to high, some of them after a plateau.
"""

import sys
from typing import Any

from flax import linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slipstream_jax as slip

TRAIN, TEST = 400_000, 100_000
COST = 0.001
RATES = 0.003, 0.01, 0.03, 0.1
STREAMS = [(seed, 'mixed') for seed in range(6)] + [
  (seed, 'plateau') for seed in range(4)
]


class Wide(nn.Module):
  """A net beside the products of all pairs of embeddings."""

  @nn.compact
  def __call__(self, embeddings):
    rows = list(embeddings.values())
    hidden = nn.relu(nn.Dense(32)(jnp.concatenate(rows, -1)))
    return nn.Dense(1)(jnp.concatenate([hidden, products(rows)], -1))[..., 0]


class Products(nn.Module):
  """Weights of ids and products of pairs, which small rows hardly learn."""

  @nn.compact
  def __call__(self, embeddings):
    rows = list(embeddings.values())
    bias = self.param('bias', nn.initializers.zeros, ())
    alone = sum(row[..., 0] for row in rows)
    return bias + alone + products([row[..., 1:] for row in rows])[..., 0]


def products(rows):
  pairs = ((a, b) for at, a in enumerate(rows) for b in rows[:at])
  return sum((a * b).sum(-1, keepdims=True) for a, b in pairs)


def planted(seed, kind) -> dict[str, Any]:
  """Ids and labels, with the numbers of ids."""
  rng, n = np.random.default_rng(seed), TRAIN + TEST
  if kind == 'mixed':
    sizes = np.exp(rng.uniform(3.4, 9.9, rng.integers(3, 7))).astype(int)
    power, alone, pairs = rng.uniform(0.6, 1.3), 0.5, rng.integers(0, 4)
    strength = rng.uniform(0.0, 0.6)
  else:
    sizes = np.array([*rng.integers(100, 600, 2), 50])
    power, alone, pairs, strength = 0.6, 0.7, 1, rng.uniform(0.6, 1.2)
  shares = [1.0 / np.arange(1, size + 1) ** power for size in sizes]
  ids = [rng.choice(len(p), n, p=p / p.sum()) for p in shares]
  logit = np.full(n, -1.0)
  for size, of in zip(sizes, ids, strict=True):
    logit += rng.normal(0, alone, size)[of]
  for _ in range(pairs):
    a, b = rng.choice(len(sizes), 2, replace=False)
    tastes = (rng.normal(size=(sizes[x], 4))[ids[x]] for x in (a, b))
    logit += strength * np.multiply(*tastes).sum(-1)
  labels = rng.random(n) < 1 / (1 + np.exp(-logit))
  columns = {f'c{at}': of for at, of in enumerate(ids)}
  return {
    'sizes': sizes.tolist(),
    'label': labels.astype(np.float32),
    **columns,
  }


def outcome(seed, kind):
  """Log loss lost, promised and allowed, and the share dropped."""
  data = planted(seed, kind)
  sizes = data.pop('sizes')
  rate = RATES[seed % len(RATES)]
  train, test = (
    {name: column[part] for name, column in data.items()}
    for part in (slice(TRAIN), slice(TRAIN, None))
  )
  losses, history = [], None
  for skip in (None, slip.Skip('auto', auto_cost=COST)):
    trainer = slip.Trainer(
      Wide() if kind == 'mixed' else Products(),
      {f'c{at}': slip.Table(size, 9) for at, size in enumerate(sizes)},
      row_optimizer=slip.rowwise_adagrad(rate),
      dense_optimizer=optax.adam(rate / 10),
      seed=seed,
    )
    history = trainer.train(
      slip.batches(train, batch_size=1000, epochs=1), skip=skip
    )
    scored = trainer.evaluate(slip.batches(test, batch_size=5000, epochs=1))
    losses.append(scored.log_loss)
  events = [e for e in history.events if 'log_loss_lost' in e]
  promised = max(event['log_loss_lost'] for event in events)
  counters = history.counters
  dropped = counters.examples_dropped / counters.examples_seen
  return losses[1] - losses[0], promised, COST * losses[0], dropped


@pytest.mark.slow
def test_what_auto_loses_is_at_most_twice_what_it_promised():
  """In 9 of 10 streams. And it is never 5 times what was allowed."""
  outcomes = [outcome(*stream) for stream in STREAMS]
  kept = [lost <= 2 * promised for lost, promised, _, _ in outcomes]
  assert sum(kept) >= 9, outcomes
  for lost, promised, allowed, _ in outcomes:
    assert lost <= 5 * allowed
    assert promised <= 1.3 * allowed  # the allowed loss follows the scorer's
  # Not because it drops nothing, but for models that learn too slowly.
  assert sum(dropped > 0.02 for *_, dropped in outcomes) >= 5


def table():
  """Yields lines of the published table, in units of 0.0001 of log loss."""
  most, kept = 0.0, np.zeros(2, int)
  for kind, number in {'mixed': 24, 'plateau': 12}.items():
    for at, rate in enumerate(RATES):
      seeds = range(at, number, len(RATES))
      lost, promised, allowed, dropped = np.transpose(
        [outcome(seed, kind) for seed in seeds]
      )
      units = *(x.mean() for x in (allowed, promised, lost)), lost.max()
      losses = ' | '.join(f'{1e4 * x:.1f}' for x in units)
      share = dropped.mean()
      yield f'| {kind} | {rate} | {len(seeds)} | {share:.1%} | {losses} |\n'
      kept += [(lost <= promised).sum(), (lost <= 2 * promised).sum()]
      most = max(most, (lost / allowed).max())
  yield f'{kept} lost at most the promise, and twice that. '
  yield f'The most was {most:.2f} times what was allowed.\n'


if __name__ == '__main__':
  sys.stdout.writelines(table())
