"""Two towers: the loss over the batch is a softmax over all items."""

import functools

import faiss
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.data.source import bound_to
from slipstream_jax.errors import UserError
from slipstream_jax.training import retrieval
from tests.models.test_interactions import params_of

USERS, ITEMS, DIM = 9, 6, 5
MODEL = slip.TwoTower(widths=(7, 4), temperature=0.5, log_q=0)


@functools.cache
def started():
  """Parameters, rows of users, and rows of items."""
  rng = np.random.default_rng(0)
  tables = [
    rng.normal(size=(count, DIM)).astype(np.float32) for count in (USERS, ITEMS)
  ]
  one = {'user': tables[0][:1], 'item': tables[1][:1]}
  params = params_of(MODEL, np.zeros((1, 1), np.float32), one)
  return jax.device_put((params, *tables))


def over_batch(learned, users, items, log_q, weights):
  """The loss that a step minimizes, for labels of 1."""
  params, of_users, of_items = learned
  logits = MODEL.apply(
    {'params': params},
    log_q[:, None],
    {'user': of_users[users], 'item': of_items[items]},
    train=True,
    weights=weights,
  )
  losses = optax.sigmoid_binary_cross_entropy(logits, jnp.ones(len(users)))
  return (losses * weights).sum() / len(users)


def over_all(learned, users, items):
  """The softmax over all items."""
  params, of_users, of_items = learned
  variables, none = {'params': params}, jnp.zeros((len(users), 1))
  rows = {'user': of_users[users], 'item': of_items[items]}
  vectors = MODEL.apply(variables, none, rows, side='users')
  each = {'user': jnp.zeros((ITEMS, DIM)), 'item': of_items}
  every = MODEL.apply(variables, jnp.zeros((ITEMS, 1)), each, side='items')
  shares = jax.nn.log_softmax(vectors @ every.T / 0.5)
  return -jnp.take_along_axis(shares, items[:, None], axis=1).mean()


GRADIENTS = {one: jax.jit(jax.grad(one)) for one in (over_batch, over_all)}


def gradient(loss, *inputs):
  """The gradient as one vector."""
  leaves = jax.tree.leaves(GRADIENTS[loss](started(), *jax.device_put(inputs)))
  return np.concatenate([np.ravel(leaf) for leaf in jax.device_get(leaves)])


def test_it_is_the_softmax_over_all_items_where_all_are_in_the_batch():
  """However often each is, as log-Q says how often."""
  counts = np.array([1, 4, 1, 2, 7, 3])
  items = np.repeat(np.arange(ITEMS), counts)
  users = np.arange(len(items)) % USERS
  log_q = np.log(counts[items]).astype(np.float32)
  found = gradient(
    over_batch, users, items, log_q, np.ones(len(items), np.float32)
  )
  wanted = gradient(over_all, users, items)
  np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
  without = gradient(
    over_batch, users, items, 0 * log_q, np.ones(len(items), np.float32)
  )
  assert np.abs(without - wanted).max() > 0.01


def test_it_is_that_softmax_in_expectation():
  """A mean over batches drawn with a fixed seed."""
  rng = np.random.default_rng(0)
  shares = np.array([0.4, 0.3, 0.15, 0.09, 0.04, 0.02])
  # A user's items are not independent of the user.
  chances = rng.dirichlet(5 * shares, size=USERS)
  log_q = np.log(chances.mean(axis=0)).astype(np.float32)
  batches, size = 300, 256
  sums = [0.0, 0.0, 0.0]
  for _ in range(batches):
    users = rng.integers(0, USERS, size)
    drawn = rng.random((size, 1)) > chances.cumsum(axis=1)[users, :-1]
    items = drawn.sum(axis=1)
    own, ones = log_q[items], np.ones(size, np.float32)
    sums[0] += gradient(over_batch, users, items, own, ones) / batches
    sums[1] += gradient(over_batch, users, items, 0 * own, ones) / batches
    sums[2] += gradient(over_all, users, items) / batches
  corrected, plain, wanted = sums
  off = np.linalg.norm(corrected - wanted) / np.linalg.norm(wanted)
  off_without = np.linalg.norm(plain - wanted) / np.linalg.norm(wanted)
  assert off < 0.02
  assert off_without > 10 * off


