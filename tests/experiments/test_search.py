"""The program that searches a click model."""

import csv
import json
import sys

import jax
import numpy as np
import pytest

from configs import criteo
from experiments.common import cli, datasets, usage
from experiments.search import job, page, supernet
from experiments.search.page import FOUND, OWN, RANDOM, SUPERNET, Trial
from slipstream_jax.models.supernet import ARCHITECTURE, expected_cost
from tests.models.test_interactions import params_of
from tests.support.runs import assert_one_sentence, changed, run_job, summary_of

SMALL = {
  'data.batch_size': 64,
  'data.test_examples': 256,
  'model.dim': 4,
  'model.bottom': (4,),
  'model.top': (4,),
}
BASE = f'{usage.CONFIGS}/criteo.py:planted'


def small(**changes):
  return changed(criteo.get_config('planted'), {**SMALL, **changes})


def search(workdir, config=None, **more):
  given = {
    'data': None,
    'budget': 1.5,
    'prices': ['0.01'],
    'supernet': 3.0,
    'nets': 1,
    'widths': [],
    'interactions': ['fm'],
    'rate': 1.0,
    'seeds': 1,
    'steps': 6,
  } | more
  return cli.guarded(
    lambda: job.search(config or small(), workdir=str(workdir), **given)
  )


