"""A comparison runs what was asked for, and compiles nothing twice."""

import gc
import weakref

import pytest

from experiments.compare import job
from experiments.compare.results import Cell, PLAIN
from slipstream_jax.errors import UserError
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.training import compiled
from slipstream_jax.training.compiled import compiled_of
from tests.support.runs import smoke


def test_plain_and_random_come_first_and_once():
  cells = job.cells([], ['0.2', '0.5', '0.20'])
  assert cells[:2] == [Cell('plain', 0.0), Cell('random', 0.2)]
  assert [c.policy for c in cells if c.target == 0.2] == [*job.ANCHORS]
  assert len(cells) == 1 + 2 * len(job.ANCHORS) - 1  # auto has no target
  names = [cell.policy for cell in job.cells(['stale'], ['0.5'])]
  assert names == ['plain', 'random', 'stale']


@pytest.mark.parametrize(
  ('policy', 'target', 'where'),
  [('stale', target, '--targets') for target in ('0', '1', 'a', '', 'nan')]
  + [('surprising', '0.5', '--policies')],
)
def test_what_cannot_be_compared_is_refused(policy, target, where):
  with pytest.raises(UserError) as raised:
    job.cells([policy], [target])
  assert raised.value.where == where


@pytest.mark.parametrize('refill', [True, None])
@pytest.mark.parametrize('name', [*POLICIES, 'random_small'])
def test_a_config_says_what_is_run(name, refill):
  config = smoke(**{'skip.refill': refill})
  before = config.to_json_best_effort()
  changed = job.configured(config, Cell(name, 0.25)).skip
  assert config.to_json_best_effort() == before
  assert changed.mode == 'examples'
  assert changed.policy == name.removesuffix('_small')
  assert changed.drop == 0.25
  assert changed.refill is (False if name == 'random_small' else refill)
  assert job.configured(config, Cell('plain', 0.0)).skip.mode == 'off'


def test_auto_has_the_policy_of_the_config():
  for policy in (None, 'local_case_control'):
    config = smoke(**{'skip.policy': policy})
    changed = job.configured(config, Cell('auto', 0.25)).skip
    assert (changed.mode, changed.drop) == ('examples', 'auto')
    assert changed.policy == policy


@pytest.mark.parametrize('longer', [1.0, 1.5])
def test_a_case_keeps_its_programs_for_all_seeds(longer, monkeypatch):
  # What is shared is gone with its last holder, as outside of tests.
  monkeypatch.setattr(compiled, 'CACHE', weakref.WeakValueDictionary())
  config = smoke(**{'train.steps': 20})
  first = job.case_of(config, None, longer)
  held = set(map(id, first.programs))
  config.seed = 1
  second = job.case_of(config, None, longer, first)
  del first
  gc.collect()
  assert {id(compiled_of(recipe)) for recipe in second.recipes} == held
  assert second.batches == (20, round(20 * longer))
  assert len(held) == (1 if longer == 1 else 2)


def test_a_run_is_scored_on_its_way():
  config = smoke(**{'train.steps': 30, 'eval.curve_examples': 1024})
  heard = []
  case = job.case_of(config, None, 1.0)
  run, points = job.measure(
    case, Cell(PLAIN, 0.0), lambda *facts: heard.append(facts)
  )
  assert [point.number for point in points] == list(range(1, 11))
  seen = [point.examples_seen for point in points]
  assert seen == [3 * 256 * number for number in range(1, 11)]
  assert points[-1].examples_trained == run.examples_trained == 30 * 256
  assert points[-1].seconds == run.seconds
  assert points[-1].log_loss != run.log_loss  # of some of the examples
  assert run.test_examples == 4096
  assert [done for done, *_ in heard] == [10, 20, 30]
