"""A folder of memory is told from one of a disk."""

import os

import pytest

from experiments.common.build import in_memory


@pytest.mark.skipif(not os.path.ismount('/dev/shm'), reason='is no mount here')
def test_shared_memory_is_no_disk():
  assert in_memory('/dev/shm')
  assert not in_memory('/proc')


def test_what_is_not_there_is_no_memory(tmp_path):
  assert not in_memory(tmp_path / 'none')
