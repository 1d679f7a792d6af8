"""Compares trees of arrays: structure, types and values."""

import functools
import itertools

import jax
import numpy as np

_same = functools.partial(np.testing.assert_array_equal, strict=True)


def assert_same(ours, theirs):
  """Checks two trees of arrays, numbers and None."""
  jax.tree.map(_same, ours, theirs)


def assert_same_batches(ours, theirs, count=None):
  """Checks the batches of two sources, or the first `count` of them."""
  ours, theirs = (itertools.islice(of, count) for of in (ours, theirs))
  for one, other in zip(ours, theirs, strict=True):
    assert_same(tuple(one), tuple(other))
