"""Lookup and pooling of any features against a float64 oracle."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.models.embedding import embed, stacked
from slipstream_jax.tables import COMBINERS, Feature
from tests.support.small import assert_same_bits

DIM = 3


def shares(pooling, weights):
  """What each lookup of a bag counts for, float64, from the definition."""
  total = {
    'sum': 1.0,
    'none': 1.0,
    'mean': weights.sum(),
    'sqrtn': np.sqrt((weights**2).sum()),
  }[pooling]
  return weights / total if total else np.zeros_like(weights)


def oracle(rows, inverse, features, weights, cotangents):
  """Embeddings by name, the rows' gradient, and what bounds rounding of both.

  One bag at a time, one lookup at a time.
  """
  rows = rows.astype(float)
  values, gradient, start = {}, np.zeros((2, *rows.shape)), 0
  for name, feature in features.items():
    length = feature.max_length
    out = np.zeros((2, *cotangents[name].shape))
    for b, places in enumerate(inverse[:, start : start + length]):
      at = np.flatnonzero(places >= 0)
      own = weights[b, start + at].astype(float)
      own = own if feature.weighted else np.ones(len(at))
      for step, share in zip(at, shares(feature.combiner, own), strict=True):
        where = (b, step) if feature.combiner == 'none' else (b,)
        term = share * rows[places[step]]
        out[(0, *where)] += term
        out[(1, *where)] += np.abs(term)
        term = share * cotangents[name][where].astype(float)
        gradient[0, places[step]] += term
        gradient[1, places[step]] += np.abs(term)
    values[name] = out
    start += length
  return values, gradient


@functools.partial(jax.jit, static_argnums=2)
def both(rows, inverse, features, weights, cotangents):
  """Embeddings, and the gradient of their product with the cotangents."""
  features = dict(features)

  def total(rows):
    found = embed(rows, inverse, features, weights)
    parts = [(found[name] * cotangents[name]).sum() for name in features]
    return sum(parts), found

  gradient, found = jax.grad(total, has_aux=True)(rows)
  return found, gradient


def draw_weights(rng, shape):
  """Dyadic, so that a sum of 0 is exactly that; of any sign and scale."""
  weights = rng.choice([0, 0.5, 1, 2, 3, -1, -0.5], shape)
  weights = weights * np.exp2(rng.integers(-90, 90, (shape[0], 1)))
  return weights.astype(np.float32)


def compare(features, examples, count, seed):
  rng = np.random.default_rng(seed)
  columns = sum(feature.max_length for feature in features.values())
  rows = rng.normal(size=(count, DIM)).astype(np.float32)
  inverse = rng.integers(-1, count, (examples, columns)).astype(np.int32)
  inverse[rng.random(inverse.shape) < rng.random()] = -1
  weights = draw_weights(rng, inverse.shape)
  cotangents = {
    name: rng.normal(
      size=(examples, feature.max_length, DIM)
      if feature.combiner == 'none'
      else (examples, DIM)
    ).astype(np.float32)
    for name, feature in features.items()
  }
  expected, slope = oracle(rows, inverse, features, weights, cotangents)
  # What weighs anything at padding must not matter.
  weights[inverse < 0] = np.where(rng.random((inverse < 0).sum()) < 0.5, 7, 0)
  arrays = jax.device_put((rows, inverse, weights, cotangents))
  found, gradient = jax.device_get(
    both(arrays[0], arrays[1], tuple(features.items()), *arrays[2:])
  )
  for name in features:
    value, size = expected[name]
    assert found[name].shape == value.shape
    assert (np.abs(found[name] - value) <= 1e-5 * size).all(), name
  assert (np.abs(gradient - slope[0]) <= 1e-5 * slope[1]).all()


FEATURES = st.lists(
  st.builds(
    Feature,
    st.just('t'),
    st.sampled_from(COMBINERS),
    st.sampled_from([1, 1, 2, 3, 7, 50]),
    st.booleans(),
  ),
  min_size=1,
  max_size=5,
)


@settings(max_examples=20)  # each is compiled
@given(
  FEATURES,
  st.sampled_from([1, 2, 5, 64]),
  st.sampled_from([1, 2, 9, 30]),
  st.integers(0, 2**32),
)
def test_values_and_gradients_equal_float64(features, examples, count, seed):
  features = {f'f{i}': feature for i, feature in enumerate(features)}
  compare(features, examples, count, seed)


def test_weights_of_one_are_no_weights():
  rng, shape = np.random.default_rng(0), (20, 4 * len(COMBINERS))
  rows = rng.normal(size=(9, DIM)).astype(np.float32)
  inverse = rng.integers(-1, 9, shape).astype(np.int32)
  ones = np.ones(shape, np.float32)
  rows, inverse, ones, threes = jax.device_put((rows, inverse, ones, 3 * ones))

  def bits(weighted, weights):
    features = {how: Feature('t', how, 4, weighted) for how in COMBINERS}
    return jax.jit(lambda *a: embed(a[0], a[1], features, a[2]))(
      rows, inverse, weights
    )

  plain = bits(False, None)
  for weighted, weights in ((True, ones), (True, None), (False, threes)):
    assert_same_bits(bits(weighted, weights), plain)


def test_names_keep_the_order_of_the_features():
  names = ['z', 'a', 'm']
  features = {name: Feature('t') for name in names}
  rows, inverse = jax.device_put(
    (np.ones((1, DIM), np.float32), np.zeros((2, 3), np.int32))
  )
  order = []
  jax.eval_shape(lambda *a: order.extend(embed(*a, features)), rows, inverse)
  assert order == names


def test_what_is_cut_and_stacked_again_is_one_gather():
  """Neither cutting nor stacking is left of either pass."""
  features = {f'f{i}': Feature('t') for i in range(26)}

  def whole(rows, inverse):
    out = rows.at[inverse].get(mode='promise_in_bounds')
    return jnp.where((inverse >= 0)[..., None], out, 0.0)

  def parts(rows, inverse):
    return stacked(embed(rows, inverse, features), 'it')

  def program(forward):
    def total(rows, inverse):
      return (jnp.sin(forward(rows, jnp.maximum(inverse, -1))) ** 2).sum()

    rows = jax.ShapeDtypeStruct((500, 16), jnp.float32)
    inverse = jax.ShapeDtypeStruct((64, 26), jnp.int32)
    compiled = jax.jit(jax.grad(total)).lower(rows, inverse).compile()
    return compiled.as_text()

  text = program(parts)
  assert 'gather' in program(whole)
  for wasted in (' concatenate(', ' pad(', ' slice('):
    assert wasted not in text


def test_unlike_dims_in_a_dlrm_end_in_one_sentence():
  def init():
    embeddings = {'a': jnp.zeros((2, 16)), 'b': jnp.zeros((2, 8))}
    return DLRM((16,), (4,)).init(
      jax.random.key(0), jnp.zeros((2, 3)), embeddings
    )

  with pytest.raises(
    UserError, match=r"\[16\] as feature 'a' .* \[8\] of"
  ) as e:
    jax.eval_shape(init)
  assert e.value.where == 'DLRM, embeddings'
