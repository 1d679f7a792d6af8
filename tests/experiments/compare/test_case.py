"""Runs of a comparison compile nothing that another one has compiled."""

import gc
import weakref

import pytest

from experiments.compare import case
from experiments.compare.grid import Cell
from experiments.compare.lines import PLAIN
from slipstream_jax.training import compiled
from slipstream_jax.training.compiled import compiled_of
from tests.support.runs import smoke

NONE = Cell(PLAIN, 0.0)


@pytest.fixture
def forgetful(monkeypatch):
  """What is shared is gone with its last holder, as outside of tests."""
  monkeypatch.setattr(compiled, 'CACHE', weakref.WeakValueDictionary())


@pytest.mark.parametrize('longer', [1.0, 1.5])
def test_a_case_holds_its_programs_for_all_seeds(longer, forgetful):
  config = smoke(**{'train.steps': 20})
  first = case.case_of(config, None, longer)
  held = set(map(id, first.programs))
  config.seed = 1
  second = case.case_of(config, None, longer, first)
  del first
  gc.collect()
  assert {id(compiled_of(recipe)) for recipe in second.recipes} == held
  assert second.batches == (20, round(20 * longer))
  assert len(held) == (1 if longer == 1 else 2)


def test_a_run_is_scored_on_its_way():
  config = smoke(**{'train.steps': 30, 'eval.curve_examples': 1024})
  heard = []
  run, points = case.measure(
    case.case_of(config, None, 1.0), NONE, lambda *facts: heard.append(facts)
  )
  assert [point.number for point in points] == list(range(1, 11))
  seen = [point.examples_seen for point in points]
  assert seen == [3 * 256 * number for number in range(1, 11)]
  assert points[-1].examples_trained == run.examples_trained == 30 * 256
  assert points[-1].seconds == run.seconds
  assert points[-1].log_loss != run.log_loss  # of some of the examples
  assert run.test_examples == 4096
  assert [done for done, *_ in heard] == [10, 20, 30]
