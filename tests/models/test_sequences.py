"""SASRec and HSTU: loops over positions, and nothing from the future."""

import functools

from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.models.sequences import HSTU, SASRec, SASRecBlock
from tests.models.test_interactions import dense, doubled, params_of

EXAMPLES, STEPS, DIM, HEADS = 4, 7, 6, 2


class SASRecStates(SASRec):
  """The states alone, without the candidate."""

  @nn.compact
  def __call__(self, history, there, times):
    return self.states(history, there, times)


class HSTUStates(HSTU):
  @nn.compact
  def __call__(self, history, there, times):
    return self.states(history, there, times if self.times else None)


STATES = {
  'sasrec': SASRecStates(2, HEADS),
  'hstu': HSTUStates(2, HEADS),
  'hstu with times': HSTUStates(2, HEADS, times='when'),
}
EVERY = pytest.mark.parametrize('name', STATES)


def drawn(seed=0):
  """A history [B, H, D], which steps are there, and their times."""
  rng = np.random.default_rng(seed)
  shape = EXAMPLES, STEPS
  history = rng.normal(size=(*shape, DIM)).astype(np.float32)
  there = rng.random(shape) < 0.7
  there[0], there[1] = True, False
  times = rng.integers(0, 1 << 14, shape).cumsum(1).astype(np.float32)
  return history * there[..., None], there, times


@functools.cache
def started(name):
  """The jitted states of a model, and its parameters."""
  model = STATES[name]
  apply = jax.jit(lambda params, *x: model.apply({'params': params}, *x))
  return apply, params_of(model, *drawn())


def states(name, *inputs):
  apply, params = started(name)
  return jax.device_get(apply(*jax.device_put((params, *inputs))))


def norm(params, x):
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
  return x * params['scale'] + params['bias']


def silu(x):
  return x / (1 + np.exp(-x))


