"""The how-to of one's own data: its file, and its very command."""

import csv
import os
import re
import shlex
import sys

import pytest

from tests.support.examples import blocks
from tests.support.programs import finished, ROOT

PAGE = ROOT / 'docs' / 'how-to' / 'own-compare.md'


@pytest.mark.slow
def test_the_command_of_the_page_runs(tmp_path):
  ((_, source),) = blocks(PAGE, 'python')
  (tmp_path / 'shop.py').write_text(source)
  command = re.search(r'^    python (-m .*)$', PAGE.read_text(), re.M)[1]
  out = tmp_path / 'out'
  done = finished(
    [
      *(sys.executable, *shlex.split(command), f'--workdir={out}'),
      '--policies=surprise',  # of all of them: to be through sooner
    ],
    cwd=tmp_path,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
  )
  assert done.returncode == 0, done.stderr
  assert '6 runs of 62 batches' in done.stdout
  assert 'a made-up shop' in (out / 'compare.html').read_text()
  with (out / 'compare.csv').open(newline='') as file:
    lines = list(csv.DictReader(file))
  assert [line['policy'] for line in lines] == [
    'plain',
    'random',
    'surprise',
  ] * 2
  for line in lines:
    assert float(line['auc']) > 0.6
