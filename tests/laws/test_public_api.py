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
from tests.watchdog import watchdog

TOLERATED: frozenset[str] = frozenset(
  [
    'an id that is NaN',
    'an id with a fraction',
    'ids of text',
    'ids in a list',
    'a lookup too large',
    'a lookup far too large',
    'a lookup below -1',
    'a lookup that is NaN',
    'a lookup with a fraction',
    "a lookup of another table's",
    'lookups of whole floats',
    'lookups in a list',
    'a label of 2',
    'a label of -1',
    'a label of 255',
    'a label that is NaN',
    'labels that are shares',
    'labels in a list',
    'a weight that is NaN',
    'a negative weight',
    'an infinite weight',
    'dense of NaN',
    'dense of infinity',
    'dense in a list',
    'a batch of 0 examples',
    'a batch size of 1.5',
    'a seed of -1',
    'a seed of 1.5',
    'negative dense features',
    'a rate below 0',
    'a rate of NaN',
    'rows in MultiSteps',
    'a model that gives a tuple',
    'a loss of one number',
    'a loss of [B, 1]',
    'a pooling that is none',
    'a table of 2.5 rows',
    'tables in a list',
    'a placement by name',
    'a placement that is none',
    'a cache of 2.5 rows',
    'hot rows of floats',
    'a depth of -1',
    'a depth of 1.5',
    'a policy by name',
    'a policy that is none',
    'an alpha of 0',
    'an alpha too large',
    'alphas in a list',
    'a warm-up of 1.5',
    'a skipping seed of -1',
    'an evaluation of nothing',
    'an endless evaluation',
    'memory that is used again',
    'skipping with fewer emitted batches than read ones',
    'skipping all of an endless source',
    'a source that ends as a decision is due',
  ]
)
"""Kinds of cases, of `Case.kinds`, that are known to break the law."""

MORE = int(os.environ.get('FUZZ_EXAMPLES', '20000'))


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
  if settings.drop_target > 0:
    yield 'drop'  # nothing is left to train


def examples(count):
  return settings(max_examples=count, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize('placement', PLACED)
@examples(90)
@given(data=st.data())
def test_plain_training_is_the_oracles(placement, data):
  law(data.draw(cases('plain', placement)))


@pytest.mark.parametrize('placement', PLACED)
@examples(90)
@given(data=st.data())
def test_skipping_trains_what_it_keeps(placement, data):
  law(data.draw(cases('skips', placement)))


@pytest.mark.parametrize('spoil', SPOILS)
@examples(8)
@given(data=st.data())
def test_a_mistake_is_one_sentence(spoil, data):
  law(data.draw(cases('spoilt', spoil=spoil)))


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['plain', 'skips', 'spoilt'])
@examples(MORE // 3)
@given(data=st.data())
def test_many_more(kind, data):
  law(data.draw(cases(kind)))
