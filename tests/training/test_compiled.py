"""What is compiled of a recipe: parts of a batch, chains per table, and life.

A batch in parts gives the update of the whole; a trainer's programs go with it.
"""

import gc
import sys
import weakref

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.errors import UserError
from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.tables import Feature, Table, TableSet
from slipstream_jax.training import compiled
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import train
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import make_parts, planned
from slipstream_jax.transforms.rowwise import rowwise_adagrad
from tests.support import by_hand, small
from tests.support.programs import finished

FEATURES = {
  'a': Feature('a'),
  'bag': Feature('b', 'mean', 4, True),
  'b': Feature('b'),
}
TABLES = TableSet({'a': Table(30, 4), 'b': Table(20, 6)}, FEATURES)
BATCHES = [by_hand.draw(TABLES, 24, 2, seed=seed) for seed in range(8)]


class Model(nn.Module):
  norm: bool = False

  @nn.compact
  def __call__(self, dense, embeddings, train):
    x = jnp.concatenate([dense, *embeddings.values()], axis=1)
    x = nn.Dense(5)(x)
    if self.norm:
      x = nn.BatchNorm(not train)(x)
    count = self.variable('count', 'passes', lambda: jnp.zeros((), jnp.int32))
    count.value += train
    return nn.Dense(1)(nn.relu(x))[:, 0]


def recipe_of(**changes):
  optimizers = rowwise_adagrad(0.1), optax.adam(1e-2)
  return Recipe(Model(), TABLES, *optimizers)._replace(**changes)


def trained(recipe, batches=BATCHES):
  return by_hand.train(recipe, *by_hand.start(recipe, 2), batches)


@pytest.mark.parametrize('parts', [2, 3, 24])
def test_parts_of_a_batch_give_the_update_of_the_whole(parts):
  weights = np.linspace(0, 2, 24, dtype=np.float32)
  batches = [batch._replace(weights=weights) for batch in BATCHES]
  # Without Adam, which makes as much of a tiny difference as of a large one.
  plain = recipe_of(dense_optimizer=optax.sgd(0.1))
  whole = trained(plain, batches)
  cut = trained(plain._replace(microbatches=parts), batches)
  np.testing.assert_allclose(whole[2], cut[2], rtol=1e-5)
  one, other = (jax.device_get((end[0].params, end[1])) for end in (whole, cut))
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  # The model's state went through the parts.
  passes = [jax.device_get(end[0].model_state)['count'] for end in (whole, cut)]
  assert passes == [{'passes': 8}, {'passes': 8 * parts}]


def test_state_goes_through_the_parts_in_order():
  recipe = recipe_of(
    model=Model(norm=True),
    dense_optimizer=optax.sgd(0.0),
    row_optimizer=optax.sgd(0.0),
  )
  cut = trained(recipe._replace(microbatches=3), BATCHES[:1])[0]
  thirds = [
    BATCHES[0].map(lambda column, i=i: column[i : i + 8]) for i in (0, 8, 16)
  ]
  one_by_one = trained(recipe, thirds)[0]
  for a, b in zip(
    *(
      jax.tree.leaves(jax.device_get(s.model_state)) for s in (cut, one_by_one)
    ),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('parts', [5, 0, 2.0, -1, 48])
def test_parts_that_do_not_divide_the_batch(parts):
  recipe = recipe_of(microbatches=parts)
  with pytest.raises(UserError, match='divides the batch of 24') as error:
    trained(recipe)
  assert error.value.where == 'Trainer, microbatches'


def plateau(rate):
  return optax.chain(
    optax.sgd(rate),
    optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.0, atol=9.0),
  )


def test_the_loss_reaches_both_chains():
  """No step gains 9, so each second one halves the rates."""
  recipe = recipe_of(dense_optimizer=plateau(1e-3), row_optimizer=plateau(1e-3))
  state, *_ = trained(recipe)
  scales = [
    float(leaf.scale)
    for leaf in jax.tree.leaves(
      jax.device_get(state.dense_state), is_leaf=lambda x: hasattr(x, 'scale')
    )
    if hasattr(leaf, 'scale')
  ]
  assert scales
  assert all(0 < scale < 0.2 for scale in scales)
  per_group = jax.device_get(state.row_globals)
  assert len(per_group) == 2
  for leaves in per_group:
    assert any(np.array_equal(leaf, scales[0]) for leaf in leaves)


