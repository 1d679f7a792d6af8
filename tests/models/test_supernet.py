"""The supernet: the net that it is, what nets cost, and what it finds."""

import functools
import itertools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.errors import UserError
from slipstream_jax.models.supernet import (
  ARCHITECTURE,
  cost_of,
  decisions,
  expected_cost,
  inputs_of,
  interaction_of,
  likeliest,
  sampled,
  Space,
  Supernet,
)
from tests.models.test_interactions import params_of

MODELS = {
  'dot': slip.DLRM,
  'cross': lambda **k: slip.DCN(**k, crosses=1, rank=2),
  'fm': lambda **k: slip.DHEN(**k, layers=(('fm',),)),
}
TABLES, DENSE, EXAMPLES = (0, 1, 1), 3, 9
SPACE = Space(
  tuple((name, interaction_of(make())) for name, make in MODELS.items()),
  TABLES,
  widths=(2, 3),
  bottom=3,
  top=4,
  dims=(1, 2, 4),
)
ROWS = 7, 5
rng = np.random.default_rng(0)
X = rng.normal(size=(EXAMPLES, DENSE)).astype(np.float32)
EMBEDDINGS = {
  f'f{i}': rng.normal(size=(EXAMPLES, 4)).astype(np.float32) for i in range(3)
}


def walked_back(part, picks):
  """A net's layers from the logit down: (layer, input, output) by place.

  The second value is the place of its input.
  """
  ends = {'bottom': (4,), 'top': (1,)}[part]
  count, first = {'bottom': (3, 1), 'top': (4, len(MODELS))}[part]
  place, path = 0, []
  for layer in reversed(range(count)):
    inputs = len(SPACE.widths) if layer else first
    width = (SPACE.widths if layer < count - 1 else ends)[place]
    name = f'{part}_{layer}_{width}'
    pick = int(picks.get('interaction' if name[:5] == 'top_0' else name, 0))
    if pick < inputs:
      path.insert(0, (layer, pick, place))
      place = pick
  return path, place


def extracted(params, picks):
  """The model that is one net of a supernet, with the same parameters."""
  parts, widths = {}, {}
  for part, end in (('bottom', 4), ('top', 1)):
    path, place = walked_back(part, picks)
    last = {'bottom': 2, 'top': 3}[part]
    own = {}
    for number, (layer, pick, output) in enumerate(path):
      outputs = SPACE.widths if layer < last else (end,)
      start = sum(outputs[:output])
      columns = slice(start, start + outputs[output])
      of_layer = params[f'{part}_{layer}_{pick}']
      own[f'Dense_{number}'] = {
        key: of_layer[key][..., columns] for key in ('kernel', 'bias')
      }
      widths.setdefault(part, []).append(outputs[output])
    parts[part] = own
  parts |= params.get(f'interaction_{place}', {})
  name = [*MODELS][place]
  model = MODELS[name](
    bottom=tuple(widths['bottom']), top=tuple(widths['top']), padded=True
  )
  dims = [SPACE.dims[pick] for pick in picks['dims']]
  return name, model, parts, dims


def test_with_certain_decisions_it_is_the_net_that_it_says():
  """The model of that net has the same logits, with the same parameters."""
  supernet = Supernet(SPACE, 10)
  params, seen = params_of(supernet, X, EMBEDDINGS), set()
  apply = jax.jit(supernet.apply)
  for seed in range(14):
    draw = np.random.default_rng(seed)
    logits = {
      name: draw.normal(size=shape).astype(np.float32)
      for name, shape in decisions(SPACE).items()
    }
    picks = {name: x.argmax(-1) for name, x in logits.items()}
    name, model, own, dims = extracted(params, picks)
    net = likeliest(SPACE, logits)
    assert net == (model.bottom, model.top[:-1], name, tuple(dims))
    seen.add((name, len(net.bottom), len(net.top)))
    variables = {
      'params': {**params, ARCHITECTURE: logits},
      'search': {'steps': np.int32(0)},
    }
    rows = {
      key: x[:, : dims[table]]
      for (key, x), table in zip(EMBEDDINGS.items(), TABLES, strict=True)
    }
    given = jax.device_put((variables, {'params': own}, X, EMBEDDINGS, rows))
    found = apply(given[0], given[2], given[3])
    expected = jax.jit(model.apply)(given[1], given[2], given[4])
    np.testing.assert_allclose(found, expected, atol=1e-6)
  # All interactions, and layers left out on both sides.
  assert {name for name, *_ in seen} == {*MODELS}
  assert {below for _, below, _ in seen} == {2, 3}
  assert {above for *_, above in seen} >= {1, 2, 3}