def attended(weigh, there, query, key, value):
  """Sums values of earlier steps. `weigh` maps scores and their steps."""
  result = np.zeros((len(query), DIM))
  for i in range(len(query)):
    seen = [j for j in range(i + 1) if there[j]]
    for head in range(HEADS if seen else 0):
      at = slice(head * DIM // HEADS, (head + 1) * DIM // HEADS)
      scores = np.array([query[i, at] @ key[j, at] for j in seen])
      for weight, j in zip(weigh(scores, i, seen), seen, strict=True):
        result[i, at] += weight * value[j, at]
  return result


def sasrec_oracle(params, history, there, times):
  def weigh(scores, i, seen):
    shares = np.exp(scores / (DIM / HEADS) ** 0.5)
    return shares / shares.sum()

  places = np.maximum(there.cumsum() - 1, 0)
  x = history * DIM**0.5 + params['position'][places]
  for number in range(2):
    block = params[f'block_{number}']
    query = dense(block['query'], norm(block['norm'], x))
    key, value = dense(block['key'], x), dense(block['value'], x)
    x = x + attended(weigh, there, query, key, value)
    hidden = dense(block['first'], norm(block['norm_2'], x))
    x = x + dense(block['second'], np.maximum(hidden, 0))
  return norm(params['norm'], x)


def hstu_oracle(params, history, there, times):
  places, x = np.maximum(there.cumsum() - 1, 0), history
  for number in range(2):
    block = params[f'block_{number}']

    def weigh(scores, i, seen, block=block):
      bias = np.array([block['place'][places[i] - places[j]] for j in seen])
      if times is not None:
        passed = np.maximum(np.abs(times[i] - times[seen]), 1)
        buckets = (np.log(passed) / 0.301).astype(int)
        bias = bias + block['time'][np.minimum(buckets, 128)]
      return silu(scores + bias) / STEPS

    parts = silu(dense(block['parts'], norm(block['norm'], x)))
    gate, value, query, key = np.split(parts, 4, axis=1)
    mixed = attended(weigh, there, query, key, value)
    x = x + dense(block['out'], norm(block['norm_2'], mixed) * gate)
  return x


@EVERY
def test_states_equal_a_loop_over_positions(name):
  history, there, times = drawn()
  found = states(name, history, there, times)
  _, params = started(name)
  oracle = sasrec_oracle if name == 'sasrec' else hstu_oracle
  if name == 'hstu':
    times = [None] * EXAMPLES
  params = doubled(params)
  for example in range(EXAMPLES):
    expected = oracle(
      params, doubled(history[example]), there[example], times[example]
    )
    at = there[example]  # states of padding are not used
    np.testing.assert_allclose(
      found[example][at], expected[at], rtol=1e-4, atol=1e-4
    )


def test_attention_of_sasrec_is_that_of_torch():
  """Without padding at the start, where torch divides by 0."""
  torch = pytest.importorskip('torch')
  x, _, _ = drawn()
  there = np.arange(STEPS) < np.array([[STEPS], [1], [4], [5]])
  model = SASRecBlock(HEADS)
  params = params_of(model, x, there)
  apply = jax.jit(lambda params, *x: model.apply({'params': params}, *x))
  found = jax.device_get(apply(*jax.device_put((params, x, there))))
  layer = torch.nn.MultiheadAttention(DIM, HEADS, batch_first=True)
  parts = [params[name] for name in ('query', 'key', 'value')]
  loaded = {
    'in_proj_weight': np.concatenate([part['kernel'].T for part in parts]),
    'in_proj_bias': np.concatenate([part['bias'] for part in parts]),
    'out_proj.weight': np.eye(DIM, dtype=np.float32),
    'out_proj.bias': np.zeros(DIM, np.float32),
  }
  layer.load_state_dict({k: torch.tensor(v) for k, v in loaded.items()})
  normed = norm(params['norm'], x).astype(np.float32)
  mixed, _ = layer(
    *map(torch.tensor, (normed, x, x)),
    key_padding_mask=torch.tensor(~there),
    attn_mask=torch.tensor(~np.tril(np.ones((STEPS, STEPS), bool))),
    need_weights=False,
  )
  y = x + mixed.detach().numpy()
  hidden = np.maximum(dense(params['first'], norm(params['norm_2'], y)), 0)
  expected = y + dense(params['second'], hidden)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@EVERY
@settings(max_examples=25)
@given(st.integers(0, STEPS - 2), st.integers(1, 1000), st.data())
def test_no_state_knows_a_later_step(name, last, seed, data):
  """Whatever is edited after it: rows, times, and which steps are there."""
  edited = [array.copy() for array in drawn()]
  others = drawn(seed)
  chosen = data.draw(st.lists(st.integers(0, 2), min_size=1, unique=True))
  for number in chosen:
    edited[number][:, last + 1 :] = others[number][:, last + 1 :]
  one, other = states(name, *drawn()), states(name, *edited)
  np.testing.assert_array_equal(one[:, : last + 1], other[:, : last + 1])
  if 0 in chosen:
    assert not np.array_equal(one, other)


MODELS = {
  'sasrec': SASRec(1, HEADS, top=()),
  'hstu': HSTU(1, HEADS, top=(5,), times='when'),
}


def logits(model, history, there, times, candidate):
  """Of two features, the second one half of the first."""
  rows = np.concatenate([history, candidate], 1)
  known = np.concatenate([there, np.ones((EXAMPLES, 1), bool)], 1)
  when = np.concatenate([times, times[:, -1:]], 1)
  inputs = {'when': when}, {'a': rows, 'b': rows / 2}, {'a': known, 'b': known}
  params = params_of(model, *inputs[:2])
  apply = jax.jit(
    lambda params, x, e, real: model.apply({'params': params}, x, e, real=real)
  )
  return jax.device_get(apply(*jax.device_put((params, *inputs))))


@pytest.mark.parametrize('name', MODELS)
def test_padding_may_stand_anywhere(name):
  candidate = np.random.default_rng(1).normal(size=(EXAMPLES, 1, DIM))
  candidate = candidate.astype(np.float32)
  history, there, times = drawn()
  times[:] = np.arange(STEPS)
  one = logits(MODELS[name], history, there, times, candidate)
  packed = np.argsort(~there, axis=1, kind='stable')  # padding last
  moved = [
    np.take_along_axis(array, packed.reshape(*packed.shape, *[1] * more), 1)
    for array, more in ((history, 1), (there, 0), (times, 0))
  ]
  other = logits(MODELS[name], *moved, candidate)
  at = slice(0, None) if name == 'sasrec' else slice(0, 1)
  np.testing.assert_allclose(one[at], other[at], rtol=1e-5, atol=1e-5)
  if name == 'sasrec':
    assert one[1] == 0  # no history: the state is 0
    assert np.abs(one[[0, 2, 3]]).min() > 0


@pytest.mark.parametrize('kind', [SASRec, HSTU])
def test_what_does_not_fit(kind):
  rows = {'a': np.zeros((2, 4, DIM), np.float32)}
  none = np.zeros((2, 0), np.float32)
  for model, inputs, said in (
    (kind(heads=4), (none, rows), 'must divide the dim of the tables, 6'),
    (kind(), (none, {'a': rows['a'][:, 0]}), 'sequences of a history'),
    (kind(times='when'), (none, rows), 'must be a dense feature'),
    (kind(times=0), (none, rows), 'must be a dense feature'),
  ):
    with pytest.raises(UserError, match=said):
      params_of(model, *inputs)


@pytest.mark.parametrize('kind', [SASRec, HSTU])
def test_next_items_are_a_softmax_over_the_batch(kind):
  """Compares the loss with a softmax of products of states and candidates."""
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(EXAMPLES, STEPS + 1, DIM)).astype(np.float32)
  log_q = rng.normal(size=(EXAMPLES, 1)).astype(np.float32)
  weights = np.float32([1, 1, 0, 1])
  model = kind(1, HEADS, top=(), next_item=True, log_q='q')
  given = {'q': log_q}, {'item': rows}
  variables = {'params': params_of(model, *given)}
  device = jax.device_put((variables, *given, weights))

  def call(**named):
    return jax.device_get(
      jax.jit(lambda *x: model.apply(*x[:3], weights=x[3], **named))(*device)
    )

  users, items = (call(side=side) for side in ('users', 'items'))
  np.testing.assert_array_equal(items, rows[:, -1])
  np.testing.assert_allclose(call(), (users * items).sum(1), rtol=1e-5)
  scores = np.asarray(users @ items.T, np.float64) - log_q.T
  found = call(train=True)
  for number in (0, 1, 3):
    rest = [scores[number, j] for j in (0, 1, 3) if j != number]
    wanted = scores[number, number] - np.log(np.exp(rest).sum())
    np.testing.assert_allclose(found[number], wanted, rtol=1e-4, atol=1e-5)
  with pytest.raises(UserError, match='top must be empty'):
    params_of(kind(1, HEADS, next_item=True), *given)