@pytest.mark.slow
def test_a_stopped_search_continues_and_leaves_a_config_that_trains(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(sys, 'argv', ['search', f'--config={BASE}'])
  measure, ran = job.measure, []

  def stopping(config, cell, *rest):
    if cell.model == FOUND and not ran:
      ran.append(cell)
      raise KeyboardInterrupt
    return measure(config, cell, *rest)

  monkeypatch.setattr(job, 'measure', stopping)
  assert search(tmp_path / 'a') == 130
  before = (tmp_path / 'a' / job.TRIALS).read_text()
  assert len(before.splitlines()) == 3  # the header, the own model, a supernet
  assert search(tmp_path / 'a') == 0
  after = (tmp_path / 'a' / job.TRIALS).read_text()
  assert after.startswith(before)
  trials = [*csv.DictReader(after.splitlines())]
  kinds = [trial['kind'] for trial in trials]
  assert kinds[:3] == [OWN, SUPERNET, FOUND]
  assert {*kinds[3:]} == {RANDOM}
  seconds = dict.fromkeys(kinds, 0.0)
  for trial in trials[:-1]:
    seconds[trial['kind']] += float(trial['seconds'])
  # Without its last net the random search has cost less, with it as much.
  assert seconds[RANDOM] < seconds[SUPERNET] + seconds[FOUND]
  assert 'What they are' in (tmp_path / 'a' / page.HTML).read_text()
  capsys.readouterr()
  assert search(tmp_path / 'a', budget=2.0) == 1
  assert_one_sentence(capsys.readouterr().err, '--budget', 'was 1.5')

  found = usage.load_config(str(tmp_path / 'a' / 'found_0.py'))
  net = json.loads(trials[2]['what'])
  assert found.model.dims == tuple(net['dims'])
  assert (found.model.bottom, found.model.top) == (
    tuple(net['bottom']),
    tuple(net['top']),
  )
  assert found.train.steps == 6
  assert run_job(tmp_path / 'b', found) == 0
  run = summary_of(tmp_path / 'b')
  assert run['steps'] == 6
  assert np.isfinite(run['log_loss'])


@pytest.mark.parametrize(
  ('changes', 'flags', 'words'),
  [
    ({}, {'budget': 0.0}, ('--budget', '0.001')),
    ({}, {'prices': ['0', 'x']}, ('--prices', '0,x')),
    ({}, {'widths': ['1']}, ('--widths', '1')),
    ({}, {'interactions': ['dots']}, ('--interactions', 'dots')),
    ({}, {'rate': float('nan')}, ('--rate', 'nan')),
    ({'model.first_order': True}, {}, ('config.model.first_order', 'True')),
    ({'model.normalization': 'layer'}, {}, ('config.model.normalization',)),
    ({'model.dims': (4,) * 12}, {}, ('config.model.dims', '4, 4')),
    ({'model.name': 'nowhere:model'}, {}, ('config.model.name', 'nowhere')),
  ],
)
def test_mistakes_are_one_sentence(changes, flags, words, tmp_path, capsys):
  assert search(tmp_path, small(**changes), **flags) == 1
  assert_one_sentence(capsys.readouterr().err, *words)
  assert not list(tmp_path.iterdir())


def setting(price):
  config = small()
  config.skip.mode = 'off'
  data = datasets.dataset(config)
  space, inputs = supernet.space_of(config, data, [], ['fm'], 1.5)
  recipe = supernet.recipe_of(config, data, space, inputs, price, 400)
  dense = np.zeros((2, 4), np.float32)
  rows = {name: np.zeros((2, 4), np.float32) for name in data.features}
  params = jax.device_put(params_of(recipe.model, dense, rows))
  zeros = {name: np.zeros_like(x) for name, x in params[ARCHITECTURE].items()}
  return space, inputs, recipe, {**params, ARCHITECTURE: jax.device_put(zeros)}


@pytest.mark.parametrize('price', [0.0, 0.01])
def test_weights_and_logits_learn_in_turn_and_a_price_has_its_effect(price):
  """Without a price, options that are equally good stay equally probable."""
  space, inputs, recipe, params = setting(price)
  optimizer = recipe.dense_optimizer

  @jax.jit
  def step(gradients, state, params, batches):
    return optimizer.update(
      gradients,
      state,
      params,
      batches_seen=batches,
      example_weight=np.float32(1),
      value=np.float32(1),
    )

  # The loss wants other weights, and has no wish about logits.
  gradients = jax.jit(lambda x: jax.tree.map(lambda y: 0 * y + 1, x))(params)
  gradients[ARCHITECTURE] = params[ARCHITECTURE]
  state = jax.jit(optimizer.init)(params)
  turns = []
  for batch in range(1, 401):
    seen = jax.device_put(np.float32(batch))
    updates, state = step(gradients, state, params, seen)
    moved = {
      name: any(np.any(x) for x in map(np.asarray, jax.tree.leaves(one)))
      for name, one in updates.items()
    }
    logits = moved.pop(ARCHITECTURE)
    turns.append(any(moved.values()))
    assert all(moved.values()) == turns[-1]
    assert logits == (not turns[-1] and price > 0)
    if logits:
      cheaper = jax.jit(lambda x, y: jax.tree.map(jax.numpy.add, x, y))(
        params[ARCHITECTURE], updates[ARCHITECTURE]
      )
      before, after = (
        jax.jit(lambda x: expected_cost(space, inputs, x))(x)
        for x in (params[ARCHITECTURE], cheaper)
      )
      assert after[0] < before[0]
      assert after[1] < before[1]
      break
  else:
    assert turns == [True] * 200 + ([True] * 40 + [False] * 10) * 4


def trial(kind, choosing, flops, seed=0, number=0):
  net = {'bottom': [4], 'top': [4], 'interaction': 'dot', 'dims': [4]}
  what = json.dumps(net)
  return Trial(
    seed,
    kind,
    0.0,
    number,
    what,
    2.0,
    choosing,
    choosing + 0.1,
    0.7,
    flops,
    9.0,
  )


def test_the_best_net_is_the_one_that_half_of_the_examples_choose():
  """Among those within the budget, whose log loss the other half gives."""
  trials = [
    trial(OWN, 0.5, 100.0),
    trial(SUPERNET, np.nan, np.nan),
    trial(FOUND, 0.4, 201.0),
    trial(FOUND, 0.46, 150.0, number=1),
    trial(FOUND, 0.45, 200.0, number=2),
    trial(RANDOM, 0.49, 50.0),
  ]
  best = page.best(trials, 2.0)
  assert [best[kind].choosing for kind in (OWN, FOUND, RANDOM)] == [
    *(0.5, 0.45, 0.49)
  ]
  own, found, random = page.figures(trials, 2.0)
  assert (found['log loss'], found['minus own']) == ('0.5500', '-0.0500')
  assert (found['FLOPs of own'], found['cost in runs']) == ('2.00', '4.00')
  assert (own['nets a seed'], found['nets a seed']) == ('1.0', '3.0')
  assert random['cost in runs'] == '1.00'
  assert FOUND not in page.best(trials, 1.0)
