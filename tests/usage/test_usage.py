"""What programs say of themselves, and of a command line that is wrong."""

import ast
import importlib.util
import pathlib
import re
import sys

import jax
import pytest

from configs import avazu, criteo, movielens, taobao, terabyte, tfds
import experiments
from experiments.common import cli, models, usage
from experiments.common.datasets import RAW_FORMATS
from experiments.common.errors import ON_BAD_LOSS, ON_ERROR
from slipstream_jax.checkpoint.policies import CHECKPOINT_POLICIES
from slipstream_jax.checkpoint.quantize import CODECS
from slipstream_jax.distributed.exchange import EXCHANGES
from slipstream_jax.formats import movielens as movielens_format
from slipstream_jax.formats.table import SPLITS
from slipstream_jax.formats.tfds import TRANSFORMS
from slipstream_jax.models.dmt import TOWERS
from slipstream_jax.models.normalization import NORMALIZATIONS
from slipstream_jax.placement import EVICTIONS, PLACEMENTS
from slipstream_jax.schedules.settings import MODES, OF
from slipstream_jax.schedules.systems import SYSTEMS
from slipstream_jax.scoring.base import MODEL, SCORERS
from slipstream_jax.selection.hot import CUTS
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.store.tiered import STORES
from slipstream_jax.synthetic.proxies import PROXIES
from slipstream_jax.tables import COMBINERS, ROW_DTYPES
from tests.support.programs import finished
from tests.support.runs import assert_one_sentence

PROGRAMS = {  # and whether they take a config
  'run.__main__': True,
  'launch.__main__': True,
  'prepare.__main__': True,
  'compare.__main__': True,
  'bench.__main__': True,
  'bench.disk': False,
  'bench.host': True,
  'bench.serving': False,
  'bench.vocabulary': False,
  'plan.__main__': True,
  'towers.__main__': False,
  'profile.__main__': True,
  'skew.__main__': False,
  'make_text.__main__': False,
  'predict.__main__': False,
  'checkpoints.__main__': False,
  'evaluate.__main__': True,
  'export.__main__': True,
  'doctor.__main__': True,
  'report.__main__': False,
  'reproduce.__main__': False,
  'search.__main__': True,
  'zoo.__main__': True,
}
CONFIGS = [avazu, criteo, movielens, taobao, terabyte, tfds]
# ml_collections loads files in a way that will be gone some day.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module')
CRITEO = '--config=configs/criteo.py'


@pytest.mark.parametrize('name', PROGRAMS)
def test_help_says_what_there_is(name):
  spec = importlib.util.find_spec(f'experiments.{name}')
  source, has_config = pathlib.Path(spec.origin).read_text(), PROGRAMS[name]
  program = f'experiments.{name}'.removesuffix('.__main__')
  command = [sys.executable, '-X', 'importtime', '-m', program, '--help']
  done = finished(command)
  text = done.stdout
  assert done.returncode == 0
  imported = re.findall(r'\| +(\w+)$', done.stderr, re.M)
  assert 'absl' in imported
  assert not {'jax', 'numba', 'polars'} & {*imported}
  assert text.startswith(ast.get_docstring(ast.parse(source)).splitlines()[0])
  assert max(map(len, text.splitlines())) <= 80
  for flag in re.findall(r"DEFINE_\w+\(\s*'(\w+)'", source):
    assert f'\n  --{flag}=' in text
  assert ('--config=FILE' in text) == has_config
  planted = name in ('zoo.__main__', 'search.__main__')
  variant = 'planted' if planted else ''
  for key, value in usage.keys_of(criteo.get_config(variant)):
    line = f'--config.{key}={value}'.replace(' ', '')
    assert (f'\n  {line}' in text) == has_config


@pytest.mark.parametrize('module', CONFIGS, ids=lambda module: module.__name__)
def test_every_key_is_explained(module):
  folder = pathlib.Path(module.__file__).parent
  files = [folder / 'common.py', pathlib.Path(module.__file__)]
  said = usage.comments_of(files)
  for key, _ in usage.keys_of(module.get_config()):
    assert said[key], key