def test_padding_is_never_a_negative():
  rng = np.random.default_rng(0)
  users, items = rng.integers(0, USERS, 12), rng.integers(0, ITEMS, 12)
  log_q = rng.normal(size=12).astype(np.float32)
  weights = (np.arange(12) < 8).astype(np.float32)
  one = gradient(over_batch, users, items, log_q, weights)
  users[8:], items[8:], log_q[8:] = 0, 1, -9
  other = gradient(over_batch, users, items, log_q, weights)
  np.testing.assert_array_equal(one, other)
  alone = gradient(
    over_batch, users[:8], items[:8], log_q[:8], np.ones(8, np.float32)
  )
  np.testing.assert_allclose(one * 12 / 8, alone, rtol=1e-4, atol=1e-6)
  only = (np.arange(12) < 1).astype(np.float32)  # without any negative
  assert not gradient(over_batch, users, items, log_q, only).any()


def trainer(model=MODEL, **arguments):
  tables = {'user': slip.Table(USERS, DIM), 'item': slip.Table(ITEMS, DIM)}
  return slip.Trainer(model, tables, **arguments)


def source(examples=32, labels=True):
  rng = np.random.default_rng(0)
  ids = {
    'user': rng.integers(0, USERS, examples),
    'item': rng.integers(0, ITEMS, examples),
  }
  clicks = np.ones(examples) if labels else None
  arguments = {'batch_size': 8, 'epochs': 1}
  return slip.batches(np.zeros((examples, 1)), ids, clicks, **arguments), ids


def test_scores_are_products_of_vectors_and_top_k_ranks_all_of_them():
  given, ids = source()
  with trainer() as two:
    two.train(given)
    scores, users = two.predict(given), two.vectors('users', given)
    items = two.vectors('items')
    by_source = two.vectors('items', given)
    seen = np.stack([ids['item'], np.full(32, -1)], axis=1)
    top = two.top_k(source(labels=False)[0], ITEMS, without=seen)
    few = two.top_k(given, 2, items=given)
  assert items.shape == (ITEMS, 4)
  np.testing.assert_allclose(
    np.linalg.norm(np.concatenate([users, items]), axis=1), 1, rtol=1e-5
  )
  np.testing.assert_allclose(by_source, items[ids['item']], rtol=1e-5)
  found = (users * items[ids['item']]).sum(axis=1) / 0.5
  np.testing.assert_allclose(found, scores, rtol=1e-4, atol=1e-5)
  every = users @ items.T
  every[np.arange(32), ids['item']] = -np.inf
  order = np.argsort(-every, axis=1)[:, : ITEMS - 1]
  np.testing.assert_array_equal(top.items[:, :-1], order)
  assert (top.items[:, -1] == -1).all()  # the one that was left out
  np.testing.assert_allclose(
    few.scores, -np.sort(-users @ by_source.T, axis=1)[:, :2], rtol=1e-5
  )


def test_top_k_in_parts_is_top_k_at_once():
  rng = np.random.default_rng(0)
  shapes = (1030, 3), (40_000, 3)
  users, items = (rng.normal(size=one).astype(np.float32) for one in shapes)
  left_out = rng.integers(-1, len(items), (len(users), 5))
  top = retrieval.top_k(users, items, 4, left_out)
  some = rng.integers(0, len(users), 20)
  scores = users[some] @ items.T
  for user, row in zip(some, scores, strict=True):
    row[left_out[user][left_out[user] >= 0]] = -np.inf
  np.testing.assert_array_equal(
    top.items[some], np.argsort(-scores, axis=1)[:, :4]
  )
  index = faiss.IndexFlatIP(3)
  index.add(items)
  scores, found = index.search(users, 4)
  top = retrieval.top_k(users, items, 4)
  np.testing.assert_array_equal(top.items, found)
  np.testing.assert_allclose(top.scores, scores, rtol=1e-5)


