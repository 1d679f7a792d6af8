"""The page for those who bring their own data: its code runs, top to bottom."""

import pathlib
import re

import slipstream_jax as slip
from slipstream_jax.inputs.batches import batches

PAGE = pathlib.Path(__file__).resolve().parents[2] / 'docs' / 'own_data.md'


def test_the_page_runs(monkeypatch, capsys, tmp_path):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(slip, 'batches', batches, raising=False)
  text = PAGE.read_text()
  code = '\n'.join(re.findall(r'```python\n(.*?)```', text, re.DOTALL))
  exec(compile(code, PAGE.name, 'exec'), {'__name__': 'own_data'})
  # The sentence on the page is the one that is printed.
  said = ' '.join(re.findall(r'^> (.*)$', text, re.MULTILINE))
  assert capsys.readouterr().out.strip() == said