def copying_rows():
  """A chain whose state starts as a copy of the rows."""
  return optax.GradientTransformation(
    lambda rows: rows, lambda updates, state, rows: (updates, rows)
  )


@pytest.mark.parametrize(
  ('own', 'said'),
  [
    (
      optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
      'MultiSteps',
    ),
    (copying_rows(), 'start every row from the same state'),
  ],
)
def test_a_chain_that_cannot_train_rows_is_named_by_its_table(own, said):
  tables = TableSet(
    {'a': Table(30, 4), 'b': Table(20, 6, optimizer=own)}, FEATURES
  )
  with pytest.raises(UserError, match=said) as error:
    assert compiled_of(recipe_of(tables=tables)).untrained_row_state
  assert error.value.where == "Table 'b', optimizer"


class Holding(nn.Module):
  """With a list, as nobody can hash it."""

  sizes: list

  @nn.compact
  def __call__(self, embeddings):
    x = jnp.concatenate(list(embeddings.values()), axis=1)
    for size in self.sizes:
      x = nn.Dense(size)(x)
    return x[:, 0]


@pytest.fixture
def as_in_a_program(monkeypatch):
  """Nothing else keeps what is compiled, as the suite does."""
  monkeypatch.setattr(compiled, 'CACHE', weakref.WeakValueDictionary())


@pytest.mark.usefixtures('as_in_a_program')
@pytest.mark.parametrize('parts', [1, 2])
def test_programs_and_model_go_with_their_last_trainer(parts):
  model = Holding([4, 1])
  recipe = recipe_of(model=model, microbatches=parts)
  programs = compiled_of(recipe)
  state, rows, _ = trained(recipe, BATCHES[:2])
  by_hand.predict(recipe, state, rows, BATCHES[0])
  watched = [weakref.ref(x) for x in (programs, model, programs.step)]
  assert all(ref() is not None for ref in watched)
  del programs, recipe, model, state, rows
  gc.collect()
  assert [ref() for ref in watched] == [None] * 3
  assert not compiled.CACHE


@pytest.mark.usefixtures('as_in_a_program')
def test_equal_recipes_of_trainers_that_live_share():
  optimizers = rowwise_adagrad(0.1), optax.adam(1e-2)
  one, other, unlike = (
    compiled_of(Recipe(Holding(sizes), TABLES, *optimizers))
    for sizes in ([4, 1], [4, 1], [5, 1])
  )
  assert one is other
  assert one is not unlike


@pytest.mark.usefixtures('as_in_a_program')
def test_a_dropped_trainer_frees_its_step_and_its_arrays():
  columns = small.columns(64 * 4)
  recipe = small.recipe()._replace(model=DLRM(bottom=[16, 8], top=[9]))
  trainer = make_parts(recipe, 'resident', small.DENSE)
  with planned(trainer, ColumnBatches(columns, 64)) as batches:
    list(train(trainer, batches, 2))
  evaluate(trainer, ColumnBatches(columns, 64, epochs=1))
  (group,) = trainer.engine.groups
  arrays = jax.tree.leaves((trainer.state, group.kept.block))
  watched = [weakref.ref(x) for x in (compiled_of(recipe), *arrays)]
  assert all(ref() is not None for ref in watched)
  del trainer, batches, group, arrays, recipe
  gc.collect()
  assert [ref() for ref in watched] == [None] * len(watched)


ENDS_LATE = """
import sys
import types
from slipstream_jax.training import compiled

class Result:
  pass

holder, hashes = types.ModuleType('holder'), types.ModuleType('hashes')
exec('''
class Key:
  def __hash__(self):
    return number()

def number():
  return 1
''', vars(hashes))
compiled.CACHE[hashes.Key()] = holder.result = Result()
# Taken apart from the last to the first.
sys.modules.update(holder=holder, hashes=hashes)
sys.modules_stay = [compiled, holder, hashes]
"""


def test_a_process_that_ends_with_a_trainer_says_nothing():
  ended = finished([sys.executable, '-c', ENDS_LATE])
  assert (ended.returncode, ended.stdout, ended.stderr) == (0, '', '')
