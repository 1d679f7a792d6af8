"""The grid is whole and in alternation; a stopped one continues."""

import functools
import itertools
import signal

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from configs import criteo
from experiments.common import cli
from experiments.reproduce import job, models, runs
from experiments.reproduce.bags import bags_at, BagSpec
from experiments.reproduce.cases import Asked
from experiments.reproduce.models import Part
from experiments.reproduce.results import KINDS, RESULTS, Results
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.systems import SYSTEMS
from slipstream_jax.synthetic.clicks import examples_at
from slipstream_jax.synthetic.proxies import PROXIES
from slipstream_jax.synthetic.spec import SyntheticSpec
from slipstream_jax.synthetic.stream import PROFILE_START, TEST_START
from tests.support.runs import (
  assert_one_sentence,
  run_job,
  snapshot,
  summary_of,
)

TIMED = {'seconds', 'choose_seconds', 'window_seconds', 'matrix_share'}
ASKED = Asked(('rm2',), 'laptop', None, 2, 0.3)


@hypothesis.given(
  st.lists(st.sampled_from([*models.MODELS]), min_size=1, unique=True),
  st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True),
)
def test_the_grid_is_whole_and_in_alternation(names, seeds):
  jobs = job.jobs_of(names, seeds)
  assert len(set(jobs)) == len(jobs)
  wanted = {*names} | ({'rm2_l20'} if 'rm2' in names else set())
  assert {job.model for job in jobs} == wanted
  for name in wanted:
    cells = [job for job in jobs if job[:2] == ('run', name)]
    pairs = [(job.system, job.skip) for job in cells]
    once = pairs[: len(pairs) // len(seeds)]
    # All systems of a seed before the next seed, always in one order.
    assert pairs == once * len(seeds)
    turns = [job.seed for job in cells]
    assert turns == [seed for seed in seeds for _ in once]
    assert {s for s, skip in once if skip == 'off'} == {*SYSTEMS, 'pinned'}
    skips = {skip for system, skip in once if system == 'pinned'}
    assert skips == {'off', 'published', 'ours'}
  # A model's jobs are side by side, so that one is in memory at a time.
  order = [job.model for job in jobs]
  changes = sum(a != b for a, b in itertools.pairwise(order))
  assert changes == len(wanted) - 1


@pytest.mark.parametrize('start', [0, TEST_START, PROFILE_START])
def test_an_example_of_bags_is_a_function_of_its_position(start):
  spec = BagSpec(SyntheticSpec(rows=(1000, 50, 300), seed=1), 6)
  positions = start + np.arange(40)
  whole = bags_at(spec, positions).columns
  assert whole.lookups.shape == (40, 3, 6)
  for some in (positions[5:9], positions[::3], positions[::-1]):
    part = bags_at(spec, some).columns
    for one, other in zip(part[:3], whole[:3], strict=True):
      np.testing.assert_array_equal(one, other[some - start])
  # Bags of a run of examples hold the clicks of as many as six times them.
  clicks = under_clicks(spec, start, 36)
  for table, lookups in enumerate(np.moveaxis(whole.lookups[:36], 1, 0)):
    expected = np.sort(clicks[:, table])
    np.testing.assert_array_equal(np.sort(lookups.reshape(-1)), expected)


def under_clicks(spec, start, examples):
  positions = start + np.arange(examples * spec.length)
  return examples_at(spec.of, positions).columns.lookups


def test_real_data_lie_in_folders_by_format(tmp_path):
  with pytest.raises(UserError, match='named by their formats'):
    models.path_of('rm2', str(tmp_path))
  (tmp_path / 'criteo').mkdir()
  assert models.path_of('rm2', str(tmp_path)) == str(tmp_path / 'criteo')
  assert models.path_of('rm1', str(tmp_path)) is None
  assert models.path_of('rm2_l20', str(tmp_path)) is None


@pytest.mark.parametrize('scale', models.SCALES)
@pytest.mark.parametrize('name', models.MODELS)
def test_all_systems_share_all_but_what_makes_them(name, scale):
  config = models.config_of(name, scale, None, 1, 0.3)
  skip, steps = config.skip, models.steps_of(name, scale)
  assert config.train.steps == steps
  # One window, and most of a run is left to skip in.
  begins = skip.warm_up_batches + skip.window_batches + skip.settle_batches
  assert 0.2 < begins / steps < 0.35
  assert skip.period_batches == 0
  pairs = [*((s, 'off') for s in job.ALONE), *job.SKIPPING]
  for pair in pairs:
    other = models.configured(config, *pair)
    for section in ('data', 'model', 'optimizer', 'hot', 'train', 'eval'):
      assert other[section] == config[section]
    assert (other.skip.mode == 'off') == (pair[1] == 'off')
    assert other.skip.drop == 0.3


@pytest.fixture(scope='module')
def small():
  """Models of seconds, and a grid of two systems; tests of all come first."""

  def config():
    config = criteo.get_config()
    config.model.bottom, config.model.top = (16, 16), (16,)
    return config

  with pytest.MonkeyPatch.context() as patched:
    for name, model in models.MODELS.items():
      part = Part(1, 64, 20, 1024)
      small = model._replace(config=config, laptop=part)
      patched.setitem(models.MODELS, name, small)
    proxy = PROXIES['kaggle']
    spec = proxy.spec._replace(rows=(300, 24, 4000, 50, 900))
    proxy = proxy._replace(spec=spec, profile_examples=8192)
    patched.setitem(PROXIES, 'kaggle', proxy)
    patched.setattr(job, 'ALONE', ('cached', 'pinned'))
    patched.setattr(job, 'SKIPPING', (('pinned', 'ours'),))
    patched.setattr(job, 'TARGETS', (0.3,))
    patched.setattr(job, 'VARIANTS', ('none', 'hot'))
    patched.setattr(job, 'WITH', {})
    yield


def reproduce(folder, asked=ASKED):
  call = functools.partial(job.reproduce, str(folder), **asked._asdict())
  return cli.guarded(call)


def untimed(folder):
  """The table, without what differs from run to run."""
  return [
    {name: x for name, x in row.items() if name not in TIMED}
    for row in Results(folder).rows
    if row['kind'] != 'phase'
  ]


def phases(folder):
  return [(*row.values(),)[:6] for row in Results(folder).of('phase')]


@pytest.fixture(scope='module')
def whole(small, tmp_path_factory):
  folder = tmp_path_factory.mktemp('reproduce') / 'whole'
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(job, 'rows_of', failing)
    assert reproduce(folder) == 0
  return folder


def failing(todo, *rest):
  """The run of a cache fails with seed 1, as one does that finds no memory."""
  if (todo.kind, todo.system, todo.seed) == ('run', 'cached', 1):
    raise MemoryError('no room\nfor 3 rows')
  return runs.rows_of(todo, *rest)


@pytest.mark.slow
def test_a_failed_run_says_so_and_the_others_go_on(whole):
  results = Results(whole)
  assert [(row['system'], row['skip']) for row in results.of('run')] == 2 * [
    *(('cached', 'off'), ('pinned', 'off'), ('pinned', 'ours')),
  ]
  statuses = ['ok'] * 3 + ['MemoryError: no room for 3 rows'] + ['ok'] * 2
  assert [row['status'] for row in results.of('run')] == statuses
  done = [row for row in results.of('run') if row['status'] == 'ok']
  assert all(0.4 < row['auc'] < 1 and row['seconds'] > 0 for row in done)
  assert [row['examples_seen'] for row in done] == [20 * 64] * len(done)
  assert {row['kind'] for row in results.rows} == {*KINDS}
  assert 'MemoryError' in (whole / 'report.html').read_text()


@pytest.mark.parametrize('name', models.MODELS)
def test_a_medium_run_is_a_laptop_run_of_more_batches(name):
  one, other = (
    models.config_of(name, scale, None, 3, 0.3)
    for scale in ('laptop', 'medium')
  )
  assert other.train.steps == 10 * one.train.steps
  assert other.skip.policy == one.skip.policy == 'surprise'
  for key in ('data', 'hot', 'model', 'optimizer'):
    assert other[key] == one[key]
  skips = other.skip.warm_up_batches + other.skip.window_batches
  assert skips + other.skip.settle_batches == round(0.29 * other.train.steps)


@pytest.mark.slow
def test_runs_are_those_of_the_main_program(whole, tmp_path):
  """Bytes, examples and quality are those of `experiments.run`, to the bit."""
  results = Results(whole)
  row = next(x for x in results.of('run') if x['system'] == 'cached')
  config = models.config_of('rm2', 'laptop', None, 0, 0.3)
  config = models.configured(config, 'cached', 'off')
  row_bytes = results.setting['models']['rm2']['row_bytes']
  config.hot.bytes = models.hot_bytes('rm2', row_bytes)
  config.train.keep_checkpoint, config.eval.curve_steps = False, 0
  assert run_job(tmp_path / 'run', config) == 0
  summary = summary_of(tmp_path / 'run')
  assert row['step'] == summary['steps']
  for name in ('bytes_loaded', 'bytes_stored', 'examples_seen'):
    assert row[name] == summary[name], name
  assert row['auc'] == summary['auc']
  assert row['log_loss'] == summary['log_loss']


@pytest.mark.slow
def test_a_stopped_one_continues(whole, tmp_path, monkeypatch, capsys):
  started, minutes = [], []

  def stopping(todo, *rest):
    started.append(todo)
    if len(started) == 5:
      minutes.append(Results(tmp_path).setting['minutes'])
      signal.raise_signal(signal.SIGINT)  # it ends between two steps
    return failing(todo, *rest)

  with monkeypatch.context() as patched:
    patched.setattr(job, 'rows_of', stopping)
    assert reproduce(tmp_path) == 130
  words = capsys.readouterr().err
  assert '4 of 12 runs are finished' in words
  assert Results(tmp_path).setting['minutes'] > minutes[0]
  assert f'this continues: {cli.again()}' in words
  assert 'report.html' in {path.name for path in tmp_path.iterdir()}
  again = []

  def counting(todo, *rest):
    again.append(todo)
    return failing(todo, *rest)

  monkeypatch.setattr(job, 'rows_of', counting)
  assert reproduce(tmp_path) == 0
  assert started[:-1] + again == job.jobs_of(['rm2'], range(2))
  assert untimed(tmp_path) == untimed(whole)
  assert phases(tmp_path) == phases(whole)


@pytest.mark.slow
def test_a_finished_one_does_nothing(whole, monkeypatch, capsys):
  monkeypatch.setattr(job, 'rows_of', None)  # whoever calls it, fails
  before = (whole / RESULTS).read_bytes()
  assert reproduce(whole) == 0
  words = capsys.readouterr().out
  assert '0 of 12 runs to do' in words
  assert max(map(len, words.splitlines())) <= 120
  assert (whole / RESULTS).read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'drop': 0.5}, ('--drop', '0.3', '0.5')),
    ({'models': ('rm9',)}, ('--models', 'rm9', 'rm2_l20')),
    ({'models': ()}, ('--models',)),
    ({'scale': 'desk'}, ('--scale', 'laptop')),
    ({'drop': 1.5}, ('--drop',)),
    ({'data': '/nowhere'}, ('--data', 'criteo')),
  ],
)
def test_what_cannot_be_is_refused(changes, words, whole, capsys):
  before = snapshot(whole)
  assert reproduce(whole, ASKED._replace(**changes)) == 1
  assert_one_sentence(capsys.readouterr().err, *words)
  assert snapshot(whole) == before


def test_a_folder_of_something_else_is_refused(small, tmp_path, capsys):
  (tmp_path / 'notes.txt').write_text('mine')
  assert reproduce(tmp_path) == 1
  assert_one_sentence(capsys.readouterr().err, '--workdir')
  assert [path.name for path in tmp_path.iterdir()] == ['notes.txt']