def test_recall_and_ndcg_equal_loops():
  rng = np.random.default_rng(0)
  found = np.stack([rng.permutation(8)[:4] for _ in range(30)])
  lengths = rng.integers(0, 7, 30)
  lists = [rng.permutation(8)[:length] for length in lengths]
  wanted = np.full((30, 6), -1)
  recalls, gains = [], []
  for number, right in enumerate(lists):
    wanted[number, : len(right)] = right
    if not len(right):
      continue
    hits = [item in right for item in found[number]]
    recalls.append(sum(hits) / len(right))
    places = [1 / np.log2(place + 2) for place in range(4)]
    best = sum(places[: len(right)])
    gains.append(sum(p for p, hit in zip(places, hits, strict=True) if hit))
    gains[-1] /= best
  assert slip.recall_at_k(found, wanted) == pytest.approx(np.mean(recalls))
  assert slip.ndcg_at_k(found, wanted) == pytest.approx(np.mean(gains))


def test_held_out_examples_are_ranked_as_by_a_loop():
  """Among items of known examples, without those that the user has there."""
  rng = np.random.default_rng(0)
  had = rng.integers(0, (USERS, ITEMS - 1), (12, 2))  # one item is not known
  asked = rng.integers(0, (USERS, ITEMS), (20, 2))
  with trainer() as two:
    two.train(source()[0])
    users, items = (
      two.vectors('users', batches_of(np.arange(USERS), 9)),
      two.vectors('items'),
    )
    tables = two.parts.shape.tables
    found = retrieval.ranked(
      two.parts,
      lambda: bound_to(batches_of(asked[:, 0], 8, asked[:, 1]), tables),
      bound_to(batches_of(had[:, 0], 4, had[:, 1]), tables),
    )
  known = {*had[:, 1]}
  best, wanted = np.full((USERS, 10), -1), np.full((USERS, 20), -1)
  for user in {*asked[:, 0]}:
    mine = known - {*had[had[:, 0] == user, 1]}
    order = sorted(mine, key=lambda item: -(users[user] @ items[item]))
    best[user, : len(order)] = order[:10]
    right = [*{*asked[asked[:, 0] == user, 1]}]
    wanted[user, : len(right)] = right
  assert found['recall_at_10'] == slip.recall_at_k(best, wanted)
  assert found['ndcg_at_10'] == pytest.approx(slip.ndcg_at_k(best, wanted))
  assert 0 < found['ndcg_at_10'] < 1


def batches_of(users, size, items=None):
  """One pass over examples without labels."""
  items = np.zeros_like(users) if items is None else items
  ids = {'user': users, 'item': items}
  columns = np.zeros((len(users), 1)), ids
  return slip.batches(*columns, batch_size=size, epochs=1)


def test_what_does_not_fit():
  given, _ = source()
  for cut in {'microbatches': 2}, {'parts': 2}:
    with trainer(**cut) as two, pytest.raises(UserError, match='whole batch'):
      two.train(given)
  for model, said in (
    (slip.TwoTower(items=('movie',)), 'items must be one of user, item'),
    (slip.TwoTower(items=('user', 'item')), 'each tower needs one'),
    (slip.TwoTower(log_q='q'), 'must be a dense feature .B, 1.'),
  ):
    with trainer(model) as two, pytest.raises(UserError, match=said):
      two.train(given)
  dot = slip.DLRM(bottom=(DIM,), top=(4,))
  with trainer(dot) as plain, pytest.raises(UserError, match='only a two-tow'):
    plain.vectors('users', given)
  with trainer() as two:
    two.train(given)
    for call, said in (
      (lambda: two.vectors('users'), 'vectors need examples'),
      (lambda: two.vectors('both', given), 'must be one of users, items'),
      (lambda: two.top_k(given, 0), 'top_k, k'),
      (lambda: two.top_k(given, 1, without=[[1]]), 'for each user'),
    ):
      with pytest.raises(UserError, match=said):
        call()
  with pytest.raises(UserError, match='as many lists of wanted items'):
    slip.recall_at_k([[1]], [-1])
