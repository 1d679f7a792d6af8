"""Any model: Flax linen, Flax nnx, or two functions, and what they ask for."""

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.models.adapters import Functions
from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.models.tbsm import TBSM
from slipstream_jax.tables import Feature, Table, TableSet
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.transforms.rowwise import rowwise_adagrad
from tests.support import by_hand, small

TABLES = TableSet(
  {'item': Table(40, 6), 'user': Table(30, 4), 'shop': Table(9, 6)},
  {
    'user': Feature('user'),
    'item': Feature('item'),
    'seen': Feature('item', 'mean', 5),
    'shop': Feature('shop', 'sqrtn', 3, True),
  },
)
DENSE, WIDTH = 3, 6 + 4 + 6 + 6
BATCHES = [by_hand.draw(TABLES, 32, DENSE, seed=seed) for seed in range(20)]


def recipe_of(model, **changes):
  optimizers = rowwise_adagrad(0.1), optax.adam(1e-2)
  return Recipe(model, TABLES, *optimizers)._replace(**changes)


def trained(recipe, steps=20):
  start = by_hand.start(recipe, DENSE)
  return by_hand.train(recipe, *start, BATCHES[:steps])


def joined(dense, embeddings):
  return jnp.concatenate([dense, *embeddings.values()], axis=1)


class Linen(nn.Module):
  norm: bool = False
  drop: float = 0.0

  @nn.compact
  def __call__(self, dense, embeddings, train):
    x = nn.relu(nn.Dense(8, name='one')(joined(dense, embeddings)))
    if self.norm:
      x = nn.BatchNorm(not train, momentum=0.9, name='norm')(x)
    x = nn.Dropout(self.drop, deterministic=not train)(x)
    return nn.Dense(1, name='two')(x)[:, 0]


class Nnx(nnx.Module):
  def __init__(self, rngs, norm=False, drop=0.0):
    self.one = nnx.Linear(DENSE + WIDTH, 8, rngs=rngs)
    self.two = nnx.Linear(8, 1, rngs=rngs)
    self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs) if norm else None
    self.drop = nnx.Dropout(drop, rngs=rngs)

  def __call__(self, dense, embeddings):
    x = jax.nn.relu(self.one(joined(dense, embeddings)))
    x = x if self.norm is None else self.norm(x)
    return self.two(self.drop(x))[:, 0]


def nnx_like(params, **how):
  """One that starts from linen's parameters."""
  with jax.transfer_guard('allow'):
    model = Nnx(nnx.Rngs(0), **how)
    for name in ('one', 'two'):
      layer = getattr(model, name)
      layer.kernel.set_value(jnp.array(params[name]['kernel']))
      layer.bias.set_value(jnp.array(params[name]['bias']))
  return model


def functions_like(params):
  def apply(params, dense, embeddings):
    x = joined(dense, embeddings) @ params['one']['kernel']
    x = jax.nn.relu(x + params['one']['bias'][None])
    return (x @ params['two']['kernel'] + params['two']['bias'][None])[:, 0]

  return lambda key, dense, embeddings: jax.tree.map(jnp.asarray, params), apply


def start_params(**how):
  recipe = recipe_of(Linen(**how))
  return jax.device_get(compiled_of(recipe).init_state(DENSE, 0).params)


def test_all_forms_of_a_model_give_the_same_parameters():
  params = start_params()
  one = recipe_of(Linen())
  forms = [
    nnx_like(params),
    Functions(*functions_like(params)),
    functions_like(params),
  ]
  expected = by_hand.bits(*trained(one)[:2])
  assert not np.array_equal(expected[1], params['one']['bias'])
  for form in forms:
    small.assert_same_bits(
      expected, by_hand.bits(*trained(recipe_of(form))[:2])
    )


def test_a_change_of_the_model_object_reaches_no_later_trace():
  params = start_params()
  logits = []
  for changed in False, True:
    model = nnx_like(params)
    recipe = recipe_of(model)
    compiled = compiled_of(recipe)  # not compiled again below
    end = trained(recipe)[:2]
    if changed:
      with jax.transfer_guard('allow'):
        model.norm = jnp.negative
    logits.append(by_hand.predict(recipe, *end, BATCHES[-1]))
    assert compiled_of(recipe) is compiled
  np.testing.assert_array_equal(*logits)


