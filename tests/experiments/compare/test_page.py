"""The page has the figures of the files, and a picture for each case."""

import csv
import io
import itertools
import math
import statistics

import numpy as np
import pytest

from experiments.compare import page
from experiments.compare.job import ANCHORS
from experiments.compare.results import AUTO, Results, RUNS
from tests.experiments.compare import drawn
from tests.support.pages import assert_complete
from tests.support.runs import smoke

TITLE, ABOUT = 'a log of <clicks>', 'compare --own=x:<y>; 2 cores'


def write(folder, runs, curve):
  page.write(folder, TITLE, True, runs, curve, ABOUT, smoke())
  return assert_complete((folder / page.HTML).read_text())


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  where = tmp_path_factory.mktemp('comparison')
  runs, curve = drawn.comparison(5)
  kept = Results(where, smoke(), longer=1.0, own=None)
  for run in runs:
    kept.add(run, [point for point in curve if point[:3] == run[:3]])
  return where


@pytest.fixture(scope='module')
def parsed(folder):
  kept = Results(folder, smoke(), longer=1.0, own=None)
  return write(folder, kept.runs, kept.curve)


def lines_of(folder, policy, target):
  """The lines of a policy by seed, as anybody would read them."""
  text = (folder / RUNS).read_bytes().decode()
  return {
    line['seed']: {k: float(v) for k, v in line.items() if k != 'policy' and v}
    for line in csv.DictReader(io.StringIO(text))
    if line['policy'] == policy and float(line['target']) == target
  }


@pytest.mark.parametrize('policy', ['surprise', 'stale'])
def test_figures_of_the_page_follow_from_the_file(policy, folder, parsed):
  plain, runs = lines_of(folder, 'plain', 0), lines_of(folder, policy, 0.4)
  quality = parsed.frame('40% asked', 'Quality')[policy]
  time = parsed.frame('40% asked', 'Time and bytes')[policy]
  lost = [plain[seed]['auc'] - runs[seed]['auc'] for seed in runs]
  middle, half = statistics.mean(lost), 2.7764451 * statistics.stdev(lost)
  half /= len(lost) ** 0.5
  interval = f'({middle - half:+.4f} to {middle + half:+.4f})'
  assert quality['AUC lost'] == f'{middle:+.4f} {interval}'
  assert quality['seeds'] == '5'
  dropped = [
    run['examples_dropped'] / run['examples_seen'] for run in runs.values()
  ]
  assert quality['dropped'] == f'{statistics.mean(dropped):.1%}'
  saved = [1 - runs[s]['seconds'] / plain[s]['seconds'] for s in runs]
  assert time['saved'].startswith(f'{statistics.mean(saved):.1%} (')


def test_the_share_of_randoms_loss_follows_from_the_file(folder, parsed):
  """The policy drops nearly what random does, so that few must be bridged."""
  row = parsed.frame('40% asked', 'Beside random dropping')['surprise']
  plain, runs = lines_of(folder, 'plain', 0), lines_of(folder, 'surprise', 0.4)
  own, others = 0.0, 0.0
  for seed, run in runs.items():
    ends = [lines_of(folder, 'random', t)[seed] for t in (0.2, 0.4, 0.6)]
    ends = sorted(
      (x['examples_trained'], x['auc']) for x in [plain[seed], *ends]
    )
    at = run['examples_trained']
    (x0, y0), (x1, y1) = next(
      pair for pair in itertools.pairwise(ends) if at <= pair[1][0]
    )
    there = y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    own += plain[seed]['auc'] - run['auc']
    others += plain[seed]['auc'] - there
  assert row["over random's"].startswith(f'{own / others:.2f} (')


def test_the_page_has_all_policies_and_settings(folder, parsed):
  warning = 'SYNTHETIC DATA: its figures say nothing about real clicks.'
  title = f'What dropping costs: {TITLE}'
  assert {warning, ABOUT, title} <= {*parsed.words}
  settings = parsed.frame('Settings', '')
  assert settings['config.data.batch_size']['value'] == '256'
  for target in ('20%', '40%', '60%'):
    assert [*parsed.frame(f'{target} asked', 'Quality')] == [*ANCHORS]
  assert (folder / page.PICTURE).stat().st_size > 5000


def test_policies_that_are_worse_than_random_are_named(folder, parsed):
  """`stale` is drawn so that it loses 1.3 times as much."""
  kept = Results(folder, smoke(), longer=1.0, own=None)
  _, *warnings = page.warnings(kept.runs, kept.curve)
  assert [words.partition(' is ')[0] for words in warnings] == [
    f'stale at {target}' for target in ('20%', '40%', '60%')
  ]
  assert all(words in parsed.words for words in warnings)
  mild = [run for run in kept.runs if run.policy != 'stale']
  assert len(page.warnings(mild, kept.curve)) == 1


def test_what_auto_promised_stands_beside_what_it_added(folder):
  kept = Results(folder, smoke(), longer=1.0, own=None)
  own = [run for run in kept.runs if run.policy in ('plain', 'random')]
  found = [
    run._replace(policy=AUTO, promised=promised)
    for run, promised in zip(
      (run for run in kept.runs if run[:2] == ('surprise', 0.4)),
      itertools.cycle([0.0003, 0.0005]),
    )
  ]
  (said,) = (x for x in page.warnings(own + found, []) if 'auto' in x)
  promised = np.mean([run.promised for run in found])
  assert f'at most {promised:.4f} to the log loss, and added +0.00' in said
  silent = [run._replace(promised=None) for run in found]
  assert not any('promised' in x for x in page.warnings(own + silent, []))


def test_a_plain_run_that_is_still_learning_is_named(folder, parsed):
  """The AUC is drawn 0.0025 below its last one at 80 % of the run."""
  kept = Results(folder, smoke(), longer=1.0, own=None)
  rising, *_ = page.warnings(kept.runs, kept.curve)
  assert 'rises by 0.0025,' in rising
  assert rising in parsed.words
  level = [
    point._replace(auc=0.77) if point.seed == 3 else point
    for point in kept.curve
  ]
  named = page.warnings(kept.runs, level)
  assert not any('still learning' in words for words in named)


@pytest.mark.parametrize('count', [0, 1, 2, 9])
@pytest.mark.parametrize('has_curve', [True, False])
def test_a_page_of_one_target_has_bars(count, has_curve, tmp_path):
  runs, curve = drawn.comparison(1, drawn.cells(targets=(0.4,)))
  runs, curve = runs[:count], curve[: 10 * count] if has_curve else []
  parsed = write(tmp_path, runs, curve)
  assert len(page.overview(runs, curve)) == count
  assert (tmp_path / page.PICTURE).exists() == (count > 1)
  bars = {f'{run.policy}, {run.dropped:.1%} dropped' for run in runs[1:]}
  assert bars <= {*parsed.words}


def test_a_page_without_a_known_auc_has_no_picture(tmp_path):
  runs, curve = drawn.comparison(2)
  runs = [run._replace(auc=math.nan) for run in runs]
  write(tmp_path, runs, curve)
  assert not (tmp_path / page.PICTURE).exists()
  runs, curve = drawn.comparison(2)
  write(tmp_path, runs, [point._replace(auc=math.nan) for point in curve])
  assert (tmp_path / page.PICTURE).exists()


def test_random_and_surprise_have_colors_of_their_own():
  colors = [page._look(name)['color'] for name in ('plain', *ANCHORS)]
  assert len({*colors}) == len(colors)
  small = page._look('random_small')
  assert small == page._look('random') | {'linestyle': ':'}