CHOICES = {
  'cache.eviction': EVICTIONS,
  'exchange': EXCHANGES,
  'hot.cut': CUTS,
  'checkpoint.codec': CODECS,
  'checkpoint.on_error': ON_ERROR,
  'checkpoint.policy': CHECKPOINT_POLICIES,
  'data.features.transform': TRANSFORMS,
  'data.format': RAW_FORMATS,
  'data.proxy': PROXIES,
  'data.split': movielens_format.SPLITS,
  'eval.split': SPLITS[1:],
  'model.compute_dtype': models._DTYPES,
  'model.form': TOWERS,
  'model.name': models.MODELS,
  'model.normalization': NORMALIZATIONS,
  'model.pooling': COMBINERS,
  'model.table_dtype': ROW_DTYPES,
  'placement': {**PLACEMENTS, 'cached': None},
  'skip.drop_of': OF,
  'skip.mode': {**MODES, 'off': None},
  'skip.policy': POLICIES,
  'skip.scorer': [*SCORERS, MODEL],
  'store.kind': STORES,
  'system': SYSTEMS,
  'train.on_bad_loss': ON_BAD_LOSS,
}


@pytest.mark.parametrize('module', CONFIGS, ids=lambda module: module.__name__)
def test_a_comment_names_all_choices(module):
  folder = pathlib.Path(module.__file__).parent
  files = [folder / 'common.py', pathlib.Path(module.__file__)]
  said = usage.comments_of(files)
  for key, value in usage.keys_of(module.get_config()):
    words = set(re.findall(r"'(\w+)'", said[key]))
    assert bool(words) == (key in CHOICES), key
    if key in CHOICES:
      assert words == set(CHOICES[key])
      assert value in CHOICES[key] or value is None


def test_the_list_of_programs_is_whole():
  folder = pathlib.Path(experiments.__file__).parent
  programs = {path.parent.name for path in folder.glob('*/__main__.py')}
  assert [path.stem for path in folder.glob('*.py')] == ['__init__']
  listed = re.findall(r'^([a-z]\w*): ', experiments.__doc__, re.M)
  assert set(listed) == programs
  assert programs <= {name.removesuffix('.__main__') for name in PROGRAMS}


def test_comments_are_found_wherever_they_stand(tmp_path):
  path = tmp_path / 'config.py'
  path.write_text("""
def get_config():
  config = ConfigDict()
  part = config.part = ConfigDict()
  # Of a comment
  # on two lines.
  part.above = 1
  part.behind = '#'  # after a sign in quotes
  # Not of what follows.

  part.none = 2
  other = part
  if other:
    other.inner = part.twin = 3  # of both
  part.above = 2  # a later one
  start = 3  # of no key
""")
  assert usage.comments_of([path]) == {
    'part': '',
    'part.above': 'Of a comment on two lines.',
    'part.behind': 'after a sign in quotes',
    'part.none': '',
    'part.inner': 'of both',
    'part.twin': 'of both',
  }


@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    ([CRITEO, '--config.data.pathh=x'], ['--config.data.path?']),
    ([CRITEO, '--config.trian.steps=5'], ['--config.train.steps?']),
    ([CRITEO, '--config.bottom=(3,)'], ['--config.model.bottom?']),
    ([CRITEO, '--config.model.zzz=3'], ['model.dim, ', 'model.top']),
    ([CRITEO, '--config.zzz=3'], ['train.steps', 'placement']),
    ([CRITEO, '--noconfig.resum'], ['--config.resume?']),
    ([CRITEO, '--config.train=5'], ['key by key', 'train.epochs']),
    ([CRITEO, '--config.skip.hot_bytes=5'], ['skip.hot_bytes']),
    (['--config=configs/criteo.py:huge'], ['variant must be one of']),
    (['--config=configs/none.py'], ['configs/none.py', 'configs/avazu.py, ']),
    (['--confg=configs/criteo.py'], ['confg', 'config']),
    ([CRITEO, 'seed=3', 'x y'], ["got seed=3 'x y'"]),
  ],
  ids=lambda value: value[-1] if value[0][0] == '-' else '',
)
def test_what_is_wrong_is_said(arguments, said, capsys):
  with pytest.raises(SystemExit) as ended:
    cli.read_command_line(['program', *arguments])
  assert ended.value.code == 1
  assert_one_sentence(capsys.readouterr().err, *said)


@pytest.mark.parametrize(
  ('body', 'said'),
  [
    ('return 5', 'ConfigDict'),
    ('return nothing', "NameError: name 'nothing' is not defined in line 2"),
    ('return', 'NoneType'),
    ('retrun 5', 'SyntaxError'),
  ],
)
def test_a_config_of_ones_own_that_is_none(body, said, tmp_path, capsys):
  path = tmp_path / 'mine.py'
  path.write_text(f'def get_config():\n  {body}\n')
  with pytest.raises(SystemExit):
    cli.read_command_line(['program', f'--config={path}'])
  assert_one_sentence(capsys.readouterr().err, said, 'mine.py')


