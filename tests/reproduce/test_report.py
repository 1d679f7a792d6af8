"""The report says what the table says, and nothing that it does not."""

import csv
import html
import json
import math
import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import stats

from experiments.common.estimates import Estimate
from experiments.common.page import Picture, Table
from experiments.reproduce import report
from experiments.reproduce.groups import DEFAULT, models_of
from experiments.reproduce.results import KINDS, RESULTS, Results, SETTING
from tests.reproduce import drawn
from tests.support.pages import assert_complete, Page

FAILED = [('rm2', 'fae', 'off', None), ('rm2', 'hotline', 'off', 1)]
SUMMARY = 'What wins and what loses'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  where = tmp_path_factory.mktemp('reproduction')
  report.write(drawn.fill(where, models=('rm2', 'rm2_l20'), failed=FAILED))
  return where


@pytest.fixture(scope='module')
def parsed(folder):
  return assert_complete((folder / report.HTML).read_text())


@pytest.fixture(scope='module')
def column(folder):
  """Values of RM2's runs by seed, as any program reads them."""
  columns = {}
  with (folder / RESULTS).open(newline='') as file:
    for line in csv.DictReader(file):
      if (line['kind'], line['model'], line['status']) == ('run', 'rm2', 'ok'):
        for name, value in line.items():
          key = (line['system'], line['skip'], name)
          columns.setdefault(key, {})[line['seed']] = value

  def values(system, skip, name):
    return np.array([float(columns[system, skip, name][x]) for x in '012'])

  return values


def written(values, form, log=False):
  """A mean with Student's interval, of ratios in logarithms."""
  values = np.log(values) if log else values
  ends = stats.t.interval(
    0.95, len(values) - 1, np.mean(values), stats.sem(values)
  )
  figures = np.array([np.mean(values), *ends])
  mean, low, high = map(form, np.exp(figures) if log else figures)
  return f'{mean} ({low} to {high})'


def test_speed_is_that_of_the_table(parsed, column):
  ratio = column('xdl', 'off', 'seconds') / column('pinned', 'ours', 'seconds')
  expected = written(ratio, '{:.2f}'.format, log=True)
  row = parsed.frame('RM2', 'Time')['XDL']
  assert row['default policy: times as fast'] == expected
  table = parsed.tables[SUMMARY, "Slipstream against the paper's baselines"]
  line = next(x for x in table if x[:3] == ['RM2', 'default policy', 'XDL'])
  assert line[3:5] == [expected, '2']
  whole = column('xdl', 'off', 'seconds') / column('pinned', 'off', 'seconds')
  dropped = column('pinned', 'ours', 'examples_dropped')
  dropped = np.mean(dropped / column('pinned', 'ours', 'examples_seen'))
  ideal = f'{stats.gmean(whole) / (1 - dropped):.2f}'
  assert row['default policy: without overhead'] == ideal == line[5]


def test_every_missed_claim_has_a_sentence(parsed, folder):
  table = parsed.tables[SUMMARY, "Slipstream against the paper's baselines"]
  missed = []
  for model, policy, against, speed, claim, *_ in table[1:]:
    known = '-' not in (speed, claim) and speed != 'failed'
    if known and float(speed.split()[0]) < float(claim):
      missed.append(f'{model}, {policy}, against {against}: {speed.split()[0]}')
  assert missed
  page = html.unescape((folder / report.HTML).read_text())
  for words in missed:
    assert page.count(f'{words} of ') == 1
  assert page.count('Pinned rows alone give') == len(missed)


@pytest.mark.parametrize(
  ('low', 'high', 'word'),
  [
    (-0.0004, 0.0004, 'yes'),
    (0.0001, 0.0004, 'yes'),
    (-0.0004, 0.0006, 'unknown'),
    (0.0004, 0.0006, 'unknown'),
    (0.0006, 0.0009, 'no'),
    (-0.01, -0.0006, 'no'),
    (None, None, '-'),
  ],
)
def test_auc_is_equal_where_its_interval_is_within_the_bound(low, high, word):
  assert report._equal(Estimate(0.0, low, high)) == word


