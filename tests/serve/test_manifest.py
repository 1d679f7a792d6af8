"""The manifest of an export, damaged in every way: a sentence, or the same."""

import contextlib
import json
import os
import random
import resource

import pytest

from slip_serve import ServeError
from slip_serve.layout import _checksum, MANIFEST, read_layout, text_of
from tests.serve import exported
from tests.support import small
from tests.support.texts.mutations import mutated, overwrite, with_another_value

MUTATIONS = int(os.environ.get('MUTATIONS', '10000'))  # see CONTRIBUTING.md


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  run = exported.trained(small.recipe(), steps=0)
  return exported.export(run, tmp_path_factory.mktemp('m') / 'x', sizes=(1,))


def test_what_is_written_is_read(folder):
  layout = read_layout(folder)
  assert text_of(layout) == (folder / MANIFEST).read_text()


def test_mutated_manifests_are_refused_or_read_right(folder):
  path = folder / MANIFEST
  text, layout = path.read_bytes(), read_layout(folder)
  rng = random.Random(0)
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  try:
    for _ in range(MUTATIONS):
      overwrite(path, mutated(text, rng))
      with contextlib.suppress(ServeError):
        assert read_layout(folder) == layout
  finally:
    path.write_bytes(text)
  grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert grown < 200_000  # kB


def test_an_older_manifest_is_read(folder):
  """It says less of vocabularies and of dense features."""
  path = folder / MANIFEST
  text, layout = path.read_bytes(), read_layout(folder)
  values = json.loads(text)
  for key in 'version', 'checksum', 'dense':
    del values[key]
  for words in values['vocabulary']:
    del words['texts'], words['hash_rows']
  try:
    older = {'version': 1, **values, 'checksum': _checksum(values)}
    path.write_text(json.dumps(older))
    assert read_layout(folder) == layout
  finally:
    path.write_bytes(text)


WRONG = (None, -1, 2**70, 1.5, True, '', '../x', [], {}, [[]], 'x' * 300)


def test_values_of_other_meaning_are_refused_though_the_checksum_fits(folder):
  """Who writes a checksum anew may write anything: nothing is believed."""
  path = folder / MANIFEST
  text = path.read_bytes()
  values = json.loads(text)
  rng, tried = random.Random(1), 0
  try:
    for changed in with_another_value(values, WRONG, 4, rng):
      for key in 'version', 'checksum':
        changed.pop(key, None)
      changed = {'version': 1, **changed, 'checksum': _checksum(changed)}
      path.write_text(json.dumps(changed))
      tried += 1
      with contextlib.suppress(ServeError):
        read_layout(folder)
  finally:
    path.write_bytes(text)
  assert tried > 300
