"""Notebooks run from top to bottom, and print what they print as stored."""

import pathlib
import warnings

import pytest

from notebooks import repository
from tests.support import programs

nbformat = pytest.importorskip('nbformat')

NOTEBOOKS = sorted(
  (pathlib.Path(__file__).resolve().parents[1] / 'notebooks').glob('*.ipynb')
)


def test_there_are_notebooks():
  assert NOTEBOOKS


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_the_repository(path):
  assert path.read_text() == repository.written(path)


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # of Jupyter's own making
    from nbclient import NotebookClient

    monkeypatch.setenv('JUPYTER_RUNTIME_DIR', str(tmp_path))
    monkeypatch.setenv('IPYTHONDIR', str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    stored = printed(notebook)
    NotebookClient(notebook, timeout=programs.LIMIT_S).execute()
  assert printed(notebook).keys() == stored.keys()
  plots = [
    output
    for cell in notebook.cells
    for output in cell.get('outputs', [])
    if 'image/png' in output.get('data', {})
  ]
  assert plots
  assert path.stat().st_size < 300_000


def printed(notebook):
  """What each cell prints, by the cell's number."""
  return {
    i: [output.text for output in cell.outputs if 'text' in output]
    for i, cell in enumerate(notebook.cells)
    if cell.cell_type == 'code' and cell.outputs
  }
