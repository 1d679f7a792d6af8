"""Laws that every scorer obeys."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.scoring.base import SCORERS
from slipstream_jax.selection.hot import hot_rows
from tests.scoring.conftest import TRIAL

N, HOT, F, I = 40, 12, 4, 3  # noqa: E741
every_scorer = pytest.mark.parametrize('name', SCORERS)


def made(name, seed=0):
  hot = hot_rows(np.random.default_rng(seed).permutation(N)[:HOT], N)
  return SCORERS[name](hot, F, I)


def drawn(seed, examples):
  """Lookups with cold rows and padding, dense features, and labels."""
  rng = np.random.default_rng(seed)
  dense = rng.normal(size=(examples, I)).astype(np.float32)
  labels = (rng.random(examples) < 0.3).astype(np.float32)
  return rng.integers(-1, N, (examples, F)), dense, labels


@every_scorer
@given(seed=st.integers(0, 99), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_no_bit_depends_on_how_the_stream_is_cut(name, seed, cuts):
  """Nor does which pairs stay, wherever the trial ends."""
  examples, whole, cut = drawn(seed, 60), made(name), made(name)
  scores = whole.learn(*examples)
  parts = zip(*(np.split(c, sorted(cuts)) for c in examples), strict=True)
  np.testing.assert_array_equal(
    scores, np.concatenate([cut.learn(*part) for part in parts])
  )
  states = whole.get_state(), cut.get_state()
  for key, learned in states[0].items():
    np.testing.assert_array_equal(learned, states[1][key])


@every_scorer
@pytest.mark.parametrize('at', [0, 10, TRIAL, 40])
def test_a_restored_scorer_goes_on_as_if_nothing_had_happened(name, at):
  scorer, other, examples = made(name), made(name), drawn(2, 60)
  scorer.learn(*(c[:at] for c in examples))
  state = scorer.get_state()
  rest = [c[at:] for c in examples]
  expected = scorer.learn(*rest)  # the state is no view of what learns on
  other.set_state(state)
  np.testing.assert_array_equal(other.learn(*rest), expected)


@every_scorer
def test_an_example_of_padding_and_no_example_at_all(name):
  scorer, none = made(name), np.full((1, F), -1)
  zero, label = np.zeros((1, I), np.float32), np.ones(1, np.float32)
  assert scorer.learn(none[:0], zero[:0], label[:0]).size == 0
  assert scorer.learn(none, zero, label).tolist() == [0.5]


@every_scorer
def test_misfits_are_named(name):
  scorer, (lookups, dense, labels) = made(name), drawn(5, 6)
  kind = 'LinearScorer' if name == 'best' else type(scorer).__name__
  for misfit in (
    (lookups, dense[:, 1:], labels),
    (lookups[1:], dense, labels),
    (lookups[:, 1:], dense, labels),
    (np.concatenate([lookups, lookups], axis=1), dense, labels),
  ):
    with pytest.raises(UserError, match=kind):
      scorer.learn(*misfit)
