"""A damaged manifest of packed data: a sentence, or the same examples."""

import json
import os
import random
import resource

import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.packed.columns import MANIFEST
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.state import integers
from tests.support.packed_folders import prepared
from tests.support.raw_example import fields, raw_of
from tests.support.texts.mutations import (
  check_sentence,
  mutated,
  overwrite,
  with_another_value,
)
from tests.support.watchdog import watchdog

MUTATIONS = int(os.environ.get('MUTATIONS', '10000'))  # see CONTRIBUTING.md
MORE = [20, pytest.param(1, marks=pytest.mark.slow)]
OLDER = pytest.mark.filterwarnings('ignore:.*before blocks had checksums')
WRONG = (None, -1, 0, 2**70, 1.5, True, '', '../x', 'f8', [], {}, [[]])


@pytest.fixture(params=['counted', 'given'])
def folder(tmp_path, request):
  given = None
  if request.param == 'given':
    ids, shared = np.arange(20), np.array([1, 2], np.int32)
    given = [Vocabulary(integers(ids), 3, 30, shared)] * 3
  raw = raw_of(fields(), (0.3, 0.7))
  prepared(raw, tmp_path / 'data', vocabularies=given)
  return tmp_path / 'data'


def examples_of(folder):
  """All that a data set is asked for."""
  data = packed_dataset(folder)
  batches = []
  for source in data.train(7), data.test(7):
    batches.append(next(source))
    source.close()
  assert len(data.counts()) == sum(data.sizes.values())
  words = data.vocabulary()
  assert len(words[0].rows(np.arange(5))) == 5
  return batches


def same(one, other):
  for a, b in zip(one, other, strict=True):
    for x, y in zip(a, b, strict=True):
      np.testing.assert_array_equal(x, y)


@OLDER
@pytest.mark.parametrize('share', MORE)
def test_mutated_manifests_are_refused_or_read_right(folder, share):
  path = folder / MANIFEST
  text, expected = path.read_bytes(), examples_of(folder)
  rng, refused = random.Random(0), 0
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with watchdog(busy_s=300):
    for _ in range(MUTATIONS // share):
      overwrite(path, mutated(text, rng))
      try:
        same(examples_of(folder), expected)
      except UserError as error:
        check_sentence(error)
        refused += 1
  assert refused > MUTATIONS // share // 2
  grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert grown < 200_000  # kB


@OLDER
@pytest.mark.parametrize('each', [1, pytest.param(6, marks=pytest.mark.slow)])
def test_values_of_other_meaning_end_in_a_sentence(folder, each):
  """In manifests of before, which have no checksum."""
  path = folder / MANIFEST
  values = json.loads(path.read_bytes())
  del values['checksum']
  path.write_text(json.dumps(values))
  assert examples_of(folder)
  rng, tried = random.Random(1), 0
  with watchdog(busy_s=300):
    for changed in with_another_value(values, WRONG, each, rng):
      overwrite(path, json.dumps(changed).encode())
      tried += 1
      try:
        examples_of(folder)
      except UserError as error:
        check_sentence(error)
  assert tried > 50 * each
