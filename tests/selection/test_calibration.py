"""Whatever is left out, predictions are those of the whole stream."""

import functools

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
from slipstream_jax.synthetic.stream import stream_dataset
from slipstream_jax.table_set import TableSet
from slipstream_jax.tables import Table
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import train
from slipstream_jax.training.parts import make_parts, planned, slipstream
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from slipstream_jax.transforms.weights import weight_aware

SIZE, BATCHES = 512, 800
ROWS = (100, 50, 4000, 2000, 300, 24, 1200, 600)
PHASES = Phases(warm_up=20, window=40, settle=20, period=300)
CORRECTED = [p.name for p in POLICIES.values() if p.correction != 'none']


@functools.cache
def stream():
  """The data set, and its hot rows: nine tenths of the lookups."""
  spec = SyntheticSpec(ROWS, dense_features=4, seed=1)
  dataset = stream_dataset(examples_at, spec, test_examples=1 << 17)
  profile = [next(dataset.profile(1 << 15)).lookups]
  n = sum(ROWS)
  rows = popular_rows(access_counts(profile, n), n // 4, 1).rows
  return dataset, hot_rows(rows, n)


@functools.cache
def recipe():
  falling = optax.linear_schedule(3e-3, 1e-4, BATCHES)
  return Recipe(
    DLRM(bottom=(16, 8), top=(32,)),
    TableSet({f't{i}': Table(rows, 8) for i, rows in enumerate(ROWS)}),
    weight_aware(ROW_OPTIMIZERS['adagrad'](0.03)),
    weight_aware(optax.adam(falling)),
  )


def calibration(skip=None):
  """Of the mean prediction, what share the clicks' mean is; and counters."""
  dataset, hot = stream()
  trainer = make_parts(recipe(), PLACEMENTS['resident'], 4, 0, hot)
  source = dataset.train(SIZE)
  if skip is None:
    batches = planned(trainer, source)
  else:
    batches = slipstream(trainer, source, skip, BATCHES)
  with batches:
    list(train(trainer, batches, BATCHES))
  return evaluate(trainer, dataset.test(4096)), trainer.engine.counters


@pytest.mark.slow
def test_plain_training_is_calibrated():
  metrics, _ = calibration()
  print(metrics)
  assert metrics.calibration == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize('name', CORRECTED)
def test_a_corrected_policy_is_calibrated(name):
  metrics, counters = calibration(Skip(0.6, name, 'examples', PHASES))
  print(metrics, counters.examples_dropped / counters.examples_seen)
  assert counters.examples_dropped > 0.1 * counters.examples_seen
  assert metrics.calibration == pytest.approx(1, abs=0.01)


@pytest.mark.slow
def test_what_is_thinned_without_correction_is_not():
  policy = POLICIES['negatives']._replace(correction='none')
  metrics, _ = calibration(Skip(0.6, policy, 'examples', PHASES))
  assert metrics.calibration > 1.2
