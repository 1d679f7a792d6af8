"""The table of a reproduction is read as it was written."""

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from experiments.reproduce.results import Job, RESULTS, Results, SETTING
from slipstream_jax.errors import UserError
from tests.reproduce import drawn

whole = st.none() | st.integers(0, 10**13)
real = st.sampled_from([None, float('nan')]) | st.floats(allow_infinity=False)
runs = st.builds(
  lambda seed, status, **values: (
    Job('run', 'rm2', seed, 'xdl')._asdict() | {'status': status, **values}
  ),
  st.integers(0, 9),
  st.sampled_from(['ok', 'a, "b"\nc', 'größer | 5 %', '\r\n', "'", '1']),
  step=whole,
  seconds=real,
  auc=real,
  bytes_loaded=whole,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(runs, max_size=3), max_size=3))
def test_what_was_added_is_read(tmp_path_factory, batches):
  folder = tmp_path_factory.mktemp('results')
  results = Results(folder)
  results.setting = {'scale': 'laptop'}
  for batch in batches:
    results.add(batch)
  known = [
    {name: x for name, x in row.items() if x is not None and x == x}
    for batch in batches
    for row in batch
  ]
  again = Results(folder)
  assert again.rows == results.rows == known
  for one, other in zip(again.rows, known, strict=True):
    assert {k: type(x) for k, x in one.items()} == {
      k: type(x) for k, x in other.items()
    }
  if batches:
    assert again.setting == {'scale': 'laptop'}


def test_points_of_a_run_that_is_not_there_are_dropped(tmp_path):
  results = drawn.fill(tmp_path, models=('rm2',), seeds=1)
  gone = Job('run', 'rm2', 0, 'fae', 'ours')
  assert results.has(gone)
  lines = (tmp_path / RESULTS).read_text().splitlines(keepends=True)
  kept = [line for line in lines if not line.startswith('run,rm2,0,fae,ours')]
  assert len(kept) == len(lines) - 1
  (tmp_path / RESULTS).write_text(''.join(kept))
  again = Results(tmp_path)
  assert not again.has(gone)
  mine = [
    row for row in again.rows if (row['system'], row['skip']) == gone[3:5]
  ]
  assert mine == []
  assert again.has(Job('phase', 'rm2', 0, 'fae'))


OLD = {
  'cells.csv': (
    'model,system,skip,seed,status,steps,examples_seen,seconds,auc',
    *('rm2,xdl,off,0,ok,20,1280,1.5,0.75', 'rm2,xdl,off,1,no memory,,,,'),
  ),
  'curves.csv': (
    'model,system,skip,seed,step,examples_seen,examples_trained,seconds,auc',
    *('rm2,xdl,off,0,5,320,320,0.5,0.6', 'rm2,xdl,off,3,5,320,320,0.5,0.6'),
  ),
  'phases.csv': (
    'model,system,skip,seed,phase,ms_per_batch',
    'rm2,xdl,off,0,step,1.25',
  ),
  'skew.csv': ('model,rank,share,cumulative_share', 'rm2,1,0.5,0.5'),
  'rows.csv': ('model,row,batch,change', 'rm2,17,0,0.0'),
  'naive.csv': (
    'model,variant,seed,auc,log_loss,accuracy',
    'rm2,hot,0,0.7,0.5,0.8',
  ),
  'thresholds.csv': (
    'model,seed,drop_target,threshold,drop_rate,auc,log_loss',
    'rm2,0,0.3,0.001,,0.7,0.5',
  ),
}


def test_a_folder_of_an_older_version_is_read(tmp_path):
  """Its last line may have been cut off, even within a letter."""
  for name, lines in OLD.items():
    text = ''.join(f'{line}\r\n' for line in lines).encode()
    (tmp_path / name).write_bytes(text + 'rm2,größer'.encode()[:7])
  (tmp_path / SETTING).write_text('{"scale": "laptop"}')
  results = Results(tmp_path)
  finished = [
    *(Job('run', 'rm2', 0, 'xdl'), Job('run', 'rm2', 1, 'xdl')),
    *(Job('phase', 'rm2', 0, 'xdl'), Job('skew', 'rm2', 0)),
    *(Job('row', 'rm2', 0), Job('naive', 'rm2', 0, variant='hot')),
    Job('threshold', 'rm2', 0, skip='published', drop_target=0.3),
  ]
  assert all(map(results.has, finished))
  assert len(results.rows) == len(finished) + 1  # the point of seed 0
  run = results.of('run')[0]
  assert (run['step'], run['seconds'], run['auc']) == (20, 1.5, 0.75)
  results.save()
  assert Results(tmp_path).rows == results.rows


@pytest.mark.parametrize(
  ('text', 'rule'),
  [
    ('kind,colour\r\nrun,3\r\n', 'columns must be known'),
    ('kind,model,rank\r\nskew,rm1,x\r\n', 'line 2 must'),
    ('kind,model,rank\r\nskew,rm1\r\n', 'line 2 must'),
  ],
)
def test_a_damaged_table_is_named(text, rule, tmp_path):
  (tmp_path / RESULTS).write_text(text, newline='')
  with pytest.raises(UserError, match=rule) as caught:
    Results(tmp_path)
  assert RESULTS in str(caught.value)


def test_a_damaged_setting_is_named(tmp_path):
  (tmp_path / SETTING).write_text('{')
  with pytest.raises(UserError, match='setting'):
    Results(tmp_path)