@pytest.mark.parametrize(
  ('arguments', 'config', 'words', 'said'),
  [
    (['a'], 'none', 'FILE LINES [SEED]', 'got a'),
    (['a', '1', '2', '3'], 'none', 'FILE LINES [SEED]', 'got a 1 2 3'),
    ([], 'none', 'FILE LINES', 'got none'),
    ([CRITEO], 'none', '', 'takes no config'),
    ([], 'required', '', 'needs a config'),
    (['a'], 'none', '', 'got a'),
    (['{folder}'], 'none', 'RUN', 'the folder of a run'),
    (['{folder}/none'], 'none', '[RUN ...]', 'no such folder'),
  ],
)
def test_words_that_are_no_flags(
  arguments, config, words, said, tmp_path, capsys
):
  given = [word.format(folder=tmp_path) for word in arguments]
  with pytest.raises(SystemExit):
    cli.read_command_line(['program', *given], config, words)
  assert_one_sentence(capsys.readouterr().err, said)


def test_words_arrive_as_they_are_named(tmp_path):
  (tmp_path / 'config.json').touch()
  run = str(tmp_path)
  for words, given, read in [
    ('RUN FILE', [run, 'a'], [tmp_path, 'a']),
    ('[RUN ...]', [], []),
    ('[RUN ...]', [run] * 3, [tmp_path] * 3),
    ('FILE LINES [SEED]', ['a', '1'], ['a', '1']),
  ]:
    line = ['program', *given]
    assert cli.read_command_line(line, 'none', words) == read


@pytest.mark.parametrize(
  ('arguments', 'code', 'said'),
  [
    (['{folder}/a.txt', '10', '0', '5'], 1, 'FILE LINES [SEED]'),
    (['{folder}/a.txt', 'ten'], 1, 'whole numbers, got ten'),
    (['{folder}/a.txt', '0'], 1, 'at least one line'),
    (['{folder}', '10'], 1, 'Is a directory'),
    (['{folder}/a.txt', '10'], 0, '10 lines'),
  ],
)
def test_a_program_of_words(arguments, code, said, tmp_path):
  words = [word.format(folder=tmp_path) for word in arguments]
  done = finished([sys.executable, '-m', 'experiments.make_text', *words])
  assert done.returncode == code, done.stderr
  if code:
    assert_one_sentence(done.stderr, said)
  else:
    assert said in done.stdout
  names = [path.name for path in tmp_path.iterdir()]
  assert names == (['a.txt'] if not code and len(words) > 1 else [])


@pytest.fixture
def cache_of(monkeypatch):
  """Returns the cache folder that a program uses with some environment."""
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
  )
  before = {name: getattr(jax.config, name) for name in names}
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR')

  def of(**environment):
    for name, value in environment.items():
      monkeypatch.setenv(name, str(value))
    jax.config.update('jax_compilation_cache_dir', None)
    used = []
    look = lambda: used.append(jax.config.jax_compilation_cache_dir)  # noqa: E731
    assert cli.guarded(look) == 0
    return used[0]

  yield of
  for name, value in before.items():
    jax.config.update(name, value)


def test_programs_are_kept_in_the_cache_folder_of_the_user(cache_of, tmp_path):
  folder = cache_of(XDG_CACHE_HOME=tmp_path / 'cache')
  assert pathlib.Path(folder).parent == tmp_path / 'cache' / 'slipstream_jax'
  assert pathlib.Path(folder).is_dir()


def test_a_cache_folder_that_cannot_be_made_is_done_without(cache_of, tmp_path):
  (tmp_path / 'file').touch()
  assert cache_of(XDG_CACHE_HOME=tmp_path / 'file') is None


def test_an_entry_of_the_cache_that_was_never_written_is_removed(
  cache_of, tmp_path
):
  folder = pathlib.Path(cache_of(XDG_CACHE_HOME=tmp_path))
  (folder / 'jit_step-1-cache').touch()  # as JAX opens it, then a kill
  (folder / 'jit_step-2-cache').write_text('program')
  cache_of()
  assert [path.name for path in folder.iterdir()] == ['jit_step-2-cache']


def test_the_cache_folder_that_jax_is_told_stays(cache_of, tmp_path):
  used = cache_of(
    XDG_CACHE_HOME=tmp_path / 'cache', JAX_COMPILATION_CACHE_DIR=''
  )
  assert used is None
  assert not list(tmp_path.iterdir())
