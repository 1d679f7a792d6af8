"""Phases of a schedule, and settings that cannot be."""

import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.schedules.phases import (
  check_phases,
  phase_at,
  Phases,
  phases_for,
)
from slipstream_jax.schedules.settings import MODES, Skip
from slipstream_jax.schedules.slipstream import slipstream
from slipstream_jax.selection.policies import POLICIES

PHASES = Phases(warm_up=4, window=6, settle=2, period=20)


def oracle_phase(phases, batch):
  """By walking, batch by batch; what a source of full batches goes through."""
  warm_up, window, settle, period, again = phases
  order = ['warm-up'] * warm_up
  cycle = ['window'] * window + ['settle'] * settle
  while len(order) <= batch:
    room = (period or 10**4) - len(cycle) - (warm_up if again else 0)
    order += cycle + ['skip'] * room + ['warm-up'] * (warm_up if again else 0)
  return order[batch]


@pytest.mark.parametrize('again', [False, True])
@pytest.mark.parametrize('period', [0, 11, 20])
@pytest.mark.parametrize('window', [0, 1, 3])
def test_phases_follow_one_another(window, period, again):
  phases = Phases(4, window, 2, period, again)
  found = [phase_at(phases, i) for i in range(70)]
  names = [oracle_phase(phases, i) for i in range(71)]
  for i, phase in enumerate(found):
    # When to settle ends is not for the batch's number alone to say.
    assert phase.name == names[i].replace('settle', 'skip')
    before = names[i - 1] if i else None
    is_window = phase.name == 'window'
    assert phase.opens == (is_window and before != 'window')
    assert phase.closes == (is_window and names[i + 1] != 'window')
    assert phase.samples == (names[i] == 'settle' and before != 'settle')


def test_phases_fit_any_number_of_batches():
  for batches in range(1, 6000):
    phases = phases_for(batches)
    check_phases(phases, needs_window=True)
    if batches >= 50:
      names = [phase_at(phases, i).name for i in range(batches)]
      settling = phases.settle * -(-batches // phases.period)
      most = 0.75 if batches >= 200 else 0.55
      assert names.count('skip') - settling >= most * batches
  assert phases_for(6000) == phases_for(None) == Phases()


BAD = {
  'mode': ({'mode': 'both'}, 'mode must be one of examples, rows.*both'),
  'target': ({'drop': 1.5}, 'drop target must be in .0, 1.*1.5'),
  'target_nan': ({'drop': float('nan')}, 'drop target'),
  'threshold': ({'threshold': -1e-3}, 'threshold must be at least 0'),
  'threshold_nan': ({'threshold': float('nan')}, 'threshold must be'),
  'window': (
    {'phases': PHASES._replace(window=0)},
    'window must be a whole number, at least 1, got 0',
  ),
  'settle': (
    {'phases': PHASES._replace(settle=0)},
    'settle must be a whole number, at least 1, got 0',
  ),
  'fraction': (
    {'phases': PHASES._replace(warm_up=1.5)},
    r'warm_up must be a whole number.*got 1.5 .Phases.warm_up',
  ),
  'text': ({'phases': PHASES._replace(period='20')}, 'period must be .*whole'),
  'again': ({'phases': PHASES._replace(warm_up_again='no')}, 'True or False'),
  'policy': ({'policy': 'suprise'}, "one of random, .*, got 'suprise'"),
  'target_text': ({'drop': '0.3'}, "drop target must be.*got '0.3'"),
  'of': ({'drop_of': 'some'}, "drop_of must be one of all, hot, got 'some'"),
  'refit': ({'refit': -1}, 'refit must be a whole number, at least 0, got -1'),
  'refill': ({'refill': 'yes'}, 'refill must be True, False or None'),
  'uniform': ({'uniform': 1.5}, 'uniform part .* must be in .0, 1., got 1.5'),
  'until': ({'until': 0.9}, 'until must be a whole number.*got 0.9'),
  'until_rows': (
    {'until': 9, 'mode': 'rows'},
    'until goes with a mode that leaves examples out, not rows',
  ),
  'alpha': ({'alpha': 1.5}, 'alpha must be a whole number.*got 1.5'),
  'alpha_0': ({'alpha': (1, 0)}, 'alpha must be .*at least 1'),
  'touches': ({'min_touches': -1}, 'min_touches must be a whole number'),
  'seed': ({'seed': -1}, 'seed must be a whole number, at least 0, got -1'),
  'batches': ({'batches': -1}, 'batches must be a whole number.*got -1'),
  'period': (
    {'phases': PHASES._replace(window=40)},
    'a period must be longer than the 42 batches.*got 20',
  ),
  'scorer': (
    {'scorer': 'forest'},
    'scorer must be one of pairs, linear, best, model',
  ),
  'random': ({'drop': 'auto', 'policy': 'random'}, "drop 'auto' leaves out"),
  'stale': (
    {'drop': 'auto', 'policy': 'stale_importance'},
    'got policy stale_importance',
  ),
  'hot': (
    {'drop': 'auto', 'policy': 'surprise', 'drop_of': 'hot'},
    'drop_of hot',
  ),
  'rows': (
    {'drop': 'auto', 'policy': 'surprise', 'mode': 'rows'},
    'mode rows',
  ),
  'auto_by_model': (
    {'drop': 'auto', 'policy': 'surprise', 'scorer': 'model'},
    'a scorer that learns beside it, got scorer model',
  ),
  'free': ({'auto_cost': 0.0}, r'in .0, 1., got 0.0'),
  'much': ({'drop': 'much'}, 'drop target must be in'),
  'epoch': (
    {'phases': Phases(15, 4, 1, 20, True)},
    'a period must be longer than the 20 batches',
  ),
}


@pytest.mark.parametrize('case', BAD)
def test_settings_that_cannot_be(case):
  changes, said = BAD[case]
  changes = dict(changes)
  batches = changes.pop('batches', None)
  settings = Skip(0.5, 'stale', 'examples', PHASES)._replace(**changes)
  with pytest.raises(UserError, match=said):
    slipstream(settings, batches)


@pytest.mark.parametrize('mode', MODES)
def test_names_and_what_they_name_are_the_same_settings(mode):
  names = Skip(0.5, 'surprise', mode, PHASES)
  values = names._replace(mode=MODES[mode], policy=POLICIES['surprise'])
  assert names.in_words() == values.in_words()
  assert names.compares_rows == values.compares_rows == (mode == 'rows')
