"""Which policies are run, and what a config says for them."""

import pytest

from experiments.compare import grid
from experiments.compare.grid import Cell
from slipstream_jax.errors import UserError
from slipstream_jax.selection.policies import POLICIES
from tests.support.runs import smoke


def test_random_comes_first_and_all_anchors_that_there_are():
  cells = grid.cells([], ['0.2', '0.5', '0.20'])
  names = [cell.policy for cell in cells if cell.target == 0.2]
  assert cells[:2] == [Cell('plain', 0.0), Cell('random', 0.2)]
  assert names == [n for n in grid.ANCHORS if n in grid.KNOWN]
  assert len(cells) == 1 + 2 * len(names)
  assert {'surprise', 'stale'} <= set(names)


def test_random_is_always_among_them():
  cells = grid.cells(['stale'], ['0.5'])
  assert [cell.policy for cell in cells] == ['plain', 'random', 'stale']


@pytest.mark.parametrize('target', ['0', '1', 'a', '', 'nan', '-1'])
def test_a_target_is_a_share(target):
  with pytest.raises(UserError, match='must be a share') as raised:
    grid.cells([], [target])
  assert raised.value.where == '--targets'


def test_a_policy_that_is_none_is_named():
  with pytest.raises(UserError, match='surprise') as raised:
    grid.cells(['surprising'], ['0.5'])
  assert raised.value.where == '--policies'


@pytest.mark.parametrize('name', [*POLICIES, 'random_small'])
def test_a_config_says_what_is_run(name):
  config = smoke()
  before = config.to_json_best_effort()
  changed = grid.configured(config, Cell(name, 0.25)).skip
  assert config.to_json_best_effort() == before
  assert changed.mode == 'examples'
  assert changed.policy == name.removesuffix('_small')
  assert changed.drop == 0.25
  if name in ('random', 'random_small'):
    assert changed.refill == (name == 'random')
  assert grid.configured(config, Cell('plain', 0.0)).skip.mode == 'off'


def test_epochs_come_in_place_of_steps():
  config = smoke()
  grid.with_epochs(config, None)
  assert config.train.steps == 200
  grid.with_epochs(config, 3)
  assert (config.train.steps, config.train.epochs) == (0, 3)
