"""Whatever is left out, predictions are those of the whole stream."""

import functools

import numpy as np
import optax
import pytest

from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.selection.hot import access_counts, hot_rows, popular_rows
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.synthetic.clicks import examples_at
from slipstream_jax.synthetic.spec import SyntheticSpec
from slipstream_jax.synthetic.stream import stream_dataset, TEST_START
from slipstream_jax.tables import Table, TableSet
from slipstream_jax.training.evaluate import predict
from slipstream_jax.training.loop import train
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import (
  make_parts,
  planned,
  slipstream,
)
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from slipstream_jax.transforms.weights import weight_aware

SIZE, BATCHES, TESTED = 1024, 1500, 1 << 16
ROWS = (100, 50, 400, 200, 300, 24, 120, 60)
SPEC = SyntheticSpec(ROWS, dense_features=4, seed=3)
BEGUN = SIZE * BATCHES // 3
PHASES = Phases(warm_up=20, window=40, settle=20, period=300)
CORRECTED = [p.name for p in POLICIES.values() if p.correction != 'none']


@functools.cache
def stream():
  """The data set, and its hot rows: half of all rows."""
  dataset = stream_dataset(examples_at, SPEC, test_examples=TESTED)
  profile = [next(dataset.profile(1 << 15)).lookups]
  n = sum(ROWS)
  rows = popular_rows(access_counts(profile, n), n // 2, 1)
  return dataset, hot_rows(rows, n)


@functools.cache
def recipe():
  return Recipe(
    DLRM(bottom=(16, 8), top=(32,)),
    TableSet({f't{i}': Table(rows, 8) for i, rows in enumerate(ROWS)}),
    weight_aware(ROW_OPTIMIZERS['rowwise_adagrad'](0.05)),
    weight_aware(optax.adam(1e-3)),
  )


def calibration(skip=None):
  """Mean prediction over the mean true chance; and the share dropped.

  The mean over the later two thirds of training: the last batches move it by
  a hundredth in any run.
  """
  dataset, hot = stream()
  trainer = make_parts(recipe(), PLACEMENTS['resident'], 4, 0, hot)
  source = dataset.train(SIZE)
  if skip is None:
    batches = planned(trainer, source)
  else:
    batches = slipstream(trainer, source, skip, BATCHES)
  truth = examples_at(SPEC, TEST_START + np.arange(TESTED)).probabilities
  ratios = []
  with batches:
    for record in train(trainer, batches, BATCHES):
      if record.step % 20 == 0 and record.counters.examples_seen > BEGUN:
        logits = predict(trainer, dataset.test(4096)).logits.astype(float)
        ratios.append((1 / (1 + np.exp(-logits))).mean() / truth.mean())
  counters = trainer.engine.counters
  dropped = counters.examples_dropped / counters.examples_seen
  return np.mean(ratios), dropped


@pytest.mark.slow
def test_plain_training_is_calibrated():
  ratio, _ = calibration()
  assert ratio == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize('name', CORRECTED)
def test_a_corrected_policy_is_calibrated(name):
  ratio, dropped = calibration(Skip(0.4, name, 'examples', PHASES))
  assert dropped > 0.1
  assert ratio == pytest.approx(1, abs=0.01)


@pytest.mark.slow
def test_what_is_thinned_without_correction_is_not():
  policy = POLICIES['negatives']._replace(correction='none')
  ratio, _ = calibration(Skip(0.4, policy, 'examples', PHASES))
  assert ratio > 1.2