def test_options_are_drawn_for_each_example_until_the_temperature_has_fallen():
  supernet = Supernet(SPACE, 4, fall=2.0)
  same = {name: np.repeat(x[:1], 400, 0) for name, x in EMBEDDINGS.items()}
  given = jax.device_put((np.repeat(X[:1], 400, 0), same))
  params = jax.device_put(params_of(supernet, X, EMBEDDINGS))
  variables = {
    'params': params,
    'search': jax.device_put({'steps': np.int32(0)}),
  }
  trained = jax.jit(
    functools.partial(supernet.apply, train=True, mutable=['search'])
  )
  for step in range(6):
    key = jax.device_put(np.array([0, step], np.uint32))
    logits, changed = trained(variables, *given, rng=key)
    variables = {**variables, **changed}
    # Equal examples differ by their draws alone.
    assert len(np.unique(logits)) > 300
  assert int(variables['search']['steps']) == 6
  assert len(np.unique(jax.jit(supernet.apply)(variables, *given))) == 1


def every_net(space, logits):
  """Yields each net with its probability, in float64."""
  shapes = decisions(space)
  names = [name for name in shapes if name != 'dims']
  shares = {}
  for name in names:
    e = np.exp(np.asarray(logits[name], np.float64))
    shares[name] = e / e.sum()
  dims = np.exp(np.asarray(logits['dims'], np.float64))
  dims /= dims.sum(1, keepdims=True)
  options = [range(shapes[name][0]) for name in names]
  tables = itertools.product(range(shapes['dims'][1]), repeat=len(dims))
  for picks in itertools.product(*options, [*tables]):
    certain = {
      name: np.arange(len(shares[name])) == pick
      for name, pick in zip(names, picks[:-1], strict=True)
    }
    certain['dims'] = np.eye(dims.shape[1])[[*picks[-1]]]
    chance = np.prod([shares[n][p] for n, p in zip(names, picks, strict=False)])
    chance *= np.prod([dims[t, p] for t, p in enumerate(picks[-1])])
    yield likeliest(space, certain), chance


def test_the_expected_cost_is_the_mean_over_all_nets():
  """And its gradient that of the mean, by finite differences in float64."""
  space = SPACE._replace(
    interactions=SPACE.interactions[:2], bottom=2, top=3, dims=(1, 4)
  )
  inputs = inputs_of(space, DENSE, ROWS)
  draw = np.random.default_rng(1)
  logits = {
    name: draw.normal(size=shape) for name, shape in decisions(space).items()
  }

  def mean(logits):
    nets = [
      (chance * np.array(cost_of(inputs, net)), chance)
      for net, chance in every_net(space, logits)
    ]
    assert np.isclose(sum(chance for _, chance in nets), 1)
    return sum(cost for cost, _ in nets)

  single = jax.device_put(
    {name: x.astype(np.float32) for name, x in logits.items()}
  )
  own = jax.jit(lambda x: jnp.stack(expected_cost(space, inputs, x)))
  np.testing.assert_allclose(own(single), mean(logits), rtol=1e-5)
  gradient = jax.device_get(jax.jit(jax.jacobian(own))(single))
  for name in ('bottom_1_4', 'interaction', 'top_1_2', 'dims'):
    step = np.zeros_like(logits[name])
    step.flat[0] = 1e-5
    sides = [mean({**logits, name: logits[name] + s}) for s in (step, -step)]
    np.testing.assert_allclose(
      gradient[name].reshape(2, -1)[:, 0],
      (sides[0] - sides[1]) / 2e-5,
      rtol=1e-3,
      atol=1e-3,
    )


@pytest.mark.parametrize('name', MODELS)
def test_the_flops_of_a_net_are_those_of_its_model(name):
  """Counts by XLA, which include sums and ReLUs, are nearly the same."""
  space = SPACE._replace(widths=(32, 64), dims=(8, 16))
  inputs, draw = inputs_of(space, 20, ROWS), np.random.default_rng(0)
  zeros = {key: np.zeros(x) for key, x in decisions(space).items()}
  nets = (sampled(space, zeros, draw) for _ in range(99))
  net = next(net for net in nets if net.interaction == name)
  model = MODELS[name](bottom=net.bottom, top=net.top, padded=True)
  shapes = [
    jax.ShapeDtypeStruct((64, net.dims[table]), jnp.float32) for table in TABLES
  ]
  given = (
    jax.ShapeDtypeStruct((64, 20), jnp.float32),
    dict(zip(EMBEDDINGS, shapes, strict=True)),
  )
  variables = jax.eval_shape(
    lambda *x: model.init(jax.random.key(0), *x), *given
  )
  counted = jax.jit(model.apply).lower(variables, *given).cost_analysis()
  flops, elements = cost_of(inputs, net)
  assert flops == pytest.approx(counted['flops'] / 64, rel=0.1)
  assert elements == 7 * net.dims[0] + 5 * net.dims[1]