def test_state_of_nnx_is_that_of_linen():
  params = start_params(norm=True)
  recipes = [
    recipe_of(Linen(norm=True)),
    recipe_of(nnx_like(params, norm=True)),
  ]
  ends = [trained(recipe, 20) for recipe in recipes]
  linen, other = (end[0].model_state for end in ends)
  linen = jax.device_get(linen)['batch_stats']['norm']
  other = jax.device_get(other)['state']['norm']
  assert np.abs(linen['mean']).max() > 0.01
  logits = [
    by_hand.predict(recipe, *end[:2], BATCHES[-1])
    for recipe, end in zip(recipes, ends, strict=True)
  ]
  np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-5)
  for name in ('mean', 'var'):
    np.testing.assert_allclose(linen[name], other[name], rtol=1e-4, atol=1e-6)


def test_the_users_own_nnx_module_is_left_as_it_is():
  model = nnx_like(start_params(), norm=True, drop=0.3)
  before = jax.device_get(jax.tree.leaves(nnx.state(model, nnx.Param)))
  mean = jax.device_get(model.norm.mean.get_value())
  trained(recipe_of(model), 3)
  after = jax.device_get(jax.tree.leaves(nnx.state(model, nnx.Param)))
  small.assert_same_bits(before, after)
  np.testing.assert_array_equal(
    mean, jax.device_get(model.norm.mean.get_value())
  )


def noisy_functions(params):
  init, plain = functions_like(params)

  def apply(params, dense, embeddings, *, train, rng):
    if train:
      dense = dense * jax.random.bernoulli(rng, 0.5, dense.shape)
    return plain(params, dense, embeddings)

  return init, apply


DROPPING = {
  'linen': lambda params: Linen(drop=0.5),
  'nnx': lambda params: nnx_like(params, drop=0.5),
  'functions': noisy_functions,
}


@pytest.mark.parametrize('form', DROPPING)
def test_dropout_is_a_function_of_seed_and_step(form):
  recipe = recipe_of(DROPPING[form](start_params()))

  def run(seed, steps, state=None):
    """From the same parameters, whatever the seed."""
    start, rows = by_hand.start(recipe, DENSE, 0)
    rng = compiled_of(recipe).init_state(DENSE, seed).rng
    return by_hand.train(recipe, start._replace(rng=rng), rows, steps)

  whole = run(5, BATCHES[:6])
  small.assert_same_bits(
    by_hand.bits(*whole[:2]), by_hand.bits(*run(5, BATCHES[:6])[:2])
  )
  for cut in (1, 5):
    state, rows, _ = run(5, BATCHES[:cut])
    # As a checkpoint does: all through the host.
    state, rows = jax.device_put(jax.device_get((state, rows)))
    again = by_hand.train(recipe, state, rows, BATCHES[cut:6])
    small.assert_same_bits(by_hand.bits(*whole[:2]), by_hand.bits(*again[:2]))
  assert run(6, BATCHES[:6])[2] != whole[2]
  assert by_hand.programs_of(recipe) == 1
  # One batch again and again: other draws at each step, none when predicting.
  still = recipe._replace(
    dense_optimizer=optax.sgd(0.0), row_optimizer=optax.sgd(0.0)
  )
  state, rows = by_hand.start(still, DENSE)
  state, rows, losses = by_hand.train(still, state, rows, BATCHES[:1] * 4)
  assert len(set(losses)) == 4
  logits = [by_hand.predict(still, state, rows, BATCHES[0]) for _ in range(2)]
  np.testing.assert_array_equal(*logits)


SEEN = []


class Asking(nn.Module):
  """A model that says what it is called with."""

  @nn.compact
  def __call__(self, embeddings, train, real, weights):
    shapes = {name: x.shape[1:] for name, x in embeddings.items()}
    SEEN.append((shapes, {n: r.shape[1:] for n, r in real.items()}, train))
    x = jnp.concatenate(list(embeddings.values()), axis=1)
    return nn.Dense(1)(x * weights[:, None])[:, 0]


def test_a_model_without_dense_features_and_what_it_is_given():
  trained(recipe_of(Asking()), 2)
  shapes, real, train = SEEN[-1]
  assert list(shapes) == list(real) == ['user', 'item', 'seen', 'shop']
  assert shapes == {'user': (4,), 'item': (6,), 'seen': (6,), 'shop': (6,)}
  assert real == {'user': (1,), 'item': (1,), 'seen': (5,), 'shop': (3,)}
  assert train


