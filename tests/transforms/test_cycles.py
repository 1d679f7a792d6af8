"""Rates of several cycles are the formula's, and of one are optax's own."""

import jax
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.transforms.weights import cycle_ends


def at(schedule, steps):
  """The rates of some steps."""
  rates = jax.jit(jax.vmap(schedule))
  return jax.device_get(rates(jax.device_put(np.array(steps, np.float32))))


@pytest.mark.parametrize('final', [0.0, 0.25])
def test_one_cycle_is_a_cosine_to_the_bit(final):
  one = slip.cosine_cycles(0.3, 40, 1, final)
  other = optax.cosine_decay_schedule(0.3, 40, final)
  # The same program, so that a run of one cycle has the bits of a plain one.
  assert str(jax.make_jaxpr(one)(1.0)) == str(jax.make_jaxpr(other)(1.0))
  steps = [0, 7, 39, 40, 50]
  np.testing.assert_array_equal(at(one, steps), at(other, steps))


@pytest.mark.parametrize('cycles', [2, 3, 8])
def test_rates_are_those_of_the_paper(cycles):
  steps = 24
  step = np.arange(1, steps + 1)  # as the paper counts
  phase = np.pi * ((step - 1) % (steps / cycles)) / (steps / cycles)
  meant = [*0.3 / 2 * (np.cos(phase) + 1), 0, 0]
  rates = at(slip.cosine_cycles(0.3, steps, cycles), [*step - 1, 24, 48])
  np.testing.assert_allclose(rates, meant, atol=1e-7)


def test_cycles_are_of_equal_lengths_up_to_one_step():
  ends = cycle_ends(17, 5)
  assert ends[-1] == 17
  assert {*np.diff([0, *ends])} == {3, 4}
  rates = at(slip.cosine_cycles(1.0, 17, 5), range(17))
  assert [*np.flatnonzero(rates == 1)] == [0, *ends[:-1]]


@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    ((0.1, 10, 0), 'cycles must be'),
    ((0.1, 4, 5), 'steps must be'),
    ((-0.1, 10, 2), 'learning rate'),
  ],
)
def test_what_cannot_be_is_refused(arguments, said):
  with pytest.raises(slip.UserError, match=said):
    slip.cosine_cycles(*arguments)
