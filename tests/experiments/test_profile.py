"""The sizing tool as its users run it."""

import json
import re
import sys

import numpy as np
import pytest

from experiments.profile.predictions import (
  Need,
  Prediction,
  Sample,
  tiers_of,
  whole_tables,
)
from slipstream_jax.placement import cached
from slipstream_jax.placement.sizing import Curve, simulate
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.store.host_table import unique_rows
from slipstream_jax.store.scratch import file_bytes
from slipstream_jax.store.tiered import MAP_BYTES, SLOT_BYTES
from tests.support import programs

pytestmark = pytest.mark.slow


def profile(workdir, *flags):
  command = [sys.executable, '-m', 'experiments.profile']
  command += ['--config=configs/criteo.py:smoke', f'--workdir={workdir}']
  return programs.finished([*command, *flags])


@pytest.fixture(scope='module')
def profiled(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('profile')
  done = profile(workdir, '--device_bytes=600000', '--steps=60')
  assert done.returncode == 0, done.stderr
  return workdir, json.loads((workdir / 'profile.json').read_text()), done


def test_it_recommends_what_fits_and_moves_least(profiled):
  workdir, figures, done = profiled
  picked = figures['recommended']
  assert picked['device_bytes'] <= 600_000
  for other in figures['predictions']:
    if other['device_bytes'] <= 600_000:
      assert picked['bytes_moved'] <= 1.05 * other['bytes_moved']
  assert f'--config.placement={picked["placement"]}' in done.stdout
  assert (workdir / 'hit_rate.png').stat().st_size > 10_000


def test_a_file_that_is_missing_leaves_no_folder(tmp_path):
  done = profile(tmp_path / 'runs' / 'profile', '--config.data.path=missing')
  assert done.returncode == 1
  assert 'missing' in done.stderr
  assert not list(tmp_path.iterdir())


def test_predictions_come_true(profiled):
  _, figures, _ = profiled
  picked, outcome = figures['recommended'], figures['outcome']
  assert outcome['steps'] == 100
  # Another part of the same stream: what is predicted is a mean.
  assert outcome['hit_rate'] == pytest.approx(picked['hit_rate'], abs=0.02)
  assert outcome['rows_loaded'] == pytest.approx(
    picked['rows_loaded'], rel=0.15
  )


def test_it_predicts_whether_skipping_saves_time(profiled):
  _, figures, done = profiled
  paid = figures['payoff']
  assert paid['left_out'] == pytest.approx(0.3, abs=0.05)
  assert paid['step_ms'] > 0
  assert paid['step_ms_to_pay'] is None  # as the CPU is the device
  (line,) = [x for x in done.stdout.splitlines() if x.startswith('leaving out')]
  assert f'{paid["step_ms"]:.3g} ms' in line
  assert ('saves no time here' in line) == (not paid['pays'])


def test_what_it_advises_runs_as_it_says(profiled, tmp_path):
  _, figures, done = profiled
  advised = re.findall(r'--config\.\S+', done.stdout)
  assert '--config.skip.mode=off' in advised
  command = [sys.executable, '-m', 'experiments.run']
  command += ['--config=configs/criteo.py:smoke', *advised]
  command += [f'--workdir={tmp_path / "run"}', '--config.train.steps=100']
  ran = programs.finished(command)
  assert ran.returncode == 0, ran.stderr
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  found = summary['hits'] / summary['lookups']
  assert found == pytest.approx(figures['recommended']['hit_rate'], abs=0.02)


def test_the_extremes_are_known_beforehand(profiled):
  _, figures, _ = profiled
  by_name = {p['placement']: p for p in figures['predictions']}
  assert by_name['resident']['hit_rate'] == 1
  assert by_name['resident']['rows_loaded'] == 0
  assert by_name['streamed']['hit_rate'] == 0
  hits = [p['hit_rate'] for p in figures['predictions'] if p['policy'] == 'lfu']
  assert hits == sorted(hits)


def test_a_host_too_small_needs_a_disk(tmp_path):
  done = profile(
    tmp_path,
    '--host_bytes=400000',
    '--device_bytes=600000',
    '--steps=20',
    '--check_steps=0',
  )
  assert done.returncode == 0, done.stderr
  tiers = json.loads((tmp_path / 'profile.json').read_text())['tiers']
  assert tiers['store'] == 'tiered'
  assert 0 < tiers['dram_bytes'] < 400_000
  assert f'--config.store.dram_bytes={tiers["dram_bytes"]}' in done.stdout
  for shares in zip(*tiers['shares'].values(), strict=True):
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0


def test_tiers_are_what_fits():
  curve = Curve(
    np.array([256, 1024, 4096]),
    lookups=np.array([100.0, 50.0]),
    hits=np.array([[50.0, 80.0, 90.0], [0.0, 25.0, 40.0]]),
    loads=np.array([30.0, 20.0, 10.0]),
    rows_used=60.0,
  )
  need = Need(row=68, dense=0, num_rows=100_000)
  all_bytes = 68 * need.num_rows
  picked = Prediction('cached', 'lru', 256, 0.3, 30, 30, 0, 0, all_bytes)
  sample = batches_of([np.arange(50), np.arange(400)] * 10, need.num_rows)
  more = sample, {'a': 99_000, 'b': 1000}, curve
  fits = tiers_of(picked, need, curve, all_bytes, *more)
  assert (fits.store, fits.dram_rows) == ('memory', need.num_rows)
  assert fits.shares['device'] == [0.5, 0]
  assert fits.shares['disk'] == [0, 0]
  assert fits.uses == [225, 0]
  assert (fits.by_table, fits.loads_by_table) == ((), 225)
  half = tiers_of(
    *(picked, need, curve, all_bytes, sample),
    *({'a': 50, 'b': 200, 'c': 99_750}, curve),
  )
  assert half.uses == [50, 100, 75]
  better = curve._replace(hits=np.full((2, 3), 45.0))
  more_pinned = *more[:2], better
  pins = tiers_of(
    picked._replace(placement='pinned'), need, curve, all_bytes, *more_pinned
  )
  assert pins.shares['device'] == pytest.approx([0.45, 0.9])
  assert (half.by_table, half.loads_by_table) == (('a', 'b'), 75)
  maps = MAP_BYTES * need.num_rows
  room = 1024 * (68 + SLOT_BYTES)
  some = tiers_of(picked, need, curve, maps + room, *more)
  assert (some.store, some.dram_rows) == ('tiered', 1024)
  assert some.dram_bytes == room
  assert some.rows_read == some.read_by_lru < 50
  assert some.whole == ()
  assert some.disk_bytes == file_bytes(need.num_rows, 68)
  assert 68 * need.num_rows < some.disk_bytes < 128 * need.num_rows
  assert some.shares['memory'] == pytest.approx([0.3, 0.5])
  assert some.shares['disk'] == pytest.approx([0.2, 0.5])
  none = tiers_of(picked, need, curve, maps, *more)
  assert (none.store, none.dram_rows) == ('file', 0)
  moved = simulate(
    cached(256, 'lru'), sample.batches, need.num_rows, sample.popular
  )
  # All that the device loads, but for those that were never used before.
  assert none.rows_read == moved.rows_loaded - 400 / 20


def batches_of(rows, num_rows):
  """A sample whose batches look up these rows."""
  uniques = [
    unique_rows(x[None], num_rows, None) for x in map(np.asarray, rows)
  ]
  unused = hot_rows(np.array([num_rows - 1]), num_rows)
  return Sample(uniques, unused, 0, 0)


def lru_reads(picked, sample, num_rows, kept=()):
  """Counts what an LRU cache reads again, beside rows that are kept."""
  used, reads = [], []
  for batch in sample.batches:
    rows = [row for row in batch.rows.tolist() if row not in kept]
    known = [row for row in rows if row in used]
    reads.append(sum(row not in used[-picked.rows :] for row in known))
    used = [row for row in used if row not in rows] + rows
  return used, reads


def test_tables_kept_whole_are_those_that_save_most():
  # Every 4th batch sweeps over table c, which drives out rows of b, of which
  # each batch has others. No batch looks up d.
  sizes = {'a': 30, 'b': 100, 'c': 4000, 'd': 500}
  rng = np.random.default_rng(0)
  rows = [
    np.unique(
      np.r_[
        rng.choice(30, 20),
        30 + rng.choice(100, 25),
        130 + (n % 4 == 0) * rng.choice(4000, 100),
      ]
    )
    for n in range(40)
  ]
  sample = batches_of(rows, 4630)
  need = Need(row=68, dense=0, num_rows=4630)
  picked = Prediction('streamed', '', 0, 0, 0, 0, 0, 0, 0)
  whole, read, by_lru = whole_tables(picked, need, 260, sample, sizes)
  assert whole == ('a', 'b')
  memory = picked._replace(rows=260)
  _, reads = lru_reads(memory, sample, 4630)
  assert by_lru == pytest.approx(np.mean(reads), rel=0.02)
  left = picked._replace(rows=130)
  _, reads = lru_reads(left, sample, 4630, range(130))
  assert read == pytest.approx(np.mean(reads), rel=0.02)
  assert read < by_lru
  all_fit = whole_tables(picked, need, 4630, sample, sizes)
  assert all_fit == ((), 0, 0)


def test_a_device_too_small_is_an_error(tmp_path):
  done = profile(tmp_path, '--device_bytes=100', '--steps=5')
  assert done.returncode == 1
  assert '--device_bytes' in done.stderr
  assert '100 bytes' in done.stderr
  assert not (tmp_path / 'profile.json').exists()