class Blind(slip.TokenModel):
  """An interaction that passes on nothing."""

  def interact(self, x, tokens):
    """Returns zeros."""
    return jnp.zeros((len(tokens), tokens.shape[1] * tokens.shape[2]))


@pytest.mark.slow
def test_the_planted_interaction_is_found():
  """One interaction alone has the features of which labels are made."""
  space = Space(
    (
      ('blind', interaction_of(Blind())),
      ('seen', interaction_of(slip.TokenModel())),
    ),
    tables=(0, 1),
    widths=(4,),
    bottom=2,
    top=2,
    dims=(4,),
  )
  draw = np.random.default_rng(0)
  users, items = draw.integers(0, 20, (2, 40 * 64))
  source = slip.batches(
    np.zeros((len(users), 1)),
    {'user': users, 'item': items},
    users % 2,
    batch_size=64,
    seed=0,
  )
  tables = {'user': slip.Table(20, 4), 'item': slip.Table(20, 4)}

  def label(params):
    return {key: str(key == ARCHITECTURE) for key in params}

  optimizer = optax.partition(
    {'True': optax.adam(0.05), 'False': optax.adam(0.01)}, label
  )
  model = Supernet(space, 300)
  with slip.Trainer(
    model, tables, dense_optimizer=optimizer, row_optimizer=slip.adagrad(0.3)
  ) as trainer:
    trainer.train(source, steps=300, progress=False)
    logits = trainer.params[ARCHITECTURE]['interaction']
  shares = np.exp(logits) / np.exp(logits).sum()
  assert shares[1] > 0.95


@pytest.mark.parametrize(
  'wrong',
  [
    {'bottom': 1},
    {'widths': (1, 2)},
    {'widths': (3, 2)},
    {'dims': ()},
    {'dims': (2, 3)},
  ],
)
def test_a_space_that_cannot_be_searched_is_refused(wrong):
  supernet = Supernet(SPACE._replace(**wrong), 10)
  with pytest.raises(UserError, match=r'Space|Supernet'):
    params_of(supernet, X, EMBEDDINGS)


@pytest.mark.parametrize(
  'model', [slip.DeepFM(), slip.WideDeep(), slip.DLRM(first_order=True)]
)
def test_a_model_with_more_than_an_interaction_is_refused(model):
  with pytest.raises(UserError, match='nothing beside its interaction'):
    interaction_of(model)


def test_narrow_embeddings_end_in_zeros():
  """With padding, a narrow table is one whose last elements are 0."""
  narrow = {**EMBEDDINGS, 'f1': EMBEDDINGS['f1'][:, :2]}
  wide = {**EMBEDDINGS, 'f1': EMBEDDINGS['f1'] * [1, 1, 0, 0]}
  wide = {name: x.astype(np.float32) for name, x in wide.items()}
  for first_order in (False, True):
    dim = 4 - first_order
    model = slip.DLRM((dim,), (5,), first_order=first_order, padded=True)
    if first_order:  # the weight of a row stays its last element
      wide['f1'] = EMBEDDINGS['f1'][:, [0, 2, 2, 1]] * [1, 0, 0, 1]
      wide['f1'] = wide['f1'].astype(np.float32)
    params = params_of(model, X, wide)
    given = jax.device_put(({'params': params}, X, narrow, wide))
    apply = jax.jit(model.apply)
    np.testing.assert_array_equal(
      apply(given[0], given[1], given[2]), apply(given[0], given[1], given[3])
    )
  too_wide = {**narrow, 'f0': np.zeros((EXAMPLES, 5), np.float32)}
  with pytest.raises(UserError, match=r"at most 4, got 5 of feature 'f0'"):
    params_of(model, X, too_wide)


def test_a_model_of_ones_own_can_be_searched():
  """Its interaction keeps its parameters and their names."""

  class Own(slip.TokenModel):
    """Mixes tokens."""

    count: int = 2

    def interact(self, x, tokens):
      """Returns a few mixtures."""
      return nn.Dense(self.count, name='mix')(tokens.reshape(len(tokens), -1))

  space = SPACE._replace(interactions=(('own', interaction_of(Own(count=3))),))
  params = params_of(Supernet(space, 1), X, EMBEDDINGS)
  assert params['interaction_0']['mix']['kernel'].shape == (16, 3)
  assert inputs_of(space, DENSE, ROWS).features == {'own': 3}
