"""Policies of checkpoints: pure functions of sizes, and what they write."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
import pytest

from slipstream_jax.checkpoint.chain import next_on
from slipstream_jax.checkpoint.policies import (
  CHECKPOINT_POLICIES,
  consecutive,
  full,
  intermittent,
  one_shot,
  worth_consolidating,
)
from slipstream_jax.checkpoint.row_file import FileFacts

policies = pytest.mark.parametrize(
  'policy', CHECKPOINT_POLICIES.values(), ids=[*CHECKPOINT_POLICIES]
)


def extended(chain, parent, size):
  facts = FileFacts('a', size, 0, 1)
  step = chain[-1].step + 10 if chain else 10
  return next_on(
    chain, parent, step=step, rows={'g': facts}, files={}, payload={}
  )


def run(policy, sizes, base=1_000):
  """Parents that a policy gives when increments have these sizes."""
  chain, parents = (), []
  for size in sizes:
    parent = policy(chain)
    chain = extended(chain, parent, base if parent is None else size)
    parents.append(parent)
  return parents, chain


@policies
@given(sizes=st.lists(st.integers(0, 3_000), min_size=1, max_size=20))
def test_a_parent_is_in_the_chain(policy, sizes):
  chain = ()
  assert policy(()) is None
  for size in sizes:
    parent = policy(chain)
    assert parent in [None, *(link.step for link in chain)]
    assert policy(chain) == parent  # and asking changes nothing
    chain = extended(chain, parent, 1_000 if parent is None else size)
    assert chain[0].parent is None
    for below, link in itertools.pairwise(chain):
      assert (link.parent.step, link.parent.identity) == (
        below.step,
        below.identity,
      )


def test_what_the_names_say():
  assert run(full, [1] * 3)[0] == [None, None, None]
  assert run(one_shot, [1] * 4)[0] == [None, 10, 10, 10]
  assert run(consecutive, [1] * 4)[0] == [None, 10, 20, 30]
  assert len(run(one_shot, [1] * 9)[1]) == 2
  assert len(run(consecutive, [1] * 9)[1]) == 9


def test_a_new_base_once_increments_are_predicted_to_cost_more():
  sizes = [0, 200, 300, 400, 500, 500, 500, 500]
  # 1000 + 200 + 300 + 400 <= 4 * 400 does not hold; with 500 more, 2400 <= 5 *
  # 500 does.
  assert run(intermittent, sizes)[0] == [None, 10, 10, 10, 10, None, 60, 60]


@given(sizes=st.lists(st.integers(1, 2_000), min_size=2, max_size=30))
def test_intermittent_writes_little_more_than_the_better_of_both(sizes):
  """Where increments since a base grow with its age, as they do."""
  sizes = sorted(sizes)

  def written(policy):
    chain, total, since = (), 0, 0
    for _ in sizes:
      parent = policy(chain)
      since = 0 if parent is None else since + 1
      size = 1_000 if parent is None else sizes[since]
      chain = extended(chain, parent, size)
      total += size
    return total

  best = min(written(full), written(one_shot))
  assert written(intermittent) <= 2 * best + 1_000


@given(
  sizes=st.lists(st.integers(1, 500), min_size=1, max_size=200),
  ratio=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_consolidation_writes_a_bounded_multiple(sizes, ratio):
  """Bases of what their chains have, each time it is worth it."""
  increments, rewritten, chain = 0, 0, extended((), None, 1_000)
  for size in sizes:
    chain = extended(chain, chain[-1].step, size)
    increments += size
    if worth_consolidating(chain, ratio, links=10**6):
      merged = sum(link.bytes for link in chain)
      rewritten += merged
      chain = extended((), None, merged)
  assert rewritten <= (1 + 1 / ratio) * increments


def test_a_chain_is_never_longer_than_its_links():
  chain = extended((), None, 10**9)
  assert not worth_consolidating(chain)
  for count in range(1, 10):
    chain = extended(chain, chain[-1].step, 1)
    assert worth_consolidating(chain, links=5) == (count >= 5)


def test_a_chain_that_stays_is_no_base_for_its_bytes():
  chain = extended((), None, 10)
  kept = chain[0]._replace(payload={'kept': True})
  assert worth_consolidating(extended(chain, 10, 100))
  chain = extended((kept,), 10, 100)
  assert not worth_consolidating(chain)
  assert worth_consolidating(chain, links=1)
