"""What the README promises is what the repository has."""

import pathlib
import re
import tomllib

import slipstream_jax as slip
from tests.support import examples

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / 'README.md'
README = PAGE.read_text()


def test_example_runs_as_it_stands(capsys):
  ((_, example),) = examples.blocks(PAGE, 'python')
  lines = [line for line in example.splitlines() if line.strip()]
  assert len(lines) <= 15
  assert len(set(re.findall(r'slip\.(\w+)', example))) <= 4
  examples.run(PAGE)
  history, auc = capsys.readouterr().out.splitlines()
  (counts,) = re.findall(r' ([\d,]+) of ([\d,]+) examples left out', history)
  dropped, seen = (int(count.replace(',', '')) for count in counts)
  share = dropped / seen
  assert 0.2 < share < 0.3  # Skip(drop=0.3), but for the warm-up
  assert float(auc) > 0.9  # the example learns


def test_two_commands_come_first():
  (_, train), (_, test) = examples.blocks(PAGE, 'sh')[:2]
  assert train.rstrip().endswith(
    'python -m experiments.run --config=configs/criteo.py'
  )
  assert 'pytest' in test
  # After the example, which shows in the first 25 lines what this is for.
  first_command = README.splitlines().index('```sh') + 1
  assert first_command <= 30
  assert len(re.sub(r'```.*?```', '', README, flags=re.DOTALL).split()) <= 500


def test_requirements_agree_with_the_package():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']

  def wanted(name):
    lines = (ROOT / name).read_text().splitlines()
    return {line for line in lines if line and line[0] not in '#-'}

  extras = project['optional-dependencies']
  ours = {'cuda12', 'tfds', 'programs', 'test', 'docs'}
  others = {'s3', 'baselines', 'orbax', 'serve', 'faiss', 'fit'}
  assert set(extras) == ours | others
  needed = (extras[name] for name in ('fit', 'tfds', 'programs'))
  ours = {*project['dependencies']}.union(*needed)
  ours.remove('slipstream_jax[fit,tfds]')
  assert wanted('requirements-cpu.txt') == ours
  cuda = {
    line.replace('jax>', 'jax[cuda12]>', 1) if line.startswith('jax>') else line
    for line in ours
  }
  assert wanted('requirements.txt') == cuda


def test_every_public_name_is_there_and_documented():
  assert sorted(slip.__all__) == sorted(set(slip.__all__))
  for name in slip.__all__:
    value = getattr(slip, name)
    assert isinstance(value, dict) or value.__doc__, name
