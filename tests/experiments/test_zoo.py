"""The models that configs name, and the program that compares them."""

import itertools

import jax
import numpy as np
import pytest

from configs import common, criteo, terabyte
from experiments.common.models import model_of

CONFIGS = {
  **{name: criteo.get_config(name).model for name in ('planted', *common.ZOO)},
  'mlperf': terabyte.get_config('dcn').model,
}


def sizes_of(model, dense=13, features=26):
  """Elements of each parameter, by its path."""
  rows = {
    f'C{i}': np.zeros((2, model.dim), np.float32) for i in range(features)
  }
  shapes = jax.eval_shape(
    lambda *x: model_of(model).init(jax.random.key(0), *x),
    np.zeros((2, dense), np.float32),
    rows,
  )
  leaves = jax.tree.leaves_with_path(shapes['params'])
  return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize('name', CONFIGS)
def test_a_config_makes_the_model_that_it_names(name):
  sizes = sizes_of(CONFIGS[name])
  kind = type(model_of(CONFIGS[name])).__name__.lower()
  assert kind == {'planted': 'dlrm', 'mlperf': 'dcn'}.get(
    name, name.replace('_', '')
  )
  assert any('top' in path for path in sizes)
  assert any('wide' in path for path in sizes) == (
    name in ('deepfm', 'wide_deep')
  )


def test_the_layers_of_dlrm_dcnv2():
  """As in MLPerf's reference: 27 vectors of 128, three crosses of rank 512."""
  sizes = sizes_of(CONFIGS['mlperf'])
  crosses = [shape for path, shape in sizes.items() if 'cross' in path]
  width = 27 * 128
  assert crosses.count((width, 512)) == crosses.count((512, width)) == 3
  assert crosses.count((width,)) == 3
  assert len(crosses) == 9
  kernels = [s for p, s in sizes.items() if 'top' in p and len(s) == 2]
  wide = [width, 1024, 1024, 512, 256, 1]
  assert kernels == [*itertools.pairwise(wide)]
