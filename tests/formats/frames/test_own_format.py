"""docs/own_format.md runs as it stands, and its claims hold."""

import pathlib
import re

import pytest

from slipstream_jax.errors import UserError

PAGE = pathlib.Path(__file__).resolve().parents[3] / 'docs' / 'own_format.md'


@pytest.fixture(scope='module')
def page(tmp_path_factory):
  """What the blocks of the page define, and where they wrote."""
  folder = tmp_path_factory.mktemp('page')
  blocks = re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)
  names = {'__name__': 'page'}
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    for block in blocks:
      exec(compile(block, str(PAGE), 'exec'), names)
    yield names, folder  # still there, as its paths are relative


def test_the_page_runs_and_trains_alike_from_both_readers(page):
  names, _ = page
  (ours,), (theirs,) = names['packed'].test(20), names['held'].test(20)
  for mine, other in zip(ours[:4], theirs[:4], strict=True):
    assert (mine == other).all()
  assert ours.lookups.shape == (20, 5)
  assert ours.labels.tolist() == [0.0, 1.0] * 10


def test_a_bad_line_of_the_format_is_one_sentence(page):
  names, folder = page
  (folder / 'bad.txt').write_text('3 stars by ann: 7\n3 stars: 8\n')
  with pytest.raises(UserError, match=r"'3 stars: 8' \(.*bad.txt, line 2\)"):
    names['in_memory'](names['stars_raw'](folder / 'bad.txt'))


def test_the_format_is_short():
  (source,) = re.findall(
    r'(def stars_raw.*?)\n```', PAGE.read_text(), re.DOTALL
  )
  assert len([line for line in source.splitlines() if line.strip()]) <= 42
