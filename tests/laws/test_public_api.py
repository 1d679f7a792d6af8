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
from tests.fuzz.cases import cases
from tests.fuzz.running import Run
from tests.watchdog import watchdog

TOLERATED: frozenset[str] = frozenset()
"""Kinds of cases, of `Case.kinds`, that are known to break the law."""

EXAMPLES = 2000  # of all laws of this file together
KINDS = {'plain': 0.3, 'skips': 0.35, 'spoilt': 0.35}
PARTS = 2  # of each kind, so that two processes share them


@pytest.fixture(autouse=True)
def _as_users_run_it():
  """Without the types checked, which only our own tests turn on."""
  jaxtyping.config.update('jaxtyping_disable', True)
  yield
  jaxtyping.config.update('jaxtyping_disable', False)


def law(case):
  if case.kinds() & TOLERATED:
    return
  run = Run(case)
  with watchdog(run.abandon):
    try:
      run.run()
    except slip.UserError as error:
      assert may_be_refused(case, str(error)), error
      if run.trainer is not None:
        run.compare_rows()
    else:
      assert run.spoil is None or run.spoil.says is None, 'no UserError'
  left = [t.name for t in threading.enumerate() if 'slipstream' in t.name]
  assert not left


def may_be_refused(case, said):
  """Whether a case may end with this sentence."""
  patterns = [p for each in case.rounds for p in refusals(case, each.skips)]
  if case.spoil is not None:
    patterns.append(Run(case).spoil.says or '')
  return any(re.search(p, said, re.IGNORECASE) for p in patterns)


def refusals(case, skips):
  """What a round that skips may find out, as patterns."""
  if skips is None:
    return
  settings = skips.settings
  yield 'hot'  # a sample without one
  if settings.compares_rows and settings.phases.settle <= case.look_ahead:
    yield 'settle'
  if settings.drop_target > 0:
    yield 'drop'  # nothing is left to train


def examples(kind):
  return settings(
    max_examples=round(EXAMPLES * KINDS[kind] / PARTS),
    suppress_health_check=list(HealthCheck),
  )


def parts(kind):
  return pytest.mark.parametrize('part', range(PARTS))


@parts('plain')
@examples('plain')
@given(case=cases('plain'))
def test_plain_training_is_the_oracles(part, case):
  law(case)


@parts('skips')
@examples('skips')
@given(case=cases('skips'))
def test_skipping_trains_what_it_keeps(part, case):
  law(case)


@parts('spoilt')
@examples('spoilt')
@given(case=cases('spoilt'))
def test_a_mistake_is_one_sentence(part, case):
  law(case)


@pytest.mark.slow
@settings(
  max_examples=int(os.environ.get('FUZZ_EXAMPLES', '20000')) // len(KINDS),
  suppress_health_check=list(HealthCheck),
)
@pytest.mark.parametrize('kind', KINDS)
@given(data=st.data())
def test_many_more(kind, data):
  law(data.draw(cases(kind)))
