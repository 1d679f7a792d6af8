"""Columns of plain data sets have the bytes that they always had.

The checksums are of version 2 of the format, which knew of one length for all
features, one feature per table and labels of 0 or 1.
"""

import pytest

from tests.support.packed_folders import checksums, prepared
from tests.support.raw_example import fields, raw_of

PINNED = {
  (None, 'counted'): 'labels 0c0fcaba dense 25346292 a 28543405'
  ' frequency_a 80f0cae6 vocabulary_a 33984d82 b 1e10efe6'
  ' frequency_b a96356f7 vocabulary_b c047cb8c c 500debc9'
  ' frequency_c 2e02f449 vocabulary_c 5d29d4c0',
  (None, 'min_count'): 'labels 0c0fcaba dense 25346292 a 28543405'
  ' frequency_a 80f0cae6 vocabulary_a 33984d82 b a4226fea'
  ' frequency_b d6fc99a1 vocabulary_b 748d0e00 c ba95eaac'
  ' frequency_c 6890079e vocabulary_c 3f2e8cbd',
  (None, 'hashed'): 'labels 0c0fcaba dense 25346292 a 625d8845'
  ' frequency_a 3bd09751 rank_a f3dac359 b 3355979c frequency_b 7b01e1d4'
  ' rank_b aef43122 c 74f869f7 frequency_c 3840deda rank_c f7532c0b',
  (3, 'counted'): 'labels e98e13e9 dense 4006be7b a eb62b9af'
  ' frequency_a a7688ccc vocabulary_a 33984d82 b 0e8fe043'
  ' frequency_b a91a9c97 vocabulary_b bc38403b c 9fa0a19e'
  ' frequency_c 3e5f6f5d vocabulary_c e12f0f7a',
  (3, 'min_count'): 'labels e98e13e9 dense 4006be7b a eb62b9af'
  ' frequency_a a7688ccc vocabulary_a 33984d82 b 07d03318'
  ' frequency_b 2cba5e5f vocabulary_b 5789d375 c c90b6d30'
  ' frequency_c b91561c1 vocabulary_c 4503e5a4',
  (3, 'hashed'): 'labels e98e13e9 dense 4006be7b a 5cb0e454'
  ' frequency_a a5cc38ee rank_a f3dac359 b 3535cad3 frequency_b 98d21951'
  ' rank_b 3678adb3 c 35c9a309 frequency_c 7c7a7258 rank_c 64fefc9d',
}
ARGUMENTS = {
  'counted': {},
  'min_count': {'min_count': 3},
  'hashed': {'hash_rows': 97},
}


@pytest.mark.parametrize(('length', 'kind'), PINNED)
def test_columns_of_the_version_before(tmp_path, length, kind):
  raw = raw_of(fields(sequence_length=length), (0.3, 0.7))
  prepared(raw, tmp_path / 'data', **ARGUMENTS[kind])
  words = PINNED[length, kind].split()
  expected = dict(zip(words[::2], words[1::2], strict=True))
  assert checksums(tmp_path / 'data') == expected
