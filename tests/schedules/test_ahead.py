"""Scores of the model that is trained: how old they are, and what they are."""

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.engine.pipeline import StepValues
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.ahead import Ahead
from slipstream_jax.training import loop
from tests.api import shop

BATCHES = 300


@given(
  st.integers(1, 9),
  st.sampled_from([0.0, 0.3, 0.5, 0.8, 0.95]),
  st.integers(0, 99),
)
def test_scores_are_as_old_as_they_must_be(settle, drop, seed):
  """They are known in time where no stretch keeps far less than is asked for.

  Each is of the model `settle` steps ago or earlier, and not much earlier.
  """
  rng = np.random.default_rng(seed)
  ahead, read, waiting, step = Ahead(settle, drop), 0, 0.0, 0
  asked, unknown = {}, []

  def read_one():
    nonlocal read
    read += 1
    ended = read > BATCHES
    return read - 1, None if ended else f'batch {read - 1}', read - 1

  def predicted(number):
    assert step - asked[number] > settle
    assert step - asked[number] <= 5 + 1.5 * (settle + 2)
    return np.full(2, number / 100)

  for number in range(BATCHES):
    assert ahead.take(read_one) == number
    scores = ahead.scores(number, 2, predicted)
    if np.isnan(scores).all():
      unknown.append(number)
    else:
      chance = 1 / (1 + np.exp(-number / 100))
      np.testing.assert_allclose(scores, chance, rtol=1e-6)
    waiting += (1 - drop) * rng.uniform(0.9, 1.1)
    while waiting >= 1:
      waiting -= 1
      found = ahead.delivered(number)
      for one, batch in found.batches if found else ():
        assert batch == f'batch {one}'
        assert one not in asked
        assert one > number
        asked[one] = step
      step += 1
  assert unknown == [*range(len(unknown))]  # those of the beginning
  assert len(unknown) <= 3 + 2 * (settle + 2) / (1 - drop)
  assert ahead.take(read_one) == BATCHES


def test_a_position_needs_what_was_predicted_before():
  ahead = Ahead(2, 0.0)
  batches = iter(range(50))

  def read_one():
    number = next(batches)
    return number, 'a batch', number

  for number in range(9):
    ahead.take(read_one)
    ahead.delivered(number)
  state = ahead.get_state(9)
  (first, _), *_ = state['asked']
  assert first == 9
  with pytest.raises(UserError, match='has predicted, got nothing of batch 9'):
    Ahead(2, 0.0).set_state(state, lambda number: number > 9)
  again = Ahead(2, 0.0)
  again.set_state(state, lambda number: True)
  assert again.get_state(9) == state
  assert again.last == ahead.last


def test_scores_are_what_the_model_predicts_then():
  """And the rows that are loaded for them are counted."""
  steps, batches, known = {}, {}, {}
  predict, put = loop.predict, StepValues.put

  def predicted(trainer, item):
    asked = item.scheduled.edge.predicts
    for number, batch in () if asked is None else asked.batches:
      steps[number] = int(jax.device_get(trainer.state.step))
      batches[number] = batch
    return predict(trainer, item)

  def noted(mailbox, number, logits):
    known[number] = np.asarray(jax.device_get(logits))
    put(mailbox, number, logits)

  skip = slip.Skip(0, scorer='model', phases=slip.Phases(2, 0, 3, 25))
  with (
    shop.trainer(placement='streamed') as scored,
    mock.patch.object(loop, 'predict', predicted),
    mock.patch.object(StepValues, 'put', noted),
  ):
    scored.train(shop.source(), 30, skip=skip)
  assert len(known) > 20
  source, found = shop.source(), {}
  with shop.trainer(placement='streamed') as plain:
    plain.train(source, 1)
    for step in range(1, 30):
      for number in (n for n, taken in steps.items() if taken == step):
        found[number] = plain.predict(_examples(batches[number]))
      plain.train(source, 1)
  assert found.keys() == known.keys()
  for number, logits in found.items():
    np.testing.assert_array_equal(logits, known[number][: len(logits)])
  shop.assert_same(scored, plain)
  more = sum(
    len(np.unique(column[column >= 0]))
    for batch in batches.values()
    for column in batch.lookups.T
  )
  loaded = [t.parts.engine.counters.rows_loaded for t in (scored, plain)]
  assert loaded[0] - loaded[1] == more


def _examples(batch):
  """Returns the same examples, with ids in place of global rows."""
  real = batch.weights > 0
  user, item = batch.lookups[real].T
  ids = {'user': user, 'item': item - shop.TABLES['user'].rows}
  return slip.batches(batch.dense[real], ids, batch_size=shop.BATCH, epochs=1)
