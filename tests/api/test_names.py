"""Dense features and labels by name are matched by name, in any order."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest

import slipstream_jax as slip
from slipstream_jax.checkpoint.manifest import publish, read_manifest
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.errors import UserError
from tests.api import shop

N, WIDTH, HEADS = 64, 5, 2
WORDS = ['age', 'price', 'width', 'b', 'a b', 'é', 'zeta', 'dense', 'label']


class Flat(nn.Module):
  """Takes dense features as one array or by name, and has two heads."""

  @nn.compact
  def __call__(self, dense, e):
    if isinstance(dense, dict):
      blocks = [x[:, None] if x.ndim == 1 else x for x in dense.values()]
      dense = jnp.concatenate(blocks, axis=1)
    match = (nn.Dense(3)(e['user']) * e['item']).sum(-1, keepdims=True)
    return match + nn.Dense(HEADS)(dense)


MODEL = Flat()


def trainer():
  return shop.trainer(model=MODEL)


class World:
  """Examples whose columns have drawn names and widths."""

  def __init__(self, rng, names=None):
    words = list(rng.permutation(WORDS[:-2])) if names is None else names
    cuts = sorted(rng.choice(range(1, WIDTH), rng.integers(1, 4), False))
    ends = [*cuts, WIDTH] if names is None else [1, 3, WIDTH]
    self.dense, start = {}, 0
    matrix = rng.normal(size=(N, WIDTH)).astype(np.float32)
    for name, end in zip(words, ends, strict=False):
      block = matrix[:, start:end]
      scalar = end - start == 1 and rng.random() < 0.7
      self.dense[str(name)] = block[:, 0] if scalar else block
      start = end
    self.labels = {
      f'{name}!': (rng.random(N) < 0.4).astype(np.float32)
      for name in rng.permutation(WORDS)[:HEADS]
    }
    self.ids = {'user': rng.integers(0, 60, N), 'item': rng.integers(0, 20, N)}

  def arrays(self, mix):
    return slip.batches(
      mix(self.dense), self.ids, mix(self.labels), batch_size=16, epochs=1
    )

  def frame(self, mix):
    columns = {**self.ids, **self.dense, **self.labels}
    columns = mix({k: pl.Series(k, v.tolist()) for k, v in columns.items()})
    return slip.batches(
      pl.DataFrame(columns),
      ['user', 'item'],
      [*mix(self.labels)],
      dense=[*mix(self.dense)],
      batch_size=16,
      epochs=1,
    )

  def columns(self, mix):
    return slip.batches(
      mix({**self.dense, **self.ids, **self.labels}),
      None,
      [*mix(self.labels)],
      dense=[*mix(self.dense)],
      batch_size=16,
      epochs=1,
    )

  def parts(self, mix):
    """Each batch in an order of its own."""
    for start in range(0, N, 16):
      part = slice(start, start + 16)

      def cut(columns, part=part):
        return {name: column[part] for name, column in mix(columns).items()}

      dense, labels = cut(self.dense), cut(self.labels)
      yield mix({**cut(self.ids), 'dense': dense, 'label': labels})

  def iterator(self, mix):
    return slip.batches(self.parts(mix))

  def function(self, mix):
    return slip.batches(lambda: self.parts(mix))


FORMS = ['frame', 'columns', 'iterator', 'function']


def as_given(columns):
  return columns


def run(world, forms, mix, folder):
  """Trains, scores, saves and goes on; all numbers that come out."""
  sources = [getattr(world, form) for form in forms]
  with trainer() as one:
    seen = [one.train(sources[0](as_given)).losses]
    seen += [one.predict(sources[1](mix)), one.evaluate(sources[2](mix))]
    seen.append(one.train(sources[1](mix)).losses)
    seen.append(one.train(world.arrays(mix), 2).losses)
    one.save(folder)
    seen += shop.state_of(one)
  with trainer() as other:
    other.restore(folder)
    seen.append(other.train(world.arrays(mix)).losses)  # the other two steps
    seen += [other.predict(sources[2](mix)), other.evaluate(sources[0](mix))]
    seen.append(other.train(sources[2](mix)).losses)
    seen += shop.state_of(other)
  return jax.tree.leaves(seen)


@pytest.mark.parametrize('seed', range(5))
def test_any_order_of_names_gives_the_bits_of_the_first(tmp_path, seed):
  rng = np.random.default_rng(seed)
  by_name = seed % 4 == 0
  world = World(rng, ['age', 'price', 'b'] if by_name else None)

  def mixed(columns):
    return {name: columns[name] for name in rng.permutation([*columns])}

  forms = [*rng.choice(FORMS, 3)]
  if by_name:  # the model gets them by name, too
    forms[0] = 'arrays'
  wanted = run(world, forms, as_given, tmp_path / 'a')
  got = run(world, forms, mixed, tmp_path / 'b')
  for one, other in zip(wanted, got, strict=True):
    np.testing.assert_array_equal(one, other)


def test_packed_columns_have_the_names_that_were_packed(tmp_path):
  rng = np.random.default_rng(0)
  columns = {name: rng.normal(size=N) for name in ('z', 'a', 'm')}
  labels = {name: rng.integers(0, 2, N) for name in ('buy', 'add')}
  ids = {'user': np.arange(N) % 60, 'item': np.arange(N) % 20}
  frame = pl.DataFrame({**ids, **columns, **labels})
  scores = []
  for number, dense in enumerate((['z', 'a', 'm'], ['a', 'm', 'z'])):
    folder = tmp_path / str(number)
    heads = ['buy', 'add'][:: 1 - 2 * number]
    data = slip.pack(frame, folder, features=[*ids], dense=dense, label=heads)
    dims = {'user': 4, 'item': 3}
    tables = {k: slip.Table(v, dims[k]) for k, v in data.sizes.items()}
    if not number:
      one = shop.trainer(model=MODEL, tables=tables)
    source = slip.batches(folder, batch_size=16, epochs=1)
    if not number:
      one.train(source)
    test = slip.batches(folder, split='test', batch_size=16, epochs=1)
    scores.append((one.predict(source), one.evaluate(test)))
  one.close()
  for a, b in zip(*map(jax.tree.leaves, scores), strict=True):
    np.testing.assert_array_equal(a, b)


SPOILS = {
  'renamed': lambda d: {
    ('c o s t' if k == 'b' else k): v for k, v in d.items()
  },
  'missing': lambda d: {k: v for k, v in d.items() if k != 'b'},
  'more': lambda d: {**d, 'height': d['age']},
  'width': lambda d: {**d, 'age': np.stack([d['age']] * 2, 1)},
}


@pytest.fixture(scope='module')
def learned():
  world = World(np.random.default_rng(1), ['age', 'price', 'b'])
  world.dense['age'] = world.dense['age'].reshape(N)
  with trainer() as one:
    one.train(world.columns(as_given))
    yield one, world


FORMS_OF_MISTAKES = ['arrays', 'columns', 'iterator']


@pytest.mark.parametrize('spoil', SPOILS)
def test_other_names_are_refused_by_name(learned, spoil):
  one, world = learned
  before = shop.state_of(one)
  spoiled = World(np.random.default_rng(1), ['age', 'price', 'b'])
  spoiled.dense = SPOILS[spoil](world.dense)
  name = {'more': 'height', 'width': 'age'}.get(spoil, 'b')
  for form in FORMS_OF_MISTAKES:
    for call in (one.predict, one.evaluate, one.train):
      with pytest.raises(UserError, match='dense feature') as raised:
        call(getattr(spoiled, form)(as_given))
      assert f'{name!r}' in str(raised.value)
  for a, b in zip(before, shop.state_of(one), strict=True):
    np.testing.assert_array_equal(a, b)


def test_other_heads_are_refused_by_name(learned):
  one, world = learned
  spoiled = World(np.random.default_rng(1), ['age', 'price', 'b'])
  spoiled.dense = world.dense
  (first, labels), (_, others) = spoiled.labels.items()
  for changed, name in (
    ({first: labels, 'bought': others}, 'bought'),
    ({first: labels}, 'label'),
    ({**spoiled.labels, 'third': labels}, 'third'),
  ):
    spoiled.labels = changed
    for form in FORMS_OF_MISTAKES:
      for call in (one.evaluate, one.train):
        with pytest.raises(UserError, match=name):
          call(getattr(spoiled, form)(as_given))


@pytest.mark.parametrize('call', ['train', 'evaluate'])
def test_a_source_that_fails_teaches_no_names(call):
  world = World(np.random.default_rng(1), ['age', 'price', 'b'])
  right = world.labels
  with trainer() as one:
    world.labels = {f'not {name}': x for name, x in right.items()}
    good, world.ids = world.ids, {k: v + 9999 for k, v in world.ids.items()}
    for _ in range(2):  # again, as some would
      with pytest.raises(UserError, match='must be in'):
        getattr(one, call)(world.function(as_given))
    world.labels, world.ids = right, good
    one.train(world.function(as_given), 2)
    assert [*one.parts.names.labels] == [*right]


def test_an_array_is_taken_in_the_order_that_was_learned(learned):
  one, world = learned
  blocks = [x.reshape(N, -1) for x in world.dense.values()]
  source = slip.batches(
    np.concatenate(blocks, axis=1), world.ids, batch_size=16, epochs=1
  )
  np.testing.assert_array_equal(
    one.predict(source), one.predict(world.frame(as_given))
  )
  with trainer() as other:  # which learns no names
    other.predict(source)
    with pytest.raises(UserError, match=r'learned from an array.*age.*price'):
      other.predict(world.arrays(as_given))


def test_a_name_of_one_column_is_learned_like_others():
  rng = np.random.default_rng(0)
  frame = {'age': rng.normal(size=N), 'size': rng.normal(size=N)} | {
    name: np.arange(N) % 20 for name in ('user', 'item')
  }

  def source(name):
    return slip.batches(frame, dense=name, batch_size=16, epochs=1)

  with trainer() as one:
    logits = one.predict(source('age'))
    np.testing.assert_array_equal(one.predict(source(['age'])), logits)
    for other in ('size', ['size']):
      with pytest.raises(UserError, match=r"'age'.*got 'size'"):
        one.predict(source(other))


def test_a_checkpoint_of_before_learns_names_from_the_next_source(tmp_path):
  world = World(np.random.default_rng(2))
  with trainer() as one:
    one.train(world.columns(as_given), 2)
    logits = one.predict(world.columns(as_given))
    one.save(tmp_path)
  place = open_place(tmp_path)
  manifest = read_manifest(place, 2)
  facts = dict(manifest.payload['facts'])
  assert facts.pop('names')
  payload = {**manifest.payload, 'facts': facts}
  publish(place, manifest._replace(payload=payload))

  def mixed(columns):
    return dict(reversed(columns.items()))

  with trainer() as other:
    other.restore(tmp_path, resume=False)
    for order in as_given, mixed:
      np.testing.assert_array_equal(
        other.predict(world.iterator(order)), logits
      )
