"""`experiments.prepare` and `experiments.make_text` on Criteo's text."""

import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from configs import criteo as criteo_config
from configs import terabyte as terabyte_config
from experiments.common import cli
from experiments.make_text import job as make_text
from experiments.prepare import job as program
from slipstream_jax.errors import UserError
from slipstream_jax.formats.criteo import criteo_raw
from slipstream_jax.packed import columns as packed
from tests.support import programs
from tests.support.texts.criteo import (
  lines,
  packed_of,
  slow_parse,
  three_days,
  write,
)


def test_made_text_is_like_the_stream_it_is_made_of(tmp_path):
  make_text.write_text(tmp_path / 'made.txt', 3000, seed=4)
  rows = slow_parse((tmp_path / 'made.txt').read_bytes())
  assert len(rows) == 3000
  assert 0.2 < np.mean([row[0] for row in rows]) < 0.3
  missing = np.mean([[v is None for v in row] for row in rows], axis=0)
  assert missing[[0, 2, 14]].tolist() == [0, 0, 0]
  assert 0.4 < missing[1] < 0.5
  unique = [len({row[t] for row in rows}) for t in range(14, 40)]
  assert max(unique) > 500 > min(unique)
  with pytest.raises(UserError, match='at least one line, got 0'):
    make_text.write_text(tmp_path / 'none.txt', 0)


def job(config, **changes):
  """The program's exit code, in this process."""
  verify = changes.pop('verify', False)
  with config.unlocked():
    config.update_from_flattened_dict(changes)
  return cli.guarded(program.prepare_data, config, verify)


def assert_one_sentence(said, *parts):
  assert said.startswith('error: ')
  assert said.count('\n') == 1
  for part in parts:
    assert part in said, said


def test_the_program_prepares_refuses_and_verifies(tmp_path, capsys):
  path = write(tmp_path / 'some.txt', [*lines(300), 'torn'])
  where = {'data.raw': str(path), 'data.path': str(tmp_path / 'data')}

  def run_job(**changes):
    return job(criteo_config.get_config(), **(where | changes))

  assert run_job() == 1
  assert_one_sentence(capsys.readouterr().err, 'line 301', 'torn')
  assert run_job(**{'data.bad_lines': 2}) == 0
  said = capsys.readouterr().out
  for part in (
    'bad lines skipped',
    'examples/s',
    'peak memory',
    'C26',
    'unknown',
  ):
    assert part in said
  assert re.search(r'bad lines skipped[ │]+1 ', said)
  assert re.search(r'examples +│ +300 ', said)
  assert run_job() == 0
  said = capsys.readouterr().out
  assert said.count('\n') == 1
  for part in (
    str(tmp_path / 'data'),
    'is finished',
    '300 examples',
    '26 tables',
  ):
    assert part in said
  assert run_job(**{'data.min_count': 2}) == 1
  assert_one_sentence(capsys.readouterr().err, 'min_count 2 after 1')
  assert run_job(verify=True, **{'data.raw': None}) == 0
  assert 'as they were written' in capsys.readouterr().out
  column = tmp_path / 'data' / 'C3.uint8'
  contents = bytearray(column.read_bytes())
  contents[7] ^= 4
  column.write_bytes(contents)
  assert run_job(verify=True) == 1
  assert_one_sentence(capsys.readouterr().err, 'checksum', 'C3.uint8')


def test_the_program_names_what_is_not_set(tmp_path, capsys):
  config = criteo_config.get_config
  assert job(config()) == 1
  assert_one_sentence(capsys.readouterr().err, 'config.data.raw')
  assert job(config(), **{'data.raw': 'x'}) == 1
  assert_one_sentence(capsys.readouterr().err, 'config.data.path')
  some = {'data.raw': 'x', 'data.path': str(tmp_path / 'data')}
  assert job(config(), **some) == 1
  assert_one_sentence(capsys.readouterr().err, 'No such file', 'x')
  assert job(config(), **some, **{'data.format': 'parquet'}) == 1
  assert_one_sentence(capsys.readouterr().err, 'criteo, terabyte', 'parquet')
  assert not (tmp_path / 'data').exists()


def test_the_terabyte_config_prepares_days(tmp_path):
  three_days(tmp_path / 'days')
  config = terabyte_config.get_config('smoke')
  where = {
    'data.raw': str(tmp_path / 'days'),
    'data.path': str(tmp_path / 'data'),
  }
  assert job(config, **where) == 0
  manifest = packed.open_packed(tmp_path / 'data').manifest
  assert manifest['examples'] == 900
  assert (manifest['min_count'], manifest['hash_rows']) == (1, 10_000)
  assert terabyte_config.get_config().data.hash_rows == 40_000_000
  with pytest.raises(ValueError, match='huge'):
    terabyte_config.get_config('huge')


def test_ctrl_c_leaves_what_the_same_command_continues(tmp_path):
  path, folder = tmp_path / 'some.txt', tmp_path / 'data'
  make_text.write_text(path, 400_000)
  command = [
    *(sys.executable, '-m', 'experiments.prepare'),
    *('--config=configs/criteo.py', f'--config.data.raw={path}'),
    f'--config.data.path={folder}',
  ]
  outputs = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.PIPE}
  with programs.started(command, **outputs) as process:
    programs.wait_until((folder / 'dense.float32').exists, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=programs.LIMIT_S)
  assert process.returncode == 130
  assert_one_sentence(errors, 'interrupted; the same command continues')
  assert not packed.is_finished(folder)
  assert packed_of(criteo_raw(path), folder).manifest['examples'] == 400_000