def test_bytes_are_those_of_the_table(parsed, column):
  def per_example(system, skip, *more):
    names = ('bytes_loaded', 'bytes_stored', *more)
    parts = [column(system, skip, name) for name in names]
    return sum(parts) / column(system, skip, 'examples_seen')

  rows = parsed.frame('RM2', 'Bytes moved')
  xdl, form = rows['XDL'], '{:.2f}'.format
  both = per_example('xdl', 'off', 'dense_bytes')
  assert xdl['in all'] == f'{both.mean():,.0f}'
  ratio = per_example('xdl', 'off') / per_example('pinned', 'ours')
  expected = written(ratio, form, log=True)
  assert xdl["tables, times the default policy's"] == expected
  ratio = both / per_example('pinned', 'ours', 'dense_bytes')
  assert xdl['with dense'] == written(ratio, form, log=True)
  # FAE has failed: only the paper's own numbers are multiples of it.
  assert (xdl['paper, GB'], xdl["paper, times FAE's"]) == ('23.2', '1.55')
  assert xdl['paper, per example'] == '51.6'  # 23.2 GB / 10 / 45 M examples
  assert "tables, times FAE's" not in xdl


def test_seconds_to_an_auc_are_those_of_the_curves(parsed, folder):
  curves = {}
  with (folder / RESULTS).open(newline='') as file:
    for line in csv.DictReader(file):
      if (line['kind'], line['model']) == ('curve', 'rm2'):
        point = float(line['seconds']), float(line['auc'])
        curves.setdefault((line['system'], line['skip']), []).append(point)
  goal = min(max(auc for _, auc in curve) for curve in curves.values())
  for key, title in {
    ('xdl', 'off'): 'XDL',
    ('plain', 'off'): 'streamed',
  }.items():
    seconds, aucs = np.array(curves[key]).T
    at = np.argmax(aucs >= goal)
    near = slice(at - 1, at + 1)
    expected = np.interp(goal, aucs[near], seconds[near])
    row = parsed.frame('RM2', 'Time')[title]
    assert row[f'seconds to AUC {goal:.4f}'] == f'{expected:.2f}'


def test_quality_and_its_intervals_are_those_of_the_table(parsed, column):
  row = parsed.frame('RM2', 'Quality')['Intel DLRM']
  auc = column('dlrm_hybrid', 'off', 'auc')
  assert row['AUC'] == written(auc, '{:.4f}'.format)
  lead = auc - column('plain', 'off', 'auc')
  assert row["AUC less streamed's"] == written(lead, '{:+z.4f}'.format)
  # Hanley and McNeil (1982), with the sizes that the generator draws.
  a, n1, n0 = auc.mean(), 10_400, 29_600
  q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
  variance = a * (1 - a) + (n1 - 1) * (q1 - a * a) + (n0 - 1) * (q2 - a * a)
  half = 1.959964 * math.sqrt(variance / n1 / n0)
  expected = f'{a:.4f} ({a - half:.4f} to {a + half:.4f})'
  assert row['AUC, one test set'] == expected


def test_drop_rates_and_overhead_are_those_of_the_table(parsed, column):
  def of(name):
    return column('pinned', 'published', name)

  dropped = of('examples_dropped') / of('examples_seen')
  spent = (of('choose_seconds') + of('window_seconds')) / of('seconds')
  table = parsed.frame('RM2', 'What is skipped, and what that costs')
  row = table['Slipstream, as published']
  assert row['dropped, of all'] == f'{dropped.mean():.1%}'
  assert row['dropped, of hot'] == f'{(dropped / 0.76).mean():.1%}'
  assert row['both'] == f'{spent.mean():.1%}'


