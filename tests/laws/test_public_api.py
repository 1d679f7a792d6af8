"""The law of the public API: the oracle's numbers, or one sentence.

Random recipes, columns, placements, schedules and mistakes. A case trains to
the numbers of an oracle in float64 and leaves every other row as it was, to
the bit; or it ends in one UserError that names its cause, and has trained
nothing but whole steps before. None hangs.

FUZZ_EXAMPLES=50000 pytest -m slow tests/laws/test_public_api.py
"""

import os
import re
import threading

from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st
import jaxtyping
import pytest

import slipstream_jax as slip
from tests.fuzz.cases import cases, PLACED
from tests.fuzz.running import Run
from tests.fuzz.spoils import SPOILS
from tests.support.watchdog import watchdog

MORE = int(os.environ.get('FUZZ_EXAMPLES', '20000'))


@pytest.fixture(autouse=True)
def _as_users_run_it():
  """Without the types checked, which only our own tests turn on."""
  jaxtyping.config.update('jaxtyping_disable', True)
  yield
  jaxtyping.config.update('jaxtyping_disable', False)


def law(case):
  run = Run(case)
  with watchdog(run.abandon):
    said = refusal(run)
  if said is None:
    assert run.spoil is None or run.spoil.says is None, 'no UserError'
  else:
    assert may_be_refused(run, said), said
  left = [t.name for t in threading.enumerate() if 'slipstream' in t.name]
  assert not left


def refusal(run):
  """The sentence that the case ends with, if it does not end well."""
  try:
    run.run()
  except slip.UserError as error:
    if run.trainer is not None:
      run.compare_rows()
    return str(error)
  return None


def may_be_refused(run, said):
  """Whether a case may end with this sentence."""
  patterns = [p for each in run.case.rounds for p in refusals(run.case, each)]
  if run.spoil is not None:
    patterns.append(run.spoil.says or '')
  return any(re.search(p, said, re.IGNORECASE) for p in patterns)


def refusals(case, each):
  """What a round that skips may find out, as patterns."""
  if each.skips is None:
    return
  settings = each.skips.settings
  yield 'hot'  # a sample without one
  if settings.compares_rows and settings.phases.settle <= case.look_ahead:
    yield 'settle'
  if settings.drop > 0:
    yield 'drop'  # nothing is left to train
  if case.zeros:
    yield 'weight above 0'  # nor was before


def examples(count):
  return settings(max_examples=count, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(
  'placement',
  [
    pytest.param(p, marks=[pytest.mark.slow] * (p != 'resident'))
    for p in PLACED
  ],
)
@examples(16)
@given(data=st.data())
def test_plain_training_is_the_oracles(placement, data):
  law(data.draw(cases('plain', placement)))


@pytest.mark.parametrize(
  'placement',
  [pytest.param(p, marks=[pytest.mark.slow] * (p != 'pinned')) for p in PLACED],
)
@examples(16)
@given(data=st.data())
def test_skipping_trains_what_it_keeps(placement, data):
  law(data.draw(cases('skips', placement)))


@pytest.mark.parametrize('spoil', SPOILS)
@examples(3)
@given(data=st.data())
def test_a_mistake_is_one_sentence(spoil, data):
  law(data.draw(cases('spoilt', spoil=spoil)))


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['plain', 'skips', 'spoilt'])
@examples(MORE // 3)
@given(data=st.data())
def test_many_more(kind, data):
  law(data.draw(cases(kind)))
