"""Writes the address of the repository into all notebooks.

Set `REPOSITORY` below, and run

    python notebooks/repository.py

Each notebook then has a badge that opens it in Colab, and a first cell that
installs the library there. The tests check that all notebooks are up to date.
"""

import json
import pathlib

REPOSITORY = 'OWNER/slipstream_jax'
"""Owner and name on GitHub. The badges work once OWNER is replaced."""

_COLAB = 'https://colab.research.google.com'
_INSTALL = """\
# Installs the library if it is missing, as on Colab.
import importlib.metadata
import importlib.util
import pathlib

REPOSITORY = '{repository}'  # written by notebooks/repository.py
if importlib.util.find_spec('slipstream_jax') is None:
  local = pathlib.Path('../pyproject.toml').exists()
  assert local or not REPOSITORY.startswith('OWNER/'), 'set REPOSITORY first'
  source = '..' if local else f'git+https://github.com/{REPOSITORY}'
  # Keeps the installed JAX, which fits the CUDA plugin of Colab.
  versions = {d.name: d.version for d in importlib.metadata.distributions()}
  kept = ' '.join(
    f'{name}=={version}'
    for name, version in versions.items()
    if name in ('jax', 'jaxlib') or name.startswith(('jax-cuda', 'jax_cuda'))
  )
  %pip install -q {source} {kept}"""


def written(path: pathlib.Path) -> str:
  """Returns the text of a notebook with the badge and the install cell."""
  notebook = json.loads(path.read_text())
  title, install = notebook['cells'][:2]
  address = f'{_COLAB}/github/{REPOSITORY}/blob/main/notebooks/{path.name}'
  badge = f'[![Open in Colab]({_COLAB}/assets/colab-badge.svg)]({address})'
  lines = ''.join(title['source']).splitlines()
  lines = [line for line in lines if not line.startswith('[![Open in Colab]')]
  while not lines[1]:
    del lines[1]
  title['source'] = _lines('\n'.join([lines[0], '', badge, '', *lines[1:]]))
  install['source'] = _lines(_INSTALL.replace('{repository}', REPOSITORY))
  return json.dumps(notebook, indent=1, ensure_ascii=False) + '\n'


def _lines(text: str) -> list[str]:
  return text.splitlines(keepends=True)


def main() -> None:
  """Rewrites the notebooks beside this file."""
  for path in sorted(pathlib.Path(__file__).parent.glob('*.ipynb')):
    path.write_text(written(path))


if __name__ == '__main__':
  main()