def test_a_failure_is_shown(parsed):
  rows = parsed.frame('RM2', 'Time')
  assert set([*rows['FAE'].values()][1:]) == {'failed'}
  assert rows['Hotline']['seeds'] == '2'
  for words in ('FAE, seed 0', 'FAE, seed 2', 'Hotline, seed 1'):
    assert f'FAILED: {words}: {drawn.SENTENCE}' in parsed.words
  assert any(words.endswith('84 runs, 4 failed') for words in parsed.words)


def test_the_setting_stands_beside_the_papers(parsed, folder):
  rows = parsed.frame('RM2', 'Setting')
  ours = json.loads((folder / SETTING).read_text())['models']['rm2']
  row = rows['rows of all tables']
  assert (row['here'], row['paper']) == (f'{ours["rows"]:,}', '33,800,000')
  row = rows['examples of a run']
  assert (row['here'], row['paper']) == ('409,600', '45,000,000')
  share = rows['lookups of the most popular 1 % of the rows']['here']
  weights = 1 / np.arange(1, 10**6 + 1) ** 1.05
  expected = 100 * weights[:10_000].sum() / weights.sum()
  assert float(share.rstrip('%')) == pytest.approx(expected, abs=0.3)
  assert any('SYNTHETIC DATA: RM2' in words for words in parsed.words)


def test_all_tables_and_pictures_are_there(parsed):
  titles = {title for _, title in parsed.tables}
  assert len({*titles - {'RM2', 'RM2 with L = 20'}, 'modelled'}) == 12
  assert parsed.words.count('Access skew') == 2


@pytest.mark.parametrize('kind', KINDS)
def test_nothing_is_said_of_what_is_not_known(kind, folder, tmp_path):
  results = Results(folder)
  results.folder, results.setting = tmp_path, {}
  results.rows = results.of(kind, 'rm2')
  sections = report.sections(models_of(results))
  titles = {
    block.title
    for section in sections
    for block in section.blocks
    if isinstance(block, Picture) or (isinstance(block, Table) and block.rows)
  }
  own = {
    'skew': {'Setting', 'Access skew'},
    'row': {'Row change over time'},
    'naive': {'Naive skipping'},
    'threshold': {
      *('Threshold, drop rate and quality', 'Threshold, drop rate and AUC'),
    },
    'phase': {'Time by phase, ms per batch', 'Time by phase and system'},
    'curve': set(),
  }
  if kind == 'run':
    assert not titles & (set.union(*own.values()) - {'Setting'})
  else:
    assert titles == own[kind]


def test_an_empty_folder_gives_a_page(tmp_path):
  report.write(Results(tmp_path))
  page = Page((tmp_path / report.HTML).read_text())
  assert page.tables == {}
  assert '0 runs, 0 failed' in page.words


def test_one_seed_has_no_interval(tmp_path):
  results = Results(tmp_path)
  failed = [('rm4', 'pinned', 'ours', 0)]
  results.rows = drawn.runs(np.random.default_rng(1), ('rm4',), 1, failed)
  report.write(results)
  page = Page((tmp_path / report.HTML).read_text())
  speed = page.frame('RM4', 'Time')['XDL']['as published: times as fast']
  assert re.fullmatch(r'\d\.\d\d', speed)
  assert 'FAILED in every run of RM4.' in page.words


def run(system, skip, seed, **figures):
  values = {'examples_seen': 100, 'bytes_loaded': 50, 'bytes_stored': 50}
  values |= {'status': 'ok', **figures}
  return drawn.key_of('run', 'rm2', seed, system, skip) | values


def sentences(rows, tmp_path):
  results = Results(tmp_path)
  results.rows = rows
  blocks = report.sections(models_of(results))[0].blocks
  return [*blocks[1], *(x for x in blocks if isinstance(x, str))]