class Embeddings(nn.Module):
  """Its first argument has another name, and is all that it takes."""

  @nn.compact
  def __call__(self, x, *, train):
    return nn.Dense(1)(x['item'])[:, 0]


class Both(nn.Module):
  @nn.compact
  def __call__(self, embeddings, dense):
    assert dense.shape[1] == DENSE
    return nn.Dense(1)(embeddings['item'])[:, 0]


@pytest.mark.parametrize('model', [Embeddings(), Both()])
def test_other_ways_to_name_the_arguments(model):
  *_, losses = trained(recipe_of(model), 3)
  assert len(set(losses)) == 3


class Named(nn.Module):
  @nn.compact
  def __call__(self, dense, embeddings):
    shapes = {name: x.shape[1:] for name, x in dense.items()}
    assert shapes == {'z': (), 'a': (2,)}, shapes
    x = jnp.concatenate([dense['z'][:, None], dense['a']], axis=1)
    return nn.Dense(1, use_bias=False)(joined(x, embeddings))[:, 0]


class Unnamed(nn.Module):
  @nn.compact
  def __call__(self, dense, embeddings):
    return nn.Dense(1, use_bias=False)(joined(dense, embeddings))[:, 0]


def test_dense_features_by_name_are_the_same_features():
  columns = {'z': None, 'a': 2}
  named = recipe_of(Named(), dense_columns=columns)
  plain = recipe_of(Unnamed())
  small.assert_same_bits(
    by_hand.bits(*trained(named, 5)[:2]), by_hand.bits(*trained(plain, 5)[:2])
  )


def test_columns_that_do_not_add_up_or_are_not_named():
  for model, columns, said in (
    (Named(), {'z': None, 'a': 4}, r'add up to the 3 columns .* got 5'),
    (Wanting('dense', 'age'), None, r'must get them by name, got one array'),
  ):
    recipe = recipe_of(model, dense_columns=columns)
    with pytest.raises(UserError, match=said):
      compiled_of(recipe).init_state(DENSE, 0)


class TakingNothing(nn.Module):
  @nn.compact
  def __call__(self):
    return 0


NO_MODELS = dict.fromkeys(
  [Linen, 'DLRM', None, (1, 2), (len,)],
  'a Flax module, linen or nnx, or a pair',
)


@pytest.mark.parametrize(
  ('model', 'said'),
  [*NO_MODELS.items(), (TakingNothing(), 'must take embeddings')],
)
def test_what_is_no_model(model, said):
  with pytest.raises(UserError, match=said):
    compiled_of(recipe_of(model))


def test_state_of_functions():
  """Only training steps change it."""

  def init(key, dense, embeddings):
    return {'bias': jnp.zeros(())}, {'steps': jnp.zeros((), jnp.int32)}

  def apply(params, state, dense, embeddings, train):
    logits = embeddings['item'].sum(axis=1) + params['bias']
    return logits, {'steps': state['steps'] + 1}

  recipe = recipe_of(Functions(init, apply, has_state=True))
  state, rows, _ = trained(recipe, 4)
  by_hand.predict(recipe, state, rows, BATCHES[0])
  assert jax.device_get(state.model_state) == {'state': {'steps': 4}}


def same_ends(models, *inputs):
  """Whether all have the same parameters and logits."""
  with jax.transfer_guard('allow'):
    inputs = jax.tree.map(jnp.asarray, inputs)
    ends = [m.init_with_output(jax.random.key(0), *inputs) for m in models]
  for end in ends[1:]:
    jax.tree.map(np.testing.assert_array_equal, ends[0], end)
  return ends[0]


@pytest.mark.parametrize('kind', [(False, 'none'), (True, 'layer')])
@pytest.mark.parametrize('sizes', [(), (8,), (8, 4)])
def test_a_last_width_of_one_is_the_logit(sizes, kind):
  """As the DLRM reference and TorchRec write the widths."""
  rng = np.random.default_rng(0)
  dense = rng.normal(size=(5, DENSE)).astype(np.float32)
  rows = {name: rng.normal(size=(5, 6)).astype(np.float32) for name in 'abc'}
  tops = sizes, (*sizes, 1), [*sizes, 1]
  models = [DLRM((8, 6 - kind[0]), top, *kind) for top in tops]
  _, variables = same_ends(models, dense, rows)
  assert len(variables['params']['top']) == len(sizes) + 1


