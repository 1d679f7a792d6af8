"""Laws that every model of the zoo obeys. Other laws are tested with DLRM.

A life trains in pieces, skips, saves, resumes elsewhere, and exports. What it
leaves is what one piece leaves, and what a server answers.
"""

import numpy as np
import optax
import pytest

import slip_serve
import slipstream_jax as slip
from slipstream_jax.models.supernet import interaction_of, Space, Supernet
from slipstream_jax.placement import cached
from tests.api.shop import PHASES, state_of

BATCH, EXAMPLES, STEPS, DIM = 16, 320, 36, 5
SMALL = {'bottom': (4,), 'top': (6,)}  # beside a weight for each row
ALL = {**SMALL, 'bottom': (DIM,)}
FM = slip.DHEN(layers=(('fm',),))
MODELS = {
  'dcn': slip.DCN(**ALL, crosses=2, rank=2),
  'deepfm': slip.DeepFM(**SMALL),  # of which Wide & Deep is a part
  'dhen': slip.DHEN(
    **ALL,
    layers=(('dot', 'low_rank_cross'), ('attention', 'fm', 'linear')),
    tokens=5,
  ),
  'dmt': slip.DMT(**ALL, towers=((0, 2), (1,)), width=2),
  'supernet': Supernet(
    Space(
      (('dot', interaction_of(slip.DLRM())), ('fm', interaction_of(FM))),
      tables=(0, 1, 1),
      widths=(3, 4),
      bottom=2,
      top=3,
      dims=(2, DIM),
    ),
    steps=30,
  ),
  'two_tower': slip.TwoTower(widths=(6, 4), log_q=1),
  'sasrec': slip.SASRec(blocks=1, top=(4,)),
  'hstu': slip.HSTU(blocks=1, top=(), times='when', next_item=True),
}
OF_SEQUENCES = 'sasrec', 'hstu'
PLACINGS = {
  'resident': 'resident',
  'pinned': 'pinned',
  'cached': cached(30, look_ahead=2),
  'swapped': 'swapped',
}
SKIPS = {
  'surprise': slip.Skip(0.3, 'surprise', phases=PHASES, refill=True),
  'rows': slip.Skip(0.4, mode='rows', phases=PHASES),
}
# Each model with one way to skip, in three placements of its own. Two are
# the fastest to compile.
CASES = [
  pytest.param(
    name,
    [*SKIPS][number % 2],
    number,
    marks=[pytest.mark.slow] * (name not in ('dcn', 'two_tower')),
  )
  for number, name in enumerate(MODELS)
]
ADAGRAD, ADAM = slip.rowwise_adagrad(0.1), optax.adam(1e-2)

_rng = np.random.default_rng(0)
USERS = np.minimum(_rng.zipf(1.3, EXAMPLES) - 1, 59)
ITEMS = np.minimum(_rng.zipf(1.5, EXAMPLES) - 1, 19)
PAST = np.where(
  _rng.random((EXAMPLES, 3)) < 0.3, -1, _rng.integers(0, 20, (EXAMPLES, 3))
)
DENSE = _rng.normal(size=(EXAMPLES, 2)).astype(np.float32)
IDS = {'user': USERS, 'item': ITEMS, 'past': PAST}
CLICKS = ((USERS + ITEMS) % 2).astype(np.float32)
TABLES = {'user': slip.Table(60, DIM), 'item': slip.Table(20, DIM)}
FEATURES = {
  'user': slip.Feature('user'),
  'item': slip.Feature('item'),
  'past': slip.Feature('item', 'mean', 3),
}
TIMES = _rng.integers(0, 9999, (EXAMPLES, 3)).cumsum(1).astype(np.float32)
STEPS_OF = {'past': slip.Feature('item', 'none', 3)}


def data(name):
  """Dense features, and ids."""
  if name in OF_SEQUENCES:
    return {'when': TIMES}, {'past': PAST}
  return DENSE, IDS


def trainer(name, placement='streamed'):
  of_sequences = name in OF_SEQUENCES
  return slip.Trainer(
    MODELS[name],
    {'item': TABLES['item']} if of_sequences else TABLES,
    features=STEPS_OF if of_sequences else FEATURES,
    row_optimizer=ADAGRAD,
    dense_optimizer=ADAM,
    placement=placement,
    hot_bytes=900,
  )


def source(name, **arguments):
  arguments = {'batch_size': BATCH, 'seed': 1} | arguments
  return slip.batches(*data(name), CLICKS, **arguments)


@pytest.mark.parametrize(('name', 'skip', 'number'), CASES)
def test_a_life_elsewhere_and_in_pieces_changes_no_number(
  name, skip, number, tmp_path
):
  skip = SKIPS[skip]
  with trainer(name) as one:
    losses = one.train(source(name), STEPS, skip=skip).losses
    wanted = state_of(one)
  assert np.isfinite(losses).all()
  places = [*PLACINGS.values()]
  first, second = places[number % 4], places[(number + 1) % 4]
  cut, pieces = 7 + 2 * number, source(name)
  with trainer(name, first) as begun:
    before = begun.train(pieces, cut, skip=skip).losses
    begun.save(tmp_path / 'saved')
  with trainer(name, second) as resumed:
    pieces = source(name)
    resumed.train(pieces, 2, skip=skip)
    assert resumed.restore(tmp_path / 'saved') == cut
    after = resumed.train(pieces, STEPS - cut, skip=skip).losses
    found = state_of(resumed)
    np.testing.assert_array_equal(np.concatenate([before, after]), losses)
    for mine, theirs in zip(found, wanted, strict=True):
      np.testing.assert_array_equal(mine, theirs)
    resumed.export(tmp_path / 'x', batch_sizes=(BATCH,))
    expected = resumed.predict(source(name, seed=None, epochs=1))
  with slip_serve.load(tmp_path / 'x') as scorer:
    logits = scorer.logits(scorer.query(*data(name)))
  np.testing.assert_array_equal(
    logits.view(np.uint32), expected.view(np.uint32)
  )