def test_the_summary_says_what_is_lost(tmp_path):
  rows = []
  for seed in range(3):
    wobble = 1 + 0.001 * seed
    rows += [
      run(*DEFAULT, seed, seconds=2.0, auc=0.780),
      run('pinned', 'off', seed, seconds=2.1 * wobble, auc=0.7802),
      run('fae', 'off', seed, seconds=1.5 * wobble, auc=0.7812),
      run('xdl', 'off', seed, seconds=(1, 2, 4)[seed], auc=0.7),
      run('dlrm_hybrid', 'off', seed, seconds=5.0 * wobble, bytes_loaded=5),
      run('plain', 'off', seed, seconds=5.0),
    ]
  text = ' '.join(sentences(rows, tmp_path))
  for words in (
    'Faster in 2 of 4 comparisons',
    'SLOWER in 1 (RM2 against FAE: 0.75).',
    "reaches the paper's speed-up in 1 of 3 comparisons. In 0 of the others",
    'The others move 0.55 to 1.00 times its bytes of tables.',
    'MORE in 1 comparisons (RM2 against Intel DLRM: 0.55).',
    'Its AUC less that of the others: -0.0012 to +0.0800.',
    'RM2: pooling on the host moves FEWER bytes.',
    'moves 1.82 times as many',
  ):
    assert words in text, text
  # The order of rows says nothing, and the last run of a seed counts.
  shuffled = random.Random(0).sample(rows, len(rows))
  failed = run('fae', 'off', 0) | {'status': 'no memory'}
  assert ' '.join(sentences([failed, *shuffled], tmp_path)) == text


def test_steps_of_one_program_say_how_noisy_the_machine_was(tmp_path):
  results = Results(tmp_path)
  for system, ms in (('pinned', 16.37), ('hotline', 30.48), ('xdl', 40.0)):
    row = {'phase': 'step', 'ms_per_batch': ms}
    results.rows.append(drawn.key_of('phase', 'rm2', 0, system) | row)
  report.write(results)
  text = (tmp_path / report.HTML).read_text()
  assert (
    '2 of them, on blocks of their own rows, and took 16.37 to 30.48 ms' in text
  )


def odd(seed, share):
  """Results of a model with holes: rows and values that are absent, or 0."""
  rng, numbers = random.Random(seed), np.random.default_rng(seed)
  models = [rng.choice(drawn.MODELS)]
  failed = [
    (*models, *rng.choice(drawn.KEYS), rng.choice([0, 1, None]))
    for _ in range(rng.randrange(8))
  ]
  rows = drawn.runs(numbers, models, rng.randrange(1, 4), failed)
  rows = rng.sample(rows, rng.randrange(len(rows) + 1))
  by_kind = {}
  for row in drawn.others(numbers, models, 2):
    by_kind.setdefault(row['kind'], []).append(row)
  for some in by_kind.values():
    rows += rng.sample(some, rng.choice([0, 1, len(some)]))
  setting = drawn.setting(models) if rng.random() < 0.7 else {}
  for facts in setting.get('models', {}).values():
    for name in rng.sample(list(facts), rng.randrange(4)):
      del facts[name]
  always = {*drawn.key_of('run', ''), 'status', 'phase', 'rank', 'share'}
  always |= {'cumulative_share', 'row', 'batch', 'change'}
  holed = []
  for row in rows:
    values = {
      name: value if name in always or rng.random() >= share else 0
      for name, value in row.items()
      if name in always or rng.random() >= share
    }
    holed.append({k: x for k, x in values.items() if x is not None})
  return setting, holed


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0, 0.1, 0.6]))
def test_any_part_gives_a_report(tmp_path_factory, seed, share):
  results = Results(tmp_path_factory.getbasetemp())
  results.setting, results.rows = odd(seed, share)
  texts = []
  for section in report.sections(models_of(results)):
    for block in section.blocks:
      if isinstance(block, Table):
        assert len({tuple(row) for row in block.rows}) <= 1
        texts += [text for row in block.rows for text in row.values()]
      texts.append(block if isinstance(block, str) else str(block))
  for text in texts:
    assert not re.search(r'\b(nan|inf)\b', text), text
    assert text != 'None'


def test_a_part_can_be_drawn(tmp_path):
  results = Results(tmp_path)
  results.setting, results.rows = odd(3, 0.3)
  report.write(results)
  assert_complete((tmp_path / report.HTML).read_text())