def test_a_last_width_of_one_is_the_logit_of_sequences():
  rng = np.random.default_rng(0)
  dense = rng.normal(size=(5, 2)).astype(np.float32)
  rows = {name: rng.normal(size=(5, 4, 6)).astype(np.float32) for name in 'ab'}
  models = [TBSM((6,), (5,), (3,), final) for final in ((7,), (7, 1))]
  one = same_ends(models, dense, rows)
  by_name = {'a': dense[:, 0], 'z': dense[:, 1:]}
  other = same_ends(models[:1], by_name, rows)
  jax.tree.map(np.testing.assert_array_equal, one, other)


def test_dlrm_takes_dense_features_by_name():
  tables = TableSet({'a': Table(20, 6), 'b': Table(9, 6)})
  batches = [by_hand.draw(tables, 16, DENSE, seed=seed) for seed in range(5)]
  ends = []
  for columns in (None, {'z': None, 'a': 2}):
    recipe = recipe_of(DLRM((6,), (4,)), dense_columns=columns, tables=tables)
    end = by_hand.train(recipe, *by_hand.start(recipe, DENSE), batches)
    ends.append(by_hand.bits(*end[:2]))
  small.assert_same_bits(*ends)


@pytest.mark.parametrize('sizes', [(7, 0), (7, 1, 1), (1, 7), (-1,)])
def test_hidden_layers_of_one_number_are_refused(sizes):
  for model in DLRM((8, 6), sizes), TBSM((6,), (5,), (3,), sizes):
    with pytest.raises(UserError, match=r'width of at least 2.*got \['):
      same_ends(
        [model],
        np.zeros((5, DENSE), np.float32),
        {name: np.zeros((5, 4, 6), np.float32) for name in 'ab'}
        if isinstance(model, TBSM)
        else {name: np.zeros((5, 6), np.float32) for name in 'ab'},
      )


class Wanting(nn.Module):
  """Asks for a feature, or looks up something of its own."""

  of: str
  key: str

  @nn.compact
  def __call__(self, dense, embeddings, real):
    offered = {'dense': dense, 'embeddings': embeddings, 'real': real}
    x = (offered | {'own': {'width': 1}})[self.of][self.key]
    own = jax.tree.map(lambda x, scale: x * scale, dense, {'a': 1.0, 'z': 2.0})
    return nn.Dense(1)(embeddings['item'])[:, 0] + own['z'] + jnp.sum(x)


class WantingNnx(nnx.Module):
  def __init__(self, of, key):
    self.of, self.key = of, key
    self.layer = nnx.Linear(6, 1, rngs=nnx.Rngs(0))

  def __call__(self, dense, embeddings, real):
    offered = {'dense': dense, 'embeddings': embeddings, 'real': real}
    return self.layer(embeddings['item'])[:, 0] + jnp.sum(
      (offered | {'own': {}})[self.of][self.key]
    )


def wanting(of, key):
  def init(key, dense, embeddings):
    return {'w': jnp.zeros(6)}

  def apply(params, dense, embeddings, real):
    offered = {'dense': dense, 'embeddings': embeddings, 'real': real}
    x = (offered | {'own': {}})[of][key]
    return embeddings['item'] @ params['w'] + jnp.sum(x)

  return Functions(init, apply)


@pytest.mark.parametrize('kind', [Wanting, WantingNnx, wanting])
@pytest.mark.parametrize('of', ['dense', 'embeddings', 'real', 'own'])
def test_a_feature_that_nobody_gives(kind, of):
  def heads(key):
    with jax.transfer_guard('allow'):
      model = kind(of, key)
    recipe = recipe_of(model, dense_columns={'z': None, 'a': 2})
    compiled = compiled_of(recipe)
    return compiled.heads(compiled.init_state(DENSE, 0), DENSE)

  if of == 'own':
    with pytest.raises(KeyError, match='colour'):
      heads('colour')
    return
  there = 'z' if of == 'dense' else 'shop'
  assert heads(there) is None
  names = "'z', 'a'" if of == 'dense' else "'user', 'item', 'seen', 'shop'"
  with pytest.raises(UserError, match=f"{names}, got 'colour'"):
    heads('colour')
