"""The grid is whole and in alternation; a stopped one continues."""

import csv
import io
import itertools
import signal

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from rich.console import Console

from configs import criteo
from experiments.common import cli
from experiments.reproduce import grid, models, results
from experiments.reproduce import reproduction as under_way
from experiments.reproduce.bags import bags_at, BagSpec
from experiments.reproduce.grid import CELL, Job, jobs_of
from experiments.reproduce.measured import jobs as runs
from experiments.reproduce.measured.cases import Asked
from experiments.reproduce.models import Part
from experiments.reproduce.results import Cell, Point
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
  jobs = jobs_of(names, seeds)
  assert len(set(jobs)) == len(jobs)
  wanted = {*names} | ({'rm2_l20'} if 'rm2' in names else set())
  assert {job.model for job in jobs} == wanted
  for name in wanted:
    cells = [job for job in jobs if job[:2] == (CELL, name)]
    pairs = [(job.system, job.skip) for job in cells]
    once = pairs[: len(pairs) // len(seeds)]
    # All systems of a seed before the next seed, always in one order.
    assert pairs == once * len(seeds)
    turns = [job.seed for job in cells]
    assert turns == [seed for seed in seeds for _ in once]
    assert {s for s, skip in once if skip == 'off'} == {*SYSTEMS, 'pinned'}
    assert {skip for s, skip in once if s == 'pinned'} == {*results.SKIPS}
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
  pairs = [*((s, 'off') for s in grid.ALONE), *grid.SKIPPING]
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
    patched.setattr(grid, 'ALONE', ('cached', 'pinned'))
    patched.setattr(grid, 'SKIPPING', (('pinned', 'ours'),))
    patched.setattr(grid, 'TARGETS', (0.3,))
    patched.setattr(grid, 'VARIANTS', ('none', 'hot'))
    patched.setattr(grid, 'WITH', {})
    yield


def reproduce(folder, asked=ASKED):
  screen = Console(width=80, file=io.StringIO())

  def main(_):
    under_way.Reproduction(screen, asked, folder, 'AGAIN').run()

  code = cli.guarded(main, criteo.get_config())
  return code, screen.file.getvalue()


def lines_of(folder, kind):
  with (folder / results.FILES[kind]).open(newline='') as file:
    lines = list(csv.DictReader(file))
  return [{k: v for k, v in x.items() if k not in TIMED} for x in lines]


@pytest.fixture(scope='module')
def whole(small, tmp_path_factory):
  folder = tmp_path_factory.mktemp('reproduce') / 'whole'
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(runs, 'cell_of', failing(runs.cell_of))
    code, said = reproduce(folder)
  assert code == 0
  assert max(map(len, said.splitlines())) <= 80
  return folder


def failing(cell_of):
  """The cell of a cache fails with seed 1, as one does that finds no memory."""

  def cell(case, system, skip, *rest):
    if (system, case.config.seed) == ('cached', 1):
      raise MemoryError('no room\nfor 3 rows')
    return cell_of(case, system, skip, *rest)

  return cell


def test_a_failed_cell_says_so_and_the_others_go_on(whole):
  cells = results.read(whole, Cell)
  expected = [
    Job(CELL, 'rm2', seed, *pair)
    for seed in (0, 1)
    for pair in (('cached', 'off'), ('pinned', 'off'), ('pinned', 'ours'))
  ]
  assert [cell[:4] for cell in cells] == [
    ('rm2', job.system, job.skip, job.seed) for job in expected
  ]
  statuses = ['ok'] * 3 + ['MemoryError: no room for 3 rows'] + ['ok'] * 2
  assert [cell.status for cell in cells] == statuses
  done = [cell for cell in cells if cell.status == 'ok']
  assert all(0.4 < cell.auc < 1 and cell.seconds > 0 for cell in done)
  assert [c.examples_seen for c in done] == [20 * 64] * len(done)
  for kind, file in results.FILES.items():
    if kind is not results.Modelled:
      assert results.read(whole, kind), file


def test_cells_are_what_runs_are(whole, tmp_path):
  """Bytes, examples and quality are those of `experiments.run`, to the bit."""
  cell = next(c for c in results.read(whole, Cell) if c.system == 'cached')
  config = models.config_of('rm2', 'laptop', None, 0, 0.3)
  config = models.configured(config, 'cached', 'off')
  setting = results.read_setting(whole)['models']['rm2']
  config.hot.bytes = models.hot_bytes('rm2', setting['row_bytes'])
  config.train.keep_checkpoint, config.eval.curve_steps = False, 0
  assert run_job(tmp_path / 'run', config) == 0
  summary = summary_of(tmp_path / 'run')
  for name in ('bytes_loaded', 'bytes_stored', 'examples_seen', 'steps'):
    assert getattr(cell, name) == summary[name], name
  assert cell.auc == summary['auc']
  assert cell.log_loss == summary['log_loss']


def test_a_stopped_one_continues(whole, tmp_path, monkeypatch, capsys):
  """Stopped in a run after others; half of a line was on the disk."""
  monkeypatch.setattr(runs, 'cell_of', failing(runs.cell_of))
  run, started = under_way.lines_of, []

  def stopping(job, *rest):
    started.append(job)
    if len(started) == 6:
      signal.raise_signal(signal.SIGINT)  # it ends between two steps
    return run(job, *rest)

  with monkeypatch.context() as patched:
    patched.setattr(under_way, 'lines_of', stopping)
    assert reproduce(tmp_path)[0] == 130
  said = capsys.readouterr().err
  assert '5 of 13 runs are finished' in said
  assert 'AGAIN' in said
  orphan = Point('rm2', 'pinned', 'ours', 1, 5)
  results.append(tmp_path, [orphan])
  for file in ('cells.csv', 'curves.csv'):
    with (tmp_path / file).open('a') as out:
      out.write('rm2,cached,off,1')
  again = []

  def counting(job, *rest):
    again.append(job)
    return run(job, *rest)

  monkeypatch.setattr(under_way, 'lines_of', counting)
  assert reproduce(tmp_path)[0] == 0
  assert started[:-1] + again == jobs_of(['rm2'], range(2))
  for kind in results.FILES:
    if kind not in (results.Phase, results.Modelled):
      assert lines_of(tmp_path, kind) == lines_of(whole, kind)
  counted = {(x['system'], x['skip'], x['phase']) for x in phases(tmp_path)}
  assert counted == {
    (x['system'], x['skip'], x['phase']) for x in phases(whole)
  }


def phases(folder):
  return lines_of(folder, results.Phase)


def test_a_finished_one_does_nothing(whole, monkeypatch):
  monkeypatch.setattr(under_way, 'lines_of', None)  # whoever calls it, fails
  before = {k: v for k, v in snapshot(whole).items() if k.suffix == '.csv'}
  code, said = reproduce(whole)
  assert code == 0
  assert '0 of 13 runs to do' in said
  after = {k: v for k, v in snapshot(whole).items() if k.suffix == '.csv'}
  assert after == before


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
  assert reproduce(whole, ASKED._replace(**changes))[0] == 1
  assert_one_sentence(capsys.readouterr().err, *words)
  assert snapshot(whole) == before


def test_a_folder_of_something_else_is_refused(small, tmp_path, capsys):
  (tmp_path / 'notes.txt').write_text('mine')
  assert reproduce(tmp_path)[0] == 1
  assert_one_sentence(capsys.readouterr().err, '--workdir')
  assert [path.name for path in tmp_path.iterdir()] == ['notes.txt']
